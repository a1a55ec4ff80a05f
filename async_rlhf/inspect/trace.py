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
from async_rlhf.buffers.stages import StageTime, unpack
from async_rlhf.inspect.rollouts import records
from async_rlhf.run.reading import Reading

Event = dict[str, Any]


class TracedSpan(NamedTuple):
    """An activity of a process."""

    kind: str
    label: str
    began: float
    """Seconds since the epoch, like `ended`."""
    ended: float


def export(reading: Reading, out: Path) -> int:
    """Write the trace of a run; returns the number of events.

    Raises ConfigError when the run left nothing to draw, DamagedError as `records`.
    """
    steps = reading.run.read_metrics()
    trains = {step: trained for _, trained, _, step in step_times(steps)}
    events = [_event("learner", "steps", span) for span in learner_spans(steps)]
    for actor, lines in reading.spans().items():
        for span in map(actor_span, lines.whole()):
            events.append(_event(actor, "weights" if span.kind == "adopt" else "engine", span))
    for record in records(reading):
        for member, rollout in enumerate(record["rollouts"]):
            if stages := unpack(rollout["timings"]):
                events += _rollout(record, member, stages, trains)
    if not any(event["ph"] == "b" for event in events):
        raise ConfigError(f"{str(reading.run.path)!r} holds no rollouts with timings")
    numbered = list(_numbered(events))
    out.write_text(json.dumps({"traceEvents": numbered, "displayTimeUnit": "ms"}))
    return len(numbered)


def step_times(records: Iterable[Mapping[str, Any]]) -> Iterator[tuple[float, float, float, int]]:
    """(began to wait, began to train, was recorded, number) of each of consecutive steps.

    Durations and dates come from two clocks, so a step never begins before the one before it has ended.
    """
    before = 0.0
    for record in records:
        if "time" in record:
            ended, took = record["time"], record["step_time"]
            began = max(before, ended - took)
            yield began, min(ended, began + record["idle/learner"] * took), ended, record["step"]
            before = ended


def learner_spans(records: Iterable[Mapping[str, Any]]) -> Iterator[TracedSpan]:
    """The learner's spans in consecutive steps."""
    for began, trained, ended, step in step_times(records):
        yield TracedSpan("wait", f"wait for step {step}", began, trained)
        yield TracedSpan("train", f"train step {step}", trained, ended)


def actor_span(line: Mapping[str, Any]) -> TracedSpan:
    """The span in a line of an actor's file."""
    name = str(line["name"])
    return TracedSpan("adopt" if name.startswith("adopt") else "idle", name, float(line["began"]), float(line["ended"]))


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


def _event(process: str, track: str, span: TracedSpan) -> Event:
    start = _us(span.began)
    return {"ph": "X", "pid": process, "tid": track, "name": span.label, "ts": start, "dur": max(0, _us(span.ended) - start)}


def _us(seconds: float) -> int:
    """Whole microseconds, so that a span ends at the number at which the next one begins, and a viewer sees no overlap."""
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
    # Ends come before beginnings of the same moment, or a viewer nests one in the other.
    for event in sorted(events, key=lambda event: (event["ts"], event["ph"] != "e")):
        yield {**event, "pid": processes[event["pid"]], "tid": tracks[event["pid"], event["tid"]]}
