"""The placement of a run's processes on hosts, devices and CPUs: a pure function of the run's needs and the resources.

    learner      a device a rank, of the hosts of `learner_hosts` in their order
    evaluation   where it works beside the run: as many as an actor. Else it waits until the run's processes have ended and
                 takes what is free then
    scorer       one on each host that has actors, with a device of that host where its models need one
    actors       by number, each on the first host with room for it, or (`away`) in turn on the hosts beyond the first; `fill`:
                 until no host has room
    relay        one on each other host with two or more actors: so its weights come once over the network. One actor alone
                 would gain nothing

A scorer and a relay have the number of their host, the supervisor's being 0. Every process is given the lowest free devices of
its host. A device is given once; with `colocate` or the strategy `flattening` once to each kind of process, with
`interleaving` once to a rank and once to a scorer. Hosts are looked through in their order, so another one at the end moves
nothing; only actors on CPUs that are more than the CPUs there were (they stay on the first host) are spread over it.

With a strategy each process is also held to some of its host's CPUs and computes with as many threads as its set has CPUs,
divided by the processes of its kind there. Evaluations have the set of generation; the hub and relays, which compute nothing,
every CPU.

    flattening      generation, scoring and learning all use every CPU
    interleaving    generation | scoring and learning: scores are computed on the learner's CPUs, beside generation
    separation      generation | scoring | learning

The strategies are those of APP (Xiao et al., An Adaptive Placement and Parallelism Framework for Accelerating RLHF Training,
https://arxiv.org/abs/2312.11819), with one difference: there the policy generates on the devices on which it is trained, and
`interleaving` spreads the frozen models over halves of them; here generation is a process of its own, so the frozen models lie
beside the learner.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle, islice, pairwise
from typing import Literal

from pydantic import Field

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.launch.config import HostConfig, Strategy
from async_rlhf.launch.program import Node, rank_name, scorer_name

Part = Literal["generation", "scoring", "learning"]


class Host(HostConfig):
    """A machine, with facts beyond the configuration. The first of a run is the supervisor's, whatever its name; a
    `Node` calls that one ""."""

    memory: int | None = Field(default=None, ge=0)
    """Bytes of the machine; None: not known."""
    own: bool = False
    """It is the first host again, under the name by which a launcher starts processes there; they share its devices."""

    def __str__(self) -> str:
        return self.name or "this machine"


Inventory = tuple[Host, ...]
Devices = int | None
"""Devices that one process needs: 0 on a CPU; None for devices other than CUDA's, which are not assigned."""


@dataclass(frozen=True)
class WantedNodes:
    """The processes of a run, by what decides where they can be. `*_threads` are those of one process."""

    ranks: int = 1
    rank_devices: Devices = 0
    rank_threads: int = 1
    actors: int | Literal["fill"] = 1
    actor_devices: Devices = 0
    actor_threads: int = 1
    scorer: bool = False
    scorer_devices: Devices = 0
    evaluation_devices: Devices = 0
    evaluates_beside: bool = False
    """Evaluations are made while training goes on."""
    learner_hosts: tuple[str, ...] = ()
    """Names, empty for all; on CPUs, for the first."""
    away: bool = False
    """No actor is on the first host."""
    colocate: bool = False
    actor_share: float = 0.5
    """With `colocate`, the share of a device's memory that an engine takes."""
    strategy: Strategy | None = None
    """None leaves every process every CPU."""


@dataclass(frozen=True)
class Slot:
    """The place of one process, as in `Node`."""

    host: str
    devices: tuple[int, ...] | None
    cpus: tuple[int, ...] | None = None
    threads: int | None = None


@dataclass(frozen=True)
class Placement:
    slots: Mapping[str, Slot]
    """By the names of nodes."""
    evaluation_waits: bool = False
    """Its devices are those of other processes, which must have ended."""

    @property
    def num_actors(self) -> int:
        return sum(name.startswith("actor-") for name in self.slots)

    def placed(self, node: Node) -> Node:
        """The node with its place; one that has none is started as the launcher finds the machine."""
        slot = self.slots.get(node.name)
        return node if slot is None else replace(node, **vars(slot))


def place(wanted: WantedNodes, inventory: Inventory) -> Placement:
    """Raises ConfigError for a process without room: the request, the free resources, the nearest that fits."""
    rooms = _FreeDevices(inventory, _sharing(wanted))
    slots = {"hub": Slot("", ()), **_learner(wanted, rooms)}
    waits = bool(wanted.evaluation_devices) and not wanted.evaluates_beside
    slots["evaluation"] = _evaluation(wanted, rooms, waits=waits)
    slots |= _actors(wanted, rooms)
    slots |= _relays(slots, [host.name for host in inventory[1:]])
    if _sharing(wanted) == _KINDS:
        _check_shares(wanted, rooms)
    if wanted.strategy is not None:
        slots = _with_cpus(slots, wanted, wanted.strategy, rooms)
    return Placement(slots, waits)


