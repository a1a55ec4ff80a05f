"""What a reward is told of a completion, in training and in evaluation alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from async_rlhf.actors.engine import Completion, Partial
from async_rlhf.actors.prompts import Row
from async_rlhf.buffers.record import SamplingMask

STREAM = "stream_id"
"""The field by which a stage that reads along knows a completion again."""
OURS = frozenset({"sampling_mask"})
"""What only a stage of ours is told: a reward that takes every column is not."""


def fields_of(row: Row, prompt_ids: Sequence[int], completion: Completion | Partial, text: str) -> dict[str, Any]:
    """The row's columns, and over them the fields every reward may ask for (`async_rlhf.actors.rewards.FIELDS`); plain data.

    Of a completion that is still being written nobody knows how it ends.
    """
    known = {
        **row.columns,
        "prompt": row.prompt,
        "completion": text,
        "prompt_ids": list(prompt_ids),
        "completion_ids": completion.token_ids.tolist(),
    }
    if isinstance(completion, Partial):
        return known
    return {**known, "finish_reason": completion.finish_reason, "sampling_mask": _plain(completion.sampling_mask)}


def _plain(sampling_mask: SamplingMask | None) -> tuple[bytes, bytes] | None:
    """Sizes and ids, little-endian int32, as a stage in another process takes them."""
    return (
        None
        if sampling_mask is None
        else (sampling_mask.sizes.astype("<i4").tobytes(), sampling_mask.ids.astype("<i4").tobytes())
    )
