"""What a finished run took, as constants of its stages, and which shares of its devices' peaks: from its metrics, rollouts and
spans.

    decode, prefill            how long each completion took, against its tokens, the rows beside it and the prompts of its time
    training                   the learner's steps, without waits and publications, against their tokens
    copy, travel, adoption     metrics, and spans of the actors
    lengths, rewards           as they were

What roles that shared cores took from each other is in these times, so they predict runs on the same cores. All groups that the
journal still has are read (`queue.keep_rollouts = true` keeps every one); of a run without them decoding follows from tokens
and idle shares alone, as if it cost the same for any number of rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from async_rlhf.buffers.errors import ConfigError, JournalError
from async_rlhf.buffers.lines import read_lines
from async_rlhf.buffers.queue.recovery import read_batches
from async_rlhf.buffers.record import Group
from async_rlhf.buffers.stages import GENERATION, StageTime, unpack
from async_rlhf.experiments.planning.model.stages import Layout, Place, decode_step_s, training_s
from async_rlhf.experiments.planning.placement.roles import Roles
from async_rlhf.experiments.planning.placement.spec import EfficiencyConfig, Spec
from async_rlhf.experiments.planning.simulation.workload import Costs, Terms, Workload
from async_rlhf.run.config import Config
from async_rlhf.run.run_dir import RunDir

Seconds = npt.NDArray[np.float64]
_LEAST = 4  # steps of a run
_LEAST_SHARE, _HALVINGS = 1e-6, 60
_TOGETHER_S = 0.02  # what is credited within this begins together
_MOST = 4096  # completions that are fitted, and lengths and latencies that are kept


@dataclass(frozen=True, kw_only=True)
class RunCosts:
    """steps: of the run, all of them. Its completions a second, and the share of its time in which the learner waited, are over
    those behind the first ones, which fill the queue."""

    workload: Workload
    costs: Costs
    steps: int
    samples_per_s: float
    learner_idle: float


@dataclass(frozen=True)
class _Made:
    """One completion. judged: by each of its rewards."""

    actor: str
    group: int
    tokens: int
    prompt: int
    generated: StageTime
    judged: tuple[StageTime, ...]


def costs_of_run(run: RunDir) -> RunCosts:
    """Raises ConfigError for a run that has done too few steps, DamagedError for metrics that cannot be read."""
    config, records = run.config(), run.read_metrics()
    warm_up = min(config.queue.max_staleness + 2, len(records) // 2)
    steady = records[warm_up:]
    if len(records) < _LEAST:
        raise ConfigError(f"{str(run.path)!r} has done {len(records)} steps: at least {_LEAST} are needed")
    made = [each for group in _groups(run) for each in _completions(group)]
    prompt = round(statistics.fmean(each.prompt for each in made)) if made else 0
    step_s = statistics.fmean(record["step_time"] for record in steady)
    prefill, decode = _decoding(made, config.engine.slots) if made else ((0.0, 0.0, 0.0), _decoding_of_metrics(steady))
    adoptions = list(_adoptions(run))
    return RunCosts(
        workload=_workload(config, made, steady, prompt),
        costs=Costs(
            decode=decode,
            prefill=prefill,
            training=_training(steady, config, prompt),
            copy_s=statistics.median(record["broadcast/seconds"] for record in steady),
            travel_s=_travel_s(records, adoptions),
            adopt_s=statistics.median([time.seconds for _, time in adoptions] or [0.0]),
        ),
        steps=len(records),
        samples_per_s=config.learner.batch_size / step_s,
        learner_idle=statistics.fmean(record["idle/learner"] * record["step_time"] for record in steady) / step_s,
    )


def _groups(run: RunDir) -> Iterator[Group]:
    """Those that the journal still has; none where it is gone."""
    try:
        for batch in read_batches(run.path / "queue"):
            yield from batch.groups
    except JournalError:
        return


def _completions(group: Group) -> Iterator[_Made]:
    for rollout in group.rollouts:
        stages = unpack(rollout.timings)
        if GENERATION in stages and rollout.num_tokens:
            judged = tuple(time for name, time in stages.items() if name != GENERATION)
            yield _Made(group.actor, group.number, rollout.num_tokens, len(group.prompt_ids), stages[GENERATION], judged)


def _workload(config: Config, made: Sequence[_Made], steady: Sequence[Mapping[str, Any]], prompt: int) -> Workload:
    """As it was: asynchronous rewards are judged by as many at once as were seen at once."""
    kept = made[:: max(1, len(made) // _MOST)]
    bound, scoring = config.bound(config.data.size), config.scoring
    actors = config.actors.count if isinstance(config.actors.count, int) else round(steady[-1]["actors"])
    servers = 1 if scoring.placement == "process" else actors
    seen = _peak([time for each in made for time in each.judged])
    return Workload(
        groups_per_batch=bound.groups_per_batch,
        group_size=config.generation.group_size,
        lengths=[each.tokens for each in kept] or [max(1, round(record["completions/mean_length"])) for record in steady],
        prompt_tokens=prompt,
        max_staleness=bound.max_staleness,
        exact=bound.exact,
        window=bound.window,
        publish_every=bound.publish_every,
        updates_per_step=config.learner.updates_per_step * config.learner.epochs,
        actors=actors,
        slots=config.engine.slots,
        queued_groups=config.actors.queued_groups,
        reward_s=[sum(time.seconds for time in each.judged) for each in kept] or [0.0],
        judges=max(scoring.workers, -(-seen // servers)),
        shared_judges=scoring.placement == "process",
        on_update=config.generation.on_update,
    )


def _peak(times: Sequence[StageTime]) -> int:
    """How many of them overlap at most: asynchronous rewards have no worker each."""
    began, ended = (np.sort([getattr(time, name) for time in times]) for name in ("began", "ended"))
    alive = np.searchsorted(began, began, "right") - np.searchsorted(ended, began, "right")
    return int(alive.max(initial=0))


def _decoding(made: Sequence[_Made], slots: int) -> tuple[Terms, Terms]:
    """Of prefill and of decode steps: each completion's seconds are c0 · prompts + tokens · (c1 + c2 · rows + c3 · rows ·
    context), the prompts that are computed while it is decoded, and the rows that are decoded beside it in the mean."""
    points, seconds = list[tuple[float, ...]](), list[float]()
    for actor in sorted({each.actor for each in made}):
        own = sorted((each for each in made if each.actor == actor), key=lambda each: each.generated.began)
        decoded, begins = list(_in_slots(own, slots)), dict[int, float]()
        for each, time in zip(own, decoded, strict=True):
            begins.setdefault(each.group, time.began)
        computed = sorted(begins.values())
        for each, time, rows in zip(own, decoded, _rows_beside(decoded), strict=True):
            if time.seconds > 0:
                prompts = int(
                    np.searchsorted(computed, time.ended, "right") - np.searchsorted(computed, time.began - _TOGETHER_S)
                )
                points.append((prompts, each.tokens, each.tokens * rows, each.tokens * rows * (each.prompt + each.tokens / 2)))
                seconds.append(time.seconds)
    every = max(1, len(points) // _MOST)
    prompt, step, row, token = fit(points[::every], seconds[::every])
    return (0.0, prompt, 0.0), (step, row, token)


def _in_slots(made: Sequence[_Made], slots: int) -> Iterator[StageTime]:
    """When each was decoded: from when a slot was free. Generation begins with its credit; slots are given in this order."""
    free = [0.0] * slots
    for each in made:
        began = max(each.generated.began, min(free[0], each.generated.ended))
        heapreplace(free, each.generated.ended)
        yield StageTime(began, each.generated.ended)


def _rows_beside(times: Sequence[StageTime]) -> list[float]:
    """For each interval, how many of them there are at a time, itself among them: the mean over it, at least 1."""
    first = min((time.began for time in times), default=0.0)  # sums over seconds since 1970 would lose the fractions
    began, ended = (np.array([getattr(time, name) - first for time in times]) for name in ("began", "ended"))

    def since(starts: Seconds, at: Seconds) -> Seconds:
        """The sum of the seconds that have passed since each of the starts, by the times `at`."""
        starts = np.sort(starts)
        count = np.searchsorted(starts, at, "right")
        found: Seconds = count * at - np.concatenate([[0.0], np.cumsum(starts)])[count]
        return found

    alive = since(began, ended) - since(ended, ended) - since(began, began) + since(ended, began)
    beside: list[float] = np.maximum(1.0, alive / np.maximum(ended - began, 1e-9)).tolist()
    return beside


def _decoding_of_metrics(steady: Sequence[Mapping[str, Any]]) -> Terms:
    """A cost for each token: what the actors' busy time was divided by."""
    tokens = sum(record["num_tokens"] for record in steady)
    busy_s = sum(record["step_time"] * (1 - record["idle/actor"]) * record["actors"] for record in steady)
    return 0.0, busy_s / max(1, tokens), 0.0


