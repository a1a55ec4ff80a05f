"""A cache that keeps a part of a row: what cannot be had is refused before a run, and what comes of it is off-policy."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from async_rlhf.actors.torch_engine.kv_policy import KeptPositions
from async_rlhf.actors.torch_engine.loading import load_engine
from async_rlhf.actors.torch_engine.settings import TorchEngineConfig
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.run.config import Config
from async_rlhf.run.loading import load
from tests.conftest import QUICK

KV: dict[str, Any] = {"policy": "chunk_sink", "sinks": 1, "window": 8, "representatives": 4, "ends": []}
SINK: dict[str, Any] = {"engine.kv": KV}
NO_WEIGHT = {"queue.max_staleness": 0, "loss.is_cap": "none"}

# what is asked beside SINK, what the refusal says, and what makes it right as the refusal says
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "another engine": (
        {"engine.kind": "vllm"},
        "unknown key 'engine.kv': engine.kind = 'vllm' has the keys .*; it is one of 'torch'",
        {"engine.kind": "torch"},
    ),
    "recorded passes": ({"engine.cuda_graphs": True}, "engine.cuda_graphs = true.*= false", {"engine.cuda_graphs": False}),
    "the same bits in any batch": (
        {"engine.batch_invariant": True},
        "engine.batch_invariant = true with engine.kv.policy = 'chunk_sink'; only 'full' can",
        {"engine.batch_invariant": "none"},
    ),
    "a window longer than any text": (
        {"engine.kv.window": 4096},
        r"engine\.kv\.window = 4097 never evicts a token.*Highest: engine\.kv\.window = (?P<near>\d+)",
        {"engine.kv.window": "near"},
    ),
    "an empty text that ends chunks": (
        {"engine.kv": KV | {"ends": [".", ""]}},
        r"engine\.kv\.ends.*empty: every token would end one",
        {"engine.kv": KV | {"ends": ["."]}},
    ),
    "no weight at staleness 0": (
        NO_WEIGHT,
        "'chunk_sink' without an importance weight trains on what another distribution sampled.*loss.is_cap = 2.0",
        {"loss.is_cap": 2.0},
    ),
    "no weight, on purpose": (NO_WEIGHT, "or loss.allow_uncorrected = true", {"loss.allow_uncorrected": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_had_is_refused_with_the_nearest_choice_that_can(case: str) -> None:
    asked, message, right = CASES[case]
    with pytest.raises(ConfigError, match=message) as refused:
        load(QUICK, SINK | asked)
    found = re.search(message, str(refused.value))
    near = found.groupdict() if found else {}
    load(QUICK, SINK | asked | {key: int(near["near"]) if value == "near" else value for key, value in right.items()})


def test_a_model_whose_layers_have_windows_is_refused_by_name(tmp_path: Path) -> None:
    model = shutil.copytree(load(QUICK).model, tmp_path / "model")
    described = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(described | {"model_type": "mistral", "sliding_window": 32}))
    with pytest.raises(ConfigError, match=r"'chunk_sink': layers of model type 'mistral' attend to 32 tokens only"):
        load(QUICK, SINK | {"model": str(model)})
    load(QUICK, {"model": str(model)})


def test_no_run_ends_because_the_engine_is_another_policy_and_evaluations_attend_to_everything() -> None:
    def limit(**overrides: Any) -> float:
        config: Config = load(QUICK, overrides)
        return config.engine.mismatch_limit or config.usual_mismatch

    assert limit() == 0.01 and limit(**SINK) == math.inf
    assert limit(**SINK, **{"engine.mismatch_limit": 0.5}) == 0.5
    assert load(QUICK, SINK).served_engine.plain == load(QUICK).served_engine


def loaded(**engine: Any) -> Any:
    settings = {"slots": 2, "kv": KV} | engine
    return load_engine(load(QUICK).model, TorchEngineConfig.model_validate(settings))


def test_the_tokens_of_the_model_say_where_chunks_end() -> None:
    tokenizer = AutoTokenizer.from_pretrained(load(QUICK).model)
    policy = loaded(kv=KV | {"ends": ["e", "1"]}).kv_policy
    assert {tokenizer.decode([token])[-1] for token in np.flatnonzero(policy.ends)} == {"e", "1"}
    assert policy.budget == 13 and not loaded().kv_policy.ends.any()
    assert loaded(kv=KV | {"policy": "window"}).kv_policy.budget == 9
    with pytest.raises(ConfigError, match=r"engine\.kv\.ends = \['(☃|\\u2603)'\]: no token of the model"):
        loaded(kv={"policy": "chunk_sink", "ends": ["☃"]})


def test_when_it_is_loaded_the_engine_is_held_to_a_masked_pass_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(kv=KV | {"ends": ["e"]}, dtype="bfloat16")
    taken = KeptPositions.take_tokens

    def forgetful(self: KeptPositions, ids: Any, at: Any) -> Any:
        columns, seen = taken(self, ids, at)
        return columns, seen & (self._positions[: len(at)] != 0)

    monkeypatch.setattr(KeptPositions, "take_tokens", forgetful)
    with pytest.raises(ConfigError, match=r"'llama' cannot be served by the torch engine.*differ from plain passes"):
        loaded()


def test_memory_for_less_than_a_row_is_refused_with_the_least_that_does() -> None:
    kv = {"policy": "chunk_sink", "ends": []}
    with pytest.raises(ConfigError, match=r"engine\.kv_bytes = 40000 holds \d+ tokens, and a row takes 325") as refused:
        loaded(kv_bytes=40000, kv=kv)
    loaded(kv_bytes=int(str(refused.value).rpartition(" ")[2]), kv=kv)