_KINDS = frozenset({"learner", "evaluation", "scorer", "actor"})


def _sharing(wanted: WantedNodes) -> frozenset[str]:
    """The kinds of process that one device may be given to at once."""
    if wanted.colocate or wanted.strategy == "flattening":
        return _KINDS
    return frozenset({"learner", "scorer"}) if wanted.strategy == "interleaving" else frozenset()


class _FreeDevices:
    """The processes that the hosts' devices are given to, while processes are placed. Hosts are numbers here."""

    def __init__(self, hosts: Inventory, sharing: frozenset[str]) -> None:
        self.hosts, self._sharing = hosts, sharing
        self.machine = [0 if host.own else number for number, host in enumerate(hosts)]
        """For each host the lowest number of the same machine."""
        self.given: dict[tuple[int, int], dict[str, str]] = {}
        """The process of each kind, by host and device."""

    def free(self, host: int, kind: str) -> list[int]:
        taken = (self.given.get((self.machine[host], device), {}) for device in range(self.hosts[host].devices))
        return [device for device, by in enumerate(taken) if not by or (kind not in by and self._sharing >= {kind, *by})]

    def has(self, host: int, kind: str, count: Devices) -> bool:
        return len(self.free(host, kind)) >= (count or 0)

    def give(self, host: int, kind: str, name: str, count: Devices) -> Slot:
        if count is None:
            return Slot(self.node_host(host), None)
        devices = tuple(self.free(host, kind)[:count])
        assert len(devices) == count, f"{name}: {len(devices)} of {count} devices"
        for device in devices:
            self.given.setdefault((self.machine[host], device), {})[kind] = name
        return Slot(self.node_host(host), devices)

    def node_host(self, host: int) -> str:
        return self.hosts[host].name if host else ""

    def there(self, kind: str, hosts: Iterable[int] | None = None) -> str:
        """The free devices for this kind, in words."""
        left = {number: len(self.free(number, kind)) for number in (range(len(self.hosts)) if hosts is None else hosts)}
        return ", ".join(f"{count} free of {self.hosts[n].devices} on {self.hosts[n]}" for n, count in left.items())


