"""One schedule: a tiny run drawn from a seed, the faults planned for it, and what came of it. Shrinks one that fails."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

import xxhash

from async_rlhf.buffers.config import Fsync
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.spool.deposit import END
from async_rlhf.buffers.weights import receiver, server
from async_rlhf.buffers.weights import weight_set as weights
from tests.simulation.actor_role import ActorRole
from tests.simulation.ether import Ether
from tests.simulation.hub_role import HubRole, Pace
from tests.simulation.invariants import Observer
from tests.simulation.learner_role import LearnerRole
from tests.simulation.memory import Machine
from tests.simulation.relay_role import RelayRole
from tests.simulation.world import ViolationError, World

PATIENCE_S = 120.0
"""Virtual seconds a run may go on after the last fault."""
KINDS = (
    *("hub", "hub", "hub", "learner", "learner", "zombie", "zombie", "actor", "actor", "cut", "cut"),
    *("freeze", "full", "slow", "still", "load", "stuck", "double", "publication", "publication"),
)
"""Each as often as it is named."""


@dataclass(frozen=True)
class Fault:
    """At `at` seconds. victim: which actor or link. amount: in [0, 1), how long, or how many disk operations later."""

    at: float
    kind: str
    victim: int
    amount: float

    def __str__(self) -> str:
        return f"{self.at:.3f} s: {self.kind} (victim {self.victim}, amount {self.amount:.2f})"


@dataclass(frozen=True)
class Shape:
    """The run of one seed."""

    bound: Bound
    steps: int
    actors: int
    group_size: int
    tokens: int
    capacity: int
    save_every: int
    max_attempts: int
    segment_bytes: int
    wild: bool
    faults: tuple[Fault, ...]
    fsync: Fsync
    shares: bool = False
    """Weights in shared memory; else they are sent."""
    refusals: float = 0.0
    """Share of the places that cannot be mapped."""
    relayed: int = 0
    """Actors that are behind a relay."""
    poison: float = 0.0
    """Share of the groups that end the learner."""
    keep_last: int = 1
    """Checkpoints that the learner may come back from."""
    fed: tuple[tuple[float, int], ...] = ()
    """When files come into the spool, and with how many rows; without, all prompts are there."""
    chosen: int = 0
    """Prompts that a curriculum chooses among: all of the run's; of a spool those that have come. 0: there is no curriculum."""
    device: bool = False
    """Weights are broadcast to the engines."""
    damage: float = 0.0
    """Share of the sets that do not come as they were sent."""

    @classmethod
    def of(cls, seed: int) -> Shape:
        rng = Random(seed)
        batch, exact = rng.randint(1, 3), rng.random() < 0.25
        publish_every = 1 if exact else rng.choice((1, 1, 1, 2))
        window = 1 if exact else rng.choice((1, 1, 2, 3))
        lowest = publish_every - 1 + -(-(window - 1) // batch)
        staleness = rng.randint(lowest, max(lowest, 3))
        steps = rng.randint(3, 6)
        horizon = 0.25 * steps
        kinds = rng.sample(KINDS, rng.randint(1, 4))
        faults = [
            Fault(rng.uniform(0, horizon), rng.choice(kinds), rng.randint(0, 3), rng.random()) for _ in range(rng.randint(0, 6))
        ]
        drawn = cls(
            _with_refill(seed, Bound(batch, staleness, batch * steps, publish_every, window, exact)),
            steps, rng.randint(1, 3), rng.randint(1, 2), rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 3),
            rng.randint(2, 4), rng.choice((300, 1000, 4000)), rng.random() < 0.3, tuple(sorted(faults, key=lambda f: f.at)),
            "group", keep_last=Random(f"keep {seed}").randint(1, 3),
            poison=Random(f"poison {seed}").choice((0.0, 0.0, 0.0, 0.2)),
        )  # fmt: skip
        fsync: Fsync = rng.choice(("group", "group", "group", "off"))
        if exact:  # the configuration allows no other
            fsync = "group"
        drawn = replace(drawn, fsync=fsync)
        if rng.random() < 0.3:
            drawn = replace(drawn, shares=True, refusals=rng.choice((0.0, 0.0, 0.3)))
        if rng.random() < 0.3:
            faults += [Fault(rng.uniform(0, horizon), "relay", 0, rng.random()) for _ in range(rng.randint(0, 2))]
            faults += [Fault(rng.uniform(0, horizon), "cut", rng.randint(0, 7), rng.random()) for _ in range(rng.randint(0, 2))]
            ordered = tuple(sorted(faults, key=lambda f: f.at))
            drawn = replace(drawn, relayed=rng.randint(1, drawn.actors), faults=ordered)
        return _broadcast(seed, _chosen(seed, _fed(seed, _with_operator(seed, drawn))))


