"""V1: fused schedules of two pipelines beside the instances that RLHFuse's solver reports.

The intra-stage fusion of RLHFuse (Zhong et al., arXiv 2409.13221, section 5): two 1F1B pipelines are trained at once, in
opposite directions over the same stages, so that the bubbles of one are filled with the tasks of the other. A model with fewer
stages than the other is replicated until both cover the same number. A micro-batch is one forward and one backward task on each
stage of its pipeline; a backward task takes twice as long.

An order names kinds only: the n-th forward task of a model on a stage is that of its n-th micro-batch there. That loses no
schedule: micro-batches of a model are alike, so exchanging two that change places between stages ends nothing later. The orders
in `fused_orders.json` were found by simulated annealing; that they are schedules, and how long they take, is computed here by
the recurrence alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.validation.rows import Figure, Row, published
from async_rlhf.experiments.planning.validation.rows import row as row_of

# Kinds of task: 2 * model + (1 where it is a backward one).
KINDS = range(4)
Orders = Sequence[Sequence[int]]
"""For each stage the kinds of its tasks, first to last."""
_Ends = list[list[list[float]]]


@dataclass(frozen=True)
class Pipeline:
    """One model. micro_batches: of each of its replicas; forward_s: of a task, in any unit."""

    depth: int
    micro_batches: int
    forward_s: float

    @property
    def alone_s(self) -> float:
        """Of its 1F1B schedule with nothing beside it: (micro_batches + depth - 1) forward and backward tasks."""
        return (self.micro_batches + self.depth - 1) * 3 * self.forward_s if self.micro_batches else 0.0


@dataclass(frozen=True)
class Fusion:
    """The first pipeline runs from stage 0 up, the second from the last stage down. Raises ConfigError where the depth of
    neither is a multiple of the other's."""

    first: Pipeline
    second: Pipeline

    def __post_init__(self) -> None:
        few, many = sorted((self.first.depth, self.second.depth))
        if many % few:
            raise ConfigError(
                f"pipelines of {few} and {many} stages are to be fused: the greater must be a multiple of the smaller"
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
    if len(orders) != fusion.stages:
        raise ConfigError(f"{len(orders)} orders are given, the fusion has {fusion.stages} stages")
    for stage, order in enumerate(orders):
        for kind in sorted({*KINDS, *order}):
            expected = fusion.models[kind // 2].micro_batches if kind in KINDS else 0
            if (found := list(order).count(kind)) != expected:
                raise ConfigError(f"the order of stage {stage} has {found} tasks of kind {kind}, {expected} belong to it")
    ends: _Ends = [[[] for _ in KINDS] for _ in orders]
    free, begun, moved = [0.0] * len(orders), [0] * len(orders), True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while begun[stage] < len(order) and (ready := _ready(fusion, ends, stage, order[begun[stage]])) is not None:
                kind = order[begun[stage]]
                free[stage] = max(free[stage], ready) + fusion.duration_s(kind)
                ends[stage][kind].append(free[stage])
                begun[stage] += 1
                moved = True
    if waiting := [stage for stage, order in enumerate(orders) if begun[stage] < len(order)]:
        raise ConfigError(f"the orders of stages {waiting} wait for each other in a circle: none of them can go on")
    return max((end for found in ends for kind in found for end in kind), default=0.0)


def _ready(fusion: Fusion, ends: _Ends, stage: int, kind: int) -> float | None:
    """When the next task of this kind could start by its source; None where that has not ended yet."""
    source = fusion.source(kind, stage)
    if source is None:
        return 0.0
    micro_batch, done = len(ends[stage][kind]), ends[source[0]][source[1]]
    return done[micro_batch] if micro_batch < len(done) else None


def greedy(fusion: Fusion, ratio: float = 1.0, wait: float = 0.0) -> Orders:
    """Time after time the stage that can start soonest takes the task whose model still needs longest.

    ratio: a second of the second model is worth so many of the first. wait: 0, a stage takes what can start soonest; up to 1,
    also what can start before the soonest end, so that it may rest for a better task (non-delay and active schedules: Giffler,
    Thompson, Operations Research 8(4), 1960).
    """
    ends: _Ends = [[[] for _ in KINDS] for _ in range(fusion.stages)]
    orders: list[list[int]] = [[] for _ in ends]
    free = [0.0] * fusion.stages

    def candidate(stage: int) -> tuple[float, float, int, int] | None:
        """Start, minus what its model still needs, stage and kind of the task that the stage would take next."""
        found = []
        for kind in KINDS:
            model, backward = divmod(kind, 2)
            pipeline, position, done = fusion.models[model], fusion.position(model, stage), len(ends[stage][kind])
            if done < pipeline.micro_batches and (ready := _ready(fusion, ends, stage, kind)) is not None:
                tasks = 3 * (pipeline.micro_batches - done) + 2 * position
                tasks += 0 if backward else 3 * (pipeline.depth - 1 - position)
                worth = tasks * pipeline.forward_s * (ratio if model else 1.0)
                found.append((max(free[stage], ready), -worth, stage, kind))
        if not found:
            return None
        soonest = min(start for start, *_ in found)
        window = wait * min(start + fusion.duration_s(kind) - soonest for start, _, _, kind in found)
        return min((each for each in found if each[0] == soonest or each[0] < soonest + window), key=lambda each: each[1:])

    # The next task of each stage, found again when something that it depends on has changed.
    candidates = [candidate(stage) for stage in range(fusion.stages)]
    while waiting := [each for each in candidates if each]:
        start, _, stage, kind = min(waiting)
        free[stage] = start + fusion.duration_s(kind)
        ends[stage][kind].append(free[stage])
        orders[stage].append(kind)
        for near in range(max(stage - 1, 0), min(stage + 2, fusion.stages)):
            candidates[near] = candidate(near)
    return orders


def kept_orders() -> list[Orders]:
    """Of each instance: for each stage the kinds of its tasks."""
    kept = json.loads(Path(__file__).with_name("fused_orders.json").read_text())
    return [[list(map(int, stage)) for stage in orders] for orders in kept]


def row() -> Row:
    instances = [
        (Fusion(*(Pipeline(*each) for each in zip(*sizes, strict=True))), reported)
        for *sizes, reported in published(1)["instances"]
    ]
    found = [makespan_s(fusion, orders) for (fusion, _), orders in zip(instances, kept_orders(), strict=True)]
    columns = {
        "serial 1F1B": [(serial, fusion.serial_s) for fusion, (serial, _, _) in instances],
        "lower bound": [(bound, fusion.bound_s) for fusion, (_, _, bound) in instances],
        "makespan found": [(annealed, makespan) for (_, (_, annealed, _)), makespan in zip(instances, found, strict=True)],
    }
    figures = [
        Figure(kind, f"instance {number}", "", float(given), predicted, "exact")
        for kind, pairs in columns.items()
        for number, (given, predicted) in enumerate(pairs)
    ]
    equal = all(each.published == each.predicted for each in figures[: 2 * len(found)])
    reported = [(makespan, annealed, bound) for makespan, (_, (_, annealed, bound)) in zip(found, instances, strict=True)]
    bounded = all(bound <= makespan <= annealed for makespan, annealed, bound in reported)
    at_bound = sum(makespan == bound for makespan, _, bound in reported)
    shorter = sum(makespan < annealed for makespan, annealed, _ in reported)
    finding = f"{at_bound} of {len(found)} searches end at the bound, {shorter} below the published annealing"
    return row_of(1, figures, holds=equal and bounded, finding=finding)
