"""Numbers from finished run directories: one `CellResult` a run, estimates over seeds, and checks of the whole sweep.

Pure functions of what is on disk; never starts, draws or prints anything. Called by `sweep`, `report` and `plot`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rlhf.run.config import Config
from async_rlhf.run.run_dir import RunDir

# Two-sided 95 % quantiles of Student's t by degrees of freedom, from 1; beyond the table its last (wider) one is used.
_T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
# Two seeds have an interval of 12.7 standard errors that rests on one difference: it is not worth printing.
MIN_SEEDS = 3


@dataclass(frozen=True)
class HeldOut:
    """One greedy evaluation of the held-out prompts; None where there was none, or it does not say."""

    reward: float | None
    accuracy: float | None


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
    wall_s: float
    """Sum of the steps' times; the first includes the start of the actors."""
    samples_per_s: float | None
    """Completions trained on per second after the first step."""
    ledger_closes: bool
    fingerprint: str
    """Of the configuration without the swept keys, seed and place."""
    code: tuple[str, ...]
    """Commit, Python and package versions."""

    @property
    def label(self) -> str:
        """The setting in short: `max_staleness 1`."""
        return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in self.setting)


def read_cell(path: Path, swept: Sequence[str]) -> CellResult:
    """The result of the finished run in a directory; `swept` are the dotted keys that tell the settings apart.

    Raises ConfigError when the directory holds no run; ValueError when it has no step.
    """
    directory = RunDir.existing(path)
    config, metrics = directory.config(), directory.read_metrics()
    if not metrics:
        raise ValueError(f"run {str(path)!r} has no finished step to analyse")
    rewards = [step["reward"] for step in metrics]
    ages = _ages(metrics)
    num_tokens = sum(ages.values())
    samples = [len(step["groups"]) * config.generation.group_size for step in metrics]
    later_s = sum(step["step_time"] for step in metrics[1:])
    ledger = directory.read_ledger().get("ledger", {})
    return CellResult(
        cell=config.name,
        setting=tuple((key, _value(config, key)) for key in swept),
        seed=config.seed,
        bound=config.queue.max_staleness,
        exact=config.queue.exact,
        steps=len(metrics),
        trained_samples=sum(samples),
        held_out_start=_held_out(directory, "start"),
        held_out_end=_held_out(directory, "end"),
        rewards=tuple(rewards),
        reward_last_quarter=_mean(rewards[-math.ceil(len(rewards) / 4) :]),
        reward_area=_area(rewards),
        staleness_tokens=tuple(ages.items()),
        staleness_mean=sum(age * count for age, count in ages.items()) / num_tokens,
        staleness_max=max(ages),
        staleness_violations=sum(step["staleness/violations"] for step in metrics),
        exact_kept=all(
            set(step["staleness/histogram"]) == {str(min(step["step"] - 1, config.queue.max_staleness))} for step in metrics
        ),
        is_ess_mean=_mean(step.get("is/ess") for step in metrics),
        is_ratio_max=max((step["is/ratio_max"] for step in metrics if "is/ratio_max" in step), default=None),
        kl_behaviour_mean=_mean(step.get("kl/behaviour") for step in metrics),
        generated_tokens=ledger.get("tokens_put"),
        trained_tokens=num_tokens,
        wall_s=sum(step["step_time"] for step in metrics),
        samples_per_s=sum(samples[1:]) / later_s if later_s else None,
        ledger_closes=bool(ledger.get("closes")),
        fingerprint=fingerprint(config, ("name", "output_dir", "seed", *swept)),
        code=_code(path),
    )


def fingerprint(config: Config, without: Iterable[str] = ()) -> str:
    """12 hexadecimal digits that two configurations share when they differ at most in the dotted keys `without`."""
    values: Any = config.model_dump(mode="json")
    for dotted in without:
        *sections, key = dotted.split(".")
        place = values
        for section in sections:
            place = place[section]
        place.pop(key, None)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds. `half_width` is that of its 95 % t interval, None with fewer than MIN_SEEDS seeds."""

    mean: float
    low: float
    high: float
    count: int
    half_width: float | None


def estimate(values: Iterable[float | None]) -> Estimate | None:
    """Mean, range and interval of what was measured; None when nothing was."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    count, mean = len(known), math.fsum(known) / len(known)
    half_width = None
    if count >= MIN_SEEDS:
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in known) / (count - 1))
        half_width = _T_95[min(count - 1, len(_T_95)) - 1] * deviation / math.sqrt(count)
    return Estimate(mean, min(known), max(known), count, half_width)


