"""Which roles share which devices: the placements of published systems and of this one, as enumerations of candidates.

A candidate divides the cluster into sets of devices. Roles of a set take turns on it; those with a part of their own in it work
beside each other. What a set takes is found by `evaluation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from async_rlhf.experiments.planning.model.schedules import Schedule, schedule
from async_rlhf.experiments.planning.placement.roles import Role

_MAX_COUNTS = 40


@dataclass(frozen=True)
class Seat:
    """A role on `devices` of its set. part: seats with different parts have devices of their own; None: all of the set."""

    role: Role
    devices: int
    part: int | None = None


@dataclass(frozen=True)
class DeviceSet:
    name: str
    devices: int
    seats: tuple[Seat, ...]

    @property
    def roles(self) -> tuple[Role, ...]:
        return tuple(seat.role for seat in self.seats)


@dataclass(frozen=True)
class Candidate:
    """here: this system can be configured so. zero: training is by ZeRO-3 over all its devices. fused: stages of generation and
    scoring, and of the two trainings, fill each other's gaps."""

    strategy: str
    schedule: Schedule
    sets: tuple[DeviceSet, ...]
    here: bool = False
    zero: bool = False
    fused: bool = False

    @property
    def max_staleness(self) -> float:
        return self.schedule.max_staleness

    def set_of(self, role: Role) -> DeviceSet:
        return next(group for group in self.sets if role in group.roles)


@dataclass(frozen=True)
class Problem:
    """roles: those that the spec has. node: devices of a node. bounds: of staleness that may be used."""

    roles: tuple[Role, ...]
    devices: int
    node: int
    bounds: tuple[int, ...]

    @property
    def scoring(self) -> tuple[Role, ...]:
        return tuple(role for role in self.roles if role in ("reference", "reward", "values"))

    @property
    def learning(self) -> tuple[Role, ...]:
        return tuple(role for role in self.roles if role.startswith("train"))

    @property
    def frozen(self) -> tuple[Role, ...]:
        return tuple(role for role in self.scoring if role != "values")

    def counts(self, most: int | None = None) -> list[int]:
        """Numbers of devices that a set may have: powers of two within a node, then whole nodes, thinned out where there are
        many, and what each leaves."""
        limit = self.devices - 1 if most is None else most
        within = [1 << power for power in range(self.node.bit_length()) if 1 << power < self.node]
        nodes = self.devices // self.node
        stride = math.ceil(nodes / _MAX_COUNTS)
        whole = [self.node * number for number in range(1, nodes + 1) if number % stride == 0 or number <= 2]
        found = {*within, *whole, *(self.devices - count for count in (*within, *whole))}
        return sorted(count for count in found if 1 <= count <= limit)

    def splits(self, parts: int) -> Iterator[tuple[int, ...]]:
        """Ways to divide all devices into so many sets, the last of which has the rest."""
        if parts == 1:
            yield (self.devices,)
            return
        for head in product(self.counts(), repeat=parts - 1):
            if (rest := self.devices - sum(head)) >= 1:
                yield (*head, rest)


Enumeration = Callable[[Problem], Iterable[Candidate]]


@dataclass(frozen=True)
class Strategy:
    """source: the system it is from. summary: which role goes where, in a line."""

    name: str
    source: str
    summary: str
    candidates: Enumeration


def _set(name: str, devices: int, roles: Iterable[Role]) -> DeviceSet:
    return DeviceSet(name, devices, tuple(Seat(role, devices) for role in roles))


def _flattening(problem: Problem) -> Iterator[Candidate]:
    """Here too: actors and ranks on the same devices, `placement.colocate`."""
    sets = (_set("all", problem.devices, problem.roles),)
    yield Candidate("flattening", schedule("synchronous"), sets)
    if "reward" not in problem.roles:
        yield Candidate("flattening", schedule("synchronous"), sets, here=True)


def _hybrid_engine(problem: Problem) -> Iterator[Candidate]:
    yield Candidate("hybrid_engine", schedule("synchronous"), (_set("all", problem.devices, problem.roles),), zero=True)


def _fused_stages(problem: Problem) -> Iterator[Candidate]:
    if problem.scoring:
        yield Candidate("fused_stages", schedule("synchronous"), (_set("all", problem.devices, problem.roles),), fused=True)


