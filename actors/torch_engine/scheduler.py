"""Who is admitted into which row, what is computed of its prefix, who is moved or sent back: decisions, without a tensor.

Running sequences always occupy rows 0 .. num_rows - 1, so every tensor operation works on a prefix and a batch that
runs empty becomes cheaper. A row freed by a finished sequence is given to the next waiting request; when none waits,
the last rows move down into the holes. Requests enter in the order they were submitted; one that is sent back (to make
room, or because new weights interrupt it) keeps its tokens and its place in that order.

A row whose prefix is not computed yet is *filling*: each plan names which chunks of which prefixes come next, at most
`prefill_tokens` at a time; one with images is computed whole. Equal prompts, with equal images, are computed once by the same
weights, for all rows that want them meanwhile. A request that continues a held one (`rows.Hold`) has its place in line, and
gets its keys and values back where they are there.
No framework, no clock, no randomness; called by the engine only, and small enough for its laws to be tested by drawing
random histories.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from async_rlhf.actors.engine import Prompt, Request, RolloutKey
from async_rlhf.actors.torch_engine.rows import Hold, Holds, RowProgress


class Size(NamedTuple):
    """The size of the running rows: their number, tokens of the longest, and of all."""

    num_rows: int = 0
    longest: int = 0
    total: int = 0

    def plus(self, length: int) -> Size:
        """With one row more."""
        return Size(self.num_rows + 1, max(self.longest, length), self.total + length)

    def later(self, steps: int) -> Size:
        """When each row has so many tokens more."""
        return Size(self.num_rows, self.longest + steps, self.total + steps * self.num_rows)


NO_ROWS = Size()


@dataclass(frozen=True)
class PrefillChunk:
    """Known tokens to compute at positions `start`, `start + 1`, ..., for all `rows` alike (they share the tokens before)."""

    ids: tuple[int, ...]
    start: int
    rows: tuple[int, ...]
    sampled: bool = False
    """Whether they follow a prompt, in a row that was sent back or has a context; else all are a prompt's."""
    images: tuple[str, ...] = ()
    """Of the prompt that they are all but the last token of."""


@dataclass(frozen=True)
class Copy:
    """The first `num_tokens` cached positions of row `source` are also those of row `target`."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True)
class RowAdmission:
    """A request enters `row`, for the first time or with the tokens it had sampled before it was sent back."""

    row: int
    request: Request
    version: int
    """The oldest weights that its prefix is, or was, computed with."""
    progress: RowProgress | None = None
    cache: tuple[Any, ...] = ()
    """Held keys and values of the row that it continues."""

    @property
    def last_token(self) -> int:
        return self.request.prefix_ids[-1] if self.progress is None else int(self.progress.token_ids[-1])


@dataclass(frozen=True)
class PassPlan:
    """The work before the next token, in this order: moves, admissions with their holds, copies, chunks."""

    moves: tuple[tuple[int, int], ...] = ()
    """(source, target) rows of running sequences; no target is a source."""
    copies: tuple[Copy, ...] = ()
    """Prefixes that a running sibling has already computed."""
    admitted: tuple[RowAdmission, ...] = ()
    """In order of submission."""
    chunks: tuple[PrefillChunk, ...] = ()
    filling: tuple[int, ...] = ()
    """Rows whose prefix is still incomplete after the chunks; their sampled tokens mean nothing."""


_NOTHING = PassPlan()


@dataclass(eq=False)
class _ScheduledRow:
    request: Request
    number: int
    """Place in the order of submission."""
    hold: Hold | None = None
    """What it continues, until it is admitted."""
    progress: RowProgress | None = None
    row: int = -1
    version: int = -1
    """Weights the cached prompt was computed with; a sibling admitted after an update computes it again."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Everything known on admission; all but the last must be computed before the next token can be sampled."""
        prefix = self.request.prefix_ids
        return prefix if self.progress is None else (*prefix, *self.progress.token_ids.tolist())


