"""What a run measured: one `CellResult`, from its directory, or from the file that is kept of it.

Starts and draws nothing. Called by `sweep`, the reports and the data frames.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from async_rlhf.buffers.errors import ConfigError, DamagedError
from async_rlhf.buffers.files import write_whole
from async_rlhf.experiments.staleness.config import Cell, Setting, shown
from async_rlhf.learner.loop.budget import Budget
from async_rlhf.run.config import Config, dotted
from async_rlhf.run.processes.agreement import portable
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.run_files import MAX_LOG_BYTES, figures, read_small
from async_rlhf.run.watching import TrackingConfig

# How a run is watched changes no number of it.
WATCHING = (
    *("stall_timeout_s", "watchdog_s", "sampled_groups", "address", "output_dir"),
    *(f"tracking.{name}" for name in TrackingConfig.model_fields),
)

# Of each step, what a curve may be drawn of; the others stay in the run's `metrics.jsonl`.
CURVES = (
    *("num_tokens", "staleness/mean", "is/ess", "clip_ratio/region_mean", "kl/behaviour", "kl/reference", "entropy"),
    *("completions/mean_length", "completions/clipped_ratio", "rewards/failed_ratio", "idle/learner", "idle/actor"),
    "grad_norm",
)
"""Metrics by name, as docs/metrics.md explains them."""
SCORE = "rewards/{}/mean"
"""The metric of one reward function; kept too where there are several."""


@dataclass(frozen=True)
class HeldOut:
    """One evaluation of the held-out prompts; None where there was none, or it does not say."""

    reward: float | None
    accuracy: float | None
    length: float | None = None
    """Mean, in tokens."""
    scores: Mapping[str, float | None] = field(default_factory=dict)
    """Mean of each reward function, before weights: also of one that is measured and not rewarded."""


@dataclass(frozen=True)
class CellResult:
    """What one run measured. Means are over steps unless they say otherwise."""

    cell: str
    setting: tuple[tuple[str, Any], ...]
    """Swept keys and their values."""
    seed: int
    bound: int
    """`queue.max_staleness`, in steps."""
    exact: bool
    steps: int
    trained_samples: int
    """Completions in all batches."""
    held_out_start: HeldOut
    held_out_end: HeldOut
    rewards: tuple[float | None, ...]
    """Mean reward of each step's batch."""
    seconds: tuple[float, ...]
    """When each step ended: the sum of the steps' times up to it; the first includes the start of the actors."""
    reward_last_quarter: float | None
    reward_area: float | None
    """Area under the curve of the steps' rewards (trapezoids) divided by its width: a mean height."""
    staleness_tokens: tuple[tuple[int, int], ...]
    """(age, trained tokens of that age) over the whole run, ascending."""
    staleness_mean: float
    """Mean over trained tokens, in steps."""
    staleness_max: int
    staleness_violations: int
    exact_kept: bool
    """Every token of step t, counted from 0, had the age min(t, bound): what exact mode promises."""
    is_ess_mean: float | None
    """Effective sample size of the importance weights, as a share of the tokens."""
    is_ratio_max: float | None
    """Largest probability ratio of learner to sampler of any token, before truncation."""
    kl_behaviour_mean: float | None
    """Estimate of KL(sampler || learner) per token, in nats."""
    generated_tokens: int | None
    """Completion tokens that reached the queue."""
    trained_tokens: int
    samples_per_s: float | None
    """Completions trained on per second after the first step."""
    ledger_closes: bool
    fingerprint: str
    """Of the configuration without the swept keys, seed and place."""
    whole: str
    """Of the configuration with them, but without how the run was watched."""
    settings: Mapping[str, Any]
    """That configuration: keys that have another value than their default."""
    code: tuple[str, ...]
    """Digest of the sources, Python and package versions; more than one of each where the run went on with another."""
    curves: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """By name of those in CURVES, and of scores, that any step has, and `samples` (completions of its batch): a number a step,
    to 6 digits."""
    ledger: Mapping[str, int] = field(default_factory=dict)
    """Attempts to make a group by how they ended, and tokens, in the words of the queue's ledger."""
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Digests of files of the user's code, and of those that the settings name; several of one that changed between starts."""
    budget: Budget | None = None
    """Where tokens or seconds were to end the run."""

    @property
    def label(self) -> str:
        """The setting in words: `queue.max_staleness = 1`."""
        return shown(self.setting)

    @property
    def wall_s(self) -> float:
        """Sum of the steps' times."""
        return self.seconds[-1]

    @property
    def samples(self) -> tuple[float, ...]:
        """Completions trained on up to each step; where only their sum was kept, equally many of every step."""
        each = self.curves.get("samples") or (self.trained_samples / self.steps,) * self.steps
        return tuple(itertools.accumulate(count or 0.0 for count in each))

    @property
    def tokens(self) -> tuple[float, ...] | None:
        """Completion tokens trained on up to each step, where that was kept."""
        each = self.curves.get("num_tokens")
        return None if each is None else tuple(itertools.accumulate(count or 0.0 for count in each))

    def mean_of(self, name: str) -> float | None:
        """Over the steps, of a curve; None where it was not kept."""
        return mean(self.curves.get(name, ()))

    @property
    def scores(self) -> list[str]:
        """Reward functions whose scores are kept apart: where there are several, also those that are not rewarded."""
        return sorted(name for name in self.held_out_end.scores if SCORE.format(name) in self.curves)

    @property
    def clip_ratio_mean(self) -> float | None:
        """Share of the tokens whose gradient the loss's clip or truncation touched."""
        return self.mean_of("clip_ratio/region_mean")

    @property
    def kl_reference_end(self) -> float | None:
        """KL to the reference in nats a token, over the last quarter of the steps."""
        return last_quarter(self.curves.get("kl/reference", ()))