def _training(steady: Sequence[Mapping[str, Any]], config: Config, prompt: int) -> Terms:
    groups = config.learner.batch_size // config.generation.group_size
    seconds = [record["step_time"] * (1 - record["idle/learner"]) - record["broadcast/seconds"] for record in steady]
    step, token = fit([(1, groups * prompt + record["num_tokens"]) for record in steady], [max(each, 1e-6) for each in seconds])
    return step, 0.0, token


def _adoptions(run: RunDir) -> Iterator[tuple[int, StageTime]]:
    """Versions that actors adopted but for the first, and when by their hosts' clocks."""
    for path in sorted((run.path / "spans").glob("*.jsonl")):
        for span in read_lines(path):
            if span["name"].startswith("adopt ") and (version := int(span["name"].removeprefix("adopt "))):
                yield version, StageTime(span["began"], span["ended"])


def _travel_s(records: Sequence[Mapping[str, Any]], adoptions: Sequence[tuple[int, StageTime]]) -> float:
    """From the record of a step, which is written when its publication has begun, to the first adoption of its version."""
    recorded = {record["step"]: record["time"] for record in records}
    first: dict[int, float] = {}
    for version, time in adoptions:
        first[version] = min(first.get(version, time.began), time.began)
    waits = [max(0.0, began - recorded[version]) for version, began in first.items() if version in recorded]
    return float(statistics.median(waits or [0.0]))


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """The constants c >= 0 with the least sum of (row · c - seconds)², which keeps the mean of points that scatter: none is
    negative, for no part of a stage gives time back.

    Some of the constants are 0 in the solution and the others are their unconstrained optimum (Lawson and Hanson, Solving Least
    Squares Problems, 1974, chapter 23): with a few columns every choice of them is tried.
    """
    matrix, target = np.asarray(rows, float), np.asarray(seconds, float)
    best, least = np.zeros(matrix.shape[1]), np.inf
    for count in range(1, matrix.shape[1] + 1):
        for chosen in combinations(range(matrix.shape[1]), count):
            found = np.zeros(matrix.shape[1])
            found[list(chosen)] = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
            loss = float(np.sum((matrix @ found - target) ** 2))
            if found.min() >= 0 and loss < least:
                best, least = found, loss
    return tuple(best.tolist())


