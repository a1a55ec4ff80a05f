"""Who is admitted into which row, who is moved, who is forgotten: the engine's decisions, without a tensor.

Running sequences always occupy rows 0 .. num_running - 1, so every tensor operation works on a prefix and a batch that
runs empty becomes cheaper. A row freed by a finished sequence is given to the next waiting request; when none waits,
the last rows move down into the holes. Requests enter in the order they were submitted. No framework, no clock, no
randomness; called by the engine only, and small enough for its laws to be tested by drawing random histories.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from actors.engine import Request, RolloutKey


@dataclass(frozen=True)
class Prefill:
    """One prompt to compute, and all rows that get its result."""

    prompt_ids: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Copy:
    """The first `num_tokens` cached positions of row `source` are also those of row `target`."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True)
class Plan:
    """What to do before the next token, in this order: moves, copies, admissions, prefills.

    moves: (source, target) rows of running sequences; no target is a source.
    copies: prompts that a running sibling has already computed.
    admitted: (row, request) in order of submission.
    """

    moves: tuple[tuple[int, int], ...]
    copies: tuple[Copy, ...]
    admitted: tuple[tuple[int, Request], ...]
    prefills: tuple[Prefill, ...]


@dataclass(eq=False)
class _Entry:
    request: Request
    submission: int
    """Requests submitted together carry the same number: only they share a prompt."""
    prompt_version: int = -1
    """Weights the cached prompt was computed with; a sibling admitted after an update computes it again."""


class Scheduler:
    """Owns the waiting line and the table of rows. Waits for nothing; nothing to close."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._waiting: deque[_Entry] = deque()
        self._rows: list[_Entry | None] = []
        self._submissions = 0

    @property
    def num_rows(self) -> int:
        """Rows in use, holes included; right after `plan` there are no holes."""
        return len(self._rows)

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + sum(entry is not None for entry in self._rows)

    def unfinished_keys(self) -> set[RolloutKey]:
        """Keys of all requests that wait or run."""
        running = (entry.request.key for entry in self._rows if entry is not None)
        return {entry.request.key for entry in self._waiting}.union(running)

    def request(self, row: int) -> Request:
        """The request that occupies `row`."""
        entry = self._rows[row]
        assert entry is not None, f"row {row} is free"
        return entry.request

    def submit(self, requests: Sequence[Request]) -> None:
        """Put requests at the end of the waiting line, in order."""
        self._waiting.extend(_Entry(request, self._submissions) for request in requests)
        self._submissions += 1

    def finish(self, rows: Iterable[int]) -> None:
        """These rows ended; they are holes until the next plan."""
        for row in rows:
            assert self._rows[row] is not None, f"row {row} ended twice"
            self._rows[row] = None

    def abort(self, keys: Collection[RolloutKey]) -> list[int]:
        """Forget these requests; returns the rows of those that were running, now holes. Unknown keys are ignored."""
        self._waiting = deque(entry for entry in self._waiting if entry.request.key not in keys)
        rows = [row for row, entry in enumerate(self._rows) if entry is not None and entry.request.key in keys]
        self.finish(rows)
        return rows

    def plan(self, version: int) -> Plan:
        """Close all holes and admit as many waiting requests as fit; prompts will be computed by weights `version`."""
        holes = [row for row, entry in enumerate(self._rows) if entry is None]
        num_running = len(self._rows) - len(holes)
        num_admitted = min(len(self._waiting), self._slots - num_running)
        if not holes and not num_admitted:
            return Plan((), (), (), ())
        num_rows = num_running + num_admitted
        moves = self._close_holes(holes, num_rows)
        free = [row for row in range(num_rows) if self._rows[row] is None]
        return self._admit(free, version, moves)

    def _close_holes(self, holes: list[int], num_rows: int) -> tuple[tuple[int, int], ...]:
        """Move running rows at or above `num_rows` into holes below it, and set the table to that length."""
        above = [row for row in range(num_rows, len(self._rows)) if self._rows[row] is not None]
        moves = tuple(zip(above, holes, strict=False))
        for source, target in moves:
            self._rows[target] = self._rows[source]
        del self._rows[num_rows:]
        self._rows.extend([None] * (num_rows - len(self._rows)))
        return moves

    def _admit(self, free: list[int], version: int, moves: tuple[tuple[int, int], ...]) -> Plan:
        """Fill the free rows from the waiting line; a prompt already computed by these weights is not computed again."""
        ready: dict[tuple[int, tuple[int, ...]], int] = {
            (entry.submission, entry.request.prompt_ids): row
            for row, entry in enumerate(self._rows)
            if entry is not None and entry.prompt_version == version
        }
        admitted, copies = [], []
        fresh: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for row in free:
            entry = self._waiting.popleft()
            self._rows[row] = entry
            entry.prompt_version = version
            admitted.append((row, entry.request))
            prompt = (entry.submission, entry.request.prompt_ids)
            if prompt in ready:
                copies.append(Copy(ready[prompt], row, len(entry.request.prompt_ids) - 1))
            else:
                fresh.setdefault(prompt, []).append(row)
        prefills = tuple(Prefill(prompt_ids, tuple(rows)) for (_, prompt_ids), rows in fresh.items())
        return Plan(moves, tuple(copies), tuple(admitted), prefills)
