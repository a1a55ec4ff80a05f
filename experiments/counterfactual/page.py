"""The results, as rows and as a page whose sentences are worded by intervals.

Of three runs or more, which differ in nothing but their seed, means are shown with 95 % intervals over seeds: what one batch
says and another would not is in them. One run has values, and no interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from async_rlhf.experiments.counterfactual.measures import FreshGradients, Measures, ceiling
from async_rlhf.experiments.counterfactual.recorded import Moment
from async_rlhf.experiments.page import raw_table, write_csv
from async_rlhf.experiments.statistics import MIN_SEEDS, Mean, adjusted, paired, worded

ENOUGH = 4096
"""Fresh completions below which a reference is called too small."""
FRESH = "fresh batch"


class CorrectionInterval(NamedTuple):
    """The value of a correction, and over seeds its 95 % interval; for a fresh batch the mean over fresh batches, and where
    nine in ten of them lie (of several runs, the means of their ends). Ends that are not known are not numbers."""

    value: float
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class EstimateRow:
    """One estimate at one step. staleness, oldest: mean over the stale batch's tokens and the largest, in learner steps.

    completions: fresh ones, of the reference. halves: cosine of its halves. fresh_below: share of fresh batches whose cosine is
    lower; None for a fresh batch. seed: of the run; runs: over how many this is a mean, with the seed of the first.
    """

    seed: int
    step: int
    estimate: str
    staleness: float
    oldest: int
    groups: int
    completions: int
    halves: float
    ceiling: float
    cosine: CorrectionInterval
    norm_ratio: CorrectionInterval
    share: CorrectionInterval
    fresh_below: float | None = None
    bias: Mean | None = None
    """Over seeds: of share - 1, from 0."""
    difference: Mean | None = None
    """Over seeds: of the cosine from that of the first correction; None for that."""
    runs: int = 1


def rows_of(
    seed: int, moment: Moment, completions: int, reference: FreshGradients, corrections: Mapping[str, Measures]
) -> list[EstimateRow]:
    """The rows of one reference: fresh batches as large as the stale one, which are the yardstick, and the stale batch by each
    correction."""
    halves, batches = reference.halves[0], reference.fresh_batches()

    def row(name: str, measures: Iterable[CorrectionInterval], fresh_below: float | None = None) -> EstimateRow:
        cosine, norm_ratio, share = measures
        about = (*moment.staleness, len(moment.groups), completions, halves, ceiling(halves))
        return EstimateRow(seed, moment.step, name, *about, cosine, norm_ratio, share, fresh_below)

    low, high = np.quantile(batches, [0.05, 0.95], axis=0)
    fresh = (CorrectionInterval(*map(float, each)) for each in zip(np.mean(batches, 0), low, high, strict=True))
    rows = [row(FRESH, fresh)]
    for name, measures in corrections.items():
        below = float(np.mean([batch.cosine < measures.cosine for batch in batches]))
        rows.append(row(name, map(CorrectionInterval, measures), below))
    return rows


def over_seeds(rows: Sequence[EstimateRow]) -> list[EstimateRow]:
    """A row for each step and estimate: as it is where one run was made, else the mean over runs, with intervals over seeds.

    Of each seed the estimate is subtracted from 1 and from the first correction's before anything is averaged. Raises
    ValueError for fewer than MIN_SEEDS runs, and more than one.
    """
    together: dict[tuple[int, str], list[EstimateRow]] = {}
    for row in rows:
        together.setdefault((row.step, row.estimate), []).append(row)
    first = next(row.estimate for row in rows if row.estimate != FRESH)
    return [_mean(runs, together[step, first]) if len(runs) > 1 else runs[0] for (step, _), runs in together.items()]


def _mean(rows: Sequence[EstimateRow], base: Sequence[EstimateRow]) -> EstimateRow:
    """base: of the first correction, one a seed."""
    if len(rows) < MIN_SEEDS:
        raise ValueError(f"{len(rows)} runs have no interval; at least {MIN_SEEDS} are needed")

    def mean(values: Iterable[float]) -> float:
        return math.fsum(values) / len(rows)

    def differs(values: Sequence[float]) -> Mean:
        is_known = all(map(math.isfinite, values))
        return paired(values, [0.0] * len(values)) if is_known else Mean(math.nan, math.nan, math.nan, len(values), None)

    changed: dict[str, Any] = {name: mean(getattr(row, name) for row in rows) for name in ("staleness", "halves", "ceiling")}
    for name in Measures._fields:
        intervals = [getattr(row, name) for row in rows]
        found = differs([each.value for each in intervals])
        changed[name] = CorrectionInterval(found.mean, found.low, found.high)
        if rows[0].estimate == FRESH:
            changed[name] = CorrectionInterval(*map(mean, zip(*intervals, strict=True)))
    if rows[0].estimate != FRESH:
        changed["bias"] = differs([row.share.value - 1 for row in rows])
        changed["fresh_below"] = mean(row.fresh_below or 0.0 for row in rows)
        if rows is not base:
            changed["difference"] = differs([a.cosine.value - b.cosine.value for a, b in zip(rows, base, strict=True)])
    return replace(rows[0], **changed, oldest=max(row.oldest for row in rows), runs=len(rows))


def shortfall(completions: int) -> str:
    """The warning about a reference that is too small; empty for one that is not."""
    if completions >= ENOUGH:
        return ""
    return f"only {completions} fresh completions, {ENOUGH} are advised: the ceiling is low and the reference rough"


# What is kept of a run's rows; all else is made from these.
_KEPT = [field.name for field in fields(EstimateRow) if field.name not in ("bias", "difference", "runs")]


def write_rows(rows: Sequence[EstimateRow], path: Path) -> None:
    """A line a row, numbers to 6 digits; an interval is three columns. An empty field was not measured."""
    found = list[dict[str, Any]]()
    for row in rows:
        values = {name: getattr(row, name) for name in _KEPT}
        for name in Measures._fields:
            values |= zip((name, f"{name}_low", f"{name}_high"), values[name], strict=True)
        numbers = {key: value for key, value in values.items() if isinstance(value, float)}
        found.append(values | {key: None if math.isnan(value) else float(f"{value:.6g}") for key, value in numbers.items()})
    write_csv(found, path)


def _command(rows: Sequence[EstimateRow]) -> str:
    """The command that makes these rows, of runs that are not named here."""
    steps = " ".join(f"--step {step}" for step in dict.fromkeys(row.step for row in rows))
    runs = "RUN" if rows[0].runs == 1 else f"RUN-1 ... RUN-{rows[0].runs}"
    return f"python -m async_rlhf.experiments.counterfactual {runs} {steps} --completions {rows[0].completions}"


def render(rows: Sequence[EstimateRow]) -> str:
    """The page. rows: of `over_seeds`."""
    warning, runs = shortfall(rows[0].completions), rows[0].runs
    parts = [
        f"{_TITLE}\n\n    {_command(rows)}\n\n{_HEAD}\n\n{_OF_ONE if runs == 1 else _OF_SEEDS.format(runs=runs)} {_READ}",
        *([f"**Warning: {warning}.**"] if warning else []),
        *(_section([row for row in rows if row.step == step]) for step in dict.fromkeys(row.step for row in rows)),
        "## What is shown",
        "\n".join(f"- {sentence}" for sentence in sentences(rows)),
    ]
    return "\n\n".join(parts) + "\n"


def sentences(rows: Sequence[EstimateRow]) -> list[str]:
    """Sentences that say of each correction whether its cosine differs from that of the first, and whether its share differs
    from 1; after Holm over all of these. Corrections that gave the same gradient are one comparison, not several."""
    same_gradient = alike(rows)
    firsts = [row for row in rows if row in [same[0] for same in same_gradient]]
    base = next(row.estimate for row in rows if row.estimate != FRESH)
    asked = [
        *((row, "cosine", base, row.difference) for row in firsts),
        *((row, "share", "1, that of an unbiased estimate", row.bias) for row in firsts),
    ]
    known = [(row, what, base, over) for row, what, base, over in asked if over is not None and math.isfinite(over.mean)]
    judged = adjusted(dict(enumerate(interval for *_, interval in known)))
    return [
        *(
            f"Step {first.step}: {', '.join(row.estimate for row in others)} gave the gradient of {first.estimate}."
            for first, *others in same_gradient
            if others
        ),
        *(
            worded(f"Step {row.step}, {row.estimate}: its {what}", base, judged[number], len(judged))
            for number, (row, what, base, _) in enumerate(known)
        ),
    ]


def alike(rows: Sequence[EstimateRow]) -> list[list[EstimateRow]]:
    """The corrections of each step, together where all measures are equal to four digits."""
    found: dict[object, list[EstimateRow]] = {}
    for row in rows:
        if row.estimate != FRESH:
            digits = tuple(f"{getattr(row, name).value:.4g}" for name in Measures._fields)
            found.setdefault((row.step, digits), []).append(row)
    return list(found.values())


_TITLE = "# Gradients on a stale batch, against fresh ones at the same weights"
_HEAD = """Written by that command; no sentence below is written by hand. At each step the reference is the on-policy gradient
of the checkpoint's weights, from fresh completions of the run's prompts; every correction gives the first update's gradient of
the batch that the run trained on from there, the same batch for all."""
_OF_ONE = """Numbers are those of one run, which have no interval; three runs that differ in their seed have;"""
_OF_SEEDS = (
    """Numbers are means over {runs} runs, which differ in their seed, and, in brackets, 95 % intervals over these seeds;"""
)
_READ = """of fresh batches: the mean, and where nine in ten of them lie. The *ceiling* is the cosine that the true gradient
itself would have with the reference. The *share* is the estimate's length along the true gradient, in lengths of that: 1 on
average without bias. A difference is said to be there when its p value, after Holm's correction over all sentences, is below
0.05."""


def _section(rows: Sequence[EstimateRow]) -> str:
    first = rows[0]
    lines = []
    for row in rows:
        below = "" if row.fresh_below is None else f"{row.fresh_below:.0%}"
        lines.append([row.estimate, *(_words(getattr(row, name)) for name in Measures._fields), below, f"{row.ceiling:.3f}"])
    return "\n\n".join(
        [
            f"## Step {first.step}: mean staleness {first.staleness:.2f}, oldest token {first.oldest}",
            f"{first.groups} groups in the batch, {first.completions} fresh completions; cosine of the reference's halves "
            f"{first.halves:.3f}.",
            raw_table(["estimate", "cosine", "norm ratio", "share", "fresh batches below", "ceiling"], lines),
        ]
    )


def _words(found: CorrectionInterval) -> str:
    if math.isnan(found.value):
        return "unknown: the halves of the reference have no common direction"
    return f"{found.value:.3f}" + ("" if math.isnan(found.low) else f" ({found.low:.3f} to {found.high:.3f})")
