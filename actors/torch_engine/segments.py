"""Neighbouring rows attend together, and read their cache as far as the longest of them: a long row among short ones costs its
own columns, once.

`LlamaForward` computes segment by segment itself. The code of other models attends through the function that transformers
looks up by name: `attend_in_segments` puts one there that calls the model's own for each segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from async_rlhf.buffers.attention import attend_by, attends_by_name

# Rows are looked at in blocks of so many; what a segment costs beside reading, in rows x columns (measured on two cores).
BLOCK, COST = 4, 128
_NAME = "segments of rows"


class Segment(NamedTuple):
    """Rows start .. stop - 1, of which none has more than `length` tokens; it costs some operations of its own."""

    start: int
    stop: int
    length: int


def segments(positions: Sequence[int]) -> list[Segment]:
    """Segments of all rows in order; positions: index of each row's last token. A block, or each row of one whose rows differ
    much, joins the segment before it when that costs no more than a segment of its own."""
    found: list[Segment] = []
    for start in range(0, len(positions), BLOCK):
        block = positions[start : start + BLOCK]
        size = 1 if len(block) * max(block) - sum(block) > (len(block) - 1) * COST else len(block)
        for first in range(0, len(block), size):
            rows = block[first : first + size]
            part = Segment(start + first, start + first + len(rows), max(rows) + 1)
            if found and _cost(joined := _join(found[-1], part)) <= _cost(found[-1]) + _cost(part):
                found[-1] = joined
            else:
                found.append(part)
    return found


def _join(before: Segment, after: Segment) -> Segment:
    return Segment(before.start, after.stop, max(before.length, after.length))


def _cost(segment: Segment) -> int:
    return (segment.stop - segment.start) * segment.length + COST


_of_pass: ContextVar[Sequence[Segment]] = ContextVar("segments of the pass", default=())


def attend_in_segments(model: PreTrainedModel) -> bool:
    """Let the model's own code attend so, in place; False where it attends by code that is not looked up, or not by sdpa."""
    if model.device.type != "cpu" or not attends_by_name(model):
        return False
    attend_by(model, _NAME, _attention)
    return True


@contextmanager
def attending(parts: Sequence[Segment]) -> Iterator[None]:
    """Passes in the block bring one token a row, which attend in these segments."""
    before = _of_pass.set(parts)
    try:
        yield
    finally:
        _of_pass.reset(before)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **named: Any,
) -> Any:
    """query [N, H, 1, D], key and value [N, J, T, D], the mask [N, 1, 1, T]: [N, 1, H, D]."""
    parts = _of_pass.get()
    if len(parts) < 2 or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **named)
    outputs = [
        sdpa_attention_forward(
            module,
            query[start:stop],
            key[start:stop, :, :length],
            value[start:stop, :, :length],
            attention_mask[start:stop, ..., :length],
            **named,
        )[0]
        for start, stop, length in parts
    ]
    return torch.cat(outputs), None
