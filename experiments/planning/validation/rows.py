"""One row of the validation: a published claim, its figures beside predictions, and whether its check holds.

`published.toml` has what was published, and what is assumed where a source is silent.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from async_rlhf.experiments.planning.model.model_costs import ModelCosts, read

How = Literal["held out", "fitted", "exact"]
_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """published None: the source gives `claim`, and no number. how: `fitted` where a constant was chosen to meet it, `held out`
    where none was, `exact` where no constant is involved.

    span: least and largest prediction over the plausible range of what the source does not state; empty where it states all.
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


def spanned(
    group: str, label: str, unit: str, published: float | None, found: Sequence[float], how: How = "held out", claim: str = ""
) -> Figure:
    """found: the prediction, then those at the edges of what is assumed."""
    return Figure(group, label, unit, published, found[0], how, (min(found), max(found)), claim)


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


@cache
def _content() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("published.toml").read_text())


def published(number: int) -> dict[str, Any]:
    """The table of a row."""
    found: dict[str, Any] = _content()[f"V{number}"]
    return found


def edges(number: int, name: str) -> tuple[float, float]:
    """The plausible range of a fact that the source does not state."""
    fact = published(number)["assumed"][name]
    return fact["low"], fact["high"]


def trials(number: int, *names: str) -> list[tuple[float, ...]]:
    """The values of these assumptions, then their edges, one of them at a time."""
    facts = [published(number)["assumed"][name] for name in names]
    first = tuple(fact["value"] for fact in facts)
    away = [
        (*first[:at], edge, *first[at + 1 :])
        for at, fact in enumerate(facts)
        for edge in (fact["low"], fact["high"])
        if edge != fact["value"]
    ]
    return [first, *away]


@cache
def model(name: str) -> ModelCosts:
    """Raises KeyError for one that the table lacks."""
    sizes = dict(zip(_SIZES, _content()["models"][name], strict=True))
    return read({"model_type": "llama", "tie_word_embeddings": name.startswith("opt"), **sizes})


def row(number: int, figures: Iterable[Figure], *, holds: bool, finding: str, fitted: str = "") -> Row:
    """The row with its source, check, assumptions and, where it misses, the reason."""
    table = published(number)
    facts = [
        f"{name.replace('_', ' ')} {each['value']:g}"
        + (f" ({each['low']:g} to {each['high']:g})" if each["low"] < each["high"] else "")
        + f": {each['why']}"
        for name, each in table.get("assumed", {}).items()
    ]
    return Row(
        number=number,
        system=table["system"],
        source=table["source"],
        check=table["check"],
        figures=tuple(figures),
        holds=holds,
        finding=finding,
        fitted=fitted,
        assumed="; ".join(facts),
        reason="" if holds else table.get("reason", ""),
    )


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
