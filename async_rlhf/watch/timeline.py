"""What each process did in the newest seconds of a run, as lanes of spans for a picture. Pure: no files, no clock.

lane             spans
learner          waits for a batch, trains on it
an actor         adopts weights, is idle
groups of it     generation and scoring of those that were sampled, one under the other where they overlap
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from async_rlhf.buffers.stages import GENERATION, unpack
from async_rlhf.inspect.trace import step_times

MOST_STEPS = 30
MAX_S = 600.0
_MAX_SPANS = 400
_MAX_ROWS = 6


class Span(NamedTuple):
    """kind: what colours it. began, ended: seconds since the epoch."""

    kind: str
    label: str
    began: float
    ended: float


def timeline(
    steps: Sequence[Mapping[str, Any]],
    spans: Mapping[str, Iterable[Mapping[str, Any]]],
    samples: Iterable[Mapping[str, Any]],
) -> dict[str, Any]:
    """Ready for JSON: `began`, `ended` and `lanes`, of the newest steps and of `MAX_S` at most; empty before the first step.

    steps: records of metrics, oldest first. spans: lines of each actor's span file. samples: lines of rollouts.jsonl. What is
    damaged is left out.
    """
    learner = _learner([record for record in steps[-MOST_STEPS - 1 :] if _learner([record])])
    if not learner:
        return {"began": 0.0, "ended": 0.0, "lanes": []}
    ended = max(span.ended for span in learner)
    began = max(min(span.began for span in learner), ended - MAX_S)
    lanes = [("learner", learner)]
    groups = _groups(samples)
    for actor in sorted({*spans, *groups}):
        lanes.append((actor, [span for line in spans.get(actor, ()) for span in _of_actor(line)]))
        lanes += [(f"{actor} groups", row) for row in stacked(groups.get(actor, []))]
    shown = [(name, [span for span in lane if span.ended > began and span.began < ended]) for name, lane in lanes]
    return {
        "began": began,
        "ended": ended,
        "lanes": [{"name": name, "spans": lane[-_MAX_SPANS:]} for name, lane in shown if lane or name == "learner"],
    }


def stacked(groups: Iterable[Sequence[Span]], rows: int = _MAX_ROWS) -> list[list[Span]]:
    """Groups of spans in rows in which no two overlap, each in the first row that is free; what finds none is left out."""
    placed: list[list[Span]] = []
    for group in sorted(groups, key=lambda group: group[0].began):
        row = next((row for row in placed if row[-1].ended <= group[0].began), None)
        if row is None and len(placed) < rows:
            placed.append(row := [])
        if row is not None:
            row.extend(group)
    return placed


def _learner(steps: Sequence[Mapping[str, Any]]) -> list[Span]:
    """The first of them begins by its own account."""
    found: list[Span] = []
    with suppress(KeyError, TypeError, ValueError):
        for began, trained, ended, step in step_times(steps):
            found += [
                Span("wait", f"wait for step {step}", began, trained),
                Span("train", f"train step {step}", trained, ended),
            ]
    return found


def _of_actor(line: Mapping[str, Any]) -> list[Span]:
    with suppress(KeyError, TypeError, ValueError):
        name = str(line["name"])
        return [Span("adopt" if name.startswith("adopt") else "idle", name, float(line["began"]), float(line["ended"]))]
    return []


def _groups(samples: Iterable[Mapping[str, Any]]) -> dict[str, list[list[Span]]]:
    """By actor; of each group its generation, and its scoring from the end of that on."""
    found: dict[str, list[list[Span]]] = {}
    for sample in samples:
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            timings = [unpack(rollout["timings"]) for rollout in sample["rollouts"]]
            generated = [times[GENERATION] for times in timings]
            scored = [time for times in timings for name, time in times.items() if name != GENERATION]
            began, ended = min(time.began for time in generated), max(time.ended for time in generated)
            label = f"group {int(sample['group'])}"
            spans = [Span("generate", f"{label}: generation", began, ended)]
            if scored and (last := max(time.ended for time in scored)) > ended:
                spans.append(Span("score", f"{label}: scoring", ended, last))
            found.setdefault(str(sample["actor"]), []).append(spans)
    return found
