"""A run as a picture: one JSON file in Chrome's trace format, for ui.perfetto.dev or chrome://tracing.

    what                          read from
    generation, each reward       the timings of every recorded rollout (`rollouts.records`)
    queueing                      from a group's last score to the start of the step that trained on it
    waiting, training             metrics.jsonl
    idle engine, adopted weights  spans/<actor>.jsonl

All times are seconds since the epoch, of the clock of the host on which they were taken: hosts keep one time by NTP.

Format: "Trace Event Format" (Google, 2016): complete events "X" on tracks, nestable events "b"/"e" for rollouts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.stages import GENERATION, Activity, StageTime, read_spans, unpack
from async_rlhf.inspect.rollouts import records
from async_rlhf.run.run_dir import RunDir

Event = dict[str, Any]


class Overlap(NamedTuple):
    """Seconds of a stage over all rollouts, and those of them without any decoding or training."""

    seconds: float
    exposed_s: float

    @property
    def share(self) -> float:
        """Of what was hidden."""
        return 1.0 - self.exposed_s / self.seconds if self.seconds > 0 else 1.0


def export(run: RunDir, out: Path) -> tuple[int, dict[str, Overlap]]:
    """Write the trace of a run; returns the number of events and, by reward, how many of its seconds the run stood still.

    A wait for a score that any engine's decoding or the learner's training fills is hidden; the rest is exposed. Raises
    ConfigError when the run left nothing to draw, DamagedError as `records`.
    """
    steps = list(step_times(run.read_metrics()))
    spans = {
        path.stem: [(span["name"], span["began"], span["ended"]) for span in read_spans(path)]
        for path in sorted((run.path / "spans").glob("*.jsonl"))
    }
    working, trains = _at_work(steps, spans), {step: trained for _, trained, _, step in steps}
    events, waits = [*_learner(steps), *_actors(spans)], dict[str, Overlap]()
    for record in records(run):
        for member, rollout in enumerate(record["rollouts"]):
            if not (stages := unpack(rollout["timings"])):
                continue
            events += _rollout(record, member, stages, trains)
            for name, time in stages.items():
                if name != GENERATION:
                    seconds, exposed = waits.get(name, (0.0, 0.0))
                    exposed += max(0.0, time.seconds - working.covers(time.began, time.ended))
                    waits[name] = Overlap(seconds + time.seconds, exposed)
    if not any(event["ph"] == "b" for event in events):
        raise ConfigError(f"{str(run.path)!r} holds no rollouts with timings")
    numbered = list(_numbered(events))
    out.write_text(json.dumps({"traceEvents": numbered, "displayTimeUnit": "ms"}))
    return len(numbered), waits


def step_times(records: Iterable[Mapping[str, Any]]) -> Iterator[tuple[float, float, float, int]]:
    """Of each of consecutive steps: when the learner began to wait for it, when it began to train, when it was recorded, its
    number.

    A duration and a date are of two clocks: a step begins when the one before it has ended, whatever they make of it.
    """
    before = 0.0
    for record in records:
        if "time" in record:
            ended, took = record["time"], record["step_time"]
            began = max(before, ended - took)
            yield began, min(ended, began + record["idle/learner"] * took), ended, record["step"]
            before = ended


def _learner(steps: list[tuple[float, float, float, int]]) -> Iterator[Event]:
    for began, trained, ended, step in steps:
        yield _event("learner", "steps", f"wait for step {step}", began, trained)
        yield _event("learner", "steps", f"train step {step}", trained, ended)


def _actors(spans: Mapping[str, list[tuple[str, float, float]]]) -> Iterator[Event]:
    for actor, found in spans.items():
        for name, began, ended in found:
            yield _event(actor, "weights" if name.startswith("adopt") else "engine", name, began, ended)


def _rollout(
    record: Mapping[str, Any], member: int, stages: Mapping[str, StageTime], trains: Mapping[int, float]
) -> Iterator[Event]:
    rollout, name = record["rollouts"][member], f"group {record['group']}.{member}"
    began, scored = min(time.began for time in stages.values()), max(time.ended for time in stages.values())
    taken = max(scored, trains.get(record["step"], scored))
    sampled = [(version, count) for version, count in rollout["spans"] if version is not None]
    about = {"version": sampled[0][0], "tokens": sum(count for _, count in sampled), "step": record["step"]}
    common = {"pid": record["actor"], "tid": "rollouts", "cat": "rollout", "id": f"{record['actor']} {name}"}
    for what, begin, end, args in (
        (name, began, taken, about),
        *((stage, time.began, time.ended, {}) for stage, time in stages.items()),
        ("queue", scored, taken, {}),
    ):
        yield {**common, "name": what, "ph": "b", "ts": _us(begin), "args": args}
        yield {**common, "name": what, "ph": "e", "ts": _us(end)}


def _at_work(steps: list[tuple[float, float, float, int]], spans: Mapping[str, list[tuple[str, float, float]]]) -> Activity:
    """When any process of the run decoded or trained: from an actor's first rollout on, but for its idle stretches."""
    stretches = [(trained, ended) for _, trained, ended, _ in steps]
    last = max((ended for _, _, ended, _ in steps), default=0.0)
    for found in spans.values():
        idle = [(began, ended) for name, began, ended in found if name == "idle"]
        ends = [began for began, _ in idle[1:]] + [last]
        stretches += [(start, end) for (_, start), end in zip(idle, ends, strict=False) if start < end]
    return Activity(stretches)


def _event(process: str, track: str, name: str, began: float, ended: float) -> Event:
    start = _us(began)
    return {"ph": "X", "pid": process, "tid": track, "name": name, "ts": start, "dur": max(0, _us(ended) - start)}


def _us(seconds: float) -> int:
    """Whole microseconds: what ends when another thing begins ends at the same number, and a viewer sees no overlap."""
    return round(seconds * 1e6)


def _numbered(events: list[Event]) -> Iterator[Event]:
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
