"""What is kept of completions that are read while they are being written, so that at their end only what came last is left.

A decoder's keys and values of a token depend on the tokens before it and on nothing after it. They are kept by the token
ids they were computed from; what a text has in common with what was read of it stays, the rest is computed again.

Owns the keys and values, at most `cache_bytes` of them. Where they would be more, the completions with the fewest tokens
lose theirs, are not read any further and are scored as if nobody had read along. Waits for nothing. Woken by its methods.
What is kept of a completion goes when it is taken or forgotten.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from transformers.cache_utils import Cache

from async_rlhf.actors.torch_engine.chunks import PaddedChunks
from async_rlhf.actors.torch_engine.masks import attention_of
from async_rlhf.actors.torch_engine.scheduler import Chunk
from async_rlhf.buffers.errors import RewardError

# What two ways to compute one number may differ by, as a share of its size.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.1}
_PROBE = 12


class Reader(Protocol):
    """A model that reads. body: it without its head."""

    device: torch.device
    dtype: torch.dtype

    @property
    def body(self) -> Any:
        """Raises AttributeError for a model that is not built of body and head."""
        ...

    def some_tokens(self, count: int) -> list[int]:
        """Different tokens, none of them padding."""
        ...


@dataclass(eq=False)
class Beginning:
    """What is kept of one text. ids: its tokens so far; keys, values: of each layer [H, T, D]."""

    ids: list[int] = field(default_factory=list)
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def shares(self, ids: Sequence[int]) -> int:
        """How many tokens a text of these ids begins with that are kept."""
        kept = self.ids
        if list(ids[: len(kept)]) == kept:
            return len(kept)
        return next((i for i, (own, other) in enumerate(zip(kept, ids, strict=False)) if own != other), len(ids))

    def take_over(self, other: Beginning, length: int) -> None:
        """Become a copy of the first `length` tokens of another."""
        self.ids = other.ids[:length]
        self.keys, self.values = ([part[:, :length].clone() for part in side] for side in (other.keys, other.values))


@torch.inference_mode()
def extend(model: Reader, texts: Sequence[tuple[Beginning, list[int]]]) -> list[torch.Tensor]:
    """Make each beginning one of all these ids; returns of each [P, C], what the model made of the tokens it read now.

    What a beginning has in common with its ids is not computed again, but for the last token.
    """
    starts = [beginning.shares(ids[:-1]) for beginning, ids in texts]
    chunks = [Chunk(tuple(ids[at:]), at, (row,)) for row, ((_, ids), at) in enumerate(zip(texts, starts, strict=True))]
    padded = PaddedChunks.of(chunks, model.device)
    assert padded is not None, "a pass over nothing"
    hidden: torch.Tensor = model.body(
        input_ids=padded.ids,
        position_ids=padded.positions,
        attention_mask=attention_of(model.body.config).masks(lambda reach: padded.mask(model.dtype, reach)),
        past_key_values=_Pass([beginning for beginning, _ in texts], chunks, padded.length),
        use_cache=True,
    ).last_hidden_state
    for beginning, ids in texts:
        beginning.ids = list(ids)
    return [row[: len(chunk.ids)] for row, chunk in zip(hidden, chunks, strict=True)]


@torch.inference_mode()
def probe(model: Reader) -> int:
    """Bytes of keys and values of one token. Raises RewardError unless a probe comes to the same in two parts as in one."""
    ids, beginning = model.some_tokens(_PROBE), Beginning()
    try:
        parts = [extend(model, [(beginning, part)])[0] for part in (ids[: _PROBE // 2], ids)]
        read = torch.cat(parts).float()
        whole = model.body(input_ids=torch.tensor([ids], device=model.device)).last_hidden_state[0].float()
        size = sum(part.numel() * part.element_size() for side in (beginning.keys, beginning.values) for part in side)
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
        raise RewardError(f"the model cannot read along ({type(error).__name__}: {error}); set stream_tokens = 0") from error
    difference = float((read - whole).abs().max())
    if not difference <= _TOLERANCE[model.dtype] * (1 + float(whole.abs().max())) or not size:
        raise RewardError(
            f"the model cannot read along: what it makes of a probe differs by {difference:.3g} when it reads it in two parts, "
            "as of a model that looks ahead or keeps more than keys and values; set stream_tokens = 0"
        )
    return size // len(ids)


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


class _Pass(Cache):  # type: ignore[misc]  # transformers ships without types
    """What the attention layers of one pass see: each chunk behind what is kept before it, which grows by it."""

    def __init__(self, kept: Sequence[Beginning], chunks: Sequence[Chunk], length: int) -> None:
        super().__init__(layers=[])
        self._kept, self._chunks, self._length = kept, chunks, length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New keys and values [K, H, P, D]; returns all, [K, H, T, D]."""
        keys = self._joined([beginning.keys for beginning in self._kept], key_states, layer_idx)
        return keys, self._joined([beginning.values for beginning in self._kept], value_states, layer_idx)

    def _joined(self, kept: Sequence[list[torch.Tensor]], new: torch.Tensor, layer: int) -> torch.Tensor:
        # Zeros, because a hidden column takes part in attention with weight 0 and must be finite.
        joined = new.new_zeros((len(new), new.shape[1], self._length, new.shape[3]))
        for row, (layers, chunk) in enumerate(zip(kept, self._chunks, strict=True)):
            end = chunk.start + len(chunk.ids)
            if chunk.start:
                joined[row, :, : chunk.start] = layers[layer][:, : chunk.start]
            joined[row, :, chunk.start : end] = new[row, :, : len(chunk.ids)]
            layers[layer : layer + 1] = [joined[row, :, :end].clone()]
        return joined

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._length, 0
