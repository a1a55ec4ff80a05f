"""How long a plan takes: with every role, over numbers of devices."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from async_rlhf.plan.search import search
from async_rlhf.plan.spec import parse

LIMITS_S = {16: 10.0, 64: 10.0, 512: 60.0}
"""Of one core, by devices."""
_NODE = 8
_LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def spec(devices: int, *, every_role: bool) -> dict[str, Any]:
    """every_role: a critic, a reward model and a reference beside the policy, the most that there is to place."""
    models = {"policy": _LLAMA_8B, **({"critic": _LLAMA_8B, "reward": _LLAMA_8B} if every_role else {})}
    return {
        "models": models,
        "cluster": {"device": "H100", "nodes": devices // _NODE, "devices_per_node": _NODE},
        "lengths": {"prompt": 512, "mean": 2500, "longest": 8192},
        "batch": {"groups": 4 * devices, "group_size": 8},
        "loss": {"kl_coef": 0.05} if every_role else {},
        "reward": {"seconds": 0.3},
    }


def lines(devices: Sequence[int]) -> Iterator[str]:
    """Seconds of this process's CPU time."""
    yield f"{'devices':>7} {'roles':10} {'placements':>10} {'CPU seconds':>11} {'limit':>6}"
    for count in devices:
        for every_role in (False, True):
            began = time.process_time()
            found = search(parse(spec(count, every_role=every_role), Path()))
            took = time.process_time() - began
            roles = "all" if every_role else "policy"
            yield f"{count:7} {roles:10} {found.candidates:10} {took:11.1f} {LIMITS_S.get(count, 60.0):6.0f}"
