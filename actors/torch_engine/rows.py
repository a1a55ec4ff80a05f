"""The host's state of each running row: counters, settings, random numbers, and sampled tokens; also of a row that was sent
back (`RowProgress`) or whose turn may be continued (`Hold`).

`Rows` is a structure of arrays, so that one step touches every row with a handful of numpy operations and no Python loop. It
never holds a torch tensor and never decides anything; the engine owns it and keeps it in step with the scheduler.

A row that ends with `Request.hold` leaves a `Hold` behind. The request of its key that continues it goes on where it was: at
its place in line, and from its keys and values, which were copied out of the row when the turn ended and are copied into
another row when the continuation is admitted. They are bounded in places; the oldest are evicted first, and what was evicted is
computed again, with the same result. What is copied is opaque here, and goes with the last reference to it.

Axes: `R` rows (slots), `N` running rows (a prefix of R), `T` completion tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from async_rlhf.actors.engine import Completion, Request, RolloutKey
from async_rlhf.buffers.record import FinishReason, Float32Array, Int32Array, SamplingMask, Span
from async_rlhf.buffers.sampling import Sampling

# Keeps u * total strictly below total after rounding, so that a token of probability 0 is never chosen.
_BELOW_ONE = 1.0 - 2.0**-40
_SAMPLING = np.dtype(
    [(name, np.int64 if each.annotation is int else np.float32) for name, each in Sampling.model_fields.items()]
)


@dataclass(frozen=True)
class RowProgress:
    """The sampled tokens of a row that was sent back."""

    token_ids: Int32Array
    """int32 [T]."""
    logprobs: Float32Array
    """float32 [T]."""
    spans: tuple[Span, ...]
    """They cover all T tokens."""
    sampling_masks: tuple[Int32Array, ...] = ()
    """int32 ids of each token, or empty."""


class Rows:
    """Arrays over rows. `T` grows to the longest completion requested so far.

    positions: int64 [R], index of the last token in its sequence; the next token is predicted from there.
    shifts: int64 [R], by how much rotary positions behind the prompt differ from that index.
    counts, limits: int64 [R], tokens sampled and tokens allowed.
    greedy, truncated, stoppable: bool [R]: takes the likeliest token; samples from a part of the vocabulary; has stop strings.
    sampling: [R] of the fields of `Sampling`, int64 or float32; those of greedy rows are the defaults.
    """

    def __init__(self, slots: int) -> None:
        self.positions = np.zeros(slots, np.int64)
        self.shifts = np.zeros(slots, np.int64)
        self.counts = np.zeros(slots, np.int64)
        self.limits = np.zeros(slots, np.int64)
        self.greedy = np.zeros(slots, np.bool_)
        self.truncated = np.zeros(slots, np.bool_)
        self.stoppable = np.zeros(slots, np.bool_)
        self.sampling = np.array([tuple(dict(Sampling()).values())] * slots, _SAMPLING)
        self._cache_versions = np.zeros(slots, np.int64)
        self._uniforms = np.zeros((slots, 0), np.float64)
        self._tokens = np.zeros((slots, 0), np.int32)
        self._logprobs = np.zeros((slots, 0), np.float32)
        # Tokens of weights that have been replaced since; what is missing is the present version's.
        self._spans: list[tuple[Span, ...]] = [()] * slots
        self._sampling_masks: list[list[Int32Array]] = [[]] * slots

    def admit(self, row: int, request: Request, version: int, progress: RowProgress | None = None) -> None:
        """Begin a request, or go on with one; the oldest weights that computed its prefix are `version`.

        Its random numbers are one Philox stream, drawn up front from its seed alone.
        """
        limit = request.max_new_tokens
        if limit > self._tokens.shape[1]:
            self._grow(limit)
        count = 0 if progress is None else len(progress.token_ids)
        self.positions[row] = len(request.prefix_ids) + count - 1
        self.counts[row], self.limits[row] = count, limit
        self.greedy[row] = request.sampling.temperature == 0
        self.truncated[row] = bool(request.sampling.truncation)
        self.sampling[row] = tuple(dict(Sampling() if self.greedy[row] else request.sampling).values())
        self.stoppable[row] = bool(request.stop)
        self._cache_versions[row] = version
        self._spans[row], self._sampling_masks[row] = (), []
        if progress is not None:
            self._tokens[row, :count], self._logprobs[row, :count] = progress.token_ids, progress.logprobs
            self._spans[row], self._sampling_masks[row] = progress.spans, list(progress.sampling_masks)
        if not self.greedy[row]:
            stream = np.random.Generator(np.random.Philox(request.seed))
            self._uniforms[row, :limit] = stream.random(limit) * _BELOW_ONE

    def move(self, moves: Iterable[tuple[int, int]]) -> None:
        """Row `target` becomes what row `source` was, for every (source, target)."""
        sources, targets = (list(side) for side in zip(*moves, strict=True))
        for array in vars(self).values():
            if isinstance(array, np.ndarray):
                array[targets] = array[sources]
        for source, target in zip(sources, targets, strict=True):
            self._spans[target], self._sampling_masks[target] = self._spans[source], self._sampling_masks[source]

    def settings(self, num_rows: int) -> dict[str, np.ndarray]:
        """[N] of each field of `Sampling`, copied; without those that have the default in all rows."""
        found = {name: self.sampling[name][:num_rows] for name in Sampling.model_fields}
        return {name: each.copy() for name, each in found.items() if (each != Sampling.model_fields[name].default).any()}

    def uniforms(self, num_rows: int) -> npt.NDArray[np.float64]:
        """float64 [N] in [0, 1): the random number of each row's next token."""
        drawn: npt.NDArray[np.float64] = self._uniforms[np.arange(num_rows), self.counts[:num_rows]]
        return drawn

    def record(self, tokens: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32], ready: npt.NDArray[np.int64]) -> None:
        """Append to each of the rows `ready` [N] the token sampled there: int64 [N], float32 [N]."""
        at = (ready, self.counts[ready])
        self._tokens[at] = tokens
        self._logprobs[at] = logprobs
        self.counts[ready] += 1
        self.positions[ready] += 1

    def record_support(self, row: int, ids: Int32Array) -> None:
        """The tokens that this row's newest one was chosen from."""
        self._sampling_masks[row].append(ids)

    def newest(self, row: int, num_tokens: int) -> list[int]:
        """The last tokens this row sampled, at most so many."""
        count = int(self.counts[row])
        return list(map(int, self._tokens[row, max(0, count - num_tokens) : count]))

    def tokens(self, row: int) -> Int32Array:
        """int32 [T]: what this row has sampled so far."""
        return self._tokens[row, : self.counts[row]].copy()

    def close_spans(self, num_rows: int, version: int) -> None:
        """The weights are about to be replaced: what the first N rows hold beyond their spans is `version`'s."""
        for row in range(num_rows):
            self._spans[row] = self._all_spans(row, version)

    def progress(self, row: int, version: int) -> RowProgress:
        """The sampled tokens of a row, copied out of the arrays, so that it can be admitted again."""
        count = int(self.counts[row])
        return RowProgress(
            token_ids=self._tokens[row, :count].copy(),
            logprobs=self._logprobs[row, :count].copy(),
            spans=self._all_spans(row, version),
            sampling_masks=tuple(self._sampling_masks[row]),
        )

    def completion(self, row: int, request: Request, version: int, finish_reason: FinishReason) -> Completion:
        """The completion of a finished row, copied out of the arrays; `version`: the present weights."""
        progress = self.progress(row, version)
        return Completion(
            key=request.key,
            token_ids=progress.token_ids,
            logprobs=progress.logprobs,
            spans=progress.spans,
            finish_reason=finish_reason,
            sampling_mask=_joined(progress.sampling_masks) if progress.sampling_masks else None,
        )

    def _all_spans(self, row: int, version: int) -> tuple[Span, ...]:
        """The row's spans with the tokens that are in none yet, which `version` sampled."""
        spans = self._spans[row]
        num_new = int(self.counts[row]) - sum(span.num_tokens for span in spans)
        if not num_new:
            return spans
        cache_version = int(self._cache_versions[row])
        new = Span(version, num_new, cache_version if cache_version != version else None)
        if spans and (spans[-1].version, spans[-1].cache_version) == (new.version, new.cache_version):
            return (*spans[:-1], Span(version, spans[-1].num_tokens + num_new, new.cache_version))
        return (*spans, new)

    def _grow(self, num_tokens: int) -> None:
        for name in ("_uniforms", "_tokens", "_logprobs"):
            old = getattr(self, name)
            setattr(self, name, np.pad(old, ((0, 0), (0, num_tokens - old.shape[1]))))


