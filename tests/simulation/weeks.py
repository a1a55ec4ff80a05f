"""Four weeks of one run in seconds: everybody waits `SLOW` times as long as in the other schedules, and mostly nothing happens.

Prompts come a few times a day and not at all for days; peers die, freeze for hours or are cut off; the machine is suspended;
the wall clock is set; the hub lives through all of it, or is killed hundreds of times.

The rules of `invariants` hold throughout. Beside them: no lease ends while its actor beats, however often the clock is set;
stages of a rollout take no negative time; and what hub, clients and disk hold does not grow (`held`). What lives longest holds
most: where the hub is not killed, neither are the learner and the first actor.

The clock begins at 23 days, so that 2³¹ and 2³² milliseconds pass on the way.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

from async_rlhf.buffers.hub import exchange as exchanges
from async_rlhf.buffers.hub import sessions
from async_rlhf.buffers.hub.exchange import Exchange
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.record import Group
from async_rlhf.buffers.stages import unpack
from async_rlhf.buffers.weights import weight_set
from tests.simulation.actor_role import ActorRole
from tests.simulation.hub_role import HubRole, Pace
from tests.simulation.invariants import Observer
from tests.simulation.learner_role import LearnerRole
from tests.simulation.schedule import PATIENCE_S, Shape, begin, quiet_logs, roles
from tests.simulation.world import ViolationError, World

HOUR_S, DAY_S = 3600.0, 86400.0
DAYS, BEGIN_S = 28, 23 * DAY_S
SLOW = 1200.0
PACE = Pace().times(SLOW)
EPOCH_S = 1.8e9
BATCH, ACTORS = 2, 3
MAX_EVENTS = 2_000_000
MIN_LOOKS, SLACK = 12, 8
KINDS = ("actor", "actor", "actor", "freeze", "freeze", "cut", "cut", "learner", "still", "full", "suspend", "clock", "clock")


@dataclass
class Weeks:
    """What came of them. sizes: by place, how many things were held there, in the order of the looks."""

    violation: ViolationError | None
    sizes: dict[str, list[int]]
    labels: list[str]
    ended_at: float
    hub: dict[str, Any]
    num_segments: int
    """Of the journal, ever."""

    @property
    def grown(self) -> dict[str, tuple[int, int]]:
        """By place, the most in the second quarter and in the last, where that is more than half more."""
        quarters = {place: (len(sizes) // 4, sizes) for place, sizes in self.sizes.items() if len(sizes) >= MIN_LOOKS}
        most = {place: (max(sizes[n : 2 * n]), max(sizes[-n:])) for place, (n, sizes) in quarters.items()}
        return {place: (early, late) for place, (early, late) in most.items() if late > 1.5 * early + SLACK}


class Watch(Observer):
    """The observer, with what minutes do not show."""

    def trained(self, step: int, groups: Any, already: Any) -> None:
        super().trained(step, groups, already)
        check_times(groups)


def check_times(groups: list[Group]) -> None:
    for group in groups:
        for rollout in group.rollouts:
            for name, stage in unpack(rollout.timings).items():
                if not 0 <= stage.hidden_s <= stage.seconds + 1e-5:
                    raise ViolationError("times", f"{name} of group {group.number} took {stage}")


def run(seed: int, *, kills: int, days: int = DAYS) -> Weeks:
    """kills: of the hub."""
    rng, whole_s = Random(f"weeks {seed}"), days * DAY_S
    files = sorted(rng.uniform(0, whole_s) for _ in range(4 * days))
    files = [at for at in files if at % (7 * DAY_S) > 2 * DAY_S]  # nothing for the first two days of a week
    rows = [rng.randint(1, 12) for _ in files]
    kinds = KINDS if kills else [kind for kind in KINDS if kind != "learner"]
    plan = [(rng.choice(kinds), rng.uniform(0, whole_s)) for _ in range(15 * days)]
    plan += [("clock", at) for at in files]
    plan += [("actor", rng.uniform(0, whole_s)) for _ in range(5 * days)]
    plan += [("hub", rng.uniform(0, whole_s)) for _ in range(kills)]
    bound = Bound(BATCH, 2, sum(rows))
    world = World(seed, BEGIN_S + whole_s + DAY_S + SLOW * PATIENCE_S, begin=BEGIN_S, max_events=MAX_EVENTS)
    wall = Wall(world)
    shape = Shape(
        bound, bound.num_steps, ACTORS, group_size=2, tokens=2, capacity=3, save_every=3, max_attempts=1000, segment_bytes=300,
        wild=False, faults=(), fsync="group", keep_last=2, fed=tuple(zip(files, rows, strict=True)),
    )  # fmt: skip
    hub, _, actors, learner = roles(world, seed, shape, Watch(bound, shape.max_attempts), PACE)
    looks = Looks(world, hub, actors, learner)
    faults = Faults(world, wall, hub, actors, learner)
    violation = None
    with planted(world, wall), hub.machine.planted(), quiet_logs():
        try:
            begin(world, hub, actors, shape.fed, whole_s)
            for kind, at in sorted(plan, key=lambda fault: fault[1]):
                world.after(at, f"FAULT {kind}", partial(faults.strike, kind, rng.random(), rng.randrange(ACTORS)))
            world.after(PACE.tick_s, "look", looks.look)
            learner.run()
        except ViolationError as error:
            violation = error
    labels, state = [label for _, label in world.trace], {} if hub.exchange is None else hub.exchange.status()
    return Weeks(violation, looks.sizes, labels, world.now, state, 0 if hub._journal is None else hub._journal._segment)


class Wall:
    """The wall clock, which is set now and then, while it is being read; the other is the world's."""

    def __init__(self, world: World) -> None:
        self._world, self._off_s = world, 0.0
        self._due: list[tuple[int, float]] = []  # after how many more readings, by how much

    def set(self, by_s: float, after: int) -> None:
        self._due.append((after, by_s))

    def time(self) -> float:
        self._off_s += sum(by_s for after, by_s in self._due if after == 0)
        self._due = [(after - 1, by_s) for after, by_s in self._due if after]
        return EPOCH_S + self._world.now + self._off_s

    def monotonic(self) -> float:
        return self._world.now


