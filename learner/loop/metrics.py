"""The learner's records: one metrics object a step, and a sample of its rollouts. `recording` owns the files."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from async_rlhf.buffers.record import Group, Rollout, source_of, staleness
from async_rlhf.buffers.stages import stage_metrics


def staleness_histogram(groups: Sequence[Group], step: int) -> dict[int, int]:
    """Tokens by staleness at learner step `step`, ascending."""
    ages: dict[int, int] = {}
    for group in groups:
        for version, num_tokens in group.sampled_spans():
            age = staleness(version, step)
            ages[age] = ages.get(age, 0) + num_tokens
    return dict(sorted(ages.items()))


def data_metrics(
    groups: Sequence[Group], per_group: Sequence[Sequence[float | None]], step: int, max_staleness: int
) -> dict[str, Any]:
    """Rewards, lengths and staleness of one batch. Means are over the completions that count; failures are a ratio. A batch
    from which every group was taken out has means of None.

    per_group: the reward of each member of each group, None where it does not count.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    counting = [[reward for reward in group if reward is not None] for group in per_group]
    spreads = [_std(group) for group in counting]
    ages = staleness_histogram(groups, step)
    num_tokens = sum(ages.values())
    lengths = [rollout.num_tokens for rollout in rollouts]
    scores = [score for rollout in rollouts for score in rollout.scores.values()]
    metrics: dict[str, Any] = {
        "reward": _mean([reward for group in counting for reward in group]),
        "reward_std": _mean(spreads),
        "frac_reward_zero_std": _mean([float(spread < 1e-6) for spread in spreads]),
        "rewards/failed_ratio": _mean([float(score.failure is not None) for score in scores]) or 0.0,
        "completions/mean_length": _mean(lengths),
        "completions/max_length": max(lengths, default=0),
        "completions/clipped_ratio": _mean([float(rollout.is_truncated) for rollout in rollouts]),
        "num_tokens": num_tokens,
        "staleness/mean": sum(age * count for age, count in ages.items()) / max(1, num_tokens),
        "staleness/max": max(ages, default=0),
        "staleness/histogram": {str(age): count for age, count in ages.items()},
        "staleness/violations": sum(count for age, count in ages.items() if age > max_staleness),
        **_episode_metrics(rollouts),
        **stage_metrics(rollout.timings for rollout in rollouts),
    }
    for name in rollouts[0].scores if rollouts else ():
        of_reward = [rollout.scores[name] for rollout in rollouts]
        metrics[f"rewards/{name}/mean"] = _mean([score.value for score in of_reward if score.value is not None])
        metrics[f"rewards/{name}/failed_ratio"] = _mean([float(score.failure is not None) for score in of_reward])
        for metric in sorted({metric for score in of_reward for metric in score.metrics}):
            metrics[f"reported/{name}/{metric}"] = _mean([s.metrics[metric] for s in of_reward if metric in s.metrics])
    return metrics


def _episode_metrics(rollouts: Sequence[Rollout]) -> dict[str, float | None]:
    """For runs with an environment: turns, tokens read between them, and the shares of episodes that limits ended."""
    if all(rollout.num_tokens == rollout.length for rollout in rollouts):
        return {}
    return {
        "episodes/mean_turns": _mean([len(rollout.turn_lengths) for rollout in rollouts]),
        "episodes/mean_observed_tokens": _mean([rollout.length - rollout.num_tokens for rollout in rollouts]),
        "episodes/mean_restarts": _mean([len(rollout.restarts) for rollout in rollouts]),
        "episodes/max_turns_ratio": _mean([float(rollout.finish_reason == "max_turns") for rollout in rollouts]),
        "episodes/context_ratio": _mean([float(rollout.finish_reason == "context") for rollout in rollouts]),
    }