def _interleaving(problem: Problem) -> Iterator[Candidate]:
    """Reference on one half, reward model on the other."""
    if len(problem.frozen) < 2 or problem.devices < 2:
        return
    half = problem.devices // 2
    beside = [Seat(role, half, part) for part, role in enumerate(problem.frozen)]
    rest = [Seat(role, problem.devices) for role in problem.roles if role not in problem.frozen]
    yield Candidate("interleaving", schedule("synchronous"), (DeviceSet("all", problem.devices, (*rest, *beside)),))


def _per_call(problem: Problem) -> Iterator[Candidate]:
    """Scoring calls, and trainings, one after the other on all devices or beside each other on parts of them."""
    if len(problem.roles) < 3 or problem.devices < 2:
        return
    for scores, trains in product(_sides(problem, problem.scoring), _sides(problem, problem.learning)):
        seats = (Seat("generate", problem.devices), *scores, *trains)
        yield Candidate("per_call_meshes", schedule("synchronous"), (DeviceSet("all", problem.devices, seats),))


def _sides(problem: Problem, roles: Sequence[Role]) -> Iterator[tuple[Seat, ...]]:
    yield tuple(Seat(role, problem.devices) for role in roles)
    if len(roles) == 2:
        for share in (4, 2):
            small = problem.devices // share
            if small:
                yield Seat(roles[0], small, 0), Seat(roles[1], problem.devices - small, 1)
                yield Seat(roles[0], problem.devices - small, 0), Seat(roles[1], small, 1)
    elif len(roles) == 3 and problem.devices >= 4:
        half, quarter = problem.devices // 2, problem.devices // 4
        for large in range(3):
            yield tuple(Seat(role, half if n == large else quarter, n) for n, role in enumerate(roles))


def _colocated_sets(problem: Problem) -> Iterator[Candidate]:
    """HybridFlow: the models divided into sets in every way, the devices among the sets."""
    models: tuple[tuple[Role, ...], ...] = (("generate", "train"), ("values", "train_critic"), ("reference",), ("reward",))
    there = [roles for model in models if (roles := tuple(role for role in problem.roles if role in model))]
    for partition in _partitions(there):
        if len(partition) == 1:
            continue  # flattening
        for sizes in problem.splits(len(partition)):
            named = [[role for model in together for role in model] for together in partition]
            sets = tuple(_set("+".join(each), size, each) for each, size in zip(named, sizes, strict=True))
            yield Candidate("colocated_sets", schedule("synchronous"), sets)


def _partitions(models: Sequence[tuple[Role, ...]]) -> Iterator[list[list[tuple[Role, ...]]]]:
    if not models:
        yield []
        return
    first, *rest = models
    for partition in _partitions(rest):
        for number in range(len(partition)):
            yield [*partition[:number], [first, *partition[number]], *partition[number + 1 :]]
        yield [[first], *partition]


def _two_job(problem: Problem) -> Iterator[Candidate]:
    """NeMo-Aligner: policy and reference in one job, critic and reward model in another."""
    first = [role for role in problem.roles if role in ("generate", "train", "reference")]
    second = [role for role in problem.roles if role not in first]
    if second:
        for sizes in problem.splits(2):
            sets = (_set("policy", sizes[0], first), _set("critic", sizes[1], second))
            yield Candidate("two_job", schedule("synchronous"), sets)


