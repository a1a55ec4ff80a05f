"""The measurements of a run: one `CellResult`, from its directory, or from the file that is kept of it.

Starts and draws nothing, and needs no pandas. Called by `sweep`, `archive` and `table`.
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
from async_rlhf.run.config import Config
from async_rlhf.run.loading import dotted
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
    """The kept measurements of one run; `table` makes its numbers of them. Means are over steps."""

    cell: str
    setting: tuple[tuple[str, Any], ...]
    """Swept keys and their values."""
    seed: int
    bound: int
    """`queue.max_staleness`, in steps."""
    exact: bool
    held_out_start: HeldOut
    held_out_end: HeldOut
    rewards: tuple[float | None, ...]
    """Mean reward of each step's batch."""
    seconds: tuple[float, ...]
    """When each step ended: the sum of the steps' times up to it; the first includes the start of the actors."""
    staleness_tokens: tuple[tuple[int, int], ...]
    """(age, trained tokens of that age) over the whole run, ascending."""
    staleness_violations: int
    exact_kept: bool
    """Every token of step t, counted from 0, had the age min(t, bound): what exact mode promises."""
    is_ess_mean: float | None
    """Effective sample size of the importance weights, as a share of the tokens."""
    is_ratio_max: float | None
    """Largest probability ratio of learner to sampler of any token, before truncation."""
    kl_behaviour_mean: float | None
    """Estimate of KL(sampler || learner) per token, in nats."""
    ledger_closes: bool
    fingerprint: str
    """Fingerprint of the configuration without the swept keys, seed and place."""
    whole: str
    """Fingerprint of the configuration with them, but without how the run was watched."""
    settings: Mapping[str, Any]
    """That configuration: keys that have another value than their default."""
    code: tuple[str, ...]
    """Digest of the sources, Python and package versions; more than one of each where the run went on with another."""
    curves: Mapping[str, tuple[float | None, ...]]
    """`samples` (completions of each step's batch); and by name of those in CURVES, and of scores, that any step has: a number
    a step, to 6 digits."""
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
    def staleness_max(self) -> int:
        """Age of the oldest token trained on."""
        return max(age for age, _ in self.staleness_tokens)

    @property
    def scores(self) -> list[str]:
        """Reward functions whose scores are kept apart: where there are several, also those that are not rewarded."""
        return sorted(name for name in self.held_out_end.scores if SCORE.format(name) in self.curves)


def read_cell(cell: Cell) -> CellResult:
    """The result of a cell's run. Raises ConfigError when there is none, or it has no step."""
    return read_run(RunDir.existing(cell.config.run_dir), cell.setting, cell.swept)


def read_run(directory: RunDir, setting: Setting | None = None, swept: Iterable[str] = ()) -> CellResult:
    """The measurements of a run, wherever its directory was moved. setting, swept: of the cell that it is, if it is one. Raises
    ConfigError when it has no step."""
    config, metrics = directory.config(), directory.read_metrics()
    if not metrics:
        raise ConfigError(f"run {str(directory.path)!r} has no finished step to analyse")
    ledger = directory.read_ledger().get("ledger", {})
    code, files = _made_by(directory.path)
    return CellResult(
        cell=config.name,
        setting=tuple((setting or {}).items()),
        seed=config.seed,
        bound=config.queue.max_staleness,
        exact=config.queue.exact,
        held_out_start=_held_out(directory, "start"),
        held_out_end=_held_out(directory, "end"),
        rewards=tuple(step["reward"] for step in metrics),
        seconds=tuple(itertools.accumulate(step["step_time"] for step in metrics)),
        staleness_tokens=_ages(metrics),
        staleness_violations=sum(step["staleness/violations"] for step in metrics),
        exact_kept=all(
            set(step["staleness/histogram"]) == {str(min(step["step"] - 1, config.queue.max_staleness))} for step in metrics
        ),
        is_ess_mean=_mean(step.get("is/ess") for step in metrics),
        is_ratio_max=max((most for step in metrics if (most := step.get("is/ratio_max")) is not None), default=None),
        kl_behaviour_mean=_mean(step.get("kl/behaviour") for step in metrics),
        ledger_closes=bool(ledger.get("closes")),
        fingerprint=fingerprint(config, ("name", "output_dir", "seed", *swept)),
        whole=fingerprint(config, WATCHING),
        settings=given(config),
        code=code,
        files=files,
        curves=_curves(metrics, config.generation.group_size),
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


def _ages(metrics: Sequence[dict[str, Any]]) -> tuple[tuple[int, int], ...]:
    ages = Counter[int]()
    for step in metrics:
        ages.update({int(age): count for age, count in step["staleness/histogram"].items()})
    return tuple(sorted(ages.items()))


def _curves(metrics: Sequence[dict[str, Any]], group_size: int) -> dict[str, tuple[float | None, ...]]:
    scores = sorted({name for step in metrics for name in step if re.fullmatch(SCORE.format(r"[^/]+"), name)})
    wanted = (*CURVES, *(scores if len(scores) > 1 else ()))
    known = [name for name in wanted if any(step.get(name) is not None for step in metrics)]
    return {
        "samples": tuple(float(len(step["groups"]) * group_size) for step in metrics),
        **{name: tuple(None if (value := step.get(name)) is None else float(f"{value:.6g}") for step in metrics)
           for name in known},
    }  # fmt: skip


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


def _mean(values: Iterable[float | None]) -> float | None:
    """Mean of those that are known."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
