"""Whether the runs of a sweep used up the same budget: samples, tokens or seconds. One of the checks of `analyze`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from async_rlhf.experiments.staleness.analyze import CellResult


def equal_budget(results: Sequence[CellResult]) -> tuple[str, bool, str]:
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
