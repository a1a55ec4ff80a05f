"""Incremental scoring: a model reads completions while they are being generated, so that little is left at their end.

One judge for every kind of model. What is read lies in a `PrefixCache`; a `Head` gives the token ids of a completion for its
model and turns hidden states into answers. A completion without a cached prefix is scored whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from async_rlhf.actors.rewards.answer import Logprobs
from async_rlhf.actors.scoring.models import ReferenceModel, RewardModel
from async_rlhf.actors.scoring.prefix_cache import CachedPrefix, Decoder, PrefixCache, WantedText, alike, extend
from async_rlhf.buffers.record import Float32Array, SamplingMask
from async_rlhf.buffers.score import Score

_NONE = np.empty(0, np.float32)


class TextSample(NamedTuple):
    """A completion behind its prompt, as the head's model takes them: texts or token ids."""

    prompt: Any
    completion: Any
    sampling_mask: SamplingMask | None = None


class ReadState(NamedTuple):
    """The state of a completion at its end. hidden: [P, C] of its last tokens; known: of those read before its end."""

    sample: TextSample
    hidden: torch.Tensor
    known: Float32Array


Result = TypeVar("Result", covariant=True)


class Head(Protocol[Result]):
    """The part of reading that differs by kind of model."""

    @property
    def model(self) -> Decoder: ...

    def read(self, samples: Sequence[TextSample]) -> list[WantedText | None]:
        """The ids to read of each; None for one that cannot be read incrementally."""

    def absorb(self, known: Float32Array, sample: TextSample, hidden: torch.Tensor) -> Float32Array:
        """The values to keep of an unfinished completion, beside keys and values."""

    def finish(self, batch: Sequence[ReadState]) -> list[Any]: ...

    def whole(self, samples: Sequence[TextSample]) -> list[Any]: ...

    def result(self, found: Any, metrics: dict[str, float]) -> Result: ...


class IncrementalJudge(Generic[Result]):
    """Owns the prefix cache. Raises RewardError for a model without incremental scoring."""

    def __init__(self, head: Head[Result], cache_bytes: int) -> None:
        self._head, self.cache = head, PrefixCache(head.model, cache_bytes)
        self._known: dict[int, Float32Array] = {}

    @property
    def streams(self) -> frozenset[int]:
        """Those of which something is kept."""
        return self.cache.streams | frozenset(self._known)

    def prefetch(self, streams: Sequence[int], samples: Sequence[TextSample]) -> None:
        """Read the new tokens of these unfinished completions."""
        wanted: dict[int, WantedText] = {}
        for stream, each in zip(streams, self._head.read(samples), strict=True):
            if each is None:
                self.cache.give_up(stream)
            elif each.ids:
                wanted[stream] = each
        found = self.cache.read(wanted)
        for stream, sample in zip(streams, samples, strict=True):
            if stream in found:
                self._known[stream] = self._head.absorb(self._known.get(stream, _NONE), sample, found[stream])

    def forget(self, streams: Iterable[int]) -> None:
        """Unknown streams are ignored."""
        streams = list(streams)
        self.cache.forget(streams)
        for stream in streams:
            self._known.pop(stream, None)

    def score(self, streams: Sequence[int | None], samples: Sequence[TextSample]) -> list[Result]:
        """The results of whole completions. streams: None for one without prefetches.

        Metrics: `prefetched`, the share of the tokens read before its end; `given_up`, 1 where the cache had no room for it.
        """
        taken = [self.cache.take(stream) for stream in streams]
        known = [_NONE if stream is None else self._known.pop(stream, _NONE) for stream in streams]
        found: dict[int, Any] = {}
        shares = dict.fromkeys(range(len(samples)), 0.0)
        left: dict[int, tuple[CachedPrefix, list[int]]] = {}
        for at, (wanted, (prefix, _)) in enumerate(zip(self._head.read(samples), taken, strict=True)):
            if prefix is not None and wanted is not None:
                shares[at] = prefix.shares(wanted.ids[:-1]) / len(wanted.ids)
                left[at] = prefix, wanted.ids
        places = {id(prefix): at for at, (prefix, _) in left.items()}
        for batch in alike(left.values()):
            ats = [places[id(prefix)] for prefix, _ in batch]
            hidden = extend(self._head.model, batch)
            progress = [ReadState(samples[at], rows, known[at]) for at, rows in zip(ats, hidden, strict=True)]
            found |= zip(ats, self._head.finish(progress), strict=True)
        if rest := [at for at in range(len(samples)) if at not in found]:
            found |= zip(rest, self._head.whole([samples[at] for at in rest]), strict=True)
        return [
            self._head.result(found[at], {"prefetched": shares[at], "given_up": float(given_up)})
            for at, (_, given_up) in enumerate(taken)
        ]


class RewardHead:
    """Scores of a reward model: the logit at the last token.

    A text is tokenised again each time it has grown, and the ids in common with those read before stay. That is exact for any
    tokenizer and chat template, whatever the policy's tokens are.
    """

    def __init__(self, model: RewardModel, max_length: int) -> None:
        self.model, self._max_length = model, max_length

    def read(self, samples: Sequence[TextSample]) -> list[WantedText | None]:
        found = self.model.read([sample.prompt for sample in samples], [sample.completion for sample in samples])
        # A longer text loses its beginning, and every token moves.
        return [
            WantedText(repr(sample.prompt), ids, len(ids)) if len(ids) <= self._max_length else None
            for sample, ids in zip(samples, found, strict=True)
        ]

    def absorb(self, known: Float32Array, sample: TextSample, hidden: torch.Tensor) -> Float32Array:
        return _NONE

    def finish(self, batch: Sequence[ReadState]) -> list[float]:
        return self.model.judge(torch.stack([each.hidden[-1] for each in batch]))

    def whole(self, samples: Sequence[TextSample]) -> list[float]:
        return self.model.score([s.prompt for s in samples], [s.completion for s in samples], self._max_length)

    def result(self, found: float, metrics: dict[str, float]) -> Score:
        return Score(found, metrics=metrics)


class ReferenceHead:
    """Log-probabilities of the reference: those of the tokens read so far are kept from prefetch to prefetch.

    A token is predicted at the token before it, so the last token of a completion is never read. The last token of the prompt
    predicts the first of the completion: each completion reads that one itself.
    """

    def __init__(self, model: ReferenceModel, temperature: float) -> None:
        self.model, self._temperature = model, temperature

    def read(self, samples: Sequence[TextSample]) -> list[WantedText | None]:
        return [WantedText(tuple(s.prompt), [*s.prompt, *s.completion[:-1]], len(s.prompt) - 1) for s in samples]

    def absorb(self, known: Float32Array, sample: TextSample, hidden: torch.Tensor) -> Float32Array:
        # The last token is read again where nothing is left to read.
        start = min(len(known), max(0, len(sample.completion) - len(hidden)))
        new = sample.completion[start:]
        return np.concatenate([known[:start], self.model.logprobs(hidden[-len(new) :], new, self._temperature, None)])

    def finish(self, batch: Sequence[ReadState]) -> list[Float32Array]:
        return [self.absorb(each.known, each.sample, each.hidden) for each in batch]

    def whole(self, samples: Sequence[TextSample]) -> list[Float32Array]:
        hidden = self.model.read([sample.prompt for sample in samples], [sample.completion for sample in samples])
        return [
            self.model.logprobs(rows, sample.completion, self._temperature, sample.sampling_mask)
            for rows, sample in zip(hidden, samples, strict=True)
        ]

    def result(self, found: Float32Array, metrics: dict[str, float]) -> Logprobs:
        return Logprobs(found, metrics)
