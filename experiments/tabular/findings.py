"""What the rows of a question show: paired differences with intervals, Holm's correction over all of a question, sentences.

Pure. No sentence is written by hand: each is worded by its interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from async_rlhf.experiments.statistics import LEVEL, Difference, holm, paired, ratio, worded
from async_rlhf.experiments.tabular.questions import (
    CORRECTIONS,
    NAIVE,
    RATES,
    STALENESS,
    Cell,
    Question,
    Row,
    best_rates,
    exponents,
    values,
)


@dataclass(frozen=True)
class Finding:
    """One comparison. adjusted: p after Holm."""

    cell: Cell
    base: Cell
    found: Difference
    adjusted: float

    @property
    def shown(self) -> bool:
        """Whether the difference stands among all that were looked at."""
        return self.adjusted < LEVEL


def findings(question: Question, rows: Sequence[Row]) -> list[Finding]:
    """In the order of `question.compared`. Raises ValueError with fewer than three seeds."""
    found = [paired(values(rows, cell), values(rows, base)) for cell, base in question.compared]
    known = [each.p for each in found if each.p is not None]
    if len(known) < len(found):
        raise ValueError(f"{found[0].count} seeds have no interval: at least 3 are needed, the results were made with 20")
    both = zip(question.compared, found, holm(known), strict=True)
    return [Finding(cell, base, each, p) for (cell, base), each, p in both]


def sentences(question: Question, rows: Sequence[Row]) -> list[str]:
    """One for each comparison, then what only this question has."""
    found = findings(question, rows)
    lines = []
    for each in found:
        same_arm, same_x = each.cell.arm == each.base.arm, each.cell.x == each.base.x
        what = f"{each.cell.arm}, {place(question, each.cell.x)}"
        base = place(question, each.base.x) if same_arm else each.base.arm if same_x else f"{each.base.arm}, {each.base.x}"
        if same_arm and same_x:
            base = f"`{each.base.quantity}`"
        lines.append(f"`{each.cell.quantity}`: {worded(what, base, each.found, each.adjusted, len(found))}")
    extra = {"corrections": _gap_closed, "rates": _law_of_rates}.get(question.name)
    return lines + (extra(rows, found) if extra is not None else [])


def place(question: Question, x: str | float) -> str:
    """Where on the axis, in words."""
    if isinstance(x, str):
        return x
    return f"{question.x.split(' [')[0].removesuffix(' (N)')} {x:g}"


def _gap_closed(rows: Sequence[Row], found: Sequence[Finding]) -> list[str]:
    """How much of what staleness costs the naive loss each correction gives back, at the greatest staleness."""
    old = STALENESS[-1]
    fresh, stale = values(rows, Cell("gold", NAIVE, 0)), values(rows, Cell("gold", NAIVE, old))
    (lost,) = [each for each in found if (each.cell, each.base) == (Cell("gold", NAIVE, old), Cell("gold", NAIVE, 0))]
    if not (lost.shown and lost.found.mean < 0):
        return [f"At staleness {old} the naive loss has no gap to the synchronous run that a correction could close."]
    lines = []
    for arm in CORRECTIONS:
        if arm != NAIVE:
            gained = np.subtract(values(rows, Cell("gold", arm, old)), stale).tolist()
            share = ratio(gained, np.subtract(fresh, stale).tolist())
            lines.append(
                f"At staleness {old} {arm} closes {share.mean:.0%} ({share.low:.0%} to {share.high:.0%}) of the gap between "
                "naive PPO and the same loss on fresh data."
            )
    return lines


def _law_of_rates(rows: Sequence[Row], found: Sequence[Finding]) -> list[str]:
    """The exponent is one more comparison of Holm's family."""
    best = best_rates(rows)
    slopes = exponents(best)
    law = paired(slopes, [0.0] * len(slopes))
    p = holm([*(each.found.p or 0.0 for each in found), law.p or 0.0])[-1]
    middles = ", ".join(f"{float(np.exp(np.mean(np.log(each)))):.3f} at {age}" for age, each in best.items())
    at_ends = sum(rate in (RATES[0], RATES[-1]) for each in best.values() for rate in each)
    verdict = "is not shown to move with staleness" if p >= LEVEL else f"{'falls' if law.mean < 0 else 'rises'} with staleness"
    return [
        f"The best learning rate {verdict}: as (1 + staleness)^a with a = {law.mean:+.3f} ({law.low:+.3f} to {law.high:+.3f}; "
        f"p = {p:.2f} after Holm). Its geometric mean over seeds: {middles}. Of {sum(map(len, best.values()))} best rates "
        f"{at_ends} lie at an end of what was tried, where the true one may lie beyond."
    ]
