"""Completions that are read while they are being written, so that at their end only what came last is left, and the head.

A decoder's keys and values of a token depend on the tokens before it and on nothing after it. They are kept by the token
ids they were computed from: a text is tokenised again each time it has grown; what both have in common at their beginning
stays, the rest is computed again. That is exact for any tokenizer and chat template, whatever the policy's tokens are.

Owns the keys and values, at most `cache_bytes` of them. Where they would be more, the completions with the fewest tokens
lose theirs, are not read any further and are scored as if nobody had read along; their scores say so. Waits for nothing.
Woken by its methods. What is kept of a completion goes when it is scored or forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from actors.reward_model.model import RewardModel
from actors.reward_model.reading import Beginning, extend, probe
from buffers.score import Score

Text = tuple[Beginning, list[int]]
"""What is kept of a completion, and the ids of all there is of it."""


class Streams:
    """See the module docstring. Raises RewardError for a model that cannot read along (`reading.probe`)."""

    def __init__(self, model: RewardModel, cache_bytes: int) -> None:
        self._model, self._cache_bytes = model, cache_bytes
        self._token_bytes = probe(model)
        # None: was given up, and stays so until it is scored or forgotten.
        self._kept: dict[int, Beginning | None] = {}
        self._prompts: dict[int, str] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values that are kept."""
        return self._token_bytes * sum(len(kept.ids) for kept in self._kept.values() if kept is not None)

    def prefetch(self, stream_ids: Sequence[int], prompts: Sequence[Any], completions: Sequence[str], max_length: int) -> None:
        """Read what there is of these completions, as far as it was not read before."""
        wanted: dict[int, list[int]] = {}
        for stream_id, prompt, ids in zip(stream_ids, prompts, self._model.read(prompts, completions), strict=True):
            self._prompts[stream_id] = repr(prompt)
            if self._kept.setdefault(stream_id, Beginning()) is None:
                continue
            if not ids:
                continue
            if len(ids) > max_length:  # its beginning will be cut off, and then every token stands elsewhere
                self._kept[stream_id] = None
            else:
                wanted[stream_id] = ids
        self._make_room(wanted)
        texts = {name: (kept, ids) for name, ids in wanted.items() if (kept := self._kept[name]) is not None}
        readers = self._readers(texts)
        for batch in alike(text for name, text in texts.items() if text[0].ids or readers[self._prompts[name]] is text[0]):
            extend(self._model, batch)
        later = {name: text for name, text in texts.items() if not text[0].ids}
        for name, (kept, ids) in later.items():
            reader = readers[self._prompts[name]]
            kept.take_over(reader, reader.shares(ids))
        for batch in alike(later.values()):
            extend(self._model, batch)

    def forget(self, stream_ids: Iterable[int]) -> None:
        """Nobody waits for these any more. Unknown ones are ignored."""
        for stream_id in stream_ids:
            self._kept.pop(stream_id, None)
            self._prompts.pop(stream_id, None)

    def score(
        self, stream_ids: Sequence[int | None], prompts: Sequence[Any], completions: Sequence[str], max_length: int
    ) -> list[Score]:
        """The scores of whole completions. stream_ids: None for one that nobody read along.

        Metrics: `prefetched`, the share of its tokens that had been read before it ended; `given_up`, 1 where there was no
        room for it.
        """
        kept = [None if name is None else self._kept.get(name) for name in stream_ids]
        given_up = [name in self._kept and own is None for name, own in zip(stream_ids, kept, strict=True)]
        self.forget(name for name in stream_ids if name is not None)
        texts = list(zip(kept, self._model.read(prompts, completions), strict=True))
        scores: dict[int, Score] = {}
        for batch in alike((own, ids) for own, ids in texts if own is not None and own.ids and len(ids) <= max_length):
            shares = [own.shares(ids[:-1]) / len(ids) for own, ids in batch]
            values = self._model.judge(extend(self._model, batch))
            for (own, _), share, value in zip(batch, shares, values, strict=True):
                scores[kept.index(own)] = Score(value, metrics={"prefetched": share, "given_up": 0.0})
        if rest := [at for at in range(len(texts)) if at not in scores]:
            whole = self._model.score([prompts[at] for at in rest], [completions[at] for at in rest], max_length)
            for at, value in zip(rest, whole, strict=True):
                scores[at] = Score(value, metrics={"prefetched": 0.0, "given_up": float(given_up[at])})
        return [scores[at] for at in range(len(texts))]

    def _make_room(self, wanted: dict[int, list[int]]) -> None:
        """Give up the shortest until all that is kept and wanted fits: the least work is lost, and none of them returns."""
        kept = {name: len(own.ids) for name, own in self._kept.items() if own is not None}
        sizes = {name: len(wanted.get(name, ())) or length for name, length in kept.items()}
        total = sum(sizes.values())
        for name in sorted(kept, key=lambda name: (kept[name], sizes[name])):
            if total * self._token_bytes <= self._cache_bytes:
                return
            total -= sizes[name]
            self._kept[name] = None

    def _readers(self, texts: dict[int, Text]) -> dict[str, Beginning]:
        """Of each prompt, one that has read it or will be the first to: the others begin with what it has."""
        readers: dict[str, Beginning] = {}
        for name, own in self._kept.items():
            if own is not None and own.ids:
                readers.setdefault(self._prompts[name], own)
        for name, (own, _) in texts.items():
            readers.setdefault(self._prompts[name], own)
        return readers


def alike(texts: Iterable[Text]) -> Iterator[list[Text]]:
    """Those that have about as many tokens to be read together: at most half of a pass is padding."""

    def size(text: Text) -> int:
        kept, ids = text
        return (len(ids) - kept.shares(ids[:-1])).bit_length()

    for _, batch in groupby(sorted(texts, key=size), key=size):
        yield list(batch)
