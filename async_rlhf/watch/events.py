"""What happened in a run, in one list for the page, newest first. Pure: no files, no clock. What is damaged stays blank.

from                what
changes.jsonl       values that an operator changed: asked for, applied from a step on; a run that went back, and a learner
                    that began again
events.jsonl        what may need a person
evaluations.jsonl   held-out rewards and accuracy, or why there are none
quarantine.jsonl    groups given up for good
metrics.jsonl       steps without an update
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from async_rlhf.run.run_files import figures
from async_rlhf.watch.series import is_number

MOST = 200
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
    """Ready for JSON: kind, text, and step and time (seconds since the epoch) where they are known. At most `MOST`.

    Each argument: lines of one file, oldest first; without_update: the steps of metrics.jsonl that were not applied.
    """
    found = [*_changes(changes)]
    found += [_event(line.get("event", ""), line, str(line.get("text", ""))) for line in raised]
    found += [_evaluated(line) for line in evaluations]
    found += [_event("quarantined", line, f"group {line.get('group')}: {line.get('reasons')}") for line in quarantined]
    found += [_event("no update", line, "loss or gradient not finite, or nothing to learn from") for line in without_update]
    return sorted(found, key=lambda event: (event["time"] or 0, event["step"] or 0), reverse=True)[:MOST]


def changed_from(changes: Iterable[Line]) -> list[int]:
    """The steps from which on something was changed, and still is, by these lines of changes.jsonl."""
    found: set[int] = set()
    for line in changes:
        kind, step = line.get("kind"), line.get("step")
        if kind == "applied" and is_number(step):
            found.add(int(step))
        elif kind == "undone" and is_number(step):
            found = {each for each in found if each <= step}
    return sorted(found)


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
