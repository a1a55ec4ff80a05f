"""The actors, what each is making, and how that ends. Owned by `admission`, which decides who may begin what.

A pure state machine over the consumption order; time enters as an argument. A lease ends when its group is put, given up, or
lost; `failures` counts it:

    its actor's end was seen            counts
    its actor is silent                 counts only if its end is seen later (`Silences`)
    it makes no progress                counts; its actor is given nothing until it moves or is dropped, and is doubted then
    its actor never got the credit      does not count
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from operator import itemgetter
from types import MappingProxyType

from async_rlhf.buffers.protocol.broadcasts import EngineDevice
from async_rlhf.buffers.queue.failures import Failures
from async_rlhf.buffers.queue.order import ConsumptionOrder


@dataclass(frozen=True)
class Credit:
    """Permission to begin one group, whose first token must come from `lowest_version` or newer."""

    number: int
    attempt: int
    lowest_version: int


@dataclass
class Actor:
    """One actor: how many groups it can hold, the weights it serves (learner fence, version), when its last message came."""

    capacity: int
    fence: int
    version: int
    last_seen: float
    leases: dict[int, Credit] = field(default_factory=dict)
    life: str = ""
    """Names its process."""
    identity: bytes = b""
    """Names its connection."""
    telemetry: Mapping[str, float] = field(default_factory=dict)
    """Its counters and gauges."""
    announced: tuple[int, int] | None = None
    """The weights that it was last told to adopt."""
    behind_since: float | None = None
    """Since when it serves others than those and has adopted nothing."""
    stuck: dict[int, int] = field(default_factory=dict)
    """Groups without progress for too long, and how far they were. It gets nothing while it holds one that has not moved
    since."""
    doubted: bool = False
    """It has made no progress since such a group and may be stuck: it gets a group only when no other actor has room."""
    device: EngineDevice | None = None
    """Its part in the device channel."""
    _moved: dict[int, tuple[int, float]] = field(default_factory=dict)
    """number -> amount, and since when it is that"""
    _works_on: dict[int, int] = field(default_factory=dict)
    """number -> amount, as it reports"""

    def has_room(self, number: int, suspects: AbstractSet[int]) -> bool:
        """Whether it can take one more. A suspect is made alone: only then does losing it prove anything."""
        if self.stuck:
            return False
        if number in suspects:
            return not self.leases and self.capacity > 0
        return len(self.leases) < self.capacity and suspects.isdisjoint(self.leases)

    def lease(self, credit: Credit) -> None:
        """It may begin this group, perhaps once more."""
        self.leases[credit.number] = credit
        self._moved.pop(credit.number, None)

    def progressed(self, amounts: Iterable[tuple[int, int]], now: float) -> None:
        """Take its report of progress with each of its groups."""
        self._works_on = known = dict(amounts)
        for number in self.leases.keys() & known.keys():
            if known[number] > (before := self._moved.get(number, (-1, 0.0))[0]):
                self._moved[number] = known[number], now
                self.doubted &= known[number] <= max(0, before)  # a first report of nothing is no progress
        self.stuck = {number: amount for number, amount in self.stuck.items() if known.get(number, amount + 1) <= amount}

    def has_put(self, number: int, now: float) -> None:
        """It has made this group, which perhaps must wait for room: that is no lack of progress."""
        if number in self.leases:
            self._moved[number] = self._moved.get(number, (0, now))[0], now
            self.doubted = False

    def overdue(self, now: float, timeout_s: float) -> list[tuple[int, bool]]:
        """Its groups without progress for `timeout_s`, counted from the first look at each, and whether it works on them: the
        credit may never have arrived."""
        self._moved = {number: self._moved.get(number, (-1, now)) for number in self.leases}
        late = {number: amount for number, (amount, since) in self._moved.items() if now - since > timeout_s}
        stuck = {number: amount for number, amount in late.items() if number in self._works_on}
        self.stuck |= stuck
        self.doubted |= bool(stuck)
        return [(number, number in self._works_on) for number in late]

    def resume(self, before: Actor) -> None:
        """It is the same process as `before`, and as stuck as that was."""
        self.stuck, self.doubted = self.stuck | before.stuck, before.doubted

    def forgive(self, seconds: float, now: float) -> None:
        """Nothing was received for `seconds`, so silence in that time proves nothing about this actor."""
        self.last_seen = min(now, self.last_seen + seconds)
        self._moved = {number: (amount, min(now, since + seconds)) for number, (amount, since) in self._moved.items()}
        if self.behind_since is not None:
            self.behind_since = min(now, self.behind_since + seconds)


class Rooms:
    """Actors with room, by the version they serve, those with most room first and then by name: whoever has the next group is
    found without a look at the others. actors: those of the learner `fence` that serve no version above `newest` are in it."""

    def __init__(self, actors: Mapping[str, Actor] = MappingProxyType({}), fence: int = 0, newest: int = 0) -> None:
        self._actors = actors
        self._by_version: dict[int, list[tuple[int, str]]] = {}
        for name, actor in actors.items():
            if actor.fence == fence > 0 and actor.version <= newest:
                self._by_version.setdefault(actor.version, []).append((len(actor.leases) - actor.capacity, name))
        for rooms in self._by_version.values():
            heapify(rooms)

    def __bool__(self) -> bool:
        return any(self._by_version.values())

    def take(self, allows: Callable[[int], bool]) -> str | None:
        """The first whose version may be; it is not among them until it is put back."""
        first = min(
            (each for version, each in self._by_version.items() if each and allows(version)), key=itemgetter(0), default=[]
        )
        return heappop(first)[1] if first else None

    def put_back(self, name: str) -> None:
        """Put an actor back after it was given a group, unless it is full."""
        actor = self._actors[name]
        if len(actor.leases) < actor.capacity:
            heappush(self._by_version[actor.version], (len(actor.leases) - actor.capacity, name))


class Silences:
    """The groups that silent actors held. Silence counts against no group; an end that is seen later does: the supervisor
    reports it, or another process joins under the actor's name."""

    MAX_NAMES = 1024
    """Remembered at most; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._silent: dict[str, tuple[Actor, list[Credit]]] = {}

    def note(self, name: str, actor: Actor) -> None:
        self._silent.pop(name, None)
        if actor.leases or actor.stuck or actor.doubted:
            self._silent[name] = actor, list(actor.leases.values())
        while len(self._silent) > self.MAX_NAMES:
            del self._silent[next(iter(self._silent))]

    def ended(self, name: str) -> list[Credit]:
        """The credits that the silent actor `name` held; none at the next call."""
        return self._silent.pop(name)[1] if name in self._silent else []

    def back(self, name: str, actor: Actor) -> list[Credit]:
        """Like `ended`, when another process comes under its name; the same process is as stuck as it was."""
        before, held = self._silent.pop(name, (actor, []))
        if before.life != actor.life:
            return held
        actor.resume(before)
        return []


class Fleet:
    """`actors` by name. newest: no version above it can have sampled anything. credited, failed: attempts, for the ledger.

    on_burial: called when a number was quarantined, which moves those behind it up.
    """

    def __init__(self, order: ConsumptionOrder, max_attempts: int, lease_s: float, on_burial: Callable[[], None]) -> None:
        self._order, self._lease_s, self._on_burial = order, lease_s, on_burial
        self.actors: dict[str, Actor] = {}
        self._names: dict[bytes, str] = {}  # by connection
        self._left: dict[str, float] = {}  # counters of actors that have left
        self.failures = Failures(max_attempts)
        self._silences = Silences()
        self.newest = self.credited = self.failed = 0

    def join(self, name: str, actor: Actor, holding: Iterable[tuple[int, int]] = ()) -> None:
        """An actor (re)joins with the (number, attempt) of each group it works on.

        Leases it no longer holds are lost; work that no other actor has is leased to it (after the hub was restarted), unless
        no version exists that could have begun it.
        """
        self._charge(self._silences.back(name, actor), f"{name} came back as another process")
        before = self._remove(name, actor.identity)
        if before is not None and before.life == actor.life:
            actor.resume(before)
        if before is not None and before.identity == actor.identity:
            actor.telemetry = before.telemetry
        held = dict(holding)
        for credit in list(before.leases.values()) if before else []:
            if held.get(credit.number) == credit.attempt:
                actor.leases[credit.number] = credit
                del held[credit.number]
            else:
                ended = before is not None and before.life != actor.life
                self._lose(credit.number, f"{name} came back {'as another process' if ended else 'without it'}", counts=ended)
        self.actors[name], self._names[actor.identity] = actor, name
        for number, attempt in sorted(held.items()):
            is_wanted = self._order.is_open(number) and not self.failures.is_stuck(number, attempt)
            if is_wanted and self._order.lowest_version(number) <= self.newest:
                self.lease(actor, number, attempt)

    def leave(self, name: str, reason: str = "left", *, seen: bool = True) -> None:
        """An actor is gone: its groups are lost and will be credited again.

        seen: whether its end was seen. Else it may be alive and slow, which counts against none of its groups, until its end
        is seen after all.
        """
        if seen:
            self._charge(self._silences.ended(name), f"{name} {reason}")
        actor = self._remove(name)
        if actor is not None and not seen:
            self._silences.note(name, actor)
        for number in list(actor.leases) if actor else []:
            self._lose(number, f"{name} {reason}", counts=seen)

    def drop(self, name: str, reason: str) -> None:
        """Give the groups of a living actor to others. Its end, should it come later, does not count against them."""
        for number in list(self.actors[name].leases):
            self._lose(number, f"{name} {reason}", counts=False)
        if (actor := self._remove(name)) is not None:
            self._silences.note(name, actor)

    def expire(self, now: float) -> list[str]:
        """Drop the actors silent for `lease_s` seconds; returns their names."""
        silent = [name for name, actor in self.actors.items() if now - actor.last_seen > self._lease_s]
        for name in silent:
            self.leave(name, f"was silent for {self._lease_s:g} s", seen=False)
        return silent

    def disband(self, reason: str) -> None:
        """End all leases; none counts as a failure."""
        for number in self.leased:
            self._lose(number, reason, counts=False)

    def overdue(self, now: float, timeout_s: float) -> list[tuple[str, int]]:
        """End the leases of groups that made no progress for so long although their actor beats; returns (actor, number).

        Lack of progress counts, and their actor is given nothing until they move, or are not there any more.
        """
        late = [(name, *each) for name, actor in self.actors.items() for each in actor.overdue(now, timeout_s)]
        for name, number, is_made in late:
            attempt = self.actors[name].leases.pop(number).attempt
            reason = f"{name} {'made no progress with' if is_made else 'does not work on'} it for {timeout_s:g} s"
            if is_made:
                self._lost(number, self.failures.stuck(number, attempt, reason))
            else:
                self._lost(number, self.failures.lost(number, reason, counts=False))
        return [(name, number) for name, number, _ in late]

    def forgive(self, seconds: float, now: float) -> None:
        """The hub received nothing for `seconds`, so silence in that time proves nothing."""
        for actor in self.actors.values():
            actor.forgive(seconds, now)

    def with_room(self, number: int) -> dict[str, Actor]:
        """Actors with room for `number`; the doubted ones only where no other has room."""
        with_room = {name: actor for name, actor in self.actors.items() if actor.has_room(number, self.failures.suspects)}
        return {name: actor for name, actor in with_room.items() if not actor.doubted} or with_room

    def name(self, identity: bytes) -> str | None:
        """The name of the actor behind a connection."""
        return self._names.get(identity)

    def telemetry(self) -> dict[str, float]:
        """The sum of all actors' telemetry; counters (`*_total`, `*_s`) include those of actors that have left."""
        total = dict(self._left)
        for actor in self.actors.values():
            _add(total, actor.telemetry)
        return total

    @property
    def leased(self) -> set[int]:
        """The numbers that are being made."""
        return {number for actor in self.actors.values() for number in actor.leases}

    def lease(self, actor: Actor, number: int, attempt: int) -> Credit:
        """Move an open number into a lease."""
        self._order.begin(number)
        credit = Credit(number, attempt, self._order.lowest_version(number))
        actor.lease(credit)
        self.credited += 1
        return credit

    def end_lease(self, number: int) -> bool:
        """Whether an actor held it."""
        return any(actor.leases.pop(number, None) for actor in self.actors.values())

    def _remove(self, name: str, goes_on: bytes | None = None) -> Actor | None:
        """Its counters stay in the sums, unless it goes on over this connection."""
        actor = self.actors.pop(name, None)
        if actor is not None:
            self._names.pop(actor.identity, None)
            if actor.identity != goes_on:
                counters = (each for each in actor.telemetry.items() if each[0].endswith(("_total", "_s")))
                _add(self._left, dict(counters))
        return actor

    def _lose(self, number: int, reason: str, *, counts: bool) -> None:
        """The lease of `number` ended without a group. counts: towards its quarantine."""
        self.end_lease(number)
        self._lost(number, self.failures.lost(number, reason, counts=counts))

    def _lost(self, number: int, is_last: bool) -> None:
        if is_last:
            self.bury(number)
        else:
            self.failed += 1
            self._order.reopen(number)

    def _charge(self, credits: Iterable[Credit], reason: str) -> None:
        """The end of an actor was seen that had been silent before: what it held then counts now, where it is still open."""
        for credit in credits:
            number = credit.number
            is_open = self._order.is_open(number) and self.failures.attempt(number) == credit.attempt + 1
            if is_open and self.failures.charge(number, f"attempt {credit.attempt}: {reason}"):
                self.failed -= 1  # the lost attempt is the quarantined one
                self.bury(number)

    def bury(self, number: int) -> None:
        """This number will never be consumed."""
        self._order.quarantine(number)
        self._on_burial()


def _add(total: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        total[name] = total.get(name, 0.0) + value
