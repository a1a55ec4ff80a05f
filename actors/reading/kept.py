"""What is kept of completions that are read while they are being written, so that at their end only what came last is left.

A decoder's keys and values of a token depend on the tokens before it and on nothing after it. They are kept by the token
ids they were computed from; what a text has in common with what was read of it stays, the rest is computed again.

Owns the keys and values, at most `cache_bytes` of them. Where they would be more, the completions with the fewest tokens
lose theirs, are not read any further and are scored as if nobody had read along. Waits for nothing. Woken by its methods.
What is kept of a completion goes when it is taken or forgotten.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

import torch

from async_rlhf.actors.reading.passes import Beginning, Reader, extend, probe

Text = tuple[Beginning, list[int]]
"""What is kept of a completion, and the ids of all there is of it."""


class Wanted(NamedTuple):
    """A text to be read.

    prompt: a name for it. ids: all there is. shareable: how many of them another text of this prompt may have read for it.
    """

    prompt: Hashable
    ids: list[int]
    shareable: int


class Kept:
    """See the module docstring. Raises RewardError for a model that cannot read along (`passes.probe`)."""

    def __init__(self, model: Reader, cache_bytes: int) -> None:
        self._model, self._cache_bytes = model, cache_bytes
        self._token_bytes = probe(model)
        # None: was given up, and stays so until it is taken or forgotten.
        self._of: dict[int, Beginning | None] = {}
        self._prompts: dict[int, Hashable] = {}

    @property
    def streams(self) -> frozenset[int]:
        """Those of which something is known."""
        return frozenset(self._of) | frozenset(self._prompts)

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values that are kept."""
        return self._token_bytes * sum(len(kept.ids) for kept in self._of.values() if kept is not None)

    def read(self, wanted: Mapping[int, Wanted]) -> dict[int, torch.Tensor]:
        """Read what there is of these, as far as it was not read before and there is room for it.

        Returns, by stream, what the model made of what it read now: [P, C] for the last P of its ids.
        """
        for stream, each in wanted.items():
            self._prompts[stream] = each.prompt
            self._of.setdefault(stream, Beginning())
        self._make_room(wanted)
        texts = {name: (kept, each.ids) for name, each in wanted.items() if (kept := self._of[name]) is not None}
        texts = {name: (kept, ids) for name, (kept, ids) in texts.items() if kept.shares(ids) < len(ids)}
        readers = self._readers(texts)
        first = {name for name, (kept, _) in texts.items() if kept.ids or readers[self._prompts[name]] is kept}
        found = self._extend({name: texts[name] for name in texts if name in first})
        later = {name: text for name, text in texts.items() if name not in first}
        for name, (kept, ids) in later.items():
            reader = readers[self._prompts[name]]
            kept.take_over(reader, min(wanted[name].shareable, reader.shares(ids)))
        return found | self._extend(later)

    def give_up(self, stream: int) -> None:
        """It cannot be read along."""
        self._of[stream] = None

    def take(self, stream: int | None) -> tuple[Beginning | None, bool]:
        """What is kept of a completion that is whole now, None where nothing is, and whether it was given up."""
        known = stream in self._of
        kept = None if stream is None else self._of.get(stream)
        self.forget([] if stream is None else [stream])
        return kept if kept is not None and kept.ids else None, known and kept is None

    def forget(self, streams: Iterable[int]) -> None:
        """Nobody waits for these any more. Unknown ones are ignored."""
        for stream in streams:
            self._of.pop(stream, None)
            self._prompts.pop(stream, None)

    def _extend(self, texts: Mapping[int, Text]) -> dict[int, torch.Tensor]:
        names = {id(kept): name for name, (kept, _) in texts.items()}
        found: dict[int, torch.Tensor] = {}
        for batch in alike(texts.values()):
            read = extend(self._model, batch)
            found |= {names[id(kept)]: hidden for (kept, _), hidden in zip(batch, read, strict=True)}
        return found

    def _make_room(self, wanted: Mapping[int, Wanted]) -> None:
        """Give up the shortest until all that is kept and wanted fits: the least work is lost, and none of them returns."""
        kept = {name: len(own.ids) for name, own in self._of.items() if own is not None}
        sizes = {name: len(wanted[name].ids) if name in wanted else length for name, length in kept.items()}
        total = sum(sizes.values())
        for name in sorted(kept, key=lambda name: (kept[name], sizes[name])):
            if total * self._token_bytes <= self._cache_bytes:
                return
            total -= sizes[name]
            self._of[name] = None

    def _readers(self, texts: Mapping[int, Text]) -> dict[Hashable, Beginning]:
        """Of each prompt, one that has read it or will be the first to: the others begin with what it has."""
        readers: dict[Hashable, Beginning] = {}
        for name, own in self._of.items():
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