def _in_this_thread(clock: Callable[[], float], real: Callable[[], float]) -> Callable[[], float]:
    """Threads that other tests have left behind read the real one."""
    own = threading.get_ident()
    return lambda: clock() if threading.get_ident() == own else real()


@contextmanager
def planted(world: World, wall: Wall) -> Iterator[None]:
    with (
        patch("time.time", _in_this_thread(wall.time, time.time)),
        patch("time.monotonic", _in_this_thread(wall.monotonic, time.monotonic)),
        patch.object(weight_set, "CHUNK_BYTES", 60),
        patch.object(sessions, "_MAX_LATE_S", SLOW * sessions._MAX_LATE_S),
        patch.object(exchanges, "_LATER_S", SLOW * exchanges._LATER_S),
    ):
        yield


class Faults:
    """What strikes in these weeks, and for how long."""

    def __init__(self, world: World, wall: Wall, hub: HubRole, actors: list[ActorRole], learner: LearnerRole) -> None:
        self._world, self._wall, self._hub, self._actors, self._learner = world, wall, hub, actors, learner

    def strike(self, kind: str, amount: float, victim: int) -> None:
        """amount: in [0, 1)."""
        world, hub, actor = self._world, self._hub, self._actors[victim]
        match kind:
            case "hub" if hub.exchange is not None:
                hub.kill()
            case "actor" if victim:  # the first is there for weeks
                actor.kill(told=amount < 0.5)
            case "freeze" if victim:
                actor.freeze(8 * HOUR_S * amount)
            case "cut" if victim and actor.link is not None:
                actor.link.cut(3 * HOUR_S * amount)
            case "learner":
                self._learner.kill()
            case "still":
                hub.stand_still(2 * HOUR_S * amount)
            case "full":
                hub.disk.full = True
                world.after(HOUR_S * amount, "the disk has room again", lambda: setattr(hub.disk, "full", False))
            case "suspend":
                world.now += 12 * HOUR_S * amount
            case "clock":
                self._wall.set(8 * HOUR_S * (amount - 0.5), after=int(100 * amount) % 10)


class Looks:
    """Twice a day, how much is held by whom."""

    def __init__(self, world: World, hub: HubRole, actors: list[ActorRole], learner: LearnerRole) -> None:
        self._world, self._hub, self._actors, self._learner = world, hub, actors, learner
        self.sizes: dict[str, list[int]] = {}
        self._first: tuple[Exchange | None, object] = (None, None)

    def look(self) -> None:
        self._world.after(DAY_S / 2, "look", self.look)
        if self._hub.exchange is None:
            return
        self._check_first(self._hub.exchange)
        found = held("hub", self._hub.exchange) | held("journal", self._hub._journal)
        for actor in self._actors:
            if actor.link is not None:
                for place, size in (held("actor", actor._worker) | held("client", actor._client)).items():
                    found[place] = max(size, found.get(place, 0))
        if self._learner.link is not None:
            found |= held("learner", self._learner._client)
        names = [path for path in self._hub.disk._names if path.name != "stream.jsonl"]
        found["files"], found["bytes on disk"] = len(names), sum(self._hub.disk.size(path) for path in names)
        for place, size in found.items():
            self.sizes.setdefault(place, []).append(size)

    def _check_first(self, exchange: Exchange) -> None:
        """It beats all the time: one hub takes it in once."""
        found = exchange, exchange._admission.fleet.actors.get(self._actors[0].name)
        if found[1] is not self._first[1] and found[0] is self._first[0]:
            raise ViolationError("lease", f"{self._actors[0].name} was dropped, and beats")
        self._first = found


def held(owner: str, root: object) -> dict[str, int]:
    """How many elements each container has that an object of ours owns, by its path of attributes."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, object]] = [(owner, root)]
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict | list | set | bytearray) or (isinstance(value, deque) and value.maxlen is None):
            found[path] = found.get(path, 0) + len(value)
            inside = value.values() if isinstance(value, dict) else value
            waiting += [(f"{path}[]", each) for each in inside] if not isinstance(value, bytearray) else []
        elif type(value).__module__.startswith("async_rlhf."):
            names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
            waiting += [(f"{path}.{name}", getattr(value, name, None)) for name in names]
    return found
