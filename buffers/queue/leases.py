"""What an actor may begin and holds: values that only `admission` changes."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Credit:
    """Permission to begin one group, whose first token must come from `lowest_version` or newer."""

    number: int
    attempt: int
    lowest_version: int


@dataclass
class Actor:
    """One actor: how many groups it can hold, the weights it serves (learner fence, version), when it was last heard.

    life: names its process. stuck: groups that it made no progress with for too long, and how far they were; it is given
    nothing while it holds one that has not moved since.
    """

    capacity: int
    fence: int
    version: int
    heard_at: float
    leases: dict[int, Credit] = field(default_factory=dict)
    life: str = ""
    stuck: dict[int, int] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    """Those of its leases that are made and wait for room in the queue."""
    _moved: dict[int, tuple[int, float]] = field(default_factory=dict)  # number -> amount, and since when it is that
    _works_on: dict[int, int] = field(default_factory=dict)  # by its own account: number -> amount

    def has_room(self, number: int, suspects: AbstractSet[int]) -> bool:
        """Whether it can take one more. A suspect is made alone: only then does losing it prove anything."""
        if self.stuck:
            return False
        making = self.leases.keys() - self.finished
        if number in suspects:
            return not making and self.capacity > 0
        return len(self.leases) < self.capacity and suspects.isdisjoint(making)

    def lease(self, credit: Credit) -> None:
        """It may begin this group, perhaps once more."""
        self.leases[credit.number] = credit
        self.finished.discard(credit.number)
        self._moved.pop(credit.number, None)

    def progressed(self, amounts: Iterable[tuple[int, int]], now: float) -> None:
        """How far each of the groups is that it works on."""
        self._works_on = known = dict(amounts)
        for number in self.leases.keys() & known.keys():
            if known[number] > self._moved.get(number, (-1, 0.0))[0]:
                self._moved[number] = known[number], now
        self.stuck = {number: amount for number, amount in self.stuck.items() if known.get(number, amount + 1) <= amount}

    def has_put(self, number: int, now: float) -> None:
        """It has made this group, which perhaps must wait for room: that is no lack of progress."""
        if number in self.leases:
            self._moved[number] = self._moved.get(number, (0, now))[0], now
            self.finished.add(number)

    def overdue(self, now: float, timeout_s: float) -> list[tuple[int, bool]]:
        """Its groups that made no progress for so long, counted from the first look at each, and whether it works on them: it
        may never have got the credit."""
        self._moved = {number: self._moved.get(number, (-1, now)) for number in self.leases}
        late = {number: amount for number, (amount, since) in self._moved.items() if now - since > timeout_s}
        self.stuck |= {number: amount for number, amount in late.items() if number in self._works_on}
        return [(number, number in self._works_on) for number in late]

    def forgive(self, seconds: float, now: float) -> None:
        """So long nothing was listened to: it proves nothing about this actor."""
        self.heard_at = min(now, self.heard_at + seconds)
        self._moved = {number: (amount, min(now, since + seconds)) for number, (amount, since) in self._moved.items()}


class Silences:
    """What actors held whose leases ended because they were silent. Silence counts against no group; an end that is seen
    later does: the supervisor's word, or the actor's return under its name as another process.
    """

    MAX_NAMES = 1024
    """Remembered at most; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._silent: dict[str, tuple[Actor, list[Credit]]] = {}

    def note(self, name: str, actor: Actor) -> None:
        self._silent.pop(name, None)
        if actor.leases or actor.stuck:
            self._silent[name] = actor, list(actor.leases.values())
        while len(self._silent) > self.MAX_NAMES:
            del self._silent[next(iter(self._silent))]

    def ended(self, name: str) -> list[Credit]:
        """What the silent actor `name` held, once."""
        return self._silent.pop(name)[1] if name in self._silent else []

    def back(self, name: str, actor: Actor) -> list[Credit]:
        """As `ended`, when another process comes under its name; the same process is as stuck as it was."""
        before, held = self._silent.pop(name, (actor, []))
        if before.life != actor.life:
            return held
        actor.stuck |= before.stuck
        return []