def _learner(wanted: WantedNodes, rooms: _FreeDevices) -> dict[str, Slot]:
    names = [host.name for host in rooms.hosts]
    if unknown := [name for name in wanted.learner_hosts if name not in names]:
        raise ConfigError(
            f"placement.learner_hosts names {unknown[0]!r}, which is no host of this run; "
            f"choose among: {', '.join(map(str, rooms.hosts))}"
        )
    hosts = list(dict.fromkeys(rooms.machine[names.index(name)] for name in wanted.learner_hosts))
    if not wanted.rank_devices:
        hosts = hosts or [0]
        on = [hosts[rank * len(hosts) // wanted.ranks] for rank in range(wanted.ranks)]
        return {
            rank_name(rank): rooms.give(host, "learner", rank_name(rank), wanted.rank_devices) for rank, host in enumerate(on)
        }
    hosts = hosts or list(dict.fromkeys(rooms.machine))
    most = sum(len(rooms.free(host, "learner")) for host in hosts)
    if most < wanted.ranks:
        way = (
            f"highest: learner.ranks = {most}" if most else "set learner.device = 'cpu', or list hosts that have in [placement]"
        )
        raise ConfigError(
            f"learner.ranks = {wanted.ranks} with learner.device = 'cuda' need {wanted.ranks} devices, one each; there are "
            f"{rooms.there('learner', hosts)}; {way}"
        )
    on = [host for host in hosts for _ in rooms.free(host, "learner")][: wanted.ranks]
    return {rank_name(rank): rooms.give(host, "learner", rank_name(rank), 1) for rank, host in enumerate(on)}


def _evaluation(wanted: WantedNodes, rooms: _FreeDevices, *, waits: bool) -> Slot:
    count = wanted.evaluation_devices
    if not count:
        return rooms.give(0, "evaluation", "evaluation", count)
    enough = [
        n for n, host in enumerate(rooms.hosts) if (host.devices >= count if waits else rooms.has(n, "evaluation", count))
    ]
    if not enough and waits:  # no host has so many, and `_actors` raises for the engine
        return Slot("", ())
    if not enough:
        raise ConfigError(
            f"evaluations during training (evaluation.every) need {count} devices of their own on one host; beside the learner "
            f"there are {rooms.there('evaluation')}. Set evaluation.every = 0 (start and end are then evaluated when the run's "
            "processes have ended), or placement.colocate = true"
        )
    if waits:
        return Slot(rooms.node_host(enough[0]), tuple(range(count)))
    return rooms.give(enough[0], "evaluation", "evaluation", count)


def _actors(wanted: WantedNodes, rooms: _FreeDevices) -> dict[str, Slot]:
    """Place the actors, and the scorer of each host that gets one."""
    hosts = range(len(rooms.hosts))[int(wanted.away) :]
    count, slots, there = wanted.actor_devices, dict[str, Slot](), rooms.there("actor", hosts)
    most = None if wanted.actors == "fill" else wanted.actors
    num_actors = 0

    def needs_scorer(host: int) -> bool:
        return wanted.scorer and scorer_name(host) not in slots

    def add(host: int) -> None:
        nonlocal num_actors
        if needs_scorer(host):
            slots[scorer_name(host)] = rooms.give(host, "scorer", scorer_name(host), wanted.scorer_devices)
        name = f"actor-{num_actors}"
        slots[name] = rooms.give(host, "actor", name, count)
        num_actors += 1

    cpus = Counter() if count else Counter({host: _cpu_room(wanted, rooms, host) for host in hosts})
    turns = deque(hosts)
    while turns and (most is None or num_actors < most):
        host = turns[0]
        if (not count and not cpus[host]) or not _has_room(wanted, rooms, host, needs_scorer(host)):
            turns.popleft()
            continue
        add(host)
        cpus[host] -= 1
        turns.rotate(-int(wanted.away))
    if not count:  # more than the CPUs: the user's decision
        more = [host for host in (hosts if wanted.away else (0,)) if _has_room(wanted, rooms, host, needs_scorer(host))]
        for host in islice(cycle(more), max(0, (most or 1) - num_actors)):
            add(host)
    if num_actors < (most or 1):
        raise _no_room(wanted, there, num_actors)
    return slots


def _relays(slots: Mapping[str, Slot], hosts: Sequence[str]) -> dict[str, Slot]:
    """hosts: without the supervisor's."""
    num_actors = Counter(slot.host for name, slot in slots.items() if name.startswith("actor-"))
    return {f"relay-{number}": Slot(host, ()) for number, host in enumerate(hosts, 1) if num_actors[host] > 1}


def _has_room(wanted: WantedNodes, rooms: _FreeDevices, host: int, with_scorer: bool) -> bool:
    """Whether an actor fits here, and the scorer that it would be the first to use."""
    scorer = (wanted.scorer_devices or 0) if with_scorer else 0
    if not rooms.has(host, "scorer", scorer):
        return False
    by_scorer = set() if _sharing(wanted) == _KINDS else set(rooms.free(host, "scorer")[:scorer])
    return len(set(rooms.free(host, "actor")) - by_scorer) >= (wanted.actor_devices or 0)


def _cpu_room(wanted: WantedNodes, rooms: _FreeDevices, host: int) -> int:
    """Actors that a host's CPUs hold. On the supervisor's, the hub has one and the learner those of its ranks."""
    of_ranks = 0 if wanted.rank_devices or wanted.learner_hosts else wanted.ranks * wanted.rank_threads
    taken = 0 if rooms.machine[host] else 1 + of_ranks
    return max(0, rooms.hosts[host].cpus - taken) // wanted.actor_threads


def _no_room(wanted: WantedNodes, there: str, num_actors: int) -> ConfigError:
    need = f"{wanted.actor_devices} devices of one host each" if wanted.actor_devices != 1 else "a device each"
    if not wanted.actor_devices:
        need = "no device"
    beside = f", and a host's scorer {wanted.scorer_devices}" if wanted.scorer and wanted.scorer_devices else ""
    if num_actors:
        way = f"highest: actors.count = {num_actors}"
    else:
        way = (
            "not one fits: take fewer for the learner (learner.ranks), or let it share its devices (placement.colocate = true)"
        )
    return ConfigError(
        f"actors.count = {wanted.actors!r}: actors need {need}{beside}; beside the other processes there are {there}; {way}"
    )


def _check_shares(wanted: WantedNodes, rooms: _FreeDevices) -> None:
    for (host, device), by in rooms.given.items():
        engines = [by[kind] for kind in ("actor", "evaluation") if kind in by]
        others = [by[kind] for kind in ("learner", "scorer") if kind in by]
        share = wanted.actor_share * len(engines)
        if share > 1 or (share == 1 and others):
            raise ConfigError(
                f"placement.actor_share = {wanted.actor_share:g}: device {device} of {rooms.hosts[host]} is shared by "
                f"{', '.join([*engines, *others])}, and the shares of engines add up to {share:g} of its memory; "
                f"set it {'below' if others else 'to at most'} {1 / len(engines):g}"
            )


_PARTS: dict[str, Part] = {"learner": "learning", "actor": "generation", "scorer": "scoring", "evaluation": "generation"}
_WEIGHTS: Mapping[Part, int] = {"generation": 2, "scoring": 1, "learning": 1}  # generation takes most of a run's time
_SETS: dict[Strategy, tuple[tuple[Part, ...], ...]] = {
    "flattening": (("generation", "scoring", "learning"),),
    "interleaving": (("generation",), ("scoring", "learning")),
    "separation": (("generation",), ("scoring",), ("learning",)),
}
_FEW: tuple[tuple[Part, ...], ...] = (("generation", "scoring"), ("learning",))
"""The sets for fewer CPUs than sets, and for actors that score by themselves."""


def _with_cpus(slots: Mapping[str, Slot], wanted: WantedNodes, strategy: Strategy, rooms: _FreeDevices) -> dict[str, Slot]:
    """The slots with the CPUs and threads of each process. Raises ConfigError."""
    if wanted.actors == "fill" and not wanted.actor_devices:
        raise ConfigError(
            "actors.count = 'fill' with placement.strategy: on CPUs actors divide the set of generation, however many they "
            "are; set a number"
        )
    if strategy == "interleaving" and not wanted.scorer:
        raise ConfigError(
            "placement.strategy = 'interleaving' puts the scorer on the learner's CPUs, and there is none: actors score by "
            "themselves; set scoring.placement = 'process' (or scoring.stages.NAME.placement), or take 'separation'"
        )
    machines = {rooms.node_host(number): machine for number, machine in enumerate(rooms.machine)}
    of_kind = Counter((machines[slot.host], name.partition("-")[0]) for name, slot in slots.items())
    sets: dict[tuple[int, str], tuple[int, ...]] = {}
    for machine in {machine for machine, kind in of_kind if kind in _PARTS}:
        kinds = [kind for kind in _PARTS if of_kind[machine, kind]]
        parts = {_PARTS[kind] for kind in kinds if kind != "evaluation"} or {"generation"}
        by_part = cpu_sets(strategy, parts, rooms.hosts[machine])
        sets |= {(machine, kind): by_part[_PARTS[kind]] for kind in kinds if _PARTS[kind] in by_part}
    held = dict(slots)
    for name, slot in slots.items():
        of = machines[slot.host], name.partition("-")[0]
        if cpus := sets.get(of):
            held[name] = replace(slot, cpus=cpus, threads=max(1, len(cpus) // of_kind[of]))
    return held


def cpu_sets(strategy: Strategy, parts: Collection[Part], host: Host) -> dict[Part, tuple[int, ...]]:
    """The CPUs of a host that each of `parts` may use, by number from 0: consecutive, in the order of the strategy's sets.

    Each set gets one, and the rest goes by weight. Raises ConfigError when there are fewer CPUs than sets.
    """
    for chosen in (_SETS[strategy], _FEW):
        sets = [each for each in (tuple(part for part in own if part in parts) for own in chosen) if each]
        if host.cpus >= len(sets):
            ends = accumulate(shares([sum(_WEIGHTS[part] for part in each) for each in sets], host.cpus), initial=0)
            return {part: tuple(range(*span)) for each, span in zip(sets, pairwise(ends), strict=True) for part in each}
    raise ConfigError(
        f"placement.strategy = {strategy!r} needs {len(sets)} CPUs of {host} ({' | '.join(map(' and '.join, sets))}), "
        f"which has {host.cpus} for the run; set 'flattening', with which all share them, or say more in placement.hosts"
    )


def shares(weights: Sequence[int], num_cpus: int) -> list[int]:
    """Whole shares of `num_cpus`, at least one each, of the others by largest remainders (Hamilton's method); equal ones go to
    the first."""
    sizes, total = [1] * len(weights), sum(weights)
    while sum(sizes) < num_cpus:
        owed = [weight * num_cpus - has * total for weight, has in zip(weights, sizes, strict=True)]
        sizes[owed.index(max(owed))] += 1
    return sizes


def as_ranges(cpus: tuple[int, ...] | None) -> str:
    """Consecutive CPUs as Linux writes them, `0-3`; `all` for None."""
    if cpus is None:
        return "all"
    return f"{cpus[0]}-{cpus[-1]}" if len(cpus) > 1 else str(cpus[0])
