"""Two 1F1B pipelines trained at once, in opposite directions over the same stages: what an order of tasks takes.

The intra-stage fusion of RLHFuse (Zhong et al., arXiv 2409.13221, section 5), where the bubbles of one model's pipeline are
filled with the other's tasks. A model with fewer stages than the other is replicated until both cover the same number. Each
micro-batch is one forward and one backward task on each stage of its pipeline; a backward task takes twice as long as a
forward one.

An order names kinds only: the n-th forward task of a model on a stage is that of its n-th micro-batch there. That loses no
schedule: micro-batches of a model are alike, so exchanging two that change places between stages ends nothing later.
`schedule_search` looks for good orders; this file makes first ones and judges all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from async_rlhf.buffers.errors import ConfigError

# Kinds of task: 2 * model + (1 where it is a backward one).
FORWARD, BACKWARD = 0, 1
KINDS = range(4)
Orders = tuple[tuple[int, ...], ...]
"""For each stage the kinds of its tasks, first to last."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """One model. micro_batches: of each of its replicas. activation_bytes: of one micro-batch on one stage, any unit."""

    depth: int
    micro_batches: int
    forward_s: float
    activation_bytes: float = 0.0

    def __post_init__(self) -> None:
        if self.depth < 1 or self.micro_batches < 0 or self.forward_s <= 0 or self.activation_bytes < 0:
            raise ConfigError(
                f"{self} is no pipeline: depth is 1 or more, forward_s above 0, micro_batches and activation_bytes 0 or more"
            )

    @property
    def alone_s(self) -> float:
        """The time of its 1F1B schedule with nothing beside it: (micro_batches + depth - 1) forward and backward tasks."""
        return (self.micro_batches + self.depth - 1) * 3 * self.forward_s if self.micro_batches else 0.0


@dataclass(frozen=True)
class Fusion:
    """The first pipeline runs from stage 0 up, the second from the last stage down."""

    first: Pipeline
    second: Pipeline

    def __post_init__(self) -> None:
        few, many = sorted((self.first.depth, self.second.depth))
        if many % few:
            near = max(depth for depth in range(1, few) if many % depth == 0)
            raise ConfigError(
                f"pipelines of {self.first.depth} and {self.second.depth} stages are to be fused: the greater must be a "
                f"multiple of the smaller, which is replicated; nearest: {near} and {many}"
            )

    @property
    def stages(self) -> int:
        return max(self.first.depth, self.second.depth)

    @property
    def models(self) -> tuple[Pipeline, Pipeline]:
        return self.first, self.second

    def position(self, model: int, stage: int) -> int:
        """How many stages of its replica lie before this one."""
        depth = self.models[model].depth
        return depth - 1 - stage % depth if model else stage % depth

    def source(self, kind: int, stage: int) -> tuple[int, int] | None:
        """Stage and kind of the task, of the same micro-batch, that one of this kind needs; None for a first forward task."""
        model, backward = divmod(kind, 2)
        position, up = self.position(model, stage), -1 if model else 1
        if not backward:
            return (stage - up, kind) if position else None
        return (stage, kind - 1) if position == self.models[model].depth - 1 else (stage + up, kind)

    def duration_s(self, kind: int) -> float:
        return self.models[kind // 2].forward_s * (1 + kind % 2)

    @property
    def serial_s(self) -> float:
        """One model after the other, each by 1F1B."""
        return self.first.alone_s + self.second.alone_s

    @property
    def bound_s(self) -> float:
        """No order takes less: the longer pipeline alone, or a stage's work between its earliest start and its shortest end."""
        work = sum(3 * model.micro_batches * model.forward_s for model in self.models)
        busy = [(number, model) for number, model in enumerate(self.models) if model.micro_batches]
        ends = (
            min((self.position(number, stage) * model.forward_s for number, model in busy), default=0.0)
            + min((self.position(number, stage) * 2 * model.forward_s for number, model in busy), default=0.0)
            for stage in range(self.stages)
        )
        return max(self.first.alone_s, self.second.alone_s, work + max(ends))


def makespan_s(fusion: Fusion, orders: Orders) -> float:
    """end(task) = max(end(previous on the stage), end(source)) + duration; the largest of them.

    Raises ConfigError where an order has other tasks than the fusion, or where tasks wait for each other in a circle.
    """
    return max((end for ends in end_times(fusion, orders) for kind in ends for end in kind), default=0.0)


def end_times(fusion: Fusion, orders: Orders) -> list[list[list[float]]]:
    """[stage][kind][micro-batch], in seconds; errors as `makespan_s`."""
    _check(fusion, orders)
    ends: list[list[list[float]]] = [[[] for _ in KINDS] for _ in orders]
    free = [0.0] * len(orders)
    begun = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while begun[stage] < len(order):
                kind = order[begun[stage]]
                ready = _ready(fusion, ends, stage, kind)
                if ready is None:
                    break
                free[stage] = max(free[stage], ready) + fusion.duration_s(kind)
                ends[stage][kind].append(free[stage])
                begun[stage] += 1
                moved = True
    waiting = [stage for stage, order in enumerate(orders) if begun[stage] < len(order)]
    if waiting:
        raise ConfigError(f"the orders of stages {waiting} wait for each other in a circle: none of them can go on")
    return ends