def _broadcast(seed: int, shape: Shape) -> Shape:
    """In two fifths of the schedules weights are broadcast, and collectives hang."""
    rng = Random(f"device {seed}")
    if rng.random() > 2 / 5:
        return shape
    hangs = [Fault(rng.uniform(0, 0.3 * shape.steps), "hang", rng.randint(0, 3), 0) for _ in range(rng.randint(0, 3))]
    faults = tuple(sorted((*shape.faults, *hangs), key=lambda f: f.at))
    return replace(shape, device=True, damage=rng.choice((0.0, 0.0, 0.1)), faults=faults)


def _with_operator(seed: int, shape: Shape) -> Shape:
    """In a fifth of the schedules an operator takes groups back, by chance those that were trained on."""
    rng = Random(f"operator {seed}")
    if rng.random() > 1 / 5:
        return shape
    orders = [Fault(rng.uniform(0, 0.3 * shape.steps), "operator", rng.randrange(shape.bound.num_groups), 0) for _ in range(3)]
    return replace(shape, faults=tuple(sorted((*shape.faults, *orders), key=lambda f: f.at)))


def _fed(seed: int, shape: Shape) -> Shape:
    """In a fifth of the schedules prompts come while the run goes on: as many as it wants, or with refill a few more."""
    rng = Random(f"spool {seed}")
    if rng.random() > 1 / 5:
        return shape
    left = shape.bound.num_groups + (rng.randint(0, 5) if shape.bound.refills else 0)
    bound, files = (replace(shape.bound, numbers=left) if shape.bound.refills else shape.bound), []
    while left:
        files.append((rng.uniform(0, 0.4 * shape.steps), rows := rng.randint(1, left)))
        left -= rows
    return replace(shape, bound=bound, fed=tuple(sorted(files)))


def _chosen(seed: int, shape: Shape) -> Shape:
    """In a fifth of the schedules a curriculum chooses each group's prompt, with as many numbers as it takes."""
    rng = Random(f"curriculum {seed}")
    if rng.random() > 1 / 5:
        return shape
    return replace(shape, chosen=rng.randint(2, 12), bound=replace(shape.bound, numbers=1 << 40))


def _with_refill(seed: int, bound: Bound) -> Bound:
    """In a third of the schedules that may, constant groups are replaced, as long as there are numbers."""
    rng = Random(f"refill {seed}")
    if bound.exact or rng.random() > 1 / 3:
        return bound
    return replace(bound, refills=rng.randint(1, 2), numbers=rng.choice((1 << 40, 1 << 40, bound.num_groups + 5)))


@dataclass(frozen=True)
class Result:
    seed: int
    shape: Shape
    faults: tuple[Fault, ...]
    violation: ViolationError | None
    hub: dict[str, Any]
    mapped: int
    trace: tuple[tuple[float, str], ...]
    digest: str
    places: tuple[int, ...]
    """What a curriculum has chosen."""


