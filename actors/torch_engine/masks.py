"""Attention masks of cached keys and values, as far back as each kind of layer reaches.

Additive, which is what every attention implementation takes as it is.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from async_rlhf.buffers.attention import FULL, Attention, Reach, attention, unknown
from async_rlhf.buffers.errors import ConfigError


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
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]


def decode_mask(positions: torch.Tensor, length: int, dtype: torch.dtype, reach: Reach = FULL) -> torch.Tensor:
    """[N, 1, 1, length] for int64 [N], as `position_mask`."""
    return position_mask(positions[:, None], length, dtype, reach)
