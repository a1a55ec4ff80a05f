"""The speeds that a machine and a finished run reached: the peaks of a device, the shares of them for a plan, and the run's
speed with another bound of staleness.

A run's times are means of its metrics, and of the spans of its actors' adoptions. What roles that shared cores took from each
other is in them, so they predict runs on the same hardware.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.lines import read_lines
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.stages import GENERATION
from async_rlhf.experiments.planning.model.stages import Device, Layout, decode_step_s, training_s
from async_rlhf.experiments.planning.placement.roles import Roles
from async_rlhf.experiments.planning.placement.spec import EfficiencyConfig, Spec
from async_rlhf.experiments.planning.placement.step import StepTime, step_time
from async_rlhf.run.config import Config
from async_rlhf.run.run_dir import RunDir

if TYPE_CHECKING:
    import torch

BOUNDS = (0, 1, 2, 4, 8)
_NEAR = 0.98  # of the fastest: no reason for more staleness
_LEAST = 4  # steps of a run
_BY_ROWS = 0.25  # of a decode step, the share that is taken to grow with its rows: a run's means do not tell
_LEAST_SHARE, _HALVINGS = 1e-6, 60


# -- a run ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunTimes:
    """steps: of the run; all else is over those behind the first ones, which fill the queue. Seconds and rows (completions) are
    of a step in the mean; lengths in tokens.

    alive: rows that an actor decodes at once, while it decodes. decode_s: of one of its steps, with its share of the prefills.
    copy_s: for which the learner stands still to publish; travel_s: from then until the first actor adopts, for adopt_s.
    score_s: of one completion, by all its rewards; judges: how many completions are scored at once.
    """

    bound: Bound
    steps: int
    actors: int
    slots: int
    rows: int
    mean_length: float
    longest: float
    step_s: float
    learner_idle: float
    train_s: float
    alive: float
    decode_s: float
    copy_s: float
    travel_s: float
    adopt_s: float
    score_s: float
    judges: float

    @property
    def samples_per_s(self) -> float:
        return self.rows / self.step_s


def times_of_run(run: RunDir) -> RunTimes:
    """Raises ConfigError for a run that has done too few steps, DamagedError for metrics that cannot be read."""
    config, records = run.config(), run.read_metrics()
    if len(records) < _LEAST:
        raise ConfigError(f"{str(run.path)!r} has done {len(records)} steps: at least {_LEAST} are needed")
    bound, scoring = config.bound(config.data.size), config.scoring
    steady = records[min(bound.max_staleness + 2, len(records) // 2) :]

    def mean(value: Callable[[Mapping[str, Any]], float]) -> float:
        return statistics.fmean(map(value, steady))

    rows, step_s, actors = config.learner.batch_size, mean(lambda step: step["step_time"]), max(1, round(steady[-1]["actors"]))
    tokens = max(1.0, mean(lambda step: step["num_tokens"]))
    decoding_s = max(mean(lambda step: step["step_time"] * (1 - step["idle/actor"])), 1e-9)
    # Little's law: rows that an actor holds; those beyond its slots wait.
    held = rows * mean(lambda step: step[f"stages/{GENERATION}/seconds"] or 0.0) / decoding_s / actors
    alive = max(1.0, min(config.engine.slots, held))
    score_s = mean(_score_s)
    adoptions = list(_adoptions(run))
    return RunTimes(
        bound=bound,
        steps=len(records),
        actors=actors,
        slots=config.engine.slots,
        rows=rows,
        mean_length=tokens / rows,
        longest=max(1.0, mean(lambda step: step["completions/max_length"])),
        step_s=step_s,
        learner_idle=mean(lambda step: step["idle/learner"] * step["step_time"]) / step_s,
        train_s=mean(lambda step: step["step_time"] * (1 - step["idle/learner"]) - step["broadcast/seconds"]),
        alive=alive,
        decode_s=alive * actors * decoding_s / tokens,
        copy_s=mean(lambda step: step["broadcast/seconds"]),
        travel_s=_travel_s(records, adoptions),
        adopt_s=statistics.median([ended - began for _, began, ended in adoptions] or [0.0]),
        score_s=score_s,
        # Asynchronous rewards have no worker each.
        judges=max(scoring.workers * (1 if scoring.placement == "process" else actors), rows * score_s / step_s),
    )


def _score_s(record: Mapping[str, Any]) -> float:
    stages = [name for name in record if name.startswith("stages/") and name.endswith("/seconds") and GENERATION not in name]
    return sum(record[name] or 0.0 for name in stages)


def _adoptions(run: RunDir) -> Iterator[tuple[int, float, float]]:
    """Versions that actors adopted but for the first; begin and end by their hosts' clocks."""
    for path in sorted((run.path / "spans").glob("*.jsonl")):
        for span in read_lines(path):
            if span["name"].startswith("adopt ") and (version := int(span["name"].removeprefix("adopt "))):
                yield version, span["began"], span["ended"]


