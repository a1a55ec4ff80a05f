"""Which process runs which session, and what becomes of them when one ends. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Phase = Literal["stepping", "waiting", "closing"]
After = Literal["waiting", "closing", "over"]
"""What a session is after a step, or after its cleanup; over: nothing is left of it."""
_MOST_WAITED = 10


class EndedSessions(NamedTuple):
    """Ids of the sessions that a dead process leaves behind. over: those that had ended."""

    failed: tuple[int, ...]
    lost: tuple[int, ...]
    over: tuple[int, ...]


@dataclass
class _BookSlot:
    takes: bool = True
    phases: dict[int, Phase] = field(default_factory=dict)


class SessionBook:
    """A few sets and their rules.

    A session is `waiting` until it may step and while the model writes, `stepping` until something has come of it, and
    `closing` once it has ended until its cleanup is done. When its process dies:

        closing                                           is over
        waiting                                           is lost, and begun again; failed the tenth time after a step, for
                                                          what an agent has running beside its calls may be the cause
        stepping, another or none of them is the cause    is lost
        stepping, it is the cause                         has failed
        stepping, the cause is not known                  is suspect: lost the first time, failed the second

    What its process reports of it is passed on while it is waiting or stepping; of one that is closing, because it has ended or
    was discarded, only that it is over.

    Of the suspects in a process one steps at a time, so that the second crash identifies one and not all that happened to be
    there. A process that is retired takes no new sessions; it has drained when none is left in it.

    Sessions are named by id, processes by number. A key names what is begun again as another session.
    """

    def __init__(self) -> None:
        self._slots: dict[int, _BookSlot] = {}
        self._worker_of: dict[int, int] = {}
        self._keys: dict[int, Hashable] = {}
        self._suspects: set[Hashable] = set()
        self._has_stepped: set[int] = set()
        self._waited: Counter[Hashable] = Counter()  # how often a process died while it waited after a step

    def open(self, worker: int) -> None:
        """This process can run sessions."""
        self._slots[worker] = _BookSlot()

    def place(self, id: int, key: Hashable, has_room: Callable[[int], bool] = lambda worker: True) -> int | None:
        """The process that the session is to begin in: the one with the fewest; None while none takes it."""
        worker, fewest = None, math.inf
        for each, slot in self._slots.items():
            if slot.takes and len(slot.phases) < fewest and has_room(each):
                worker, fewest = each, len(slot.phases)
        if worker is None:
            return None
        self._slots[worker].phases[id] = "waiting"
        self._worker_of[id], self._keys[id] = worker, key
        return worker

    def worker_of(self, id: int) -> int | None:
        return self._worker_of.get(id)

    def step(self, id: int) -> bool:
        """Whether the session may step now; it then does."""
        phases = self._slots[self._worker_of[id]].phases
        if self._keys[id] in self._suspects:
            stepping = (self._keys[other] for other, phase in phases.items() if phase == "stepping" and other != id)
            if any(key in self._suspects for key in stepping):
                return False
        phases[id] = "stepping"
        self._has_stepped.add(id)
        return True

    def enter(self, id: int, phase: Literal["waiting", "closing"]) -> None:
        """An ended session is closing, and no longer suspect."""
        self._slots[self._worker_of[id]].phases[id] = phase
        if phase == "closing":
            self.forget([self._keys[id]])

    def heard(self, id: int, after: After) -> bool:
        """Enters the phase that its process reports, `closed` where it is over. Returns whether to pass the report on."""
        if self.phase(id) not in ("waiting", "stepping"):
            return False
        self.enter(id, "waiting" if after == "waiting" else "closing")
        return True

    def phase(self, id: int) -> Phase | None:
        worker = self._worker_of.get(id)
        return None if worker is None else self._slots[worker].phases[id]

    def closed(self, id: int) -> None:
        """Nothing of it is left."""
        self._keys.pop(id, None)
        self._has_stepped.discard(id)
        if (worker := self._worker_of.pop(id, None)) is not None:
            del self._slots[worker].phases[id]

    def forget(self, keys: Iterable[Hashable]) -> None:
        """These are not begun again."""
        for key in keys:
            self._suspects.discard(key)
            self._waited.pop(key, None)

    def retire(self, worker: int) -> None:
        self._slots[worker].takes = False

    def has_drained(self, worker: int) -> bool:
        slot = self._slots[worker]
        return not slot.takes and not slot.phases

    def sessions(self, worker: int) -> Collection[int]:
        """The ids of those in the process, in the order of their beginning; those that are being cleaned up included."""
        return self._slots[worker].phases.keys() if worker in self._slots else ()

    def died(self, worker: int, causes: Collection[int] | None) -> EndedSessions:
        """causes: the sessions that ended the process; None: not known. Of a process that was never open: nothing."""
        slot = self._slots.pop(worker, _BookSlot())
        found: dict[str, list[int]] = {"failed": [], "lost": [], "over": []}
        for id, phase in slot.phases.items():
            key = self._keys.pop(id)
            del self._worker_of[id]
            if phase == "waiting" and id in self._has_stepped:
                self._waited[key] += 1
            self._has_stepped.discard(id)
            is_cause = phase == "stepping" and (key in self._suspects if causes is None else id in causes)
            is_cause = is_cause or self._waited[key] == _MOST_WAITED
            found["over" if phase == "closing" else "failed" if is_cause else "lost"].append(id)
            if is_cause:
                self.forget([key])
            elif phase == "stepping" and causes is None:
                self._suspects.add(key)
        return EndedSessions(*map(tuple, found.values()))
