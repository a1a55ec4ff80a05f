"""Requests and completions in vLLM's terms and in ours. Pure; reads vLLM's objects by their fields only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from async_rlhf.actors.engine import Completion, Request, RolloutKey
from async_rlhf.actors.vllm_engine.arguments import Capabilities
from async_rlhf.buffers.errors import EngineError
from async_rlhf.buffers.record import Float32Array, Int32Array, SamplingMask, Span


def sampling_arguments(request: Request, stop_ids: Sequence[int], has: Capabilities) -> dict[str, Any]:
    """Keyword arguments of vLLM's SamplingParams but for its `output_kind`, which `partial_every` decides.

    With top-k its likeliest tokens are requested, because what of them has a finite log-probability is the sampling_mask.
    """
    arguments: dict[str, Any] = {
        **request.sampling.model_dump(include=set(has.sampling)),
        "max_tokens": request.max_new_tokens,
        "seed": request.seed,
        "stop": list(request.stop),
        "detokenize": bool(request.stop),
        "stop_token_ids": list(stop_ids),
        "ignore_eos": True,  # stop_token_ids has them all
        "logprobs": request.sampling.top_k,
    }
    if request.partial_every:
        arguments["stream_interval"] = request.partial_every
    return arguments | ({"flat_logprobs": True} if has.flat_logprobs else {})


def completion_of(request: Request, output: Any, admitted: int, oldest: int) -> Completion:
    """vLLM's final CompletionOutput as ours.

    admitted: version of the weights when vLLM was given the request; oldest: of those its cache may come from.
    Raises EngineError when vLLM ended the request for another reason than its own end.
    """
    if output.finish_reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended {request.key} with finish_reason {output.finish_reason!r}")
    tokens = np.array(output.token_ids, np.int32)
    is_truncated = bool(request.sampling.truncation)
    logprobs, sampling_mask = read_logprobs(output.logprobs, tokens, is_truncated and request.sampling.top_k > 0)
    if (mask := getattr(output, "sampling_mask", None)) is not None and is_truncated:
        sampling_mask = _sampling_mask(mask.token_ids)
    return Completion(
        key=RolloutKey(*request.key),
        token_ids=tokens,
        logprobs=logprobs,
        spans=read_spans(getattr(output, "weight_versions", None), len(tokens), admitted, oldest),
        finish_reason=output.finish_reason,
        sampling_mask=sampling_mask,
    )


def read_logprobs(positions: Any, tokens: Int32Array, with_sampling_mask: bool) -> tuple[Float32Array, SamplingMask | None]:
    """float32 [T] log-probabilities of int32 [T] tokens, and the tokens with a finite one at each position.

    positions: vLLM's FlatLogprobs, or a list of {token id: Logprob}.
    """
    if hasattr(positions, "start_indices"):
        ids, values = np.array(positions.token_ids, np.int32), np.array(positions.logprobs, np.float32)
        starts = np.array(positions.start_indices, np.int64)
        logprobs = values[starts]  # the sampled token stands first
        if not with_sampling_mask:
            return logprobs, None
        bounds = zip(positions.start_indices, positions.end_indices, strict=True)
        return logprobs, _sampling_mask(np.unique(ids[a:b][np.isfinite(values[a:b])]).tolist() for a, b in bounds)
    pairs = list(zip(tokens.tolist(), positions, strict=True))
    logprobs = np.array([at[token].logprob for token, at in pairs], np.float32)
    if not with_sampling_mask:
        return logprobs, None
    return logprobs, _sampling_mask([token for token, value in at.items() if np.isfinite(value.logprob)] for _, at in pairs)


def read_spans(labels: Any, num_tokens: int, admitted: int, oldest: int) -> tuple[Span, ...]:
    """The versions of a completion's tokens.

    labels: vLLM's spans (version, start, end), exact because a label changes only while generation is paused; None where
    it has none, and then every token counts as the weights' that were served when the request was admitted.
    """
    if labels is None:
        return (Span(admitted, num_tokens),)
    spans = [(int(label.version), label.end - label.start) for label in labels if label.end > label.start]
    return tuple(Span(version, length, oldest if oldest < version else None) for version, length in spans)


def read_probe(prompt_logprobs: Any, token_ids: Sequence[int]) -> Float32Array:
    """float32 [T - 1] from vLLM's prompt log-probabilities, of which the first token has none."""
    pairs = zip(token_ids[1:], list(prompt_logprobs)[1:], strict=True)
    return np.array([at[token].logprob for token, at in pairs], np.float32)


def _sampling_mask(kept: Iterable[Sequence[int]]) -> SamplingMask:
    lists = [np.array(ids, np.int32) for ids in kept]
    return SamplingMask(np.array([len(ids) for ids in lists], np.int32), np.concatenate(lists))
