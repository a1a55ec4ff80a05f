"""What must hold of a sweep, or of one run, for its figures to mean anything.

Pure. Called by `report` and by the report of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from async_rlhf.experiments.staleness.cells import CellResult


@dataclass(frozen=True)
class Check:
    """Something that must hold for the sweep to mean anything."""

    claim: str
    holds: bool
    detail: str


def listed(found: Sequence[Check]) -> str:
    """Markdown."""
    return "\n".join(f"- {'holds' if check.holds else '**FAILS**'}: {check.claim} ({check.detail})" for check in found)


def checks(results: Sequence[CellResult]) -> list[Check]:
    """All checks of a sweep, each with what it found."""
    prints = {r.fingerprint for r in results}
    code = {r.code for r in results}
    # A run that went on with other code has two texts of a kind.
    one_code = len(code) == 1 and all(len({text.split()[0] for text in each}) == len(each) for each in code)
    return [
        *checks_of_each(results),
        Check(*_equal_budget(results)),
        Check("all cells share every setting that is not swept", len(prints) == 1, f"fingerprint {', '.join(sorted(prints))}"),
        Check("all cells ran the same code", one_code, " / ".join(", ".join(each) for each in sorted(code))),
        *_same_files(results),
    ]


def _same_files(results: Sequence[CellResult]) -> list[Check]:
    """Of `CellResult.files`, where there are any."""
    digests: dict[str, set[str]] = {}
    for file, found in (item for result in results for item in result.files.items()):
        digests.setdefault(file, set()).update(found)
    changed = sorted(file for file, found in digests.items() if len(found) > 1)
    claim = "no file of the user's changed while the cells ran"
    return [Check(claim, not changed, ", ".join(changed) or f"{len(digests)} files")] if digests else []


def checks_of_each(results: Sequence[CellResult]) -> list[Check]:
    """What must hold of every run on its own."""
    on_policy = [result for result in results if result.bound == 0]
    exact = [result for result in results if result.exact]
    over = [f"{r.cell}: {r.staleness_max} > {r.bound}" for r in results if r.staleness_max > r.bound]
    violations = sum(r.staleness_violations for r in results)
    found = [
        Check("the oldest token trained on keeps the bound in every cell", not over, "; ".join(over) or _cells(len(results))),
        Check("no violation was counted", violations == 0, f"{violations} tokens"),
        _all_of("bound 0 is staleness 0 for every token", on_policy, [r.staleness_max == 0 for r in on_policy]),
        _all_of("exact mode: every token of step t has staleness min(t, bound)", exact, [r.exact_kept for r in exact]),
        _all_of("the ledger closes at the end", results, [r.ledger_closes for r in results]),
    ]
    return [check for check in found if check.detail != "0 of 0 cells"]


def _cells(count: int) -> str:
    return f"{count} cell{'' if count == 1 else 's'}"


def _all_of(claim: str, results: Sequence[CellResult], hold: Sequence[bool]) -> Check:
    return Check(claim, all(hold), f"{sum(hold)} of {_cells(len(results))}")


def _equal_budget(results: Sequence[CellResult]) -> tuple[str, bool, str]:
    """The claim, whether it holds, and what was found.

    Where all share a limit of tokens or seconds, the last step of each must be the one that reached it: so they lie within a
    batch, or a step, above it. Else all have trained on as many samples.
    """
    limits = {result.budget and (result.budget.max_trained_tokens, result.budget.max_seconds) for result in results}
    tokens, seconds = (limits.pop() if len(limits) == 1 else None) or (None, None)
    if tokens is not None:
        limit, unit, digits = float(tokens), "tokens trained on", 0
        used = [result.tokens or () for result in results]
    elif seconds is not None:
        limit, unit, digits = seconds, "seconds of training", 1
        used = [result.seconds for result in results]
    else:
        samples = sorted({result.trained_samples for result in results})
        return "all cells trained on the same number of samples", len(samples) == 1, ", ".join(map(str, samples))
    curves = [(0.0, 0.0, *curve) for curve in used]
    ends = [curve[-1] for curve in curves]
    return (
        f"all cells used up a budget of {limit:,.10g} {unit}, each with its last step",
        all(curve[-2] < limit <= curve[-1] for curve in curves),
        f"{min(ends):,.{digits}f} to {max(ends):,.{digits}f}",
    )
