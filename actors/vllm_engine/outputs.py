"""Requests and completions in vLLM's terms and in ours. Pure; reads vLLM's objects by their fields only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from async_rlhf.actors.engine import Completion, Request, RolloutKey
from async_rlhf.buffers.errors import EngineError
from async_rlhf.buffers.record import Float32Array, Int32Array, SamplingMask, Span


def sampling_arguments(request: Request, stop_ids: Sequence[int]) -> dict[str, Any]:
    """Keyword arguments of vLLM's SamplingParams but for its `output_kind`, which `partial_every` decides.

    With top-k its likeliest tokens are requested, because what of them has a finite log-probability is the sampling_mask.
    """
    arguments: dict[str, Any] = {
        **request.sampling.model_dump(),
        "max_tokens": request.max_new_tokens,
        "seed": request.seed,
        "stop": list(request.stop),
        "detokenize": bool(request.stop),
        "stop_token_ids": list(stop_ids),
        "ignore_eos": True,  # stop_token_ids has them all
        "logprobs": request.sampling.top_k,
        "flat_logprobs": True,  # lists: an object a token less
    }
    return arguments | ({"stream_interval": request.partial_every} if request.partial_every else {})


def completion_of(request: Request, output: Any, oldest: int) -> Completion:
    """vLLM's final CompletionOutput as ours. oldest: weights that its cache may come from.

    Raises EngineError when vLLM ended the request for another reason than its own end.
    """
    if output.finish_reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended {request.key} with finish_reason {output.finish_reason!r}")
    is_truncated = bool(request.sampling.truncation)
    logprobs, sampling_mask = read_logprobs(output.logprobs, is_truncated and request.sampling.top_k > 0)
    if output.sampling_mask is not None and is_truncated:
        sampling_mask = _sampling_mask(output.sampling_mask.token_ids)
    return Completion(
        key=RolloutKey(*request.key),
        token_ids=np.array(output.token_ids, np.int32),
        logprobs=logprobs,
        spans=read_spans(output.weight_versions, oldest),
        finish_reason=output.finish_reason,
        sampling_mask=sampling_mask,
    )


def read_logprobs(flat: Any, with_sampling_mask: bool) -> tuple[Float32Array, SamplingMask | None]:
    """float32 [T] log-probabilities of the sampled tokens, and the tokens with a finite one at each position, from vLLM's
    FlatLogprobs."""
    ids, values = np.array(flat.token_ids, np.int32), np.array(flat.logprobs, np.float32)
    logprobs = values[np.array(flat.start_indices, np.int64)]  # the sampled token stands first
    if not with_sampling_mask:
        return logprobs, None
    bounds = zip(flat.start_indices, flat.end_indices, strict=True)
    return logprobs, _sampling_mask(np.unique(ids[a:b][np.isfinite(values[a:b])]).tolist() for a, b in bounds)


def read_spans(labels: Any, oldest: int) -> tuple[Span, ...]:
    """The versions of a completion's tokens, from vLLM's spans (version, start, end), which are exact because a label changes
    only while generation is paused."""
    spans = [(int(label.version), label.end - label.start) for label in labels if label.end > label.start]
    return tuple(Span(version, length, oldest if oldest < version else None) for version, length in spans)


def read_probe(prompt_logprobs: Any, token_ids: Sequence[int]) -> Float32Array:
    """float32 [T - 1] from vLLM's prompt log-probabilities, of which the first token has none."""
    pairs = zip(token_ids[1:], list(prompt_logprobs)[1:], strict=True)
    return np.array([at[token].logprob for token, at in pairs], np.float32)


def _sampling_mask(kept: Iterable[Sequence[int]]) -> SamplingMask:
    lists: list[Int32Array] = [np.array(ids, np.int32) for ids in kept]
    return SamplingMask(np.array([len(ids) for ids in lists], np.int32), np.concatenate(lists))