def _joined(sampling_masks: Sequence[Int32Array]) -> SamplingMask:
    return SamplingMask(np.array([len(ids) for ids in sampling_masks], np.int32), np.concatenate(sampling_masks))


Decode = Callable[[Sequence[int]], str]

# A character takes up to four tokens of one byte each; some more for tokens that are no text.
_TOKENS_A_CHARACTER, _SPARE_TOKENS = 4, 8


class Stopping:
    """stop_ids end any completion. decode: tokens to text; None where no request may have stop strings."""

    def __init__(self, stop_ids: Iterable[int], decode: Decode | None) -> None:
        self._stop_ids = np.array(sorted(stop_ids), np.int64)
        self.decode = decode

    def stopped(
        self, rows: Rows, tokens: npt.NDArray[np.int64], ready: npt.NDArray[np.int64], stops: Callable[[int], Sequence[str]]
    ) -> npt.NDArray[np.bool_]:
        """bool [N]: which of the rows `ready`, to each of which one of int64 [N] `tokens` was just added, are to end.

        `stops` gives the stop strings of a row that has some.
        """
        stopped: npt.NDArray[np.bool_] = (tokens[:, None] == self._stop_ids).any(axis=1)
        for index in np.flatnonzero(rows.stoppable[ready] & ~stopped).tolist():
            row = int(ready[index])
            stopped[index] = self._ends_with(rows, row, stops(row))
        return stopped

    def _ends_with(self, rows: Rows, row: int, stops: Sequence[str]) -> bool:
        """Whether the text of the newest tokens holds a stop string; had it held one before, the row would have ended."""
        assert self.decode is not None
        window = _TOKENS_A_CHARACTER * max(map(len, stops)) + _SPARE_TOKENS
        text = self.decode(rows.newest(row, window))
        return any(stop in text for stop in stops)


