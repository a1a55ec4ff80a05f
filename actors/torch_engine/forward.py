"""One pass of any Hugging Face causal language model over the running rows: the generic way.

The last token of every row's prompt is not prefilled: it is the first token the row decodes. So a decode pass is the
same for new and old rows, and the logits of all rows come from one place. Called by the engine once per token; never
samples and never knows a request.

Axes: `N` running rows, `K` prompts, `P` longest prompt less one, `T` visible columns, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel

from actors.torch_engine.cache import RowCache
from actors.torch_engine.scheduler import Prefill

# Bounds the memory of activations when many long prompts come at once.
MAX_PREFILL_TOKENS = 16384


class Forward(Protocol):
    """Computes what the next token of every running row depends on, and keeps the cache."""

    def __call__(self, prefills: Sequence[Prefill], tokens: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
        """Compute new prompts, then one token in each row.

        tokens, positions: int64 [N], each row's last token and its index in its sequence.
        length: columns the longest row occupies, this token included.
        Returns logits [N, V].
        """
        ...


class ModelForward:
    """`Forward` through the model's own code: a padded prefill pass when there are new prompts, then a decode pass."""

    def __init__(self, model: PreTrainedModel, cache: RowCache) -> None:
        self._model = model
        self._cache = cache

    def __call__(self, prefills: Sequence[Prefill], tokens: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
        for chunk in in_chunks(prefills):
            prompts = PaddedPrompts.of(chunk, tokens.device)
            if prompts is not None:
                self._prefill(prompts)
        self._cache.begin_tokens(positions, length)
        mask = decode_mask(positions, length, self._model.dtype)
        return self._pass(tokens[:, None], positions[:, None], mask)

    def _prefill(self, prompts: PaddedPrompts) -> None:
        num_prompts, length = prompts.ids.shape
        self._cache.begin_prompts(prompts.targets, prompts.origins, length)
        columns = torch.arange(length, device=prompts.ids.device)
        # Padding is on the right, so the causal mask alone keeps it out of sight of every real token.
        mask = decode_mask(columns, length, self._model.dtype).transpose(0, 2).expand(num_prompts, 1, length, length)
        self._pass(prompts.ids, columns.expand(num_prompts, length), mask)

    def _pass(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Logits [rows, V] at the last position."""
        outputs = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = outputs.logits
        return logits[:, -1]


def decode_mask(positions: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """[N, 1, 1, length]: 0 up to each row's position, the lowest finite number beyond.

    The additive form is what every attention implementation takes as it is.
    """
    hidden = torch.arange(length, device=positions.device) > positions[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None, None, :]


def in_chunks(prefills: Sequence[Prefill]) -> Iterator[list[Prefill]]:
    """In order, so many at a time that padded they stay within MAX_PREFILL_TOKENS; a longer one goes alone."""
    chunk: list[Prefill] = []
    longest = 0
    for prefill in prefills:
        longest = max(longest, len(prefill.prompt_ids))
        if chunk and longest * (len(chunk) + 1) > MAX_PREFILL_TOKENS:
            yield chunk
            chunk, longest = [], len(prefill.prompt_ids)
        chunk.append(prefill)
    if chunk:
        yield chunk


class PaddedPrompts:
    """New prompts without their last token, right padded: ids int64 [K, P].

    targets, origins: int64 [M], the rows to fill and the prompt each of them gets.
    """

    def __init__(self, ids: torch.Tensor, targets: torch.Tensor, origins: torch.Tensor) -> None:
        self.ids, self.targets, self.origins = ids, targets, origins

    @classmethod
    def of(cls, prefills: Sequence[Prefill], device: torch.device) -> PaddedPrompts | None:
        """None when no prompt has more than its last token."""
        prefills = [prefill for prefill in prefills if len(prefill.prompt_ids) > 1]
        if not prefills:
            return None
        length = max(len(prefill.prompt_ids) for prefill in prefills) - 1
        ids = [(*prefill.prompt_ids[:-1], *(0,) * (length + 1 - len(prefill.prompt_ids))) for prefill in prefills]
        targets = [row for prefill in prefills for row in prefill.rows]
        origins = [index for index, prefill in enumerate(prefills) for _ in prefill.rows]
        return cls(*(torch.tensor(values, device=device) for values in (ids, targets, origins)))
