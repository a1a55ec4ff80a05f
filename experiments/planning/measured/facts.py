"""What is read of a finished run: its speed over the steady part, and what each stage cost there.

The steady part begins when the queue has been through `max_staleness` + 2 batches and training has gone on for `WARM_UP_S`
after the first step, whose time has the start of the actors in it. Times of stages are as they were in the run, beside the
other processes, and not what they would be alone.

A decode step is found from the completions. Each gets one token a step, so a completion's seconds over its tokens is its mean
step, and the rows that were alive meanwhile are known from the times of the others: least squares over all completions gives
step = `decode_step_s` + `decode_row_s` · rows. It counts prefills and adopted weights in, as a run does.

Axes: R rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from async_rlhf.buffers.errors import AsyncRLHFError
from async_rlhf.buffers.lines import read_lines
from async_rlhf.buffers.stages import GENERATION, Activity, StageTime, read_spans
from async_rlhf.inspect.trace import TracedRollout, read_rollouts
from async_rlhf.run.run_dir import RunDir

Array = npt.NDArray[np.float64]
WARM_UP_S = 3.0
MIN_STEPS = 8
"""Fewer say little: a batch takes up to a tenth of them."""
_QUANTILES = (0.5, 0.9, 0.99)
_ROUNDS = 50


class TooShortError(AsyncRLHFError):
    """A run has too few steps in its steady part."""


def read(run: RunDir, max_staleness: int) -> dict[str, float]:
    """Facts by name; times in seconds. A character of a prompt is a token of the shipped model.

    Raises TooShortError and DamagedError.
    """
    steps = steady(run.read_metrics(), max_staleness)
    began, ended = steps[0]["time"] - steps[0]["step_time"], steps[-1]["time"]
    numbers = {step["step"] for step in steps}
    everything = list(read_rollouts(run))
    rollouts = [rollout for rollout in everything if rollout.step in numbers]
    return {
        **_speed(steps),
        **_of_learner(steps),
        **_of_lengths([rollout.num_tokens for rollout in rollouts]),
        **_of_generation(everything, numbers),
        **_of_scoring(steps, rollouts),
        "prompt_characters": _mean(len(sample["prompt"]) for sample in read_lines(run.path / "rollouts.jsonl")),
        "adopt_s": _mean(
            span["ended"] - span["began"]
            for path in sorted((run.path / "spans").glob("*.jsonl"))
            for span in read_spans(path)
            if span["name"].startswith("adopt") and began <= span["began"] <= ended
        ),
    }


def steady(metrics: Sequence[Mapping[str, Any]], max_staleness: int) -> list[Mapping[str, Any]]:
    """The steps of the steady part. Raises TooShortError."""
    applied = [step for step in metrics if "step_time" in step]
    warm = applied[0]["time"] + WARM_UP_S if applied else math.inf
    found = [step for number, step in enumerate(applied) if number >= max_staleness + 2 and step["time"] >= warm]
    if len(found) < MIN_STEPS:
        raise TooShortError(
            f"{len(found)} of {len(applied)} steps came after the first {max_staleness + 2} and {WARM_UP_S:g} s; a measurement "
            f"needs {MIN_STEPS}: let it run longer (--seconds)"
        )
    return found


def _speed(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    seconds = math.fsum(step["step_time"] for step in steps)
    samples = math.fsum(step["samples_per_second"] * step["step_time"] for step in steps)
    return {
        "samples_per_s": samples / seconds,
        "steps": float(len(steps)),
        "seconds": seconds,
        "idle_learner": math.fsum(step["idle/learner"] * step["step_time"] for step in steps) / seconds,
        "idle_actor": _mean(step["idle/actor"] for step in steps),
        "staleness_mean": _mean(step["staleness/mean"] for step in steps),
    }


def _of_learner(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """learner_step_s: of a step, without its wait for the batch and for its weights."""
    publishing = [step.get("broadcast/seconds") or 0.0 for step in steps]
    busy = [step["step_time"] * (1.0 - step["idle/learner"]) for step in steps]
    return {
        "learner_step_s": _mean(max(0.0, all_ - wait) for all_, wait in zip(busy, publishing, strict=True)),
        "publish_s": _mean(publishing),
        "tokens_per_step": _mean(step["num_tokens"] for step in steps),
    }


def _of_lengths(lengths: Sequence[int]) -> dict[str, float]:
    quantiles = np.quantile(lengths, _QUANTILES).tolist()
    named = {f"length_p{q * 100:.0f}": value for q, value in zip(_QUANTILES, quantiles, strict=True)}
    return {"length_mean": _mean(lengths), **named, "length_max": float(max(lengths))}


def _of_generation(rollouts: Sequence[TracedRollout], steps: Collection[int]) -> dict[str, float]:
    """Of the completions of `steps`, beside all others. decode_tokens_per_s: of one actor, while a row of it is alive."""
    by_actor: dict[str, list[TracedRollout]] = {}
    for rollout in rollouts:
        by_actor.setdefault(rollout.actor, []).append(rollout)
    busy_s, tokens = 0.0, 0
    for own in by_actor.values():
        times = [rollout.stages[GENERATION] for rollout in own]
        busy_s += Activity((time.began, time.ended) for time in times).covers(-math.inf, math.inf)
        tokens += sum(rollout.num_tokens for rollout in own)
    step_s, row_s, rows = decode_step(list(by_actor.values()), steps)
    return {
        "generation_s": _mean(rollout.stages[GENERATION].seconds for rollout in rollouts if rollout.step in steps),
        "decode_tokens_per_s": tokens / busy_s,
        "decode_step_s": step_s,
        "decode_row_s": row_s,
        "alive_mean": rows,
    }


def decode_step(actors: Sequence[Sequence[TracedRollout]], steps: Collection[int]) -> tuple[float, float, float]:
    """Seconds of a decode step, seconds more of it for each row, and the mean rows of a step. See the module docstring.

    The rows are to be averaged over steps, and what is known of a stretch with the same rows is its time: how many steps that
    is follows from the line that is looked for. So the line is found again until it stays.
    """
    step_s, row_s, mean_rows = 1.0, 0.0, math.nan
    for _ in range(_ROUNDS):
        points: list[tuple[float, float, float]] = []
        for own in actors:
            times = [rollout.stages[GENERATION] for rollout in own]
            rows = alive_rows(times, partial(_step_s, step_s, row_s))
            points += [
                (alive, time.seconds / rollout.num_tokens, rollout.num_tokens)
                for rollout, time, alive in zip(own, times, rows, strict=True)
                if rollout.step in steps and rollout.num_tokens and time.seconds > 0
            ]
        rows_R, means_R, tokens_R = np.array(points).T
        (step_s, row_s), before = line(rows_R, means_R, tokens_R), (step_s, row_s)
        mean_rows = float(np.average(rows_R, weights=tokens_R))
        if np.allclose((step_s, row_s), before, rtol=1e-4, atol=0):
            break
    return step_s, row_s, mean_rows


def _step_s(step_s: float, row_s: float, rows: Array) -> Array:
    return step_s + row_s * rows


def alive_rows(times: Sequence[StageTime], step_s: Callable[[Array], Array] = np.ones_like) -> list[float]:
    """Of each interval, how many of the intervals are alive in it, itself among them: the mean over steps of step_s(rows)."""
    edges = sorted([(time.began, 1) for time in times] + [(time.ended, -1) for time in times])
    at = np.array([edge for edge, _ in edges])
    alive = np.cumsum([change for _, change in edges])[:-1].astype(np.float64)
    num_steps = np.diff(at) / step_s(np.maximum(alive, 1.0))
    began, ended = np.array([time.began for time in times]), np.array([time.ended for time in times])

    def between(amounts: Array) -> Array:
        until = np.concatenate([[0.0], np.cumsum(amounts)])
        return np.asarray(np.interp(ended, at, until) - np.interp(began, at, until))

    all_steps = between(num_steps)
    found: list[float] = np.where(
        all_steps > 0, between(num_steps * alive) / np.where(all_steps > 0, all_steps, 1.0), 1.0
    ).tolist()
    return found


def line(x_R: Array, y_R: Array, weights_R: Array) -> tuple[float, float]:
    """Intercept and slope of y over x by weighted least squares, neither negative; where x does not vary, the slope is 0."""
    mean_x, mean_y = np.average(x_R, weights=weights_R), np.average(y_R, weights=weights_R)
    spread = float(np.average((x_R - mean_x) ** 2, weights=weights_R))
    slope = 0.0
    if spread > 1e-9:
        slope = max(0.0, float(np.average((x_R - mean_x) * (y_R - mean_y), weights=weights_R)) / spread)
    intercept = float(mean_y - slope * mean_x)
    if intercept < 0:  # then the best line is through the origin
        return 0.0, float(np.sum(weights_R * x_R * y_R) / np.sum(weights_R * x_R**2))
    return intercept, slope


def _of_scoring(steps: Sequence[Mapping[str, Any]], rollouts: Sequence[TracedRollout]) -> dict[str, float]:
    """scored_s: from a completion's last token to its score, waiting included; score_s: of that, while the call was made;
    reward_s: of the reward itself, by its own clock."""
    calls = [time for rollout in rollouts for name, time in rollout.stages.items() if name != GENERATION]
    waits = [max(time.ended for time in each.stages.values()) - each.stages[GENERATION].ended for each in rollouts]
    own = [step[key] for step in steps for key in step if key.startswith("rewards/") and key.endswith("/seconds")]
    return {
        "scored_s": _mean(waits),
        "score_s": _mean(time.seconds for time in calls),
        "reward_s": _mean(own),
        "exposed_ratio": _mean(step.get("stages/exposed_ratio") for step in steps),
    }


def _mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return fmean(known) if known else math.nan
