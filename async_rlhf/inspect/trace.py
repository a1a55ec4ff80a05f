"""A run as a picture: one JSON file in Chrome's trace format, for ui.perfetto.dev or chrome://tracing.

    what                          read from
    generation, each reward       the timings of every rollout: the journal, or the samples in rollouts.jsonl
    queueing                      from a group's last score to the start of the step that trained on it
    waiting, training             metrics.jsonl
    idle engine, adopted weights  spans/<actor>.jsonl

All times are seconds since the epoch, of the clock of the host on which they were taken: hosts keep one time by NTP.

Format: "Trace Event Format" (Google, 2016): complete events "X" on tracks, nestable events "b"/"e" for rollouts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rlhf.buffers.errors import ConfigError, JournalError
from async_rlhf.buffers.lines import read_lines
from async_rlhf.buffers.queue.recovery import read_batches
from async_rlhf.buffers.stages import GENERATION, Activity, StageTime, read_spans, unpack
from async_rlhf.run.run_dir import RunDir


@dataclass(frozen=True)
class TracedRollout:
    """Where a rollout was and when. step: learner step (from 1) that trained on it."""

    group: int
    member: int
    actor: str
    step: int
    stages: Mapping[str, StageTime]
    version: int
    num_tokens: int


@dataclass(frozen=True)
class Overlap:
    """Seconds of a stage over all rollouts, those of them without any decoding or training, and the share of the rest."""

    seconds: float
    exposed_s: float
    share: float


def export(run: RunDir, out: Path) -> int:
    """Write the trace of a run; returns the number of events. Raises ConfigError when the run left nothing to draw."""
    rollouts = list(read_rollouts(run))
    if not rollouts:
        raise ConfigError(f"{str(run.path)!r} holds no rollouts with timings: no step was done, or sampled_groups was 0")
    events = list(_numbered([*_learner(run), *_actors(run), *_rollouts(rollouts, run)]))
    out.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return len(events)


def overlap(run: RunDir) -> dict[str, Overlap]:
    """By reward: how many of its seconds the run stood still meanwhile.

    A wait for a score that any engine's decoding or the learner's training fills is hidden; the rest is exposed.
    """
    working = _at_work(run)
    found: dict[str, list[float]] = {}
    for rollout in read_rollouts(run):
        for name, time in rollout.stages.items():
            if name != GENERATION:
                sums = found.setdefault(name, [0.0, 0.0])
                sums[0] += time.seconds
                sums[1] += max(0.0, time.seconds - working.covers(time.began, time.ended))
    return {name: Overlap(s, e, 1.0 - e / s if s > 0 else 1.0) for name, (s, e) in found.items()}


def read_rollouts(run: RunDir) -> Iterator[TracedRollout]:
    """Every rollout whose timings are known: all that the journal holds, and the samples of the other steps."""
    in_journal: set[int] = set()
    try:
        for batch in read_batches(run.path / "queue"):
            in_journal.add(batch.step + 1)
            for group in batch.groups:
                for member, rollout in enumerate(group.rollouts):
                    version = next(rollout.sampled_spans())[0]
                    timed = unpack(rollout.timings)
                    yield TracedRollout(group.number, member, group.actor, batch.step + 1, timed, version, rollout.num_tokens)
    except JournalError:
        pass  # a run without a journal any more still has its samples
    for sample in read_lines(run.path / "rollouts.jsonl"):
        if sample["step"] not in in_journal:
            for member, record in enumerate(sample["rollouts"]):
                stages = unpack(record["timings"])
                yield TracedRollout(
                    sample["group"],
                    member,
                    sample["actor"],
                    sample["step"],
                    stages,
                    record["spans"][0][0],
                    sum(count for version, count in record["spans"] if version is not None),
                )


def _learner(run: RunDir) -> Iterator[dict[str, Any]]:
    for began, trained, ended, step in _steps(run):
        yield _event("learner", "steps", f"wait for step {step}", began, trained)
        yield _event("learner", "steps", f"train step {step}", trained, ended)


def _actors(run: RunDir) -> Iterator[dict[str, Any]]:
    for actor, spans in _spans(run):
        for name, began, ended in spans:
            yield _event(actor, "weights" if name.startswith("adopt") else "engine", name, began, ended)


def _spans(run: RunDir) -> Iterator[tuple[str, list[tuple[str, float, float]]]]:
    """Of each actor: what it did, when it began and ended."""
    for path in sorted((run.path / "spans").glob("*.jsonl")):
        yield path.stem, [(span["name"], span["began"], span["ended"]) for span in read_spans(path)]


def _rollouts(rollouts: list[TracedRollout], run: RunDir) -> Iterator[dict[str, Any]]:
    trains = {step: trained for _, trained, _, step in _steps(run)}
    for rollout in rollouts:
        if not rollout.stages:
            continue
        name = f"group {rollout.group}.{rollout.member}"
        began = min(time.began for time in rollout.stages.values())
        scored = max(time.ended for time in rollout.stages.values())
        taken = max(scored, trains.get(rollout.step, scored))
        about = {"version": rollout.version, "tokens": rollout.num_tokens, "step": rollout.step}
        yield from _nested(rollout.actor, name, name, began, taken, about)
        for stage, time in rollout.stages.items():
            yield from _nested(rollout.actor, name, stage, time.began, time.ended, {})
        yield from _nested(rollout.actor, name, "queue", scored, taken, {})


def _steps(run: RunDir) -> Iterator[tuple[float, float, float, int]]:
    """Of each step: when the learner began to wait for it, when it began to train, when it was recorded, its number.

    A duration and a date are of two clocks: a step begins when the one before it has ended, whatever they make of it.
    """
    return step_times(run.read_metrics())


def step_times(records: Iterable[Mapping[str, Any]]) -> Iterator[tuple[float, float, float, int]]:
    """As `_steps`, of records of consecutive steps."""
    before = 0.0
    for record in records:
        if "time" in record:
            ended, took = record["time"], record["step_time"]
            began = max(before, ended - took)
            yield began, min(ended, began + record["idle/learner"] * took), ended, record["step"]
            before = ended


def _at_work(run: RunDir) -> Activity:
    """When any process of the run decoded or trained: from an actor's first rollout on, but for its idle stretches."""
    stretches = [(trained, ended) for _, trained, ended, _ in _steps(run)]
    for _, spans in _spans(run):
        idle = [(began, ended) for name, began, ended in spans if name == "idle"]
        starts = [ended for _, ended in idle]
        ends = [began for began, _ in idle[1:]] + [max((ended for _, _, ended, _ in _steps(run)), default=0.0)]
        stretches += [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]
    return Activity(stretches)