def read_cell(cell: Cell) -> CellResult:
    """The result of a cell's run. Raises ConfigError when there is none, or it has no step."""
    return read_run(RunDir.existing(cell.config.run_dir), cell.setting, cell.swept)


def read_run(directory: RunDir, setting: Setting | None = None, swept: Iterable[str] = ()) -> CellResult:
    """What a run measured, wherever its directory was moved. setting, swept: of the cell that it is, if it is one. Raises
    ConfigError when it has no step."""
    config, metrics = directory.config(), directory.read_metrics()
    if not metrics:
        raise ConfigError(f"run {str(directory.path)!r} has no finished step to analyse")
    rewards = [step["reward"] for step in metrics]
    ages = _ages(metrics)
    num_tokens = sum(ages.values())
    samples = [len(step["groups"]) * config.generation.group_size for step in metrics]
    later_s = sum(step["step_time"] for step in metrics[1:])
    ledger = directory.read_ledger().get("ledger", {})
    code, files = _made_by(directory.path)
    return CellResult(
        cell=config.name,
        setting=tuple((setting or {}).items()),
        seed=config.seed,
        bound=config.queue.max_staleness,
        exact=config.queue.exact,
        steps=len(metrics),
        trained_samples=sum(samples),
        held_out_start=_held_out(directory, "start"),
        held_out_end=_held_out(directory, "end"),
        rewards=tuple(rewards),
        seconds=tuple(itertools.accumulate(step["step_time"] for step in metrics)),
        reward_last_quarter=last_quarter(rewards),
        reward_area=_area(rewards),
        staleness_tokens=tuple(ages.items()),
        staleness_mean=sum(age * count for age, count in ages.items()) / num_tokens,
        staleness_max=max(ages),
        staleness_violations=sum(step["staleness/violations"] for step in metrics),
        exact_kept=all(
            set(step["staleness/histogram"]) == {str(min(step["step"] - 1, config.queue.max_staleness))} for step in metrics
        ),
        is_ess_mean=mean(step.get("is/ess") for step in metrics),
        is_ratio_max=max((most for step in metrics if (most := step.get("is/ratio_max")) is not None), default=None),
        kl_behaviour_mean=mean(step.get("kl/behaviour") for step in metrics),
        generated_tokens=ledger.get("tokens_put"),
        trained_tokens=num_tokens,
        samples_per_s=sum(samples[1:]) / later_s if later_s else None,
        ledger_closes=bool(ledger.get("closes")),
        fingerprint=fingerprint(config, ("name", "output_dir", "seed", *swept)),
        whole=fingerprint(config, WATCHING),
        settings=given(config),
        code=code,
        files=files,
        curves={"samples": tuple(map(float, samples)), **_curves(metrics)},
        budget=config.budget if config.budget.may_cut_steps else None,
        ledger={word: count for word, count in ledger.items() if type(count) is int},
    )