def _travel_s(records: list[dict[str, Any]], adoptions: list[tuple[int, float, float]]) -> float:
    """From the record of a step, which is written when its publication has begun, to the first adoption of its version."""
    recorded = {record["step"]: record["time"] for record in records}
    first: dict[int, float] = {}
    for version, began, _ in adoptions:
        first[version] = min(first.get(version, began), began)
    waits = [max(0.0, began - recorded[version]) for version, began in first.items() if version in recorded]
    return float(statistics.median(waits or [0.0]))


# -- with another bound --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WhatIf:
    """Steps with each bound as `max_staleness`, the run's own among them, and with an actor more. factor: what a step took,
    over what the run's times make of it; the circuit that bounds it is multiplied by that in all predictions."""

    run: RunTimes
    factor: float
    by_bound: Mapping[int, StepTime]
    with_another_actor: StepTime

    def samples_per_s(self, step: StepTime) -> float:
        return self.run.rows / step.seconds

    @property
    def best(self) -> int:
        """The smallest bound that is about as fast as any."""
        least = min(step.seconds for step in self.by_bound.values())
        return min(bound for bound, step in self.by_bound.items() if _NEAR * step.seconds <= least)


def what_if(run: RunTimes) -> WhatIf:
    """By the circuits of the run's own times. An actor more is taken to bring hardware of its own. Bounds with which the run
    would hang are left out."""
    own = run.bound.max_staleness
    made = _step(run, own, run.actors)
    name, factor = made.bound_by.name, run.step_s / made.seconds

    def predicted(bound: int, actors: int) -> StepTime:
        circuits = _step(run, bound, actors).circuits
        return StepTime.of(replace(each, step_s=each.step_s * (factor if each.name == name else 1.0)) for each in circuits)

    bounds = sorted({own, *(bound for bound in BOUNDS if bound >= run.bound.lowest_staleness)})
    return WhatIf(run, factor, {bound: predicted(bound, run.actors) for bound in bounds}, predicted(own, run.actors + 1))


def _step(run: RunTimes, bound: int, actors: int) -> StepTime:
    """With more batches ahead more rows share a step, up to the slots. A batch alone waits for its longest row, and for those
    that found no slot before."""
    rows = run.rows / actors
    tokens = rows * run.mean_length
    most = max(1.0, min(run.slots, max(1, bound) * rows))
    lasts = run.longest + max(0.0, rows - run.slots) * run.mean_length / run.slots
    usual = max(1.0, min(most, (bound + 1) * tokens / lasts))  # Little's law, where each batch waits for its longest row

    def decode_s(alive: float) -> float:
        return run.decode_s * (1 - _BY_ROWS + _BY_ROWS * alive / run.alive)

    around = {
        "generate": lasts * decode_s(usual),
        "score": run.score_s,
        "train": run.train_s,
        "publish": run.copy_s + run.travel_s,
        "adopt": run.adopt_s,
    }
    lanes = {
        "actors": {"generate": tokens / most * decode_s(most), "adopt": run.adopt_s},
        "learner": {"train": run.train_s, "publish": run.copy_s},
        "judges": {"score": run.rows * run.score_s / run.judges},
        "weight channel": {"publish": run.travel_s},
    }
    return step_time(bound, around, lanes)


# -- shares of a device's peaks ------------------------------------------------------------------------------------------


