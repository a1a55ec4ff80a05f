"""Checks that must hold of a sweep, or of one run, for its figures to mean anything.

Pure. Called by `report` and by the report of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from async_rlhf.experiments.staleness.cells import CellResult
from async_rlhf.experiments.staleness.table import Table


@dataclass(frozen=True)
class SweepCheck:
    """Something that must hold for the sweep to mean anything."""

    claim: str
    holds: bool
    detail: str


def listed(found: Sequence[SweepCheck]) -> str:
    """Markdown."""
    return "\n".join(f"- {'holds' if check.holds else '**FAILS**'}: {check.claim} ({check.detail})" for check in found)


def checks(table: Table) -> list[SweepCheck]:
    """All checks of a sweep, each with what it found."""
    results = table.results
    prints = {r.fingerprint for r in results}
    code = {r.code for r in results}
    # A run that went on with other code has two texts of a kind.
    one_code = len(code) == 1 and all(len({text.split()[0] for text in each}) == len(each) for each in code)
    return [
        *checks_of_each(results),
        _equal_budget(table),
        SweepCheck(
            "all cells share every setting that is not swept", len(prints) == 1, f"fingerprint {', '.join(sorted(prints))}"
        ),
        SweepCheck("all cells ran the same code", one_code, " / ".join(", ".join(each) for each in sorted(code))),
        *_same_files(results),
    ]


def _same_files(results: Sequence[CellResult]) -> list[SweepCheck]:
    """The check of `CellResult.files`, where there are any."""
    digests: dict[str, set[str]] = {}
    for file, found in (item for result in results for item in result.files.items()):
        digests.setdefault(file, set()).update(found)
    changed = sorted(file for file, found in digests.items() if len(found) > 1)
    claim = "no file of the user's changed while the cells ran"
    return [SweepCheck(claim, not changed, ", ".join(changed) or f"{len(digests)} files")] if digests else []


def checks_of_each(results: Sequence[CellResult]) -> list[SweepCheck]:
    """The checks of every run on its own."""
    on_policy = [result for result in results if result.bound == 0]
    exact = [result for result in results if result.exact]
    over = [f"{r.cell}: {r.staleness_max} > {r.bound}" for r in results if r.staleness_max > r.bound]
    violations = sum(r.staleness_violations for r in results)
    found = [
        SweepCheck(
            "the oldest token trained on keeps the bound in every cell", not over, "; ".join(over) or _cells(len(results))
        ),
        SweepCheck("no violation was counted", violations == 0, f"{violations} tokens"),
        _all_of("bound 0 is staleness 0 for every token", [r.staleness_max == 0 for r in on_policy]),
        _all_of("exact mode: every token of step t has staleness min(t, bound)", [r.exact_kept for r in exact]),
        _all_of("the ledger closes at the end", [r.ledger_closes for r in results]),
    ]
    return [check for check in found if check.detail != "0 of 0 cells"]


def _cells(count: int) -> str:
    return f"{count} cell{'' if count == 1 else 's'}"


def _all_of(claim: str, hold: Sequence[bool]) -> SweepCheck:
    return SweepCheck(claim, all(hold), f"{sum(hold)} of {_cells(len(hold))}")


def _equal_budget(table: Table) -> SweepCheck:
    """Where all share a limit of tokens or seconds, the last step of each must be the one that reached it: so they lie within a
    batch, or a step, above it. Else all have trained on as many samples."""
    limits = {result.budget and (result.budget.max_trained_tokens, result.budget.max_seconds) for result in table.results}
    tokens, seconds = (limits.pop() if len(limits) == 1 else None) or (None, None)
    if tokens is not None:
        limit, unit, digits, used = float(tokens), "tokens trained on", 0, table.steps["tokens"]
    elif seconds is not None:
        limit, unit, digits, used = seconds, "seconds of training", 1, table.steps["seconds"]
    else:
        samples = sorted(table.cells["trained_samples"].unique())
        return SweepCheck("all cells trained on the same number of samples", len(samples) == 1, ", ".join(map(str, samples)))
    ends = used.groupby("run").tail(1)
    before = used.groupby("run").shift(fill_value=0.0)[ends.index]
    return SweepCheck(
        f"all cells used up a budget of {limit:,.10g} {unit}, each with its last step",
        bool(((before < limit) & (limit <= ends)).all()),
        f"{ends.min():,.{digits}f} to {ends.max():,.{digits}f}",
    )
