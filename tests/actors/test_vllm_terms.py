"""vLLM's terms and ours, without a vLLM: arguments, capabilities, spans, log-probabilities, the weights' file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from async_rlhf.actors.config import EngineConfig
from async_rlhf.actors.engine import Request, RolloutKey
from async_rlhf.actors.vllm_engine.arguments import Capabilities, engine_arguments, environment, probe
from async_rlhf.actors.vllm_engine.engine import VLLMEngine
from async_rlhf.actors.vllm_engine.outputs import completion_of, read_logprobs, read_spans, sampling_arguments
from async_rlhf.actors.vllm_engine.weights import IndexedWeights, as_index
from async_rlhf.buffers.errors import ConfigError, EngineError
from async_rlhf.buffers.record import Span
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.buffers.weights.shared import SealedMemory
from async_rlhf.buffers.weights.weight_set import WeightSet

NEEDED = ("worker_extension_cls", "logprobs_mode", "max_logprobs", "kv_cache_memory_bytes", "enable_prefix_caching")
SAMPLING = (*Sampling.model_fields, "seed", "stop", "stop_token_ids", "logprobs", "prompt_logprobs", "output_kind")
REQUEST = Request(RolloutKey(1, 0, 2), (5, 6), 8, Sampling(temperature=0.7, top_k=2), seed=3)


@dataclass
class Label:
    version: str
    start: int
    end: int


class OldAsyncLLM:
    """The pause of early releases: it can only abort."""

    def pause_generation(self) -> None: ...
    def resume_generation(self) -> None: ...
    def collective_rpc(self, method: str, args: Any) -> None: ...


class PlainAsyncLLM(OldAsyncLLM):
    def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None: ...


def test_a_vllm_that_lacks_what_is_needed_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as refused:
        probe(OldAsyncLLM, make_dataclass("A", NEEDED[1:]), make_dataclass("S", SAMPLING), "0.9")
    assert "vLLM 0.9 lacks AsyncLLM.pause_generation(mode, clear_cache), AsyncEngineArgs.worker_extension_cls;" in str(
        refused.value
    )


def test_a_vllm_without_version_labels_is_served_the_careful_way() -> None:
    has = probe(PlainAsyncLLM, make_dataclass("A", NEEDED), make_dataclass("S", SAMPLING), "0.20")
    assert has == Capabilities(names_versions=False, flat_logprobs=False)
    assert ["version labels" in text for text in has.lacking] == [True, False, False]
    assert read_spans(None, 7, admitted=3, oldest=3) == (Span(3, 7),), "all count as the oldest weights'"


def test_spans_name_the_cache_where_it_is_older() -> None:
    labels = [Label("3", 0, 4), Label("5", 4, 4), Label("6", 4, 9)]
    assert read_spans(labels, 9, admitted=3, oldest=3) == (Span(3, 4), Span(6, 5, 3))
    assert read_spans(labels, 9, admitted=3, oldest=6) == (Span(3, 4), Span(6, 5)), "its prefix was computed again"


def flat(*positions: tuple[tuple[int, float], ...]) -> Any:
    ends = np.cumsum([len(position) for position in positions]).tolist()
    pairs = [pair for position in positions for pair in position]
    return SimpleNamespace(
        start_indices=[0, *ends[:-1]], end_indices=ends, token_ids=[p[0] for p in pairs], logprobs=[p[1] for p in pairs]
    )


def test_what_has_a_finite_logprob_is_the_support_in_either_form() -> None:
    positions = (((7, -0.5), (7, -0.5), (9, -1.0)), ((4, 0.0), (4, 0.0), (8, -np.inf)))
    tokens = np.array([7, 4], np.int32)
    dicts = [{token: SimpleNamespace(logprob=value) for token, value in position} for position in positions]
    for given in (flat(*positions), dicts):
        logprobs, sampling_mask = read_logprobs(given, tokens, with_sampling_mask=True)
        assert logprobs.tolist() == [-0.5, 0.0] and sampling_mask is not None
        assert (sampling_mask.sizes.tolist(), sampling_mask.ids.tolist()) == ([2, 1], [7, 9, 4])


def test_a_request_that_vllm_gave_up_is_an_error() -> None:
    output = SimpleNamespace(finish_reason="error", token_ids=[1])
    with pytest.raises(EngineError, match="finish_reason 'error'"):
        completion_of(REQUEST, output, admitted=0, oldest=0)


def test_sampling_is_passed_on_and_ends_with_our_stop_tokens_only() -> None:
    arguments = sampling_arguments(REQUEST, [1, 9], Capabilities(True, True))
    assert (arguments["temperature"], arguments["seed"], arguments["top_k"], arguments["max_tokens"]) == (0.7, 3, 2, 8)
    assert arguments["stop_token_ids"] == [1, 9] and arguments["ignore_eos"] and not arguments["detokenize"]
    assert arguments["logprobs"] == 2, "so many as can have been sampled"


def test_a_setting_that_this_vllm_has_not_is_not_passed_on_and_is_named() -> None:
    has = probe(PlainAsyncLLM, make_dataclass("A", NEEDED), make_dataclass("S", set(SAMPLING) - {"min_p"}), "0.20")
    assert has.lacking[-1] == "SamplingParams.min_p"
    assert Sampling.model_fields.keys() - sampling_arguments(REQUEST, [], has).keys() == {"min_p"}
    engine = VLLMEngine(cast(Any, SimpleNamespace(has=has)), cast(Any, None), vocabulary=9, max_length=20, has_tokenizer=False)
    with pytest.raises(ConfigError, match=r"generation.min_p = 0.1: the installed vLLM has no such setting"):
        engine.submit([replace(REQUEST, sampling=Sampling(min_p=0.1))])


def arguments(**vllm: Any) -> dict[str, Any]:
    config = EngineConfig.model_validate({"kind": "vllm", "slots": 8, "prefill_tokens": 100, "vllm": vllm})
    known = {"model", "max_model_len", "swap_space", "dtype"}
    return engine_arguments("model", config, context=512, has_tokenizer=True, known=known)


def test_engine_arguments_are_passed_through() -> None:
    given = arguments(tensor_parallel_size=2, arguments={"max_model_len": 300, "swap_space": 3})
    assert (given["tensor_parallel_size"], given["max_model_len"], given["swap_space"]) == (2, 300, 3)
    assert given["max_num_seqs"] == 9, "a place for the probe"
    assert given["max_num_batched_tokens"] == 300, "on a CPU a prompt is computed whole"


@pytest.mark.parametrize(
    ("name", "said"),
    [("max_modellen", "did you mean 'max_model_len'"), ("dtype", r"arguments\.dtype is set by other settings")],
)
def test_an_unknown_or_doubled_engine_argument_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        arguments(arguments={name: 1})


def test_the_users_environment_is_kept_but_for_the_threads() -> None:
    given = {"VLLM_LOGGING_LEVEL": "DEBUG", "OMP_NUM_THREADS": "16"}
    set_ = environment(EngineConfig(threads=2), True, 77, given)
    assert "VLLM_LOGGING_LEVEL" not in set_ and set_["OMP_NUM_THREADS"] == "2"
    assert set_["TORCH_COMPILE_DISABLE"] == "1" and "TORCH_COMPILE_DISABLE" not in environment(EngineConfig(), False, 77, {})


def test_the_workers_read_the_tensors_bit_for_bit_and_change_them_for_nobody_else() -> None:
    tensors = {"a.weight": torch.randn(3, 5), "b": torch.randn(7, dtype=torch.bfloat16), "empty": torch.zeros(0, 4)}
    raw = {
        name: RawTensor(
            str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.view(torch.uint8).numpy().tobytes()
        )
        for name, tensor in tensors.items()
    }
    weights = WeightSet.of(1, 1, raw, make=SealedMemory.make)
    sealed = weights.tensors()
    for given, is_mapped in ((raw, False), (sealed, True)):
        with as_index(given) as path:
            held = os.readlink(json.loads(Path(path).read_text())["b"][2])
            assert ("async-rlhf-weights" in held) is is_mapped, "sealed memory is mapped as it is"
            loaded = IndexedWeights(path)
        assert list(loaded) == list(tensors)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
        loaded["b"].zero_()
    assert bytes(sealed["b"].data) == bytes(raw["b"].data)
