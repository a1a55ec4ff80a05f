"""`python -m async_rlhf.experiments.planning.validation`: published figures of other systems that are sums of stages, beside
what was predicted and what the model gives now. `figures.toml` has the terms of each."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer

from async_rlhf.experiments import page
from async_rlhf.experiments.planning.model.model_costs import ModelCosts, read
from async_rlhf.experiments.planning.model.stages import (
    Efficiency,
    Layout,
    Place,
    catalogue,
    inference_s,
    prefill_s,
    replica_s,
    training_s,
)
from async_rlhf.experiments.planning.placement.spec import EfficiencyConfig, LengthsConfig

_NODE, _SLOTS = 8, 256  # devices; rows that vLLM decodes at once by default
_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
)  # fmt: skip
Terms = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Figure:
    """predicted: as it was when the tables of README.md were made; now: what the model's stages give."""

    name: str
    published: float
    predicted: float
    now: float


def figures() -> list[Figure]:
    return [Figure(each["name"], each["published"], each["predicted"], _computed(each)) for each in _content()["figure"]]


def table() -> str:
    """Markdown."""
    lines = [[each.name, *(f"{value:.3g}" for value in (each.published, each.predicted, each.now))] for each in figures()]
    return page.raw_table(["figure", "published", "predicted", "computed anew"], lines)


@cache
def _content() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("figures.toml").read_text())


def _computed(figure: Mapping[str, Any]) -> float:
    def seconds(terms: Terms) -> float:
        return math.fsum(term.get("times", 1) * _term_s(figure, term) for term in terms)

    slowest = max(map(seconds, figure.get("apart", ())), default=1.0)
    return float(figure.get("scale", 1.0)) * seconds(figure["stages"]) / slowest


def _term_s(figure: Mapping[str, Any], term: Mapping[str, Any]) -> float:
    tensor, pipeline, data = term["layout"]
    layout = Layout(tensor=tensor, pipeline=pipeline, data=data, zero_stage=term.get("zero", 0), recompute=True)
    usual = EfficiencyConfig()
    reached = {"flops": usual.training, "memory": usual.decode, "links": usual.links, "launch_s": usual.launch_s}
    place = Place(
        model=_model(term["model"]),
        device=catalogue()[figure["device"]],
        layout=layout,
        spread=layout.devices > _NODE,
        efficiency=Efficiency(**{**reached, **figure.get("efficiency", {})}),
    )
    match term["stage"]:
        case "generate":
            spread = 0.7 if term["mean"] < term["longest"] else 0.0
            lengths = LengthsConfig(mean=term["mean"], longest=term["longest"], spread=spread).batch(term["rows"])
            prompt = term["prompt"]
            return replica_s(
                place, lengths, data, prompt_tokens=prompt, slots=_SLOTS, prefill_s=lambda rows: prefill_s(place, rows, prompt)
            )
        case "infer":
            return inference_s(place, term["rows"], term["tokens"], head=term.get("head", True))
        case "train":
            return training_s(place, term["rows"], term["tokens"], micro_batches=term["micro_batches"])
        case _:  # ZeRO-3's weights, gathered
            return place.far.gather_s(place.model.weight_bytes, data)


@cache
def _model(name: str) -> ModelCosts:
    sizes = dict(zip(_SIZES, _content()["models"][name], strict=True))
    return read({"model_type": "llama", "tie_word_embeddings": name.startswith("opt"), **sizes})


if __name__ == "__main__":
    typer.echo(table())