def by_setting(results: Sequence[CellResult]) -> dict[str, list[CellResult]]:
    """Results of each setting, in the order of the sweep."""
    settings: dict[str, list[CellResult]] = {}
    for result in results:
        settings.setdefault(result.label, []).append(result)
    return settings


def paired_difference(results: Sequence[CellResult], reference: Sequence[CellResult]) -> Estimate | None:
    """Final held-out reward minus that of the reference setting with the same seed (which has the same prompts)."""
    base = {result.seed: result.held_out_end.reward for result in reference}
    pairs = [(result.held_out_end.reward, base.get(result.seed)) for result in results]
    return estimate(mine - other for mine, other in pairs if mine is not None and other is not None)


@dataclass(frozen=True)
class Check:
    """Something that must hold for the sweep to mean anything."""

    claim: str
    holds: bool
    detail: str


def checks(results: Sequence[CellResult]) -> list[Check]:
    """All checks of a sweep, each with what it found."""
    on_policy = [result for result in results if result.bound == 0]
    exact = [result for result in results if result.exact]
    samples, prints = {r.trained_samples for r in results}, {r.fingerprint for r in results}
    code = {r.code for r in results}
    over = [f"{r.cell}: {r.staleness_max} > {r.bound}" for r in results if r.staleness_max > r.bound]
    violations = sum(r.staleness_violations for r in results)
    found = [
        Check(
            "the oldest token trained on keeps the bound in every cell", not over, "; ".join(over) or f"{len(results)} cells"
        ),
        Check("no violation was counted", violations == 0, f"{violations} tokens"),
        _all_of("bound 0 is staleness 0 for every token", on_policy, [r.staleness_max == 0 for r in on_policy]),
        _all_of("exact mode: every token of step t has staleness min(t, bound)", exact, [r.exact_kept for r in exact]),
        Check("all cells trained on the same number of samples", len(samples) == 1, ", ".join(map(str, sorted(samples)))),
        _all_of("the ledger closes at the end", results, [r.ledger_closes for r in results]),
        Check("all cells share every setting that is not swept", len(prints) == 1, f"fingerprint {', '.join(sorted(prints))}"),
        Check("all cells ran the same code", len(code) == 1, " / ".join(", ".join(each) for each in sorted(code))),
    ]
    return [check for check in found if check.detail != "0 of 0 cells"]


def _all_of(claim: str, results: Sequence[CellResult], hold: Sequence[bool]) -> Check:
    return Check(claim, all(hold), f"{sum(hold)} of {len(results)} cells")


def _ages(metrics: Sequence[dict[str, Any]]) -> dict[int, int]:
    ages: dict[int, int] = {}
    for step in metrics:
        for age, count in step["staleness/histogram"].items():
            ages[int(age)] = ages.get(int(age), 0) + count
    return dict(sorted(ages.items()))


def _area(rewards: Sequence[float | None]) -> float | None:
    points = [(step, reward) for step, reward in enumerate(rewards) if reward is not None]
    if len(points) < 2:
        return points[0][1] if points else None
    pieces = [(b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points)]
    return math.fsum(pieces) / (points[-1][0] - points[0][0])


def _held_out(directory: RunDir, label: str) -> HeldOut:
    """The last evaluation with this label."""
    record: dict[str, Any] = next((r for r in reversed(directory.read_evaluations()) if r["label"] == label), {})
    return HeldOut(record.get("mean_reward"), record.get("accuracy"))


def _code(path: Path) -> tuple[str, ...]:
    manifest = path / "manifest.json"
    if not manifest.exists():
        return ("unknown",)
    found = json.loads(manifest.read_text())
    packages = (f"{name} {version}" for name, version in found.get("packages", {}).items() if name in ("torch", "transformers"))
    return (f"commit {(found.get('git_commit') or 'unknown')[:12]}", f"python {found.get('python')}", *packages)


def _value(config: Config, dotted: str) -> Any:
    value: Any = config.model_dump()
    for part in dotted.split("."):
        value = value[part]
    return value


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
