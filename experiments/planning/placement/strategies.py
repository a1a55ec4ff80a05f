"""Which roles share which devices: the placements of published systems and of this one, as enumerations of candidates.

A candidate divides the cluster into sets of devices. Roles of a set take turns on it; those with a part of their own in it work
beside each other. What a set takes is found by `evaluation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product

from async_rlhf.experiments.planning.placement.roles import LEARNING, SCORING, Role

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


Named = Mapping[str, Sequence[Role]]
"""Sets of roles by their names."""


@dataclass(frozen=True)
class Problem:
    """roles: those that the spec has. node: devices of a node. bounds: of staleness that may be used."""

    roles: tuple[Role, ...]
    devices: int
    node: int
    bounds: tuple[int, ...]

    def of(self, *roles: str) -> tuple[Role, ...]:
        """Those of these that there are."""
        return tuple(role for role in self.roles if role in roles)

    @property
    def scoring(self) -> tuple[Role, ...]:
        return self.of(*SCORING)

    @property
    def learning(self) -> tuple[Role, ...]:
        return self.of(*LEARNING)

    @property
    def frozen(self) -> tuple[Role, ...]:
        return self.of("reference", "reward")

    def counts(self) -> list[int]:
        """Numbers of devices that a set may have: powers of two within a node, then whole nodes, thinned out where there are
        many, and what each leaves."""
        within = [1 << power for power in range(self.node.bit_length()) if 1 << power < self.node]
        nodes = self.devices // self.node
        stride = math.ceil(nodes / _MAX_COUNTS)
        whole = [self.node * number for number in range(1, nodes + 1) if number % stride == 0 or number <= 2]
        found = {*within, *whole, *(self.devices - count for count in (*within, *whole))}
        return sorted(count for count in found if 1 <= count < self.devices)

    def divided(self, sets: Named) -> Iterator[tuple[DeviceSet, ...]]:
        """The devices among these sets, in every way; the last one has the rest."""
        for head in product(self.counts(), repeat=len(sets) - 1):
            if (rest := self.devices - sum(head)) >= 1:
                yield _sized(sets, (*head, rest))

    @property
    def pools(self) -> Named:
        """Generators, frozen models, learners with what reads the weights that they train."""
        return {"actors": ("generate",), "scorers": self.frozen, "learner": (*self.of("values"), *self.learning)}


Sets = Iterable[tuple[DeviceSet, ...]]


@dataclass(frozen=True)
class Strategy:
    """source: the system it is from. summary: which role goes where, in a line. sets: every way to divide the cluster by it;
    here: those that this system can be configured for, besides. bounds: of staleness; None: those of the problem.

    continuous, scores_early: as in `step_time`. zero: training is by ZeRO-3 over all its devices. fused: stages of generation
    and scoring, and of the two trainings, fill each other's gaps.
    """

    name: str
    source: str
    summary: str
    sets: Callable[[Problem], Sets]
    bounds: tuple[float, ...] | None = (0,)
    here: Callable[[Problem], Sets] = lambda problem: ()
    continuous: bool = False
    scores_early: bool = False
    zero: bool = False
    fused: bool = False

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        bounds = problem.bounds if self.bounds is None else self.bounds
        for here, ways in ((False, self.sets(problem)), (True, self.here(problem))):
            for sets, bound in product(ways, bounds):
                yield Candidate(self, bound, sets, here)


@dataclass(frozen=True)
class Candidate:
    """max_staleness: in steps; inf: no bound. here: this system can be configured so."""

    strategy: Strategy
    max_staleness: float
    sets: tuple[DeviceSet, ...]
    here: bool

    def set_of(self, role: Role) -> DeviceSet:
        return next(group for group in self.sets if role in group.roles)


def _sized(sets: Named, sizes: Iterable[int]) -> tuple[DeviceSet, ...]:
    return tuple(
        DeviceSet(name, size, tuple(Seat(role, size) for role in roles))
        for (name, roles), size in zip(sets.items(), sizes, strict=True)
    )


def _all(problem: Problem) -> Sets:
    return problem.divided({"all": problem.roles})


def _interleaving(problem: Problem) -> Sets:
    """Reference on one half, reward model on the other."""
    if len(problem.frozen) < 2 or problem.devices < 2:
        return
    half = problem.devices // 2
    beside = [Seat(role, half, part) for part, role in enumerate(problem.frozen)]
    rest = [Seat(role, problem.devices) for role in problem.roles if role not in problem.frozen]
    yield (DeviceSet("all", problem.devices, (*rest, *beside)),)


def _per_call(problem: Problem) -> Sets:
    """Scoring calls, and trainings, one after the other on all devices or beside each other on parts of them."""
    if len(problem.roles) < 3 or problem.devices < 2:
        return
    for scores, trains in product(_sides(problem, problem.scoring), _sides(problem, problem.learning)):
        yield (DeviceSet("all", problem.devices, (Seat("generate", problem.devices), *scores, *trains)),)


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


def _colocated_sets(problem: Problem) -> Sets:
    """HybridFlow: the models divided into sets in every way, the devices among the sets; all in one set is flattening."""
    models = (("generate", "train"), ("values", "train_critic"), ("reference",), ("reward",))
    there = [roles for model in models if (roles := problem.of(*model))]
    for partition in _partitions(there):
        if len(partition) > 1:
            named = [[role for model in together for role in model] for together in partition]
            yield from problem.divided({"+".join(each): each for each in named})


def _partitions(models: Sequence[tuple[Role, ...]]) -> Iterator[list[list[tuple[Role, ...]]]]:
    if not models:
        yield []
        return
    first, *rest = models
    for partition in _partitions(rest):
        for number in range(len(partition)):
            yield [*partition[:number], [first, *partition[number]], *partition[number + 1 :]]
        yield [[first], *partition]


def _two_job(problem: Problem) -> Sets:
    """NeMo-Aligner: policy and reference in one job, critic and reward model in another."""
    first = problem.of("generate", "train", "reference")
    second = [role for role in problem.roles if role not in first]
    return problem.divided({"policy": first, "critic": second}) if second else ()


def _separation(problem: Problem) -> Sets:
    """Each role on devices of its own; those that score, and the critic's, share evenly what generation and training leave."""
    others = [role for role in problem.roles if role not in ("generate", "train")]
    roles: Named = {role: [role] for role in ("generate", "train", *others)}
    for generate, train in product(problem.counts(), repeat=2):
        rest = problem.devices - generate - train
        if rest < len(others) or (not others and rest):
            continue
        share, more = divmod(rest, max(len(others), 1))
        yield _sized(roles, (generate, train, *(share + more * (not number) for number in range(len(others)))))