def _separation(problem: Problem) -> Iterator[Candidate]:
    """Each role on devices of its own; those that score, and the critic's, share evenly what generation and training leave."""
    others = [role for role in problem.roles if role not in ("generate", "train")]
    for generate, train in product(problem.counts(), repeat=2):
        rest = problem.devices - generate - train
        if rest < len(others) or (not others and rest):
            continue
        sizes = [rest // len(others)] * len(others) if others else []
        if others:
            sizes[0] += rest - sum(sizes)
        sets = [_set("generate", generate, ["generate"]), _set("train", train, ["train"])]
        sets += [_set(role, size, [role]) for role, size in zip(others, sizes, strict=True)]
        yield Candidate("separation", schedule("disaggregated"), tuple(sets))


def _makers(problem: Problem) -> Iterator[Candidate]:
    """ColossalChat: experience is made (generation and scoring) on one set, trainers are another."""
    for sizes in problem.splits(2):
        sets = (_set("makers", sizes[0], ("generate", *problem.scoring)), _set("trainers", sizes[1], problem.learning))
        yield Candidate("maker_split", schedule("one_step"), sets)


def _two_pools(problem: Problem, name: str, bounds: Sequence[float], *, here: bool = False) -> Iterator[Candidate]:
    """Generators, and everything else."""
    for sizes in problem.splits(2):
        sets = (_set("actors", sizes[0], ["generate"]), _set("learner", sizes[1], (*problem.scoring, *problem.learning)))
        for bound in bounds:
            yield Candidate(name, schedule(name, bound), sets)
            if here and "reward" not in problem.roles:
                yield Candidate(name, schedule(name, bound), sets, here=True)


def _three_pools(problem: Problem, name: str, bounds: Sequence[float]) -> Iterator[Candidate]:
    """Generators, frozen models, learners with what reads the weights that they train."""
    for generate, score in product(problem.counts(), repeat=2) if problem.frozen else ():
        if (learner := problem.devices - generate - score) >= 1:
            sets = _with_scorers(problem, generate, score, learner)
            yield from (Candidate(name, schedule(name, bound), sets) for bound in bounds)


def _three_pools_here(problem: Problem) -> Iterator[Candidate]:
    """A scorer has one device on each host of actors; engines of several devices may leave some of a host unused."""
    for learner in problem.counts() if problem.frozen else ():
        hosts = math.ceil((problem.devices - learner) / problem.node)
        free = problem.devices - learner - hosts
        for generate in sorted({free // tensor * tensor for tensor in (1, 2, 4, 8)} - {0}):
            sets = _with_scorers(problem, generate, hosts, learner)
            yield from (Candidate("bounded", schedule("bounded", bound), sets, here=True) for bound in problem.bounds)


def _with_scorers(problem: Problem, generate: int, score: int, learner: int) -> tuple[DeviceSet, ...]:
    values = [role for role in problem.scoring if role == "values"]
    return (
        _set("actors", generate, ["generate"]),
        _set("scorers", score, problem.frozen),
        _set("learner", learner, (*values, *problem.learning)),
    )


def _bounded(problem: Problem) -> Iterator[Candidate]:
    yield from _two_pools(problem, "bounded", problem.bounds, here=True)
    yield from _three_pools(problem, "bounded", problem.bounds)
    yield from _three_pools_here(problem)


STRATEGIES: Mapping[str, Strategy] = {
    each.name: each
    for each in (
        Strategy("flattening", "APP / FlexRLHF; HybridFlow, all colocated", "every role on every device, in turn", _flattening),
        Strategy(
            "hybrid_engine", "DeepSpeed-Chat", "as flattening; training by ZeRO-3, gathered for generation", _hybrid_engine
        ),
        Strategy("interleaving", "APP / FlexRLHF", "reference and reward model beside each other, on halves", _interleaving),
        Strategy("separation", "APP / FlexRLHF; OpenRLHF", "each role on its own devices, one step at a time", _separation),
        Strategy("two_job", "NeMo-Aligner", "policy with reference, critic with reward model", _two_job),
        Strategy("per_call_meshes", "ReaL", "each call on all devices or beside another on a part", _per_call),
        Strategy("colocated_sets", "HybridFlow", "models divided into sets in every way", _colocated_sets),
        Strategy("fused_stages", "RLHFuse", "as flattening; stages fill each other's gaps", _fused_stages),
        Strategy("maker_split", "ColossalChat", "makers of experience, and trainers, a step apart", _makers),
        Strategy(
            "inter_batch",
            "Pipe-RLHF",
            "three pools, a step apart, batch by batch",
            partial(_three_pools, name="inter_batch", bounds=(1,)),
        ),
        Strategy(
            "one_step",
            "Noukhovitch et al.; verl one-step-off",
            "two pools, a step apart",
            partial(_two_pools, name="one_step", bounds=(1,)),
        ),
        Strategy("bounded", "async-rlhf", "actors never stop; at most max_staleness steps old", _bounded),
        Strategy(
            "fully_async",
            "AReaL; verl fully async; LlamaRL",
            "as bounded, without a bound",
            partial(_two_pools, name="fully_async", bounds=(math.inf,)),
        ),
    )
}