def keep(result: CellResult, path: Path) -> None:
    """Write what a cell measured, for `kept`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, _RESULT.dump_json(result) + b"\n")


def kept(path: Path) -> CellResult | None:
    """None where there is no such file. Raises DamagedError."""
    if not path.exists():
        return None
    try:
        return _RESULT.validate_json(read_small(path, MAX_LOG_BYTES))
    except ValidationError as error:
        raise DamagedError(
            f"{path} is no result of a cell: {error.errors()[0]['msg']}. Remove it, and run the cell again"
        ) from error


def fingerprint(config: Config, without: Iterable[str] = ()) -> str:
    """12 hexadecimal digits that two configurations share when they differ at most in the dotted keys `without`, and in the
    folders that files lie in."""
    left_out = set(without)
    values = {key: value for key, value in given(config).items() if key not in left_out}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def given(config: Config) -> dict[str, Any]:
    """Dotted keys that have another value than their default, without the folders that files lie in.

    A key that the program has more than it had changes nothing here; a default that it has changed is seen in its sources.
    """
    return dotted(portable(config.model_dump(mode="json", exclude_defaults=True)))


_RESULT = TypeAdapter(CellResult)


def _ages(metrics: Sequence[dict[str, Any]]) -> dict[int, int]:
    ages = Counter[int]()
    for step in metrics:
        ages.update({int(age): count for age, count in step["staleness/histogram"].items()})
    return dict(sorted(ages.items()))


def _area(rewards: Sequence[float | None]) -> float | None:
    points = [(step, reward) for step, reward in enumerate(rewards) if reward is not None]
    if len(points) < 2:
        return points[0][1] if points else None
    pieces = [(b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points)]
    return math.fsum(pieces) / (points[-1][0] - points[0][0])


def _curves(metrics: Sequence[dict[str, Any]]) -> dict[str, tuple[float | None, ...]]:
    scores = sorted({name for step in metrics for name in step if re.fullmatch(SCORE.format(r"[^/]+"), name)})
    wanted = (*CURVES, *(scores if len(scores) > 1 else ()))
    known = [name for name in wanted if any(step.get(name) is not None for step in metrics)]
    return {
        name: tuple(None if (value := step.get(name)) is None else float(f"{value:.6g}") for step in metrics) for name in known
    }


def _held_out(directory: RunDir, label: str) -> HeldOut:
    """The last evaluation with this label."""
    record: dict[str, Any] = next((r for r in reversed(directory.read_evaluations()) if r["label"] == label), {})
    accuracy = figures(record).get("accuracy")
    return HeldOut(record.get("mean_reward"), accuracy, record.get("mean_length"), record.get("rewards", {}))


def _made_by(path: Path) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """`code` and `files` of a run directory."""
    manifest = path / "manifest.json"
    if not manifest.exists():
        return ("unknown",), {}
    begun = json.loads(manifest.read_text())
    code: dict[str, None] = {}
    files: dict[str, dict[str, None]] = {}
    for made in (begun, *begun.get("later", ())):
        packages = made.get("packages", {})
        named = [f"{name} {packages[name]}" for name in ("torch", "transformers") if name in packages]
        code |= dict.fromkeys((f"sources {made.get('sources') or 'unknown'}", f"python {made.get('python')}", *named))
        for file, digest in made.get("files", {}).items():
            files.setdefault(file, {})[digest] = None
    return tuple(code), {file: tuple(digests) for file, digests in files.items()}


def last_quarter(values: Sequence[float | None]) -> float | None:
    """Mean over the last quarter of the steps."""
    return mean(values[-math.ceil(len(values) / 4) :])


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