def _makers(problem: Problem) -> Sets:
    """ColossalChat: experience is made (generation and scoring) on one set, trainers are another."""
    return problem.divided({"makers": ("generate", *problem.scoring), "trainers": problem.learning})


def _two_pools(problem: Problem) -> Sets:
    """Generators, and everything else."""
    return problem.divided({"actors": ("generate",), "learner": (*problem.scoring, *problem.learning)})


def _three_pools(problem: Problem) -> Sets:
    return problem.divided(problem.pools) if problem.frozen else ()


def _here(sets: Callable[[Problem], Sets]) -> Callable[[Problem], Sets]:
    """A reward model runs here on devices of its own alone."""
    return lambda problem: () if "reward" in problem.roles else sets(problem)


def _bounded_here(problem: Problem) -> Sets:
    """Two pools; or a scorer with one device on each host of actors, of which engines of several devices may leave some
    unused."""
    yield from _here(_two_pools)(problem)
    for learner in problem.counts() if problem.frozen else ():
        hosts = math.ceil((problem.devices - learner) / problem.node)
        free = problem.devices - learner - hosts
        for generate in sorted({free // tensor * tensor for tensor in (1, 2, 4, 8)} - {0}):
            yield _sized(problem.pools, (generate, hosts, learner))


_TABLE = (
    Strategy(
        "flattening", "APP / FlexRLHF; HybridFlow, all colocated", "every role on every device, in turn", _all, here=_here(_all)
    ),
    Strategy(
        "hybrid_engine", "DeepSpeed-Chat", "as flattening; training by ZeRO-3, gathered for generation", _all, zero=True
    ),
    Strategy("interleaving", "APP / FlexRLHF", "reference and reward model beside each other, on halves", _interleaving),
    Strategy("separation", "APP / FlexRLHF; OpenRLHF", "each role on its own devices, one step at a time", _separation),
    Strategy("two_job", "NeMo-Aligner", "policy with reference, critic with reward model", _two_job),
    Strategy("per_call_meshes", "ReaL", "each call on all devices or beside another on a part", _per_call),
    Strategy("colocated_sets", "HybridFlow", "models divided into sets in every way", _colocated_sets),
    Strategy(
        "fused_stages", "RLHFuse", "as flattening; stages fill each other's gaps",
        lambda problem: _all(problem) if problem.scoring else (), fused=True,
    ),
    Strategy("maker_split", "ColossalChat", "makers of experience, and trainers, a step apart", _makers, (1,)),
    Strategy("inter_batch", "Pipe-RLHF", "three pools, a step apart, batch by batch", _three_pools, (1,), scores_early=True),
    Strategy("one_step", "Noukhovitch et al.; verl one-step-off", "two pools, a step apart", _two_pools, (1,)),
    Strategy(
        "bounded", "async-rlhf", "actors never stop; at most max_staleness steps old",
        lambda problem: chain(_two_pools(problem), _three_pools(problem)), None, _bounded_here,
        continuous=True, scores_early=True,
    ),
    Strategy(
        "fully_async", "AReaL; verl fully async; LlamaRL", "as bounded, without a bound",
        _two_pools, (math.inf,), continuous=True, scores_early=True,
    ),
)  # fmt: skip
STRATEGIES: Mapping[str, Strategy] = {each.name: each for each in _TABLE}
