"""The record of the learner's steps: `metrics.jsonl`, a line a step, and `rollouts.jsonl`, a sample of their groups.

    owns        both files
    waits for   room on the disk, where a step finds none. Without a deadline of its own: a run that finishes no step ends
                after `stall_timeout_s`
    woken by    nothing: it tries again every `_AGAIN_S`
    on close    nothing is left to write

A resumed run continues the same files: what a lost incarnation wrote beyond the checkpoint is cut off first, so that steps
never go back. The metrics have no hole, so they wait; a sample that cannot be written is counted and left out.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from async_rlhf.buffers.files import FULL
from async_rlhf.buffers.lines import LineFile, read_lines_backwards
from async_rlhf.learner.loop.budget import Spent

_log = logging.getLogger(__name__)
_AGAIN_S = 1.0


class Recording:
    """See the module docstring. max_bytes: after which the samples begin anew (`LineFile`); metrics are kept whole. `sleep`:
    how it waits for room. `lost_lines`: those that should be in the files and are not."""

    def __init__(self, directory: Path, max_bytes: int | None = None, sleep: Callable[[float], object] = time.sleep) -> None:
        self._sleep = sleep
        self._metrics = LineFile(directory / "metrics.jsonl")
        self._samples = LineFile(directory / "rollouts.jsonl", max_bytes)
        self._begun = False
        self.lost_lines = 0

    def begin(self, steps_done: int) -> None:
        """Cut off the lines of steps after `steps_done`, the checkpoint's; nothing when it has begun already."""
        if self._begun:
            return
        self._begun, last = True, 0
        for name, file in (("rollouts.jsonl", self._samples), ("metrics.jsonl", self._metrics)):
            cut = file.cut(lambda line: isinstance(line.get("step"), int) and line["step"] <= steps_done)
            last = 0 if cut.last is None else cut.last["step"]
            if cut.damaged:
                _log.warning("%s ended with %d bytes that were no whole lines; they are cut off", name, cut.damaged)
        if last < steps_done:
            self.lost_lines += steps_done - last
            _log.error("metrics.jsonl is damaged: it has no lines of the steps from %d to %d", last + 1, steps_done)

    def step(self, record: Mapping[str, Any]) -> None:
        """Write down a step; on a full disk wait until there is room. Raises OSError for every other failure of the disk."""
        line, full = as_line(record), False
        while True:
            try:
                self._metrics.write(line)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                if not full:
                    _log.error("the disk is full: step %s waits until metrics.jsonl has room (%s)", record["step"], error)
                full = True
                self._sleep(_AGAIN_S)
            else:
                break
        if full:
            _log.warning("there is room on the disk again: step %s is recorded", record["step"])

    def sample(self, record: Mapping[str, Any]) -> None:
        """Write down a group that was trained on; one that cannot be written is counted."""
        try:
            self._samples.write(as_line(record))
        except OSError as error:
            if not self.lost_lines:
                _log.error("rollouts.jsonl loses lines as long as this lasts: %s", error)
            self.lost_lines += 1

    def sync(self) -> None:
        """Make all records so far durable; may be called by another thread. Raises OSError."""
        self._metrics.sync()
        self._samples.sync()

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()


def spent(directory: Path, steps_done: int) -> Spent:
    """The used budget at the end of this step, from its line of `metrics.jsonl`; without one only the steps."""
    lines = read_lines_backwards(directory / "metrics.jsonl") if steps_done else ()
    return next((Spent.until(line) for line in lines if line.get("step") == steps_done), Spent(steps_done))


def last_step(directory: Path) -> int:
    """The step of the last line of `metrics.jsonl`; 0 where there is none."""
    lines = read_lines_backwards(directory / "metrics.jsonl")
    return next((line["step"] for line in lines if isinstance(line.get("step"), int)), 0)


def as_line(record: Mapping[str, Any]) -> str:
    """One JSON object. A number that is not finite becomes null, which every reader of JSON understands."""
    return json.dumps(_finite(record), default=float, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
