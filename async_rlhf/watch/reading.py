"""What the page shows of one run, kept up to date by reading only what was added: bounded in memory and in time.

Who watches asks `refresh` now and then, from one thread at a time; what it gives out are plain values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from async_rlhf.buffers.errors import AsyncRLHFError, DamagedError
from async_rlhf.run.reading import MOST_EVENTS, Reading
from async_rlhf.run.run_dir import RunDir
from async_rlhf.watch.completions import Decode, decoder, shown
from async_rlhf.watch.events import MOST_STEPS, events, timeline
from async_rlhf.watch.series import MAX_STEP, History, ages, numbers


class RunReading:
    """Owns what was read of one run. problems: what cannot be read, in words; renewed by `refresh`."""

    def __init__(self, run: RunDir) -> None:
        self.files, self.problems, self.history = Reading(run, brief=True), list[str](), History()
        self._steps: deque[dict[str, Any]] = deque(maxlen=MOST_STEPS + 1)
        self._refused: deque[dict[str, Any]] = deque(maxlen=MOST_EVENTS)

    def refresh(self) -> None:
        """Read what was added."""
        self.problems = self.files.refresh(self._take)

    def timeline(self) -> dict[str, Any]:
        """Of the newest steps, in the supervisor's time."""
        spans = {actor: list(recent.lines) for actor, recent in self.files.spans().items()}
        return timeline(list(self._steps), spans, list(self.files.samples.lines))

    def completions(self) -> list[dict[str, Any]]:
        """The newest sampled groups, newest first."""
        decode = decode_of(self.files.run)
        found = [shown(sample, decode) for sample in reversed(self.files.samples.lines)]
        return [group for group in found if group is not None]

    def events(self, evaluations: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """What happened, newest first (`events`)."""
        files = self.files
        return events(files.changes.lines, files.events.lines, evaluations, files.quarantined.lines, self._refused)

    def changed(self) -> list[int]:
        """The steps from which on something was changed; none where that cannot be read, which the status says."""
        with suppress(DamagedError, OSError):
            return self.files.changed()
        return []

    def _take(self, record: dict[str, Any]) -> None:
        if not 0 <= (step := record["step"]) <= MAX_STEP:
            return
        self.history.add(step, {k: v for k, v in numbers(record).items() if k not in ("step", "time")}, ages(record))
        while self._steps and self._steps[-1]["step"] >= step:
            self._steps.pop()
        self._steps.append(record)
        if record.get("applied") is False:
            self._refused.append({"step": step, "time": record.get("time")})


def decode_of(run: RunDir) -> Decode | None:
    """By the tokenizer of the newest checkpoint, else by that of the run's model."""
    with suppress(OSError):
        path = run.latest / "model" / "tokenizer.json"
        return decoder(path, path.stat().st_mtime)
    with suppress(OSError, ValueError, AsyncRLHFError):
        path = Path(run.config().model) / "tokenizer.json"
        return decoder(path, path.stat().st_mtime)
    return None