def _ready(fusion: Fusion, ends: list[list[list[float]]], stage: int, kind: int) -> float | None:
    """When the next task of this kind could start by its source; None where that has not ended yet."""
    source = fusion.source(kind, stage)
    if source is None:
        return 0.0
    micro_batch, done = len(ends[stage][kind]), ends[source[0]][source[1]]
    return done[micro_batch] if micro_batch < len(done) else None


def _check(fusion: Fusion, orders: Orders) -> None:
    if len(orders) != fusion.stages:
        raise ConfigError(f"{len(orders)} orders are given, the fusion has {fusion.stages} stages")
    for stage, order in enumerate(orders):
        for kind in sorted({*KINDS, *order}):
            expected = fusion.models[kind // 2].micro_batches if kind in KINDS else 0
            if order.count(kind) != expected:
                raise ConfigError(
                    f"the order of stage {stage} has {order.count(kind)} tasks of kind {kind}, {expected} belong to it"
                )


def peak_bytes(fusion: Fusion, orders: Orders) -> float:
    """The most activations that a stage holds: those of each micro-batch from its forward task to its backward one."""
    return max((max(_held(fusion, order), default=0.0) for order in orders), default=0.0)


def _held(fusion: Fusion, order: tuple[int, ...]) -> Iterator[float]:
    alive = [0, 0]
    for kind in order:
        alive[kind // 2] += -1 if kind % 2 else 1
        yield alive[0] * fusion.first.activation_bytes + alive[1] * fusion.second.activation_bytes


def one_f_one_b(fusion: Fusion, model: int) -> Orders:
    """The 1F1B order of one model's tasks alone (PipeDream-Flush, Narayanan et al., arXiv 2006.09503)."""
    pipeline = fusion.models[model]
    forward, backward = 2 * model + FORWARD, 2 * model + BACKWARD
    orders = []
    for stage in range(fusion.stages):
        warm = min(pipeline.depth - 1 - fusion.position(model, stage), pipeline.micro_batches)
        steady = (forward, backward) * (pipeline.micro_batches - warm)
        orders.append((forward,) * warm + steady + (backward,) * warm)
    return tuple(orders)


@dataclass(frozen=True, kw_only=True)
class Preference:
    """Which of several tasks a stage takes first: the one whose model still needs longest, by a weighted count.

    Counted are the tasks of the micro-batches left on the stage, `out` times those of the way to the last stage and back, and
    `back` times those of the way to the first. ratio: a second of the second model is worth so many of the first. wait: 0, a
    stage takes what can start soonest; up to 1, also what can start before the soonest end, so that it may rest for a better
    task (non-delay and active schedules: Giffler, Thompson, Operations Research 8(4), 1960). extra: a stage holds at most so
    many micro-batches of each model beyond those of 1F1B; None: any number.
    """

    ratio: float = 1.0
    out: float = 1.0
    back: float = 1.0
    wait: float = 0.0
    extra: tuple[int | None, int | None] = (None, None)

    def __post_init__(self) -> None:
        if not 0 <= self.wait <= 1:
            raise ConfigError(f"wait = {self.wait}: a share of the time until the soonest end, 0 to 1")
        if any(extra is not None and extra < 0 for extra in self.extra):
            raise ConfigError(
                f"extra = {self.extra}: micro-batches beyond those of 1F1B, 0 or more; with fewer a pipeline stands still"
            )


def greedy(fusion: Fusion, preference: Preference = Preference()) -> Orders:
    """Time after time the stage that can start soonest takes the task that it prefers."""
    ends: list[list[list[float]]] = [[[] for _ in KINDS] for _ in range(fusion.stages)]
    orders: list[list[int]] = [[] for _ in ends]
    free = [0.0] * fusion.stages
    # The next task of each stage, found again when something that it depends on has changed.
    candidates = [_candidate(fusion, preference, ends, free, stage) for stage in range(fusion.stages)]
    while waiting := [candidate for candidate in candidates if candidate]:
        start, _, stage, kind = min(waiting)
        free[stage] = start + fusion.duration_s(kind)
        ends[stage][kind].append(free[stage])
        orders[stage].append(kind)
        for near in range(max(stage - 1, 0), min(stage + 2, fusion.stages)):
            candidates[near] = _candidate(fusion, preference, ends, free, near)
    return tuple(tuple(order) for order in orders)


def _candidate(
    fusion: Fusion, preference: Preference, ends: list[list[list[float]]], free: list[float], stage: int
) -> tuple[float, float, int, int] | None:
    """Start, minus what its model still needs, stage and kind of the task that the stage would take next."""
    found = []
    for kind in KINDS:
        model, backward = divmod(kind, 2)
        pipeline, position, done = fusion.models[model], fusion.position(model, stage), len(ends[stage][kind])
        extra, ahead = preference.extra[model], pipeline.depth - 1 - position
        if done == pipeline.micro_batches:
            continue
        if extra is not None and not backward and done - len(ends[stage][kind + 1]) > ahead + extra:
            continue
        ready = _ready(fusion, ends, stage, kind)
        if ready is not None:
            tasks = 3 * (pipeline.micro_batches - done) + 2 * preference.back * position
            tasks += 0 if backward else 3 * preference.out * ahead
            worth = tasks * pipeline.forward_s * (preference.ratio if model else 1.0)
            found.append((max(free[stage], ready), -worth, stage, kind))
    if not found:
        return None
    soonest = min(start for start, *_ in found)
    window = preference.wait * min(start + fusion.duration_s(kind) - soonest for start, _, _, kind in found)
    return min((each for each in found if each[0] == soonest or each[0] < soonest + window), key=lambda each: each[1:])
