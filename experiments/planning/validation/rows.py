"""One row of the validation: a published claim, its figures with predictions, and whether its check holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Literal

How = Literal["held out", "fitted", "exact"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """published None: the source gives `claim`, and no number. how: `fitted` where a constant was chosen to meet it, `held out`
    where none was, `exact` where no constant is involved.

    span: predictions over the plausible range of what the source does not state; empty where it states all.
    """

    group: str
    label: str
    unit: str
    published: float | None
    predicted: float
    how: How = "held out"
    span: tuple[float, ...] = ()
    claim: str = ""

    @property
    def ratio(self) -> float:
        """Predicted over published; nan without a published number."""
        return self.predicted / self.published if self.published is not None else math.nan


@dataclass(frozen=True, kw_only=True)
class Row:
    """check: the condition, in words; holds: what came of it. fitted, assumed: constants, with where each is from."""

    number: int
    system: str
    source: str
    check: str
    figures: tuple[Figure, ...]
    holds: bool
    finding: str
    fitted: str = ""
    assumed: str = ""
    reason: str = ""

    @property
    def name(self) -> str:
        return f"V{self.number}"

    @property
    def verdict(self) -> str:
        return "holds" if self.holds else f"misses: {self.reason}"

    def groups(self) -> list[Figures]:
        """Figures of one kind, in their order."""
        return [Figures(tuple(found)) for _, found in groupby(self.figures, key=_kind)]


def _kind(figure: Figure) -> tuple[str, How, bool]:
    return figure.group, figure.how, figure.published is None


@dataclass(frozen=True)
class Figures:
    """Several of a kind, as one line of the table."""

    each: tuple[Figure, ...]

    @property
    def label(self) -> str:
        first = self.each[0]
        return (
            ", ".join(filter(None, (first.group, first.label))) if len(self.each) == 1 else f"{first.group} ({len(self.each)})"
        )

    @property
    def how(self) -> How:
        return self.each[0].how

    @property
    def unit(self) -> str:
        return self.each[0].unit

    @property
    def ratio(self) -> float:
        return median(figure.ratio for figure in self.each)


def within(figures: Iterable[Figure], share: float) -> bool:
    """Every prediction differs from what was published by at most this share of it."""
    return all(abs(figure.ratio - 1) <= share for figure in figures)


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's: Pearson's correlation of the ranks, where equal values share the mean of theirs."""
    left, right = _ranks([pair[0] for pair in pairs]), _ranks([pair[1] for pair in pairs])
    middle = (len(pairs) - 1) / 2
    product = sum((a - middle) * (b - middle) for a, b in zip(left, right, strict=True))
    return product / math.sqrt(sum((a - middle) ** 2 for a in left) * sum((b - middle) ** 2 for b in right))


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]