class SourceMetrics:
    """Rewards and lengths of each source of mixed data. Under names of their own stand the first `MOST` sources seen, and only
    names that a dashboard can show; all others are one source, so that a column of many values makes no endless record."""

    MOST = 64

    def __init__(self) -> None:
        self._known: set[str] = set()

    def measure(self, groups: Sequence[Group], per_group: Sequence[Sequence[float | None]]) -> dict[str, float | None]:
        """Means over the completions of each source in this batch; nothing of groups without one. per_group: as above."""
        rewards: dict[str, list[float]] = {}
        lengths: dict[str, list[int]] = {}
        for group, rewarded in zip(groups, per_group, strict=True):
            if (source := source_of(group.columns)) is not None:
                name = self._name(source)
                rewards.setdefault(name, []).extend(reward for reward in rewarded if reward is not None)
                lengths.setdefault(name, []).extend(rollout.num_tokens for rollout in group.rollouts)
        metrics = {f"reward/{name}": _mean(values) for name, values in rewards.items()}
        return metrics | {f"completions/{name}/mean_length": _mean(values) for name, values in lengths.items()}

    def _name(self, source: str) -> str:
        if len(self._known) < self.MOST and 0 < len(source) <= 64 and source.isprintable():
            self._known.add(source)
        return source if source in self._known else "other"


class StepClock:
    """The times of a step, and the actors' work meanwhile. `step_time` runs from record to record, so a checkpoint counts
    into the step after it."""

    def __init__(self) -> None:
        self._recorded_at = time.monotonic()
        self._busy: Mapping[str, float] = {}

    def measure(
        self, groups: Sequence[Group], num_tokens: int, telemetry: Mapping[str, float], waited_s: float
    ) -> dict[str, float]:
        """The metrics of a step that ends now. telemetry: the hub's; waited_s: for this batch."""
        now = time.monotonic()
        took, self._recorded_at = now - self._recorded_at, now
        actors = telemetry.get("actors", 0.0)
        return {
            "step_time": took,
            "tokens_per_second": num_tokens / took,
            "samples_per_second": sum(len(group.rollouts) for group in groups) / took,
            "idle/learner": waited_s / took,
            "idle/actor": self._idle(telemetry),
            "queue/depth": telemetry.get("queue/depth", 0.0),
            "groups/filtered_total": telemetry.get("groups/filtered", 0.0),
            "actors": actors,
            "canary/drift": telemetry.get("canary_drift", 0.0) / max(1.0, actors),
            **{name: value for name, value in telemetry.items() if name.startswith("curriculum/")},
        }

    def _idle(self, telemetry: Mapping[str, float]) -> float:
        """Share of the actors' time since the last step in which no sequence was being decoded."""
        idle = max(0.0, telemetry.get("idle_s", 0.0) - self._busy.get("idle_s", 0.0))
        busy = max(0.0, telemetry.get("busy_s", 0.0) - self._busy.get("busy_s", 0.0))
        self._busy = dict(telemetry)
        return idle / (idle + busy) if idle + busy > 0 else 0.0


def sample_record(
    group: Group, step: int, advantages: Sequence[float | None], weights: Sequence[float | None]
) -> dict[str, Any]:
    """A group's record with the tokens, scores, advantages and importance weights used."""
    fields = [
        {
            "tokens": rollout.completion_ids.tolist(),
            "scores": {n: s.failure if s.failure is not None else s.value for n, s in rollout.scores.items()},
            "advantage": advantage,
            "weight": weight,
        }
        for rollout, advantage, weight in zip(group.rollouts, advantages, weights, strict=True)
    ]
    return group_record(group, step, fields)


def group_record(group: Group, step: int, fields: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One group for a person: texts, versions, times. fields: further ones of each rollout."""
    return {
        "step": step,
        "group": group.number,
        "attempt": group.attempt,
        "actor": group.actor,
        "prompt": group.prompt,
        "columns": dict(group.columns),
        **({"images": [*group.images]} if group.images else {}),
        "rollouts": [
            {
                "text": rollout.text,
                **({"images": [digest for piece in rollout.images for digest in piece]} if rollout.images else {}),
                **further,
                "spans": [[span.version, span.num_tokens] for span in rollout.spans],
                "restarts": rollout.restarts,
                "turn_scores": [*rollout.turn_scores],
                "finish_reason": rollout.finish_reason,
                "timings": dict(rollout.timings),
            }
            for rollout, further in zip(group.rollouts, fields, strict=True)
        ],
    }


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _std(values: Sequence[float]) -> float:
    if not values:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.hypot(*(value - mean for value in values)) / math.sqrt(len(values))  # squares could overflow
