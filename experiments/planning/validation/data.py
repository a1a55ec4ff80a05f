"""What was published, and what is assumed where a source is silent: `published.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from async_rlhf.experiments.planning.validation.rows import Figure, Row
from async_rlhf.plan.model_costs import ModelCosts, read

_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """A fact that the source does not state: the value taken, and the plausible range."""

    value: float
    low: float
    high: float
    why: str

    @property
    def range(self) -> tuple[float, float]:
        return self.low, self.high


@cache
def _content() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("published.toml").read_text())


def published(number: int) -> dict[str, Any]:
    """The table of a row."""
    found: dict[str, Any] = _content()[f"V{number}"]
    return found


def assumed(number: int, name: str) -> Assumed:
    return Assumed(**published(number)["assumed"][name])


def trials(number: int, *names: str) -> list[tuple[float, ...]]:
    """The values of these assumptions, then their edges, one of them at a time."""
    facts = [assumed(number, name) for name in names]
    first = tuple(fact.value for fact in facts)
    edges = [
        (*first[:at], edge, *first[at + 1 :]) for at, fact in enumerate(facts) for edge in fact.range if edge != fact.value
    ]
    return [first, *edges]


@cache
def model(name: str) -> ModelCosts:
    """Raises KeyError for one that the table lacks."""
    sizes = dict(zip(_KEYS, _content()["models"][name], strict=True))
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
