"""The events of a run, for the page: a list, newest first, and a time line of its newest seconds. Pure: no files, no clock.
Damaged values stay blank or are left out.

of the list         what
changes.jsonl       values that an operator changed: asked for, applied from a step on; a run that went back, and a learner
                    that began again
events.jsonl        what may need a person
evaluations.jsonl   held-out rewards and accuracy, or why there are none
quarantine.jsonl    groups given up for good
metrics.jsonl       steps without an update

lane                spans
learner             waits for a batch, trains on it
an actor            adopts weights, is idle
groups of it        generation and scoring of those that were sampled, one under the other where they overlap
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from async_rlhf.buffers.stages import GENERATION, unpack
from async_rlhf.inspect.trace import TracedSpan, actor_span, learner_spans
from async_rlhf.run.reading import MOST_EVENTS
from async_rlhf.run.run_files import figures, is_number

MOST_STEPS = 30
MAX_S = 600.0
_MAX_SPANS = 400
_MAX_ROWS = 6
_MAX_TEXT = 1000
_WENT_BACK = "the run goes on from this step; what was changed behind it is forgotten"
_CHANGES = {"asked": "change asked", "applied": "change applied", "undone": "went back", "reached": "learner starts again"}

Line = Mapping[str, Any]


def events(
    changes: Iterable[Line] = (),
    raised: Iterable[Line] = (),
    evaluations: Iterable[Line] = (),
    quarantined: Iterable[Line] = (),
    without_update: Iterable[Line] = (),
) -> list[dict[str, Any]]:
    """Ready for JSON: kind, text, and step and time (seconds since the epoch) where they are known. At most `MOST_EVENTS`.

    Each argument: lines of one file, oldest first; without_update: the steps of metrics.jsonl that were not applied.
    """
    shown = [*_changes(changes)]
    shown += [_event(line.get("event", ""), line, str(line.get("text", ""))) for line in raised]
    shown += [_evaluated(line) for line in evaluations]
    shown += [_event("quarantined", line, f"group {line.get('group')}: {line.get('reasons')}") for line in quarantined]
    shown += [_event("no update", line, "loss or gradient not finite, or nothing to learn from") for line in without_update]
    return sorted(shown, key=lambda event: (event["time"] or 0, event["step"] or 0), reverse=True)[:MOST_EVENTS]


def _changes(lines: Iterable[Line]) -> Iterator[dict[str, Any]]:
    """A line that applies a change names only its number; the values are those that were asked for."""
    asked: dict[str, str] = {}
    for line in lines:
        kind, number, values = str(line.get("kind", "change")), str(line.get("number")), line.get("values")
        if isinstance(values, Mapping):
            asked[number] = ", ".join(f"{key} {_pair(value)}" for key, value in values.items())
        text = asked.get(number) or (_WENT_BACK if kind == "undone" else "")
        yield _event(_CHANGES.get(kind, f"change {kind}"), line, text)


def _evaluated(line: Line) -> dict[str, Any]:
    words = [f"{name} {value:.4g}" for name, value in figures(line).items()]
    return _event("evaluation", line, str(line["missing"]) if "missing" in line else ", ".join(words))


def _pair(value: object) -> str:
    return f"{value[0]} → {value[1]}" if isinstance(value, list) and len(value) == 2 else str(value)


def _event(kind: object, line: Line, text: str) -> dict[str, Any]:
    step, time = (value if is_number(value) else None for value in (line.get("step"), line.get("time")))
    return {"kind": str(kind)[:40], "step": step, "time": time, "text": text[:_MAX_TEXT]}


def timeline(
    steps: Sequence[Mapping[str, Any]],
    spans: Mapping[str, Iterable[Mapping[str, Any]]],
    samples: Iterable[Mapping[str, Any]],
) -> dict[str, Any]:
    """Ready for JSON: `began`, `ended` and `lanes`, of the newest steps and of `MAX_S` at most; empty before the first step.

    steps: records of metrics, oldest first. spans: lines of each actor's span file. samples: lines of rollouts.jsonl. What is
    damaged is left out.
    """
    # the first of them begins by its own account
    learner = [*learner_spans(record for record in steps[-MOST_STEPS - 1 :] if _whole(learner_spans([record])))]
    if not learner:
        return {"began": 0.0, "ended": 0.0, "lanes": []}
    ended = max(span.ended for span in learner)
    began = max(min(span.began for span in learner), ended - MAX_S)
    lanes = [("learner", learner)]
    groups = _groups(samples)
    for actor in sorted({*spans, *groups}):
        lanes.append((actor, [span for line in spans.get(actor, ()) for span in _whole(map(actor_span, [line]))]))
        lanes += [(f"{actor} groups", row) for row in stacked(groups.get(actor, []))]
    shown = [(name, [span for span in lane if span.ended > began and span.began < ended]) for name, lane in lanes]
    return {
        "began": began,
        "ended": ended,
        "lanes": [{"name": name, "spans": lane[-_MAX_SPANS:]} for name, lane in shown if lane or name == "learner"],
    }


def stacked(groups: Iterable[Sequence[TracedSpan]], rows: int = _MAX_ROWS) -> list[list[TracedSpan]]:
    """Groups of spans in rows without overlap, each in the first free row; groups without a free row are left out."""
    placed: list[list[TracedSpan]] = []
    for group in sorted(groups, key=lambda group: group[0].began):
        row = next((row for row in placed if row[-1].ended <= group[0].began), None)
        if row is None and len(placed) < rows:
            placed.append(row := [])
        if row is not None:
            row.extend(group)
    return placed


def _whole(spans: Iterator[TracedSpan]) -> list[TracedSpan]:
    """The spans that are not damaged."""
    with suppress(KeyError, TypeError, ValueError):
        return list(spans)
    return []


def _groups(samples: Iterable[Mapping[str, Any]]) -> dict[str, list[list[TracedSpan]]]:
    """By actor: each group's generation, and its scoring after that."""
    by_actor: dict[str, list[list[TracedSpan]]] = {}
    for sample in samples:
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            timings = [unpack(rollout["timings"]) for rollout in sample["rollouts"]]
            generated = [times[GENERATION] for times in timings]
            scored = [time for times in timings for name, time in times.items() if name != GENERATION]
            began, ended = min(time.began for time in generated), max(time.ended for time in generated)
            label = f"group {int(sample['group'])}"
            spans = [TracedSpan("generate", f"{label}: generation", began, ended)]
            if scored and (last := max(time.ended for time in scored)) > ended:
                spans.append(TracedSpan("score", f"{label}: scoring", ended, last))
            by_actor.setdefault(str(sample["actor"]), []).append(spans)
    return by_actor
