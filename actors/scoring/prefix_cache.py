"""The prefix cache of incremental scoring: keys and values of unfinished completions, so that little is left at their end.

A decoder's keys and values of a token depend on the tokens before it and on nothing after it. They are cached by the token
ids they were computed from; the common prefix of a text and its cached ids stays, the rest is computed again.

Owns at most `cache_bytes` of keys and values. Beyond that the completions with the fewest tokens are given up: they lose
theirs, are read no further and are scored whole. An entry goes when it is taken or forgotten. `extend` is one pass of the
decoder over chunks of texts; `probe` finds out whether a model fits: any Hugging Face model whose layers keep keys and values
and whose tokens see only earlier ones.

Axes: `K` chunks, `P` longest chunk, `T` longest text, `H` key heads, `D` head width, `C` model width.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from transformers.cache_utils import Cache

from async_rlhf.actors.torch_engine.chunks import PaddedChunks, attention_of
from async_rlhf.actors.torch_engine.scheduler import PrefillChunk
from async_rlhf.buffers.attention import cache_argument
from async_rlhf.buffers.errors import RewardError

# What two ways to compute one number may differ by, as a share of its size.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.1}
_PROBE = 12


class Decoder(Protocol):
    """A causal model. body: it without its head."""

    device: torch.device
    dtype: torch.dtype

    @property
    def body(self) -> Any:
        """Raises AttributeError for a model that is not built of body and head."""

    def some_tokens(self, count: int) -> list[int]:
        """Different tokens, none of them padding."""


@dataclass(eq=False)
class CachedPrefix:
    """The cache of one text. ids: its tokens so far; keys, values: of each layer [H, T, D]."""

    ids: list[int] = field(default_factory=list)
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def shares(self, ids: Sequence[int]) -> int:
        """The length of the common prefix."""
        cached = self.ids
        if list(ids[: len(cached)]) == cached:
            return len(cached)
        return next((i for i, (own, other) in enumerate(zip(cached, ids, strict=False)) if own != other), len(ids))

    def take_over(self, other: CachedPrefix, length: int) -> None:
        """Become a copy of the first `length` tokens of another."""
        self.ids = other.ids[:length]
        self.keys, self.values = ([part[:, :length].clone() for part in side] for side in (other.keys, other.values))


@torch.inference_mode()
def extend(model: Decoder, texts: Sequence[tuple[CachedPrefix, list[int]]]) -> list[torch.Tensor]:
    """Extend each prefix to all these ids; returns of each [P, C], the hidden states of the tokens computed now.

    A common prefix is not computed again, except for the last token.
    """
    starts = [prefix.shares(ids[:-1]) for prefix, ids in texts]
    chunks = [PrefillChunk(tuple(ids[at:]), at, (row,)) for row, ((_, ids), at) in enumerate(zip(texts, starts, strict=True))]
    padded = PaddedChunks.of(chunks, model.device)
    assert padded is not None, "a pass over nothing"
    hidden: torch.Tensor = model.body(
        input_ids=padded.ids,
        position_ids=padded.positions,
        attention_mask=attention_of(model.body.config).masks(lambda reach: padded.mask(model.dtype, reach)),
        use_cache=True,
        **{cache_argument(model.body): _Pass([prefix for prefix, _ in texts], chunks, padded.length)},
    ).last_hidden_state
    for prefix, ids in texts:
        prefix.ids = list(ids)
    return [row[: len(chunk.ids)] for row, chunk in zip(hidden, chunks, strict=True)]


@torch.inference_mode()
def probe(model: Decoder) -> int:
    """Bytes of keys and values of one token. Raises RewardError unless a probe comes to the same in two parts as in one."""
    ids, prefix = model.some_tokens(_PROBE), CachedPrefix()
    try:
        parts = [extend(model, [(prefix, part)])[0] for part in (ids[: _PROBE // 2], ids)]
        read = torch.cat(parts).float()
        whole = model.body(input_ids=torch.tensor([ids], device=model.device)).last_hidden_state[0].float()
        size = sum(part.numel() * part.element_size() for side in (prefix.keys, prefix.values) for part in side)
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
        raise RewardError(
            f"the model has no incremental scoring ({type(error).__name__}: {error}); set stream_tokens = 0"
        ) from error
    difference = float((read - whole).abs().max())
    if not difference <= _TOLERANCE[model.dtype] * (1 + float(whole.abs().max())) or not size:
        raise RewardError(
            f"the model has no incremental scoring: the hidden states of a probe differ by {difference:.3g} when it is read in "
            "two parts, as of a model that looks ahead or keeps more than keys and values; set stream_tokens = 0"
        )
    return size // len(ids)


Text = tuple[CachedPrefix, list[int]]
"""The cached prefix of a completion, and all its ids so far."""


class WantedText(NamedTuple):
    """A text to be read.

    prompt: a name for it. ids: all there is. shareable: how many of them another text of this prompt may have read for it.
    """

    prompt: Hashable
    ids: list[int]
    shareable: int


class PrefixCache:
    """See the module docstring. Raises RewardError for a model without incremental scoring (`probe`)."""

    def __init__(self, model: Decoder, cache_bytes: int) -> None:
        self._model, self._cache_bytes = model, cache_bytes
        self._token_bytes = probe(model)
        # None: given up, until it is taken or forgotten.
        self._of: dict[int, CachedPrefix | None] = {}
        self._prompts: dict[int, Hashable] = {}

    @property
    def streams(self) -> frozenset[int]:
        """Those with an entry."""
        return frozenset(self._of) | frozenset(self._prompts)

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values."""
        return self._token_bytes * sum(len(cached.ids) for cached in self._of.values() if cached is not None)

    def read(self, wanted: Mapping[int, WantedText]) -> dict[int, torch.Tensor]:
        """Read the new ids of these texts, as far as there is room.

        Returns, by stream, the hidden states of the newly read ids: [P, C] for the last P.
        """
        for stream, each in wanted.items():
            self._prompts[stream] = each.prompt
            self._of.setdefault(stream, CachedPrefix())
        self._make_room(wanted)
        texts = {name: (cached, each.ids) for name, each in wanted.items() if (cached := self._of[name]) is not None}
        texts = {name: (cached, ids) for name, (cached, ids) in texts.items() if cached.shares(ids) < len(ids)}
        readers = self._readers(texts)
        first = {name for name, (cached, _) in texts.items() if cached.ids or readers[self._prompts[name]] is cached}
        found = self._extend({name: texts[name] for name in texts if name in first})
        later = {name: text for name, text in texts.items() if name not in first}
        for name, (cached, ids) in later.items():
            reader = readers[self._prompts[name]]
            cached.take_over(reader, min(wanted[name].shareable, reader.shares(ids)))
        return found | self._extend(later)

    def give_up(self, stream: int) -> None:
        """Drop its entry; it is scored whole."""
        self._of[stream] = None

    def take(self, stream: int | None) -> tuple[CachedPrefix | None, bool]:
        """Removes the entry of a completion that is whole now, None without one, and whether it was given up."""
        known = stream in self._of
        cached = None if stream is None else self._of.get(stream)
        self.forget([] if stream is None else [stream])
        return cached if cached is not None and cached.ids else None, known and cached is None

    def forget(self, streams: Iterable[int]) -> None:
        """Drop these; unknown ones are ignored."""
        for stream in streams:
            self._of.pop(stream, None)
            self._prompts.pop(stream, None)

    def _extend(self, texts: Mapping[int, Text]) -> dict[int, torch.Tensor]:
        names = {id(cached): name for name, (cached, _) in texts.items()}
        found: dict[int, torch.Tensor] = {}
        for batch in alike(texts.values()):
            read = extend(self._model, batch)
            found |= {names[id(cached)]: hidden for (cached, _), hidden in zip(batch, read, strict=True)}
        return found

    def _make_room(self, wanted: Mapping[int, WantedText]) -> None:
        """Give up the shortest until everything fits: the least work is lost."""
        cached = {name: len(own.ids) for name, own in self._of.items() if own is not None}
        sizes = {name: len(wanted[name].ids) if name in wanted else length for name, length in cached.items()}
        total = sum(sizes.values())
        for name in sorted(cached, key=lambda name: (cached[name], sizes[name])):
            if total * self._token_bytes <= self._cache_bytes:
                return
            total -= sizes[name]
            self._of[name] = None

    def _readers(self, texts: Mapping[int, Text]) -> dict[Hashable, CachedPrefix]:
        """By prompt, the text that has read it or reads it first: the others copy its prefix."""
        readers: dict[Hashable, CachedPrefix] = {}
        for name, own in self._of.items():
            if own is not None and own.ids:
                readers.setdefault(self._prompts[name], own)
        for name, (own, _) in texts.items():
            readers.setdefault(self._prompts[name], own)
        return readers


