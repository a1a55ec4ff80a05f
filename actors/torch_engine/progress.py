"""What a request has sampled so far, when it leaves its row without having ended. Nothing of it is ever sampled again."""

from __future__ import annotations

from dataclasses import dataclass

from async_rlhf.buffers.record import Float32Array, Int32Array, Span


@dataclass(frozen=True)
class Progress:
    """token_ids: int32 [T]; logprobs: float32 [T]; spans cover all T tokens; sampling_masks: int32 ids of each, or empty."""

    token_ids: Int32Array
    logprobs: Float32Array
    spans: tuple[Span, ...]
    sampling_masks: tuple[Int32Array, ...] = ()
