"""When each stage of a rollout ran: its generation, each of its rewards. Written by actors, read by the learner and a trace.

In a record they are plain numbers under `timings`: `<stage>.began` and `<stage>.ended` in seconds since the epoch, and
`<stage>.hidden_s`, the seconds of it during which the actor's engine was decoding, so that it cost no time there. A
reward that read the completion along while it was being generated has done so for `<stage>.ahead_s` seconds more.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from async_rlhf.buffers.lines import LineFile

GENERATION = "generation"
"""From the request to the last token; waiting for a slot is part of it."""
_AHEAD = ".ahead_s"


class StageTime(NamedTuple):
    """Seconds since the epoch, and how many of the seconds between were hidden behind decoding."""

    began: float
    ended: float
    hidden_s: float = 0.0

    @property
    def seconds(self) -> float:
        """0 where the clock was set back meanwhile."""
        return max(0.0, self.ended - self.began)


def pack(stages: Mapping[str, StageTime]) -> dict[str, float]:
    """The times as a rollout's timings have them, rounded to microseconds."""
    return {f"{name}.{part}": round(value, 6) for name, time in stages.items() for part, value in time._asdict().items()}


def pack_ahead(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds that each stage worked on a completion before its end, by stage."""
    return {f"{name}{_AHEAD}": round(value, 6) for name, value in seconds.items()}


def unpack(timings: Mapping[str, float]) -> dict[str, StageTime]:
    """The stages in a rollout's timings, in the order in which they were written."""
    names = [key.removesuffix(".began") for key in timings if key.endswith(".began")]
    return {
        name: StageTime(timings[f"{name}.began"], timings[f"{name}.ended"], timings.get(f"{name}.hidden_s", 0.0))
        for name in names
        if f"{name}.ended" in timings
    }


def stage_metrics(rollouts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Means over the rollouts' timings: `stages/<name>/seconds`, and of every reward the seconds without any decoding.

    `stages/<name>/ahead_s`: of a reward that reads along, its seconds before the completions ended; not in the others.
    `stages/exposed_ratio`: of all seconds of scoring, the share during which the completion's own engine had nothing to do.
    """
    by_stage: dict[str, list[StageTime]] = {}
    ahead: dict[str, list[float]] = {}
    for timings in rollouts:
        for key in timings:
            if key.endswith(_AHEAD):
                ahead.setdefault(key.removesuffix(_AHEAD), []).append(timings[key])
        for name, time in unpack(timings).items():
            by_stage.setdefault(name, []).append(time)
    metrics = {f"stages/{name}/seconds": _mean([time.seconds for time in times]) for name, times in by_stage.items()}
    metrics |= {f"stages/{name}/ahead_s": _mean(seconds) for name, seconds in ahead.items()}
    scoring = {name: times for name, times in by_stage.items() if name != GENERATION}
    for name, times in scoring.items():
        metrics[f"stages/{name}/exposed_s"] = _mean([max(0.0, time.seconds - time.hidden_s) for time in times])
    total = sum(time.seconds for times in scoring.values() for time in times)
    exposed = sum(max(0.0, time.seconds - time.hidden_s) for times in scoring.values() for time in times)
    return {**metrics, "stages/exposed_ratio": exposed / total} if total > 0 else metrics


class Activity:
    """Intervals in which something was busy, and how much of another interval they cover. Times only rise.

    Owns one entry for each stretch without a pause; `forget` drops what is older than every open question.
    """

    def __init__(self, intervals: Iterable[tuple[float, float]] = ()) -> None:
        self._began: list[float] = []
        self._ended: list[float] = []
        for began, ended in sorted(intervals):
            self.add(began, ended)

    def add(self, began: float, ended: float) -> None:
        """A stretch of work; one that touches the last is the same stretch."""
        if self._ended and began <= self._ended[-1]:
            self._ended[-1] = max(self._ended[-1], ended)
        elif ended > began:
            self._began.append(began)
            self._ended.append(ended)

    def covers(self, began: float, ended: float) -> float:
        """Seconds of [began, ended] that fall into stretches of work."""
        seconds = 0.0
        for i in range(max(0, bisect_right(self._began, began) - 1), len(self._began)):
            if self._began[i] >= ended:
                break
            seconds += max(0.0, min(ended, self._ended[i]) - max(began, self._began[i]))
        return seconds

    def forget(self, before: float) -> None:
        keep = bisect_right(self._ended, before)
        del self._began[:keep], self._ended[:keep]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_log = logging.getLogger(__name__)


class SpanFile:
    """A process's timed activities (idle stretches, adopted weights), one JSON object a line, for a trace afterwards.

    Owns the file, appended to by one process. max_bytes: as of `LineFile`. `lost_lines`: those that could not be written, on a
    full disk for example."""

    def __init__(self, path: Path, max_bytes: int | None = None) -> None:
        self._file = LineFile(path, max_bytes)
        self._file.cut()
        self.lost_lines = 0

    def write(self, name: str, began: float, ended: float, **about: Any) -> None:
        """name: what it was. began, ended: seconds since the epoch."""
        span = {"name": name, "began": round(began, 6), "ended": round(ended, 6), **about}
        try:
            self._file.write(json.dumps(span))
        except OSError as error:
            if not self.lost_lines:
                _log.error("spans are lost from here on as long as this lasts: %s", error)
            self.lost_lines += 1

    def close(self) -> None:
        self._file.close()
