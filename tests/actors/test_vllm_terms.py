"""vLLM's terms and ours, without a vLLM: arguments, spans, log-probabilities, the weights' file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from async_rlhf.actors.engine import Request, RolloutKey
from async_rlhf.actors.vllm_engine.loading import engine_arguments, environment
from async_rlhf.actors.vllm_engine.outputs import completion_of, read_logprobs, read_spans, sampling_arguments
from async_rlhf.actors.vllm_engine.settings import VLLMEngineConfig
from async_rlhf.actors.vllm_engine.weights import IndexedWeights, as_index
from async_rlhf.buffers.errors import ConfigError, EngineError
from async_rlhf.buffers.record import Span
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.buffers.weights.shared import SealedPool
from async_rlhf.buffers.weights.weight_set import WeightSet

REQUEST = Request(RolloutKey(1, 0, 2), (5, 6), 8, Sampling(temperature=0.7, top_k=2), seed=3)


def test_spans_name_the_cache_where_it_is_older() -> None:
    labels = [SimpleNamespace(version=v, start=a, end=b) for v, a, b in (("3", 0, 4), ("5", 4, 4), ("6", 4, 9))]
    assert read_spans(labels, oldest=3) == (Span(3, 4), Span(6, 5, 3))
    assert read_spans(labels, oldest=6) == (Span(3, 4), Span(6, 5)), "its prefix was computed again"


def test_what_has_a_finite_logprob_is_the_support() -> None:
    flat = SimpleNamespace(
        start_indices=[0, 3], end_indices=[3, 6], token_ids=[7, 7, 9, 4, 4, 8], logprobs=[-0.5, -0.5, -1.0, 0.0, 0.0, -np.inf]
    )
    logprobs, sampling_mask = read_logprobs(flat, with_sampling_mask=True)
    assert logprobs.tolist() == [-0.5, 0.0] and sampling_mask is not None
    assert (sampling_mask.sizes.tolist(), sampling_mask.ids.tolist()) == ([2, 1], [7, 9, 4])


def test_a_request_that_vllm_gave_up_is_an_error() -> None:
    with pytest.raises(EngineError, match="finish_reason 'error'"):
        completion_of(REQUEST, SimpleNamespace(finish_reason="error", token_ids=[1]), oldest=0)


def test_sampling_is_passed_on_and_ends_with_our_stop_tokens_only() -> None:
    arguments = sampling_arguments(REQUEST, [1, 9])
    assert {**REQUEST.sampling.model_dump(), "seed": 3, "max_tokens": 8}.items() <= arguments.items()
    assert arguments["stop_token_ids"] == [1, 9] and arguments["ignore_eos"] and not arguments["detokenize"]
    assert arguments["logprobs"] == 2, "so many as can have been sampled"


def arguments(**vllm: Any) -> dict[str, Any]:
    config = VLLMEngineConfig(kind="vllm", slots=8, prefill_tokens=100, **vllm)
    known = {"model", "max_model_len", "swap_space", "dtype"}
    return engine_arguments("model", config, context=512, has_tokenizer=True, known=known)


def test_engine_arguments_are_passed_through_and_unknown_or_doubled_ones_refused() -> None:
    given = arguments(tensor_parallel_size=2, arguments={"max_model_len": 300, "swap_space": 3})
    assert (given["tensor_parallel_size"], given["max_model_len"], given["swap_space"]) == (2, 300, 3)
    assert given["max_num_seqs"] == 9, "a place for the probe"
    assert given["max_num_batched_tokens"] == 300, "on a CPU a prompt is computed whole"
    for name, said in (("max_modellen", "did you mean 'max_model_len'"), ("dtype", r"arguments\.dtype is set by other")):
        with pytest.raises(ConfigError, match=said):
            arguments(arguments={name: 1})


def test_the_users_environment_is_kept_but_for_the_threads() -> None:
    given = {"VLLM_LOGGING_LEVEL": "DEBUG", "OMP_NUM_THREADS": "16"}
    config = VLLMEngineConfig(kind="vllm", threads=2)
    set_ = environment(config, True, 77, given)
    assert "VLLM_LOGGING_LEVEL" not in set_ and set_["OMP_NUM_THREADS"] == "2"
    assert set_["TORCH_COMPILE_DISABLE"] == "1" and "TORCH_COMPILE_DISABLE" not in environment(config, False, 77, {})


def test_the_workers_read_the_tensors_bit_for_bit_and_change_them_for_no_other() -> None:
    tensors = {"a.weight": torch.randn(3, 5), "b": torch.randn(7, dtype=torch.bfloat16), "empty": torch.zeros(0, 4)}
    raw = {
        name: RawTensor(
            str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.view(torch.uint8).numpy().tobytes()
        )
        for name, tensor in tensors.items()
    }
    weights = WeightSet.of(1, 1, raw, make=SealedPool().make)
    sealed = weights.tensors()
    for given, is_mapped in ((raw, False), (sealed, True)):
        with as_index(given) as path:
            held = os.readlink(json.loads(Path(path).read_text())["b"][2][0])
            assert ("async-rlhf-weights" in held) is is_mapped, "sealed memory is mapped as it is"
            loaded = IndexedWeights(path)
        assert list(loaded) == list(tensors)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
        loaded["b"].zero_()
    assert bytes(sealed["b"].data) == bytes(raw["b"].data)