# -- the shares of a device's peaks that a run has reached --------------------------------------------------------------


def reached(spec: Spec, config: Config, measured: RunCosts) -> EfficiencyConfig:
    """For a plan of the same model on more of the same devices: the spec's shares with those of the run of this config.

    `training`, and `launch_s` (`decode`, where a step is faster than its share lets it be), with which the model of stages
    takes what the run took; and the speed of its weight channel. Raises ConfigError where the run was faster than the spec's
    model can be on the spec's device.
    """
    roles = Roles(spec)
    decode, launch_s = _decoding_shares(roles, config, measured)
    training = _training_share(roles, config, measured, memory=decode)
    found = {"training": training, "decode": decode, "launch_s": launch_s}
    if measured.costs.travel_s > 0:
        found["weights_bytes_per_s"] = roles.policy.weight_bytes / measured.costs.travel_s
    return spec.efficiency.model_copy(update=found)


def _training_share(roles: Roles, config: Config, measured: RunCosts, *, memory: float) -> float:
    """memory: the share of the memory bandwidth, for the optimizer."""
    learner, load = config.learner, measured.workload
    mean = sum(load.lengths) / len(load.lengths)
    row, updates = round(load.prompt_tokens + mean), load.updates_per_step
    rows = max(1, load.samples // updates)
    layout = Layout(
        tensor=learner.tensor_parallel,
        context=learner.sequence_parallel,
        data=max(1, learner.ranks // learner.tensor_parallel // learner.sequence_parallel),
        zero_stage=learner.zero_stage if learner.backend == "deepspeed" and learner.ranks > 1 else 0,
        micro_rows=max(1, learner.micro_batch_tokens // row),
        recompute="full" if learner.gradient_checkpointing else "none",
    )
    place = roles.place("train", layout)

    def seconds(share: float) -> float:
        at = replace(place, efficiency=replace(place.efficiency, flops=share, memory=memory))
        return updates * training_s(at, rows, row, micro_batches=layout.micro_batches(rows))

    took = measured.costs.training_s(load.groups_per_batch, load.prompt_tokens, round(mean * load.samples), updates)
    return _share(seconds, took, "a learner step", roles)


def _decoding_shares(roles: Roles, config: Config, measured: RunCosts) -> tuple[float, float]:
    """Share of the memory bandwidth, and seconds of a step besides: at half of the rows that an actor may hold."""
    load = measured.workload
    tensor = config.engine.vllm.tensor_parallel_size if config.engine.kind == "vllm" else 1
    place = roles.place("generate", Layout(tensor=tensor))
    rows = max(1, min(load.slots, load.samples // load.actors) // 2)
    context = load.prompt_tokens + sum(load.lengths) / len(load.lengths) / 2
    took = measured.costs.decode_s(rows, context)

    def at(share: float, launch_s: float) -> Place:
        return replace(place, efficiency=replace(place.efficiency, memory=share, launch_s=launch_s))

    share = place.efficiency.memory
    besides = took - decode_step_s(at(share, 0.0), rows, context)
    if besides >= 0:
        return share, besides
    return _share(lambda tried: decode_step_s(at(tried, 0.0), rows, context), took, "a decode step", roles), 0.0


def _share(seconds: Callable[[float], float], took: float, stage: str, roles: Roles) -> float:
    """At which a stage takes what it took; by bisection of its logarithm."""
    if seconds(1.0) > took:
        raise ConfigError(
            f"{stage} of the run took {took:.3g} s, and at least {seconds(1.0):.3g} s by the peaks of the spec's device "
            f"{roles.spec.cluster.device!r}: cluster.device and models.policy are to be those of the run"
        )
    low, high = math.log(_LEAST_SHARE), 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(math.exp(middle)) > took else (low, middle)
    return math.exp(high)
