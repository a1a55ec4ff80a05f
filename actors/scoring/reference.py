"""The stage `reference`, as the pool calls it: log-probabilities of completions under the frozen initial model.

It is called as a reward is, in worker processes of its own, and answers with log-probabilities in place of a score. No torch
here: the supervisor looks at it before a run, workers load it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from async_rlhf.actors.rewards.answer import Logprobs
from async_rlhf.actors.rewards.settings import Stream, reward

if TYPE_CHECKING:
    from async_rlhf.actors.scoring.incremental import ReferenceStreams
    from async_rlhf.actors.scoring.models import ReferenceModel
    from async_rlhf.buffers.record import SamplingMask

_CACHE_BYTES = 1 << 30


def prepare(path: str, device: str = "cpu", dtype: str = "float32", threads: int = 1, **others: Any) -> None:
    """Load the model; once in each process."""
    _model(path, device, dtype, threads)


def prefetch(prompt_ids: list[list[int]], completion_ids: list[list[int]], stream_ids: list[int], **options: Any) -> None:
    """Read what there is of these completions."""
    _streams(**options).prefetch(stream_ids, prompt_ids, completion_ids)


def forget(stream_ids: list[int], **options: Any) -> None:
    """Let go of what was read of these."""
    _streams(**options).forget(stream_ids)


@reward(batch_size=16, batch_wait_s=0.02, workers=1, timeout_s=60.0, prepare=prepare, stream=Stream(prefetch, forget))
def reference(
    prompt_ids: list[list[int]],
    completion_ids: list[list[int]],
    path: str,
    temperature: float,
    restricted: bool = True,
    device: str = "cpu",
    dtype: str = "float32",
    threads: int = 1,
    cache_bytes: int = _CACHE_BYTES,
    sampling_mask: list[Sequence[bytes] | None] | None = None,
    stream_ids: list[int | None] | None = None,
) -> list[Logprobs]:
    """Of each completion, float32 [T] log-probabilities at `temperature`.

    path: the model's directory. restricted: over the tokens that each was chosen among (`sampling_mask`), where that
    known; else over the whole vocabulary. cache_bytes: most memory for what was read of completions that are not whole yet.
    """
    given = sampling_mask if restricted and sampling_mask is not None else [None] * len(completion_ids)
    sampling_masks = [None if own is None else _sampling_mask(*own) for own in given]
    if stream_ids is not None:
        streams = _made_streams(path, temperature, device, dtype, threads, cache_bytes)
        return streams.score(stream_ids, prompt_ids, completion_ids, sampling_masks)
    model = _model(path, device, dtype, threads)
    read = zip(model.read(prompt_ids, completion_ids), completion_ids, sampling_masks, strict=True)
    return [Logprobs(model.logprobs(hidden, ids, temperature, own)) for hidden, ids, own in read]


def _sampling_mask(sizes: bytes, ids: bytes) -> SamplingMask:
    from async_rlhf.buffers.record import SamplingMask

    return SamplingMask(np.frombuffer(sizes, "<i4"), np.frombuffer(ids, "<i4"))


@functools.cache
def _model(path: str, device: str, dtype: str, threads: int) -> ReferenceModel:
    from async_rlhf.actors.scoring.models import ReferenceModel

    return ReferenceModel(Path(path), device=device, dtype=dtype, threads=threads)


def _streams(
    path: str,
    temperature: float,
    device: str = "cpu",
    dtype: str = "float32",
    threads: int = 1,
    cache_bytes: int = _CACHE_BYTES,
    **others: Any,
) -> ReferenceStreams:
    return _made_streams(path, temperature, device, dtype, threads, cache_bytes)


@functools.cache
def _made_streams(path: str, temperature: float, device: str, dtype: str, threads: int, cache_bytes: int) -> ReferenceStreams:
    from async_rlhf.actors.scoring.incremental import ReferenceStreams

    return ReferenceStreams(_model(path, device, dtype, threads), cache_bytes, temperature)
