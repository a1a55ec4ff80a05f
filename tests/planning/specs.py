"""Specs of plans that are small enough to search in a moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from async_rlhf.experiments.planning.placement.spec import Spec, parse

LLAMA_1B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def spec_values(**changes: Any) -> dict[str, Any]:
    """Sections of a spec; those that are given change single keys of them."""
    values: dict[str, Any] = {
        "models": {"policy": LLAMA_1B},
        "cluster": {"device": "A100-80GB", "nodes": 1, "devices_per_node": 8},
        "lengths": {"prompt": 256, "mean": 300, "longest": 1024},
        "batch": {"groups": 32, "group_size": 8},
    }
    for section, table in changes.items():
        values[section] = {**values.get(section, {}), **table}
    return values


def spec(**changes: Any) -> Spec:
    return parse(spec_values(**changes), Path())
