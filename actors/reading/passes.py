"""One pass of a decoder over chunks of texts, each behind the keys and values that are kept of its beginning.

Owns nothing: what is kept is the caller's. Any Hugging Face model whose layers keep keys and values and whose tokens see
only what is before them; `probe` finds out whether a model is one.

Axes: `K` chunks, `P` longest chunk, `T` longest text, `H` key heads, `D` head width, `C` model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache

from async_rlhf.actors.torch_engine.chunks import PaddedChunks
from async_rlhf.actors.torch_engine.masks import attention_of
from async_rlhf.actors.torch_engine.scheduler import Chunk
from async_rlhf.buffers.errors import RewardError

# What two ways to compute one number may differ by, as a share of its size.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.1}
_PROBE = 12


class Reader(Protocol):
    """A model that reads. body: it without its head."""

    device: torch.device
    dtype: torch.dtype

    @property
    def body(self) -> Any:
        """Raises AttributeError for a model that is not built of body and head."""
        ...

    def some_tokens(self, count: int) -> list[int]:
        """Different tokens, none of them padding."""
        ...


@dataclass(eq=False)
class Beginning:
    """What is kept of one text. ids: its tokens so far; keys, values: of each layer [H, T, D]."""

    ids: list[int] = field(default_factory=list)
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def shares(self, ids: Sequence[int]) -> int:
        """How many tokens a text of these ids begins with that are kept."""
        kept = self.ids
        if list(ids[: len(kept)]) == kept:
            return len(kept)
        return next((i for i, (own, other) in enumerate(zip(kept, ids, strict=False)) if own != other), len(ids))

    def take_over(self, other: Beginning, length: int) -> None:
        """Become a copy of the first `length` tokens of another."""
        self.ids = other.ids[:length]
        self.keys, self.values = ([part[:, :length].clone() for part in side] for side in (other.keys, other.values))


@torch.inference_mode()
def extend(model: Reader, texts: Sequence[tuple[Beginning, list[int]]]) -> list[torch.Tensor]:
    """Make each beginning one of all these ids; returns of each [P, C], what the model made of the tokens it read now.

    What a beginning has in common with its ids is not computed again, but for the last token.
    """
    starts = [beginning.shares(ids[:-1]) for beginning, ids in texts]
    chunks = [Chunk(tuple(ids[at:]), at, (row,)) for row, ((_, ids), at) in enumerate(zip(texts, starts, strict=True))]
    padded = PaddedChunks.of(chunks, model.device)
    assert padded is not None, "a pass over nothing"
    hidden: torch.Tensor = model.body(
        input_ids=padded.ids,
        position_ids=padded.positions,
        attention_mask=attention_of(model.body.config).masks(lambda reach: padded.mask(model.dtype, reach)),
        past_key_values=_Pass([beginning for beginning, _ in texts], chunks, padded.length),
        use_cache=True,
    ).last_hidden_state
    for beginning, ids in texts:
        beginning.ids = list(ids)
    return [row[: len(chunk.ids)] for row, chunk in zip(hidden, chunks, strict=True)]


@torch.inference_mode()
def probe(model: Reader) -> int:
    """Bytes of keys and values of one token. Raises RewardError unless a probe comes to the same in two parts as in one."""
    ids, beginning = model.some_tokens(_PROBE), Beginning()
    try:
        parts = [extend(model, [(beginning, part)])[0] for part in (ids[: _PROBE // 2], ids)]
        read = torch.cat(parts).float()
        whole = model.body(input_ids=torch.tensor([ids], device=model.device)).last_hidden_state[0].float()
        size = sum(part.numel() * part.element_size() for side in (beginning.keys, beginning.values) for part in side)
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
        raise RewardError(f"the model cannot read along ({type(error).__name__}: {error}); set stream_tokens = 0") from error
    difference = float((read - whole).abs().max())
    if not difference <= _TOLERANCE[model.dtype] * (1 + float(whole.abs().max())) or not size:
        raise RewardError(
            f"the model cannot read along: what it makes of a probe differs by {difference:.3g} when it reads it in two parts, "
            "as of a model that looks ahead or keeps more than keys and values; set stream_tokens = 0"
        )
    return size // len(ids)


class _Pass(Cache):  # type: ignore[misc]  # transformers ships without types
    """What the attention layers of one pass see: each chunk behind what is kept before it, which grows by it."""

    def __init__(self, kept: Sequence[Beginning], chunks: Sequence[Chunk], length: int) -> None:
        super().__init__(layers=[])
        self._kept, self._chunks, self._length = kept, chunks, length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New keys and values [K, H, P, D]; returns all, [K, H, T, D]."""
        keys = self._joined([beginning.keys for beginning in self._kept], key_states, layer_idx)
        return keys, self._joined([beginning.values for beginning in self._kept], value_states, layer_idx)

    def _joined(self, kept: Sequence[list[torch.Tensor]], new: torch.Tensor, layer: int) -> torch.Tensor:
        # Zeros, because a hidden column takes part in attention with weight 0 and must be finite.
        joined = new.new_zeros((len(new), new.shape[1], self._length, new.shape[3]))
        for row, (layers, chunk) in enumerate(zip(kept, self._chunks, strict=True)):
            end = chunk.start + len(chunk.ids)
            if chunk.start:
                joined[row, :, : chunk.start] = layers[layer][:, : chunk.start]
            joined[row, :, chunk.start : end] = new[row, :, : len(chunk.ids)]
            layers[layer : layer + 1] = [joined[row, :, :end].clone()]
        return joined

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._length, 0