def run(seed: int, faults: Sequence[Fault] | None = None) -> Result:
    """The schedule of a seed; with other faults than its own when they are given."""
    shape = Shape.of(seed)
    planned = shape.faults if faults is None else tuple(faults)
    quiet = 0.25 * shape.steps + 5.0
    world = World(seed ^ 0x5EED, quiet + PATIENCE_S)
    observer = Observer(shape.bound, shape.max_attempts, chooses=bool(shape.chosen))
    hub, relay, actors, learner = roles(world, seed, shape, observer, Pace())
    violation = None
    small = patch.object(weights, "CHUNK_BYTES", 60), patch.object(server, "_TURN_BYTES", 100)
    ahead = patch.object(receiver, "_CHUNKS_AHEAD", 2)  # fewer than a set or some deltas have
    with small[0], small[1], ahead, hub.machine.planted(), quiet_logs():
        try:
            begin(world, hub, actors, shape.fed, shape.fed[-1][0] if shape.fed else None)
            if shape.relayed:
                world.after(0, "relay starts", relay.start)
            for fault in planned:
                world.after(fault.at, f"FAULT {fault}", partial(_strike, fault, world, hub, relay, actors, learner))
            if shape.wild:
                world.wild = hub.network.was_wild = True
                world.after(quiet, "the network is calm", lambda: _calm(world, hub, relay))
            learner.run()
        except ViolationError as error:
            violation = error
    state = hub.exchange.status() if hub.exchange is not None else {}
    places = tuple(hub.places) if shape.chosen and violation is None else ()
    return Result(seed, shape, planned, violation, state, hub.machine.mapped, tuple(world.trace), world.digest(), places)


def roles(
    world: World, seed: int, shape: Shape, observer: Observer, pace: Pace
) -> tuple[HubRole, RelayRole, list[ActorRole], LearnerRole]:
    """Of one run, on one machine."""
    hub = HubRole(
        world, shape.bound, observer, max_attempts=shape.max_attempts, segment_bytes=shape.segment_bytes, fsync=shape.fsync,
        machine=Machine(world.rng, shape.refusals), shares=shape.shares, fed=bool(shape.fed), chosen=shape.chosen, pace=pace,
    )  # fmt: skip
    relay = RelayRole(hub)
    actors = [
        ActorRole(
            f"actor-{i}", hub, relay.network if i < shape.relayed else hub.network,
            group_size=shape.group_size, capacity=shape.capacity, tokens=shape.tokens, rows=max(1, shape.chosen),
        )
        for i in range(shape.actors)
    ]  # fmt: skip
    if shape.device:
        hub.ether = Ether(world, shape.damage, partial(_broadcast_failed, hub, actors, observer))
    learner = LearnerRole(
        hub, seed, max_steps=shape.steps, publish_every=shape.bound.publish_every, save_every=shape.save_every,
        keep_last=shape.keep_last, poison=shape.poison,
    )  # fmt: skip
    return hub, relay, actors, learner


def _broadcast_failed(hub: HubRole, actors: Sequence[ActorRole], observer: Observer, come: Sequence[str]) -> None:
    """Who did not come, and does nothing at all?"""
    if hub.exchange is None or (epoch := hub.exchange._weight_server.broadcasts.membership.epoch) is None:
        return
    invited = {name for name, _ in epoch.members}
    for actor in actors:
        if actor.name in invited and actor.process not in come and actor.is_frozen:
            observer.waited((actor.process, actor.frozen_since, hub.life, epoch.id[0]))


def run_block(seeds: tuple[int, int]) -> tuple[int, int, str, int | None]:
    """(schedules, events, digest of all traces, first failing seed) of a block of seeds: what a worker of the command does."""
    digest, events = xxhash.xxh3_128(), 0
    for seed in range(*seeds):
        result = run(seed)
        events += len(result.trace)
        digest.update(result.digest.encode())
        if result.violation is not None:
            return seed + 1 - seeds[0], events, digest.hexdigest(), seed
    return seeds[1] - seeds[0], events, digest.hexdigest(), None


def begin(
    world: World, hub: HubRole, actors: Sequence[ActorRole], files: Sequence[tuple[float, int]], end_at: float | None
) -> None:
    """All start, and files with so many rows come into the spool, which ends then, if it does."""
    world.after(0, "hub starts", hub.start)
    for actor in actors:
        world.after(world.rng.uniform(0, 0.1), f"{actor.name} starts", actor.start)
    first = 0
    for number, (at, rows) in enumerate(files):
        world.after(at, f"{rows} prompts", partial(hub.feed, f"{number:03d}.jsonl", first, rows))
        first += rows
    if end_at is not None:
        world.after(end_at, "the last prompts", partial(hub.feed, END, 0, 0))


