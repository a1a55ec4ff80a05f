"""Completions that a reward model reads while they are being written (`async_rlhf.actors.scoring.prefix_cache`).

A text is tokenised again each time it has grown, and what its ids have in common with those read before stays: that is exact
for any tokenizer and chat template, whatever the policy's tokens are. Scores of completions that found no room say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from async_rlhf.actors.rewards.answer import Logprobs
from async_rlhf.actors.scoring.models import ReferenceModel, RewardModel
from async_rlhf.actors.scoring.prefix_cache import Beginning, Kept, Wanted, alike, extend
from async_rlhf.buffers.record import Float32Array, SamplingMask
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


_NONE = np.empty(0, np.float32)


class ReferenceStreams:
    """Owns what is kept of each, and the log-probabilities of the tokens it has read. Raises RewardError for a model that
    cannot read along."""

    def __init__(self, model: ReferenceModel, cache_bytes: int, temperature: float) -> None:
        self._model, self._temperature, self.kept = model, temperature, Kept(model, cache_bytes)
        self._known: dict[int, Float32Array] = {}

    def prefetch(self, streams: Sequence[int], prompts: Sequence[list[int]], completions: Sequence[list[int]]) -> None:
        """Read what there is of these completions, as far as it was not read before."""
        wanted = {
            stream: Wanted(tuple(prompt), [*prompt, *completion[:-1]], len(prompt) - 1)
            for stream, prompt, completion in zip(streams, prompts, completions, strict=True)
        }
        found = self.kept.read(wanted)
        for stream, completion in zip(streams, completions, strict=True):
            if stream in found:
                known = self._known.get(stream, _NONE)
                new = completion[len(known) :]
                more = self._model.logprobs(found[stream][-len(new) :], new, self._temperature, None)
                self._known[stream] = np.concatenate([known, more])

    def forget(self, streams: Iterable[int]) -> None:
        """Nobody waits for these any more. Unknown ones are ignored."""
        streams = list(streams)
        self.kept.forget(streams)
        for stream in streams:
            self._known.pop(stream, None)

    def score(
        self,
        streams: Sequence[int | None],
        prompts: Sequence[list[int]],
        completions: Sequence[list[int]],
        sampling_masks: Sequence[SamplingMask | None],
    ) -> list[Logprobs]:
        """Of whole completions. streams: None for one that nobody read along. Metrics as a reward model's (`prefetched`,
        `given_up`)."""
        taken = [self.kept.take(stream) for stream in streams]
        known = [_NONE if stream is None else self._known.pop(stream, _NONE) for stream in streams]
        found: dict[int, Float32Array] = {}
        left: dict[int, tuple[Beginning, list[int]]] = {}
        for at, ((own, _), prompt, completion) in enumerate(zip(taken, prompts, completions, strict=True)):
            if own is None:
                known[at] = _NONE
            elif len(known[at]) == len(completion):
                found[at] = known[at]
            else:
                left[at] = own, [*prompt, *completion[:-1]]
        places = {id(own): at for at, (own, _) in left.items()}
        for batch in alike(left.values()):
            for (own, _), hidden in zip(batch, extend(self._model, batch), strict=True):
                at = places[id(own)]
                new = completions[at][len(known[at]) :]
                more = self._model.logprobs(hidden[-len(new) :], new, self._temperature, None)
                found[at] = np.concatenate([known[at], more])
        if rest := [at for at in range(len(streams)) if at not in found]:
            whole = self._model.read([prompts[at] for at in rest], [completions[at] for at in rest])
            for at, hidden in zip(rest, whole, strict=True):
                found[at] = self._model.logprobs(hidden, completions[at], self._temperature, sampling_masks[at])
        return [
            Logprobs(found[at], {"prefetched": len(known[at]) / len(completion), "given_up": float(taken[at][1])})
            for at, completion in enumerate(completions)
        ]
