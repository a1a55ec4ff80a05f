"""Chunks of prefixes as tensors: padded ids and positions, what each token may see, and where its key and value go.

Axes: `K` chunks, `P` longest chunk, `M` rows that get a chunk, `W` tokens written (once for each row), `T` columns seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from async_rlhf.actors.torch_engine.scheduler import Chunk
from async_rlhf.buffers.attention import FULL, Attention, Reach, attention, unknown
from async_rlhf.buffers.errors import ConfigError


@dataclass(frozen=True)
class Continues:
    """Where chunks that do not all begin their row are written, and what they attend to.

    place: int64 [W] rows and [W] columns; origin: int64 [W] chunks and [W] tokens in them. sources: int64 [K], the row
    each chunk reads.
    """

    place: tuple[torch.Tensor, torch.Tensor]
    origin: tuple[torch.Tensor, torch.Tensor]
    sources: torch.Tensor


@dataclass(frozen=True)
class PaddedChunks:
    """ids, positions: int64 [K, P], right padded; a padded position repeats the last. length: columns seen, T.

    targets, origins: int64 [M], the rows to fill and the chunk each of them gets. continues: None when every chunk begins
    its row, and attention among the new tokens is all there is.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    length: int
    targets: torch.Tensor
    origins: torch.Tensor
    continues: Continues | None

    @classmethod
    def of(cls, chunks: Sequence[Chunk], device: torch.device) -> PaddedChunks | None:
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
        continues = None
        if any(chunk.start for chunk in chunks):
            continues = _continues(chunks, starts, lengths, targets, origins, device)
        return cls(
            ids=torch.tensor(ids, device=device),
            positions=positions.to(device),
            length=int((starts + lengths).max()),
            targets=targets.to(device),
            origins=origins.to(device),
            continues=continues,
        )

    def mask(self, dtype: torch.dtype, reach: Reach = FULL) -> torch.Tensor:
        """[K, 1, P, T], as `position_mask`. What padding sees means nothing."""
        return position_mask(self.positions, self.length, dtype, reach)


def _continues(
    chunks: Sequence[Chunk],
    starts: torch.Tensor,
    lengths: torch.Tensor,
    targets: torch.Tensor,
    origins: torch.Tensor,
    device: torch.device,
) -> Continues:
    counts = lengths[origins]
    tokens = torch.cat([torch.arange(int(count)) for count in counts])
    chunk = origins.repeat_interleave(counts)
    place = (targets.repeat_interleave(counts).to(device), (starts[chunk] + tokens).to(device))
    sources = torch.tensor([each.rows[0] for each in chunks], device=device)
    return Continues(place, (chunk.to(device), tokens.to(device)), sources)


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
    hidden = columns > positions
    if reach.window is not None:
        hidden |= columns <= positions - reach.window
    if reach.chunk is not None:
        hidden |= columns // reach.chunk != positions // reach.chunk
    return additive(~hidden, dtype)[:, None]


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where bool `seen` is true, elsewhere the lowest finite number."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


def decode_mask(positions: torch.Tensor, length: int, dtype: torch.dtype, reach: Reach = FULL) -> torch.Tensor:
    """[N, 1, 1, length] for int64 [N], as `position_mask`."""
    return position_mask(positions[:, None], length, dtype, reach)