@contextmanager
def quiet_logs() -> Iterator[None]:
    """What the roles log is no news here: every fault was meant."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _strike(fault: Fault, world: World, hub: HubRole, relay: RelayRole, actors: list[ActorRole], learner: LearnerRole) -> None:
    actor = actors[fault.victim % len(actors)]
    ends = (*(each.link for each in actors), learner.link, learner.weight_link, *relay.links)
    links = [link for link in ends if link is not None and not link.closed]
    match fault.kind:
        case "hub" if fault.amount < 0.4:
            if hub.exchange is not None:
                hub.kill()
        case "publication":
            _kill_while_weights_travel(world, hub, learner, world.now + 1.0)
        case "hub":
            hub.disk.fuse = int((fault.amount - 0.4) * 20)
        case "learner":
            learner.kill()
        case "zombie":
            learner.replace()
        case "actor":
            actor.kill(told=fault.amount < 0.5)
        case "relay":
            relay.kill()
        case "operator":
            hub.take_back(fault.victim)
        case "still":
            hub.stand_still(10 * fault.amount)
        case "load":
            actor.load(10 * fault.amount)
        case "stuck" if actor is not actors[0]:  # one at least goes on
            actor.get_stuck()
        case "double":
            actor.double()
        case "hang":
            actor.hang()
        case "freeze":
            actor.freeze(5 * fault.amount)
        case "full":
            hub.disk.full = True
            world.after(3 * fault.amount, "the disk has room again", lambda: setattr(hub.disk, "full", False))
        case "cut" if links:
            links[fault.victim % len(links)].cut(2 * fault.amount)
        case "slow" if links:
            slowed = links[fault.victim % len(links)]
            slowed.slow = 1 + 60 * fault.amount
            world.after(2.0, f"{slowed.name} is fast again", lambda: setattr(slowed, "slow", 1.0))


def _kill_while_weights_travel(world: World, hub: HubRole, learner: LearnerRole, until: float) -> None:
    if learner.trains and learner.errand is not None and not learner.errand.is_over and hub.exchange is not None:
        hub.kill()
    elif world.now < until:
        world.after(0.005, "a publication?", lambda: _kill_while_weights_travel(world, hub, learner, until))


def _calm(world: World, hub: HubRole, relay: RelayRole) -> None:
    world.wild = False
    for link in (*hub.network.links.values(), *relay.network.links.values()):
        if not link.closed:
            link.cut(0.1)


def shrink(result: Result) -> Result:
    """The same failure with as few faults as can be: they are taken away one by one while some rule still breaks."""
    smallest = result
    again = True
    while again:
        again = False
        for index in range(len(smallest.faults)):
            fewer = run(result.seed, [*smallest.faults[:index], *smallest.faults[index + 1 :]])
            if fewer.violation is not None:
                smallest, again = fewer, True
                break
    return smallest


def story(result: Result, last: int = 60) -> str:
    """What happened, to be read by a person."""
    shape = result.shape
    lines = [f"seed {result.seed}: {result.violation or 'no rule was broken'}", f"  {shape.bound}"]
    lines.append(
        f"  steps {shape.steps}, actors {shape.actors} of capacity {shape.capacity}, group size {shape.group_size}, "
        f"save every {shape.save_every}, keep {shape.keep_last}, network {'wild' if shape.wild else 'tcp'}, weights "
        f"{f'mapped but for {shape.refusals}' if shape.shares else 'sent'}, {shape.relayed} behind a relay"
        f"{f', fed {shape.fed}' if shape.fed else ''}{f', chosen among {shape.chosen}' if shape.chosen else ''}"
    )
    lines += [f"  fault at {fault}" for fault in result.faults]
    lines += [f"  the hub at the end: {result.hub}"]
    lines += [f"  {now:10.4f}  {label}" for now, label in result.trace[-last:]]
    return "\n".join(lines)