def alike(texts: Iterable[Text]) -> Iterator[list[Text]]:
    """Batches of texts with about as many tokens to read: at most half of a pass is padding."""

    def size(text: Text) -> int:
        cached, ids = text
        return (len(ids) - cached.shares(ids[:-1])).bit_length()

    for _, batch in groupby(sorted(texts, key=size), key=size):
        yield list(batch)


class _Pass(Cache):  # type: ignore[misc]  # transformers ships without types
    """The cache of one pass: its layers see each chunk behind its cached prefix, which it extends."""

    def __init__(self, cached: Sequence[CachedPrefix], chunks: Sequence[PrefillChunk], length: int) -> None:
        super().__init__(layers=[])
        self._cached, self._chunks, self._length = cached, chunks, length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New keys and values [K, H, P, D]; returns all, [K, H, T, D]."""
        keys = self._joined([prefix.keys for prefix in self._cached], key_states, layer_idx)
        return keys, self._joined([prefix.values for prefix in self._cached], value_states, layer_idx)

    def _joined(self, cached: Sequence[list[torch.Tensor]], new: torch.Tensor, layer: int) -> torch.Tensor:
        # Zeros, because a hidden column takes part in attention with weight 0 and must be finite.
        joined = new.new_zeros((len(new), new.shape[1], self._length, new.shape[3]))
        for row, (layers, chunk) in enumerate(zip(cached, self._chunks, strict=True)):
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