def reached(spec: Spec, config: Config, run: RunTimes) -> EfficiencyConfig:
    """For a plan of the same model on more of the same devices: the spec's shares with those of the run of this config.

    `training`, and `launch_s` (`decode`, where a step is faster than its share lets it be), with which the model of stages
    takes what the run took; and the speed of its weight channel. Raises ConfigError where the run was faster than the spec's
    model can be on the spec's device.
    """
    roles = Roles(spec)
    decode, launch_s = _decoding_shares(roles, config, run)
    training = _training_share(roles, config, run, memory=decode)
    found = {"training": training, "decode": decode, "launch_s": launch_s}
    if run.travel_s > 0:
        found["weights_bytes_per_s"] = roles.policy.weight_bytes / run.travel_s
    return spec.efficiency.model_copy(update=found)


def _training_share(roles: Roles, config: Config, run: RunTimes, *, memory: float) -> float:
    """memory: the share of the memory bandwidth, for the optimizer."""
    learner, row = config.learner, round(roles.prompt + run.mean_length)
    updates = learner.updates_per_step * learner.epochs
    rows = max(1, run.rows // updates)
    layout = Layout(
        tensor=learner.tensor_parallel,
        context=learner.sequence_parallel,
        data=max(1, learner.ranks // learner.tensor_parallel // learner.sequence_parallel),
        zero_stage=learner.zero_stage if learner.backend == "deepspeed" and learner.ranks > 1 else 0,
        micro_rows=max(1, learner.micro_batch_tokens // row),
        recompute=learner.gradient_checkpointing,
    )
    place = roles.place(layout, roles.spec.efficiency.of_training)

    def seconds(share: float) -> float:
        at = replace(place, efficiency=replace(place.efficiency, flops=share, memory=memory))
        return updates * training_s(at, rows, row, micro_batches=layout.micro_batches(rows))

    return _share(seconds, run.train_s, "a learner step", roles)


def _decoding_shares(roles: Roles, config: Config, run: RunTimes) -> tuple[float, float]:
    """Share of the memory bandwidth, and seconds of a step besides."""
    place = roles.engine(config.engine.num_devices)
    rows, context = round(run.alive), roles.prompt + run.mean_length / 2

    def seconds(share: float) -> float:
        return decode_step_s(replace(place, efficiency=replace(place.efficiency, memory=share, launch_s=0.0)), rows, context)

    share = place.efficiency.memory
    if (besides := run.decode_s - seconds(share)) >= 0:
        return share, besides
    return _share(seconds, run.decode_s, "a decode step", roles), 0.0


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


# -- a machine -----------------------------------------------------------------------------------------------------------


def measure(device: str, dtype: str, threads: int, seconds: float) -> Device:
    """By a large matrix product, a copy of memory that no cache holds, and one from the host to the device, which stands for
    the links to other devices and nodes, too: where there are others, put their figures in its place.

    device: of torch. seconds: for each of the three, three repetitions at least. Raises ConfigError for a device that cannot be
    used.
    """
    import torch

    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device = {device!r} cannot be used: {error}; use 'cpu'") from error
    torch.set_num_threads(threads)
    on_cpu = where.type == "cpu"
    width, size = (1024, 256 << 20) if on_cpu else (8192, 2 << 30)
    square = torch.ones(width, width, dtype=getattr(torch, dtype), device=where)
    product = torch.empty_like(square)
    source = torch.ones(size, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    flops = 2 * width**3 / _best_s(lambda: torch.mm(square, square, out=product), where, seconds)
    copied = 2 * size / _best_s(lambda: target.copy_(source), where, seconds)
    if on_cpu:
        import psutil

        memory_bytes, moved = psutil.virtual_memory().total, copied
    else:
        host = torch.ones(size // 8, dtype=torch.uint8, pin_memory=True)
        moved = size // 8 / _best_s(lambda: target[: size // 8].copy_(host), where, seconds)
        memory_bytes = torch.cuda.get_device_properties(where).total_memory
    return Device(
        peak_flops=flops,
        memory_bytes=float(memory_bytes),
        memory_bytes_per_s=copied,
        link_bytes_per_s=moved,
        network_bytes_per_s=moved,
        host_bytes_per_s=moved,
        is_cpu=on_cpu,
    )


def _best_s(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The least time of one of its repetitions."""
    import torch

    best, began, count = math.inf, time.perf_counter(), 0
    while count < 3 or time.perf_counter() - began < seconds:
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best, count = min(best, time.perf_counter() - started), count + 1
    return best
