"""Completions that a reward model reads while they are being written (`async_rlhf.actors.reading.kept`).

A text is tokenised again each time it has grown, and what its ids have in common with those read before stays: that is exact
for any tokenizer and chat template, whatever the policy's tokens are. Scores of completions that found no room say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from async_rlhf.actors.reading.kept import Kept, Wanted, alike
from async_rlhf.actors.reading.passes import extend
from async_rlhf.actors.reward_model.model import RewardModel
from async_rlhf.buffers.score import Score


class Streams:
    """Owns what is kept of each. Raises RewardError for a model that cannot read along."""

    def __init__(self, model: RewardModel, cache_bytes: int) -> None:
        self._model, self.kept = model, Kept(model, cache_bytes)

    def prefetch(self, stream_ids: Sequence[int], prompts: Sequence[Any], completions: Sequence[str], max_length: int) -> None:
        """Read what there is of these completions, as far as it was not read before."""
        wanted: dict[int, Wanted] = {}
        for stream_id, prompt, ids in zip(stream_ids, prompts, self._model.read(prompts, completions), strict=True):
            if len(ids) > max_length:  # its beginning will be cut off, and then every token stands elsewhere
                self.kept.give_up(stream_id)
            elif ids:
                wanted[stream_id] = Wanted(repr(prompt), ids, len(ids))
        self.kept.read(wanted)

    def forget(self, stream_ids: Iterable[int]) -> None:
        """Nobody waits for these any more. Unknown ones are ignored."""
        self.kept.forget(stream_ids)

    def score(
        self, stream_ids: Sequence[int | None], prompts: Sequence[Any], completions: Sequence[str], max_length: int
    ) -> list[Score]:
        """The scores of whole completions. stream_ids: None for one that nobody read along.

        Metrics: `prefetched`, the share of its tokens that had been read before it ended; `given_up`, 1 where there was no
        room for it.
        """
        taken = [self.kept.take(name) for name in stream_ids]
        kept = [own for own, _ in taken]
        texts = list(zip(kept, self._model.read(prompts, completions), strict=True))
        scores: dict[int, Score] = {}
        for batch in alike((own, ids) for own, ids in texts if own is not None and len(ids) <= max_length):
            shares = [own.shares(ids[:-1]) / len(ids) for own, ids in batch]
            values = self._model.judge(torch.stack([hidden[-1] for hidden in extend(self._model, batch)]))
            for (own, _), share, value in zip(batch, shares, values, strict=True):
                scores[kept.index(own)] = Score(value, metrics={"prefetched": share, "given_up": 0.0})
        if rest := [at for at in range(len(texts)) if at not in scores]:
            whole = self._model.score([prompts[at] for at in rest], [completions[at] for at in rest], max_length)
            for at, value in zip(rest, whole, strict=True):
                scores[at] = Score(value, metrics={"prefetched": 0.0, "given_up": float(taken[at][1])})
        return [scores[at] for at in range(len(texts))]