@dataclass(eq=False)
class Hold:
    """The state of a row after a turn."""

    ids: tuple[int, ...]
    """All tokens of the row, int [T]."""
    number: int
    """Its place in the order of submission."""
    version: int
    """The oldest weights that computed the cache."""
    cache: tuple[Any, ...]
    """Keys and values of the first T - 1 tokens (the last one is the first that a continuation computes), empty once
    evicted."""
    num_places: int
    """Columns of a cache that they fill."""


class Holds:
    """Owns the holds by key, each with the request that it is the end of, and those with caches in the order in which their
    turns ended. Waits for nothing; nothing to close."""

    def __init__(self) -> None:
        self._held: dict[RolloutKey, tuple[Request, Hold]] = {}
        self._cached: list[Hold] = []

    def numbers(self, rollout: RolloutKey) -> list[int]:
        """Places in line of what is held of a rollout."""
        return [hold.number for key, (_, hold) in self._held.items() if key.rollout == rollout]

    def add(self, request: Request, hold: Hold, room: int) -> None:
        """Hold the end of this request; of the caches, the newest stay that take at most `room` places together."""
        self._held[request.key] = request, hold
        self._cached.append(hold)
        excess = sum(each.num_places for each in self._cached) - room
        while excess > 0:
            oldest = self._cached.pop(0)
            excess -= oldest.num_places
            oldest.cache = ()

    def continued_by(self, request: Request) -> Hold | None:
        """The hold that this request continues, kept until released. A hold that it does not continue is dropped."""
        if (held := self._held.get(request.key)) is None:
            return None
        before, hold = held
        # The prompt counts too: where it ends decides how the tokens around it are computed.
        if before.prompt == request.prompt and request.prefix_ids[: len(hold.ids)] == hold.ids:
            return hold
        self.forget([request.key])
        return None

    def release(self, key: RolloutKey, hold: Hold) -> None:
        """It goes on in a row."""
        self._drop(hold)
        if key in self._held and self._held[key][1] is hold:
            del self._held[key]

    def forget(self, keys: Iterable[RolloutKey]) -> None:
        """Nothing is held of these any more; unknown ones are ignored."""
        for key in keys:
            if (held := self._held.pop(key, None)) is not None:
                self._drop(held[1])

    def release_caches(self) -> None:
        """Keep tokens and places in line only."""
        for hold in self._cached:
            hold.cache = ()
        self._cached = []

    def _drop(self, hold: Hold) -> None:
        if hold in self._cached:
            self._cached.remove(hold)