def _event(process: str, track: str, name: str, began: float, ended: float) -> dict[str, Any]:
    start = _us(began)
    return {"ph": "X", "pid": process, "tid": track, "name": name, "ts": start, "dur": max(0, _us(ended) - start)}


def _nested(
    process: str, key: str, name: str, began: float, ended: float, about: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    common = {"pid": process, "tid": "rollouts", "cat": "rollout", "id": f"{process} {key}", "name": name}
    yield {**common, "ph": "b", "ts": _us(began), "args": dict(about)}
    yield {**common, "ph": "e", "ts": _us(ended)}


def _us(seconds: float) -> int:
    """Whole microseconds: what ends when another thing begins ends at the same number, and a viewer sees no overlap."""
    return round(seconds * 1e6)


def _numbered(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Processes and tracks as the numbers that viewers want, with their names beside them, and the events in time order."""
    processes: dict[str, int] = {}
    tracks: dict[tuple[str, str], int] = {}
    for event in events:
        process, track = event["pid"], event["tid"]
        if process not in processes:
            processes[process] = len(processes) + 1
            yield {"ph": "M", "pid": processes[process], "tid": 0, "name": "process_name", "args": {"name": process}}
        if (process, track) not in tracks:
            tracks[process, track] = len(tracks) + 1
            names = {"pid": processes[process], "tid": tracks[process, track]}
            yield {"ph": "M", **names, "name": "thread_name", "args": {"name": track}}
    # What ends comes before what begins at the same moment, or a viewer nests one in the other.
    for event in sorted(events, key=lambda event: (event["ts"], event["ph"] != "e")):
        yield {**event, "pid": processes[event["pid"]], "tid": tracks[event["pid"], event["tid"]]}