@dataclass(eq=False)
class _Fill:
    """A prefix being computed for its members' rows: positions 0 .. done - 1 are there, len(ids) - 2 is the last wanted."""

    ids: tuple[int, ...]
    members: list[_ScheduledRow]
    done: int = 0

    @property
    def is_of_sampled(self) -> bool:
        """Whether it goes on after a prompt, which another fill has computed."""
        return len(self.ids) > len(self.members[0].request.prompt_ids)

    @property
    def images(self) -> tuple[str, ...]:
        """Those of its prompt; none of what goes on after it."""
        return () if self.is_of_sampled else self.members[0].request.images

    @property
    def num_left(self) -> int:
        return len(self.ids) - 1 - self.done


class Scheduler:
    """Owns the waiting line and the table of rows. Waits for nothing; nothing to close.

    evicts: rows do not keep all that they compute, so a prompt is not copied out of a row that has gone on, and a plan has no
    two chunks of one row.
    """

    def __init__(self, slots: int, prefill_tokens: int = 2048, *, evicts: bool = False) -> None:
        self._slots, self._prefill_tokens, self._evicts = slots, prefill_tokens, evicts
        self._waiting: deque[_ScheduledRow] = deque()
        self._rows: list[_ScheduledRow | None] = []
        self._unfinished: set[RolloutKey] = set()
        self._fills: list[_Fill] = []
        self._holds = Holds()
        self._submitted = 0

    @property
    def num_rows(self) -> int:
        """Rows in use, holes included; right after `plan` there are no holes."""
        return len(self._rows)

    @property
    def num_begun(self) -> int:
        """Requests that run or were sent back."""
        return sum(entry is not None for entry in self._rows) + sum(entry.progress is not None for entry in self._waiting)

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    def unfinished_keys(self) -> Set[RolloutKey]:
        """Keys of all requests that wait or run."""
        return self._unfinished

    def request(self, row: int) -> Request:
        return self._entry(row).request

    def running(self) -> list[tuple[int, Request]]:
        """Rows in use and who occupies them."""
        return [(row, entry.request) for row, entry in enumerate(self._rows) if entry is not None]

    def rows_by_age(self) -> list[int]:
        """Rows in use, the earliest submitted first."""
        running = [(entry.number, row) for row, entry in enumerate(self._rows) if entry is not None]
        return [row for _, row in sorted(running)]

    def submit(self, requests: Sequence[Request]) -> None:
        """Put requests at the end of the waiting line, in order; what continues a held one, where that one stood, and a further
        row of a rollout where the first of those that are here stands."""
        for request in requests:
            hold = self._holds.continued_by(request)
            self._wait(_ScheduledRow(request, self._place(request.key) if hold is None else hold.number, hold))
            self._unfinished.add(request.key)
            self._submitted += 1

    def _place(self, key: RolloutKey) -> int:
        """In line, of what continues nothing."""
        if not key.row:
            return self._submitted
        others = [each.number for each in (*self._rows, *self._waiting) if each and each.request.key.rollout == key.rollout]
        return min([*others, *self._holds.numbers(key.rollout)], default=self._submitted)

    def finish(self, rows: Iterable[int]) -> None:
        """These rows ended; they are holes until the next plan."""
        for row in rows:
            entry = self._entry(row)
            self._unfinished.discard(entry.request.key)
            if not entry.request.hold:
                self._holds.forget([entry.request.key])
            self._free(entry)

    def hold(self, row: int, token_ids: Iterable[int], cache: tuple[Any, ...], num_places: int, room: int) -> None:
        """This row ended with these tokens, and may be continued; free it afterwards.

        cache: its keys and values, of all tokens but the last, in so many places. room: the most places held.
        """
        entry = self._entry(row)
        ids = (*entry.request.prefix_ids, *token_ids)
        self._holds.add(entry.request, Hold(ids, entry.number, entry.version, cache, num_places), room)

    def release_caches(self) -> None:
        """Drops held caches, which continuations compute again."""
        self._holds.release_caches()

    def suspend(self, progress: Iterable[tuple[int, RowProgress]]) -> None:
        """Send the requests of these rows back to their place in the waiting line, with what they have sampled so far."""
        for row, sampled in progress:
            entry = self._entry(row)
            self._free(entry)
            entry.progress = sampled if len(sampled.token_ids) else None
            self._wait(entry)

    def abort(self, keys: Collection[RolloutKey]) -> tuple[list[int], int]:
        """Forget these requests, held ones too; unknown keys are ignored.

        Returns the rows of those that were running, now holes, and the tokens of those that had been sent back.
        """
        self._holds.forget(keys)
        gone = [entry for entry in self._waiting if entry.request.key in keys]
        if gone:
            self._unfinished.difference_update(entry.request.key for entry in gone)
            self._waiting = deque(entry for entry in self._waiting if entry.request.key not in keys)
        rows = [row for row, entry in enumerate(self._rows) if entry is not None and entry.request.key in keys]
        self.finish(rows)
        return rows, sum(len(entry.progress.token_ids) for entry in gone if entry.progress is not None)

    def plan(
        self,
        version: int,
        *,
        size: Size = NO_ROWS,
        fits: Callable[[Size], bool] | None = None,
        only_begun: bool = False,
    ) -> PassPlan:
        """Close all holes, admit as many waiting requests as fit, choose what is computed of prefixes by `version`.

        `fits(size)`: whether there is memory for rows of this size; `size` is that of the running ones. `only_begun` admits
        nothing but what was sent back.
        """
        holes = [row for row, entry in enumerate(self._rows) if entry is None]
        num_running = len(self._rows) - len(holes)
        entering = self._take_admissible(num_running, size, fits, only_begun)
        if not holes and not entering and not self._fills:
            return _NOTHING
        moves = self._close_holes(holes, num_running + len(entering))
        copies, admitted = self._admit(entering, version)
        chunks = self._next_chunks() if self._fills else ()
        filling = tuple(sorted(entry.row for fill in self._fills for entry in fill.members))
        return PassPlan(moves, copies, admitted, chunks, filling)

    def _take_admissible(
        self, num_rows: int, size: Size, fits: Callable[[Size], bool] | None, only_begun: bool
    ) -> list[_ScheduledRow]:
        """Those that can enter now, out of the waiting line: from its front, or of those that had begun from theirs."""
        entering: list[_ScheduledRow] = []
        passed: list[_ScheduledRow] = []
        while self._waiting and num_rows + len(entering) < self._slots:
            entry = self._waiting[0]
            # What had begun may stand behind a continuation, and the weights that this one is for wait until it has ended.
            if only_begun and entry.progress is None:
                passed.append(self._waiting.popleft())
                continue
            if fits is not None:
                size = size.plus(len(entry.ids))
                if not fits(size):
                    break
            entering.append(self._waiting.popleft())
        self._waiting.extendleft(reversed(passed))
        return entering

    def _wait(self, entry: _ScheduledRow) -> None:
        """Into the waiting line, which is in the order of submission."""
        insort(self._waiting, entry, key=lambda each: each.number)

    def _close_holes(self, holes: list[int], num_rows: int) -> tuple[tuple[int, int], ...]:
        """Move running rows at or above `num_rows` into holes below it, and set the table to that length."""
        above = [row for row in range(num_rows, len(self._rows)) if self._rows[row] is not None]
        moves = tuple(zip(above, holes, strict=False))
        for source, target in moves:
            entry = self._rows[target] = self._entry(source)
            entry.row = target
        del self._rows[num_rows:]
        self._rows.extend([None] * (num_rows - len(self._rows)))
        return moves

    def _admit(self, entering: Sequence[_ScheduledRow], version: int) -> tuple[tuple[Copy, ...], tuple[RowAdmission, ...]]:
        """Fill the free rows; what is held, or a prompt already computed by these weights, is not computed again."""
        if not entering:
            return (), ()
        free = [row for row, entry in enumerate(self._rows) if entry is None]
        ready = {} if self._evicts else self._ready(version)
        shared = {(fill.ids, fill.images): fill for fill in self._fills if _is_of_prompt(fill, version)}
        copies, admitted = [], []
        for row, entry in zip(free, entering, strict=True):
            hold, entry.hold = entry.hold, None
            if hold is not None:
                self._holds.release(entry.request.key, hold)
            held = hold if hold is not None and hold.cache else None
            self._rows[row], entry.row, entry.version = entry, row, version if held is None else held.version
            admitted.append(RowAdmission(row, entry.request, entry.version, entry.progress, () if held is None else held.cache))
            prompt = entry.request.prompt
            if held is not None:
                self._fills += self._rest(entry, len(held.ids) - 1)
            elif prompt in ready:
                num_tokens = len(entry.request.prompt_ids) - 1
                copies.append(Copy(ready[prompt].row, row, num_tokens))
                self._fills += self._rest(entry, num_tokens)
            elif prompt in shared:
                fill = shared[prompt]
                if fill.done:
                    copies.append(Copy(fill.members[0].row, row, fill.done))
                fill.members.append(entry)
            else:
                shared[prompt] = _Fill(entry.request.prompt_ids, [entry])
                self._fills.append(shared[prompt])
        return tuple(copies), tuple(admitted)

    def _ready(self, version: int) -> dict[Prompt, _ScheduledRow]:
        """Rows whose prompt has been computed by these weights and may be copied, by prompt."""
        filling = {id(entry) for fill in self._fills for entry in fill.members}
        running = (entry for entry in self._rows if entry is not None and entry.version == version)
        return {entry.request.prompt: entry for entry in running if id(entry) not in filling}

    def _rest(self, entry: _ScheduledRow, done: int) -> list[_Fill]:
        """The first `done` tokens of this row are computed; its further tokens are its own."""
        return [_Fill(entry.ids, [entry], done)] if len(entry.ids) - 1 > done else []

    def _next_chunks(self) -> tuple[PrefillChunk, ...]:
        """As much as `prefill_tokens` allow, padding included, in order; completed fills are forgotten."""
        chunks: list[PrefillChunk] = []
        longest = 0
        index = 0
        while index < len(self._fills):
            fill = self._fills[index]
            room = self._prefill_tokens // (len(chunks) + 1)
            size = fill.num_left if fill.images else min(fill.num_left, room)
            if size:
                if longest > room or (size > room and chunks):
                    break
                longest = max(longest, size)
                rows = tuple(entry.row for entry in fill.members)
                ids = fill.ids[fill.done : fill.done + size]
                chunks.append(PrefillChunk(ids, fill.done, rows, fill.is_of_sampled, fill.images))
                fill.done += size
            if fill.num_left:
                break
            # What each member has beyond the prompt comes next, so that rows are ready one group after the other.
            rests = [rest for entry in fill.members for rest in self._rest(entry, fill.done)]
            self._fills[index : index + 1] = rests
            if self._evicts and size:
                index += len(rests)
        return tuple(chunks)

    def _entry(self, row: int) -> _ScheduledRow:
        entry = self._rows[row]
        assert entry is not None, f"row {row} is free"
        return entry

    def _free(self, entry: _ScheduledRow) -> None:
        self._rows[entry.row] = None
        for fill in self._fills:
            if entry in fill.members:
                fill.members.remove(entry)
        self._fills = [fill for fill in self._fills if fill.members]


def _is_of_prompt(fill: _Fill, version: int) -> bool:
    """Whether others may join: it computes a prompt, and these weights began it."""
    first = fill.members[0]
    return first.version == version and fill.ids == first.request.prompt_ids
