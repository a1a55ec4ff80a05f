"""Chunks of prefixes as tensors: padded ids and positions, what each token may see, and where its key and value go.

Axes: `K` chunks, `P` longest chunk, `W` tokens written (once for each row that gets their chunk), `T` columns seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from async_rlhf.actors.torch_engine.scheduler import PrefillChunk
from async_rlhf.buffers.attention import FULL, Attention, Reach, attention, unknown
from async_rlhf.buffers.errors import ConfigError


@dataclass(frozen=True)
class PaddedChunks:
    """Chunks of several rows in one pass."""

    ids: torch.Tensor
    """int64 [K, P], right padded."""
    positions: torch.Tensor
    """int64 [K, P], right padded; a padded position repeats the last."""
    length: int
    """Columns seen, T."""
    place: torch.Tensor
    """int64 [2, W], row and column that each token is written into. Padding is left out: its columns may be another token's, or
    beyond the buffer."""
    origin: torch.Tensor
    """int64 [2, W], the chunk of each token and its place in that."""
    writes: tuple[tuple[int, int, int, int], ...]
    """The same: a chunk, a row that it is written into, and the columns from and to which."""
    sources: torch.Tensor | None
    """int64 [K], the row each chunk reads; None where every chunk begins its row, and attends to its own tokens alone."""

    @classmethod
    def of(cls, chunks: Sequence[PrefillChunk], device: torch.device) -> PaddedChunks | None:
        """None when there are no chunks."""
        if not chunks:
            return None
        width = max(len(chunk.ids) for chunk in chunks)
        ids = [(*chunk.ids, *(0,) * (width - len(chunk.ids))) for chunk in chunks]
        starts = torch.tensor([chunk.start for chunk in chunks])
        lengths = torch.tensor([len(chunk.ids) for chunk in chunks])
        positions = starts[:, None] + torch.arange(width).expand(len(chunks), width).minimum(lengths[:, None] - 1)
        targets = torch.tensor([row for chunk in chunks for row in chunk.rows])
        origins = torch.tensor([index for index, chunk in enumerate(chunks) for _ in chunk.rows])
        counts = lengths[origins]
        tokens = torch.cat([torch.arange(count) for count in counts.tolist()])
        of_chunk = origins.repeat_interleave(counts)
        place = torch.stack((targets.repeat_interleave(counts), starts[of_chunk] + tokens))
        begin = all(chunk.start == 0 for chunk in chunks)
        return cls(
            ids=torch.tensor(ids, device=device),
            positions=positions.to(device),
            length=int((starts + lengths).max()),
            place=place.to(device),
            origin=torch.stack((of_chunk, tokens)).to(device),
            writes=tuple(
                (index, row, chunk.start, chunk.start + len(chunk.ids))
                for index, chunk in enumerate(chunks)
                for row in chunk.rows
            ),
            sources=None if begin else torch.tensor([chunk.rows[0] for chunk in chunks], device=device),
        )

    def mask(self, dtype: torch.dtype, reach: Reach = FULL) -> torch.Tensor:
        """[K, 1, P, T], as `position_mask`. What padding sees means nothing."""
        return position_mask(self.positions, self.length, dtype, reach)


def attention_of(config: PretrainedConfig) -> Attention:
    """Raises ConfigError for a family that is not known to keep keys and values of each position and nothing else."""
    text = config.get_text_config().to_dict()
    found = attention(text)
    if found is None:
        raise ConfigError(unknown(str(text.get("model_type"))))
    return found


def position_mask(positions: torch.Tensor, length: int, dtype: torch.dtype, reach: Reach) -> torch.Tensor:
    """[K, 1, P, length] for int64 [K, P]: 0 up to each position as far back as a layer reaches, elsewhere the
    lowest finite number."""
    columns = torch.arange(length, device=positions.device)
    positions = positions[:, :, None]
    seen = columns <= positions
    seen &= reach.covers(positions, columns)
    return additive(seen, dtype)[:, None]


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where bool `seen` is true, elsewhere the lowest finite number."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)
