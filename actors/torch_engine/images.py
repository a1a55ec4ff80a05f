"""Passes of a model that reads images: prompts with their images whole, in front of which nothing is cached; everything else
through the model's own code, with rotary positions that may run apart from the index of a token.

Axes: `N` running rows, `K` chunks, `P` longest chunk, `T` visible columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from async_rlhf.actors.torch_engine.cache import RowCache
from async_rlhf.actors.torch_engine.chunks import PaddedChunks, additive
from async_rlhf.actors.torch_engine.forward import Forward
from async_rlhf.actors.torch_engine.scheduler import PrefillChunk
from async_rlhf.buffers.attention import Reach
from async_rlhf.buffers.images.tower import ImageTower, PromptPlace


class ImageForward(Forward):
    """`Forward` for prompts with images. shifts: int64 [R], as in `Rows`, as they are when a pass begins."""

    def __init__(self, model: PreTrainedModel, cache: RowCache, tower: ImageTower, shifts: np.ndarray) -> None:
        super().__init__(model, cache)
        self._tower, self._shifts = tower, shifts

    def _prefill(self, chunks: Sequence[PrefillChunk], padded: PaddedChunks) -> None:
        if not any(chunk.images for chunk in chunks) and not self._shifts.any():
            super()._prefill(chunks, padded)
            return
        prompts = [PromptPlace(row, 0, chunk.ids, chunk.images) for row, chunk in enumerate(chunks) if chunk.images]
        together = self._tower.together(padded.ids, prompts)

        def mask(reach: Reach) -> torch.Tensor:
            found = padded.mask(self._model.dtype, reach)
            if together is None:
                return found
            own = torch.nn.functional.pad(together, (0, padded.length - together.shape[1]), value=-1)
            same = (together[:, :, None] == own[:, None]) & (together >= 0)[:, :, None]
            queries, keys = padded.positions[:, :, None], torch.arange(padded.length, device=own.device)
            return found.maximum(additive(same & reach.covers(queries, keys), self._model.dtype)[:, None])

        at = padded.positions + self._after(chunks).to(padded.positions.device)
        self._cache.is_in_pass = True
        self._model.get_decoder()(
            **self._tower.embedded(padded.ids, prompts),
            position_ids=self._tower.turned(at, prompts, [len(each.ids) for each in prompts]),
            attention_mask=self._attention.masks(mask),
            use_cache=True,
            **self._cached,
        )
        self._cache.is_in_pass = False

    def logits(self, ids: torch.Tensor, prompt: PromptPlace | None = None) -> torch.Tensor:
        return super().logits(ids) if prompt is None else self._tower.logits(ids, prompt)

    def _after(self, chunks: Sequence[PrefillChunk]) -> torch.Tensor:
        """int64 [K, 1]: the shift of those that follow a prompt."""
        return torch.tensor([[int(self._shifts[chunk.rows[0]]) if chunk.sampled else 0] for chunk in chunks])

    def _turned(self, positions: torch.Tensor) -> torch.Tensor:
        return positions + torch.from_numpy(self._shifts[: len(positions)].copy()).to(positions.device)
