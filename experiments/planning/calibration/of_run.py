"""What a finished run took, as the same constants that `calibrate` measures: from its metrics, rollouts and spans.

    decode, prefill            how long each completion took, against its tokens, the rows beside it and the prompts of its time
    training                   the learner's steps, without waits and publications, against their tokens
    copy, travel, adoption     metrics, and spans of the actors
    lengths, rewards           as they were

What roles that shared cores took from each other is in these times, so they predict runs on the same cores and are simulated
without pools. All groups that the journal still has are read (`queue.keep_rollouts = true` keeps every one); of a run without
them decoding follows from tokens and idle shares alone, as if it cost the same for any number of rows.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import pairwise
from typing import Any

from async_rlhf.buffers.errors import ConfigError, JournalError
from async_rlhf.buffers.queue.recovery import read_batches
from async_rlhf.buffers.record import Group
from async_rlhf.buffers.stages import GENERATION, StageTime, read_spans, unpack
from async_rlhf.experiments.planning.model.costs import Costs, Fit, Terms, fit
from async_rlhf.experiments.planning.simulation.refitting import Observed
from async_rlhf.experiments.planning.simulation.workload import Workload
from async_rlhf.run.config import Config
from async_rlhf.run.run_dir import RunDir

_LEAST = 4  # steps of a run
_TOGETHER_S = 0.02  # what is credited within this begins together
_MOST = 4096  # completions that are fitted, and lengths and latencies that are kept


@dataclass(frozen=True, kw_only=True)
class RunCosts:
    """seconds_per_step, samples_per_s, learner_idle (share of its time in which the learner waited): measured, over the steps
    behind the first ones, which fill the queue."""

    workload: Workload
    costs: Costs
    fits: Mapping[str, Fit]
    steps: int
    seconds_per_step: float
    samples_per_s: float
    learner_idle: float

    @property
    def observed(self) -> Observed:
        """For `refit`."""
        return Observed(self.workload, self.samples_per_s, self.learner_idle)


@dataclass(frozen=True)
class _Made:
    """One completion. judged_s: of all its rewards."""

    actor: str
    group: int
    tokens: int
    prompt: int
    generated: StageTime
    judged: tuple[StageTime, ...]


def costs_of_run(run: RunDir) -> RunCosts:
    """Raises ConfigError for a run that has done too few steps to tell, DamagedError for metrics that cannot be read."""
    config, records = run.config(), run.read_metrics()
    warm_up = min(config.queue.max_staleness + 2, len(records) // 2)
    steady = records[warm_up:]
    if len(records) < _LEAST:
        raise ConfigError(
            f"{str(run.path)!r} has done {len(records)} steps: at least {_LEAST} are needed to tell what one takes"
        )
    made = [each for group in _groups(run) for each in _completions(group)]
    prompt = round(statistics.fmean(each.prompt for each in made)) if made else 0
    training, step_s = _training(steady, config, prompt), statistics.fmean(record["step_time"] for record in steady)
    prefill, decoding = _decoding(made, config.engine.slots) if made else ((0.0, 0.0, 0.0), _decoding_of_metrics(steady))
    adoptions = list(_adoptions(run))
    return RunCosts(
        workload=_workload(config, made, steady, prompt),
        costs=Costs(
            decode=decoding.terms,
            prefill=prefill,
            training=training.terms,
            copy_s=statistics.median(record["broadcast/seconds"] for record in steady),
            travel_s=_travel_s(records, adoptions),
            adopt_s=statistics.median([time.seconds for _, time in adoptions] or [0.0]),
        ),
        fits={"decode": decoding, "training": training},
        steps=len(records),
        seconds_per_step=step_s,
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
    changes = sorted([(time.ended, -1) for time in times] + [(time.began, 1) for time in times])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def _decoding(made: Sequence[_Made], slots: int) -> tuple[Terms, Fit]:
    """Of prefill and of decode steps: each completion's seconds are c0 · prompts + tokens · (c1 + c2 · rows + c3 · rows ·
    context), the prompts that are computed while it is decoded, and the rows that are decoded beside it in the mean."""
    points, seconds = list[tuple[float, ...]](), list[float]()
    for actor in sorted({each.actor for each in made}):
        own = sorted((each for each in made if each.actor == actor), key=lambda each: each.generated.began)
        decoded = list(_in_slots(own, slots))
        beside, begins = _Beside(decoded), dict[int, float]()
        for each, time in zip(own, decoded, strict=True):
            begins.setdefault(each.group, time.began)
        computed = sorted(begins.values())
        for each, time in zip(own, decoded, strict=True):
            if time.seconds > 0:
                rows = max(1.0, beside.mean(time))
                prompts = bisect_right(computed, time.ended) - bisect_left(computed, time.began - _TOGETHER_S)
                points.append((prompts, each.tokens, each.tokens * rows, each.tokens * rows * (each.prompt + each.tokens / 2)))
                seconds.append(time.seconds)
    every = max(1, len(points) // _MOST)
    found = fit(points[::every], seconds[::every], relative=False)
    prompt, *decode = found.constants
    return (0.0, prompt, 0.0), found.model_copy(update={"constants": tuple(decode)})


def _in_slots(made: Sequence[_Made], slots: int) -> Iterator[StageTime]:
    """When each was decoded: from when a slot was free. Generation begins with its credit; slots are given in this order."""
    free = [0.0] * slots
    for each in made:
        began = max(each.generated.began, min(free[0], each.generated.ended))
        heapreplace(free, each.generated.ended)
        yield StageTime(began, each.generated.ended)


class _Beside:
    """How many of some intervals there are at a time."""

    def __init__(self, times: Sequence[StageTime]) -> None:
        changes = sorted([(time.began, 1) for time in times] + [(time.ended, -1) for time in times])
        self._at, self._sums, alive, total = [changes[0][0]], [0.0], 0, 0.0
        self._alive = [0]
        for (at, change), (then, _) in pairwise([*changes, (changes[-1][0], 0)]):
            alive += change
            total += alive * (then - at)
            self._at.append(then)
            self._sums.append(total)
            self._alive.append(alive)

    def mean(self, time: StageTime) -> float:
        """Over the interval."""
        return (self._sum(time.ended) - self._sum(time.began)) / time.seconds

    def _sum(self, at: float) -> float:
        """Of alive · seconds until then."""
        place = bisect_right(self._at, at) - 1
        if place + 1 == len(self._at):
            return self._sums[place]
        return self._sums[place] + self._alive[place + 1] * (at - self._at[place])


def _decoding_of_metrics(steady: Sequence[Mapping[str, Any]]) -> Fit:
    """A cost for each token: what the actors' busy time was divided by."""
    tokens = sum(record["num_tokens"] for record in steady)
    busy_s = sum(record["step_time"] * (1 - record["idle/actor"]) * record["actors"] for record in steady)
    return Fit(constants=(0.0, busy_s / max(1, tokens), 0.0), points=1, error=0.0, worst=0.0)


def _training(steady: Sequence[Mapping[str, Any]], config: Config, prompt: int) -> Fit:
    groups = config.learner.batch_size // config.generation.group_size
    seconds = [record["step_time"] * (1 - record["idle/learner"]) - record["broadcast/seconds"] for record in steady]
    found = fit(
        [(1, groups * prompt + record["num_tokens"]) for record in steady],
        [max(each, 1e-6) for each in seconds],
        relative=False,
    )
    step, token = found.constants
    return found.model_copy(update={"constants": (step, 0.0, token)})


def _adoptions(run: RunDir) -> Iterator[tuple[int, StageTime]]:
    """Versions that actors adopted but for the first, and when by their hosts' clocks."""
    for path in sorted((run.path / "spans").glob("*.jsonl")):
        for span in read_spans(path):
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
