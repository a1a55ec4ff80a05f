"""Which process runs which episode, and what becomes of them when one ends. Pure: a few sets and their rules.

An episode is `waiting` until it may step and while the model writes, `stepping` until the step is answered, and `closing` once
it has ended until its cleanup is done. When its process dies:

    closing                                           is over
    waiting                                           is lost, and begun again: it cannot be the cause
    stepping, another or none of them is the cause    is lost
    stepping, it is the cause                         has failed
    stepping, the cause is not known                  is suspect: lost the first time, failed the second

Of the suspects in a process one steps at a time, so that the second death accuses one and not all that happened to be there.
A process that is retired takes no new episodes; it has drained when none is left in it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Phase = Literal["stepping", "waiting", "closing"]


class Fallen(NamedTuple):
    """Ids of the episodes that a dead process leaves behind."""

    failed: tuple[int, ...]
    lost: tuple[int, ...]


@dataclass
class _Seat:
    takes: bool = True
    phases: dict[int, Phase] = field(default_factory=dict)


class EpisodeBook:
    """Episodes by id, processes by number. A key names what is begun again as another episode."""

    def __init__(self) -> None:
        self._seats: dict[int, _Seat] = {}
        self._worker_of: dict[int, int] = {}
        self._keys: dict[int, Hashable] = {}
        self._suspects: set[Hashable] = set()
        self._lost: set[Hashable] = set()

    def open(self, worker: int) -> None:
        """This process can run episodes."""
        self._seats[worker] = _Seat()

    def place(self, id: int, key: Hashable) -> int | None:
        """The process that the episode is to begin in: the one with the fewest; None while none takes episodes."""
        taking = [worker for worker, seat in self._seats.items() if seat.takes]
        if not taking:
            return None
        worker = min(taking, key=lambda each: len(self._seats[each].phases))
        self._seats[worker].phases[id] = "waiting"
        self._worker_of[id], self._keys[id] = worker, key
        return worker

    def worker_of(self, id: int) -> int | None:
        return self._worker_of.get(id)

    def step(self, id: int) -> bool:
        """Whether the episode may step now; it then does."""
        phases = self._seats[self._worker_of[id]].phases
        if self._keys[id] in self._suspects:
            stepping = (self._keys[other] for other, phase in phases.items() if phase == "stepping")
            if any(key in self._suspects for key in stepping):
                return False
        phases[id] = "stepping"
        return True

    def enter(self, id: int, phase: Literal["waiting", "closing"]) -> None:
        """An ended episode is closing, and no longer suspect."""
        self._seats[self._worker_of[id]].phases[id] = phase
        if phase == "closing":
            self._suspects.discard(self._keys[id])

    def phase(self, id: int) -> Phase | None:
        worker = self._worker_of.get(id)
        return None if worker is None else self._seats[worker].phases[id]

    def loses(self, id: int) -> bool:
        """Whether an episode whose environment is gone is lost, the first time, or has failed."""
        key = self._keys[id]
        is_first = key not in self._lost
        self._lost.add(key)
        return is_first

    def closed(self, id: int) -> None:
        """Nothing of it is left."""
        self._keys.pop(id, None)
        if (worker := self._worker_of.pop(id, None)) is not None:
            del self._seats[worker].phases[id]

    def forget(self, keys: Iterable[Hashable]) -> None:
        """These are not begun again."""
        keys = frozenset(keys)
        self._suspects -= keys
        self._lost -= keys

    def retire(self, worker: int) -> None:
        self._seats[worker].takes = False

    def has_drained(self, worker: int) -> bool:
        seat = self._seats[worker]
        return not seat.takes and not seat.phases

    def num_busy(self, worker: int) -> int:
        """Episodes in the process, those that are being cleaned up included."""
        return len(self.episodes(worker))

    def episodes(self, worker: int) -> tuple[int, ...]:
        """The ids of those in the process."""
        return tuple(self._seats[worker].phases) if worker in self._seats else ()

    def died(self, worker: int, causes: Collection[int] | None) -> Fallen:
        """causes: the episodes that ended the process; None: not known. Of a process that was never open: nothing."""
        seat = self._seats.pop(worker, _Seat())
        failed: list[int] = []
        lost: list[int] = []
        for id, phase in seat.phases.items():
            key = self._keys.pop(id)
            del self._worker_of[id]
            if phase == "closing":
                continue
            is_cause = phase == "stepping" and (key in self._suspects if causes is None else id in causes)
            (failed if is_cause else lost).append(id)
            if is_cause:
                self._suspects.discard(key)
            elif phase == "stepping" and causes is None:
                self._suspects.add(key)
        return Fallen(tuple(failed), tuple(lost))
