"""Completions that the reference reads while they are being written (`async_rlhf.actors.reading.kept`).

A token is predicted by what the model made of the token before it, so the last token of a completion is never read. The
prompt's last token predicts the first of the completion: each completion reads that one itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from async_rlhf.actors.reading.kept import Kept, Wanted, alike
from async_rlhf.actors.reading.passes import Beginning, extend
from async_rlhf.actors.reference.model import ReferenceModel
from async_rlhf.actors.rewards.answer import Logprobs
from async_rlhf.buffers.record import Float32Array, SamplingMask

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
