"""What is known of one run, kept up to date by reading only what was added: bounded in memory and in time.

Who watches asks `refresh` now and then, from one thread at a time; what it gives out are plain values. Every file may be
missing, damaged or foreign (`run_files`): what cannot be read is counted or named beside the rest. Writes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from async_rlhf.buffers.errors import AsyncRLHFError
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.run_files import Tail, is_long, is_step, read_last_lines, read_steps
from async_rlhf.watch.completions import Decode, decoder, shown
from async_rlhf.watch.events import MOST, MOST_STEPS, changed_from, events, timeline
from async_rlhf.watch.series import MAX_STEP, History, ages, numbers

_GROUPS, _SPANS, _EVENTS = 24, 400, MOST
_MAX_ACTORS = 64


class Recent:
    """The newest lines of a JSONL file. The first `refresh` reads its end, each later one what was added."""

    def __init__(self, path: Path, keep: int) -> None:
        self._path, self._tail = path, Tail(path)
        self.lines: deque[dict[str, Any]] = deque(maxlen=keep)
        self.changed = 0
        self._begun = False

    @property
    def unreadable(self) -> int:
        return self._tail.unreadable

    def refresh(self) -> None:
        """Raises DamagedError when it is no regular file."""
        added: Iterable[dict[str, Any]] = ()
        if not self._begun:
            self._begun = True
            self._tail.skip()
            found = read_last_lines(self._path)
            added, self._tail.unreadable = found.records, found.unreadable
        before = len(self.lines), self.changed
        for line in chain(added, self._tail.rest()):
            self.lines.append(line)
            self.changed = before[1] + 1


class RunReading:
    """Owns what was read of one run. problems: what cannot be read, in words; renewed by `refresh`."""

    def __init__(self, run: RunDir) -> None:
        self.run, self.problems = run, list[str]()
        self.history, self.is_spread = History(), False
        self._metrics = Tail(run.metrics)
        self._steps: deque[dict[str, Any]] = deque(maxlen=MOST_STEPS + 1)
        self._samples = Recent(run.samples, _GROUPS)
        self._changes = Recent(run.path / "changes.jsonl", _EVENTS)
        self._happened = Recent(run.path / "events.jsonl", _EVENTS)
        self._quarantine = Recent(run.path / "quarantine.jsonl", _EVENTS)
        self._spans: dict[str, Recent] = {}
        self._refused: deque[dict[str, Any]] = deque(maxlen=_EVENTS)
        self._begun = False

    def refresh(self) -> None:
        """Read what was added."""
        self.problems = []
        with self._noting():
            for record in self._added():
                self._take(record)
        with suppress(OSError):
            for path in sorted((self.run.path / "spans").glob("*.jsonl"))[:_MAX_ACTORS]:
                self._spans.setdefault(path.stem, Recent(path, _SPANS))
        for recent in (self._samples, self._changes, self._happened, self._quarantine, *self._spans.values()):
            with self._noting():
                recent.refresh()
        if unreadable := self._metrics.unreadable:
            self.problems.append(f"metrics.jsonl: damaged lines that are left out: {unreadable}")
        if unreadable := self._samples.unreadable:
            self.problems.append(f"rollouts.jsonl: damaged lines that are left out: {unreadable}")

    @property
    def seen(self) -> int:
        """Rises when there are new completions to read."""
        return self._samples.changed

    def timeline(self) -> dict[str, Any]:
        """Of the newest steps, in the supervisor's time."""
        spans = {actor: list(recent.lines) for actor, recent in self._spans.items()}
        return timeline(list(self._steps), spans, list(self._samples.lines))

    def completions(self) -> list[dict[str, Any]]:
        """The newest sampled groups, newest first."""
        decode = decode_of(self.run)
        found = [shown(sample, decode) for sample in reversed(self._samples.lines)]
        return [group for group in found if group is not None]

    def events(self, evaluations: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """What happened, newest first (`events`)."""
        return events(self._changes.lines, self._happened.lines, evaluations, self._quarantine.lines, self._refused)

    def changed(self) -> list[int]:
        """The steps from which on something was changed (`changed_from`)."""
        return changed_from(self._changes.lines)

    def _added(self) -> Iterable[dict[str, Any]]:
        if self._begun:
            return self._metrics.rest()
        self._begun = True
        self.is_spread = is_long(self.run.metrics)
        if not self.is_spread:
            return self._metrics.rest()
        self._metrics.skip()  # what is written from here on is read by `rest`; a line that comes twice takes its own place
        return chain(read_steps(self.run.metrics), self._metrics.rest())

    def _take(self, record: dict[str, Any]) -> None:
        if not is_step(record) or not 0 <= record["step"] <= MAX_STEP:
            return
        step = record["step"]
        self.history.add(step, {k: v for k, v in numbers(record).items() if k not in ("step", "time")}, ages(record))
        while self._steps and self._steps[-1]["step"] >= step:
            self._steps.pop()
        self._steps.append(record)
        if record.get("applied") is False:
            self._refused.append({"step": step, "time": record.get("time")})

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """What cannot be read inside is a problem in words."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  whatever stands in one file, the others are read
            self.problems.append(str(error) or repr(error))


def decode_of(run: RunDir) -> Decode | None:
    """By the tokenizer of the newest checkpoint, else by that of the run's model."""
    with suppress(OSError):
        path = run.latest / "model" / "tokenizer.json"
        return decoder(path, path.stat().st_mtime)
    with suppress(OSError, ValueError, AsyncRLHFError):
        path = Path(run.config().model) / "tokenizer.json"
        return decoder(path, path.stat().st_mtime)
    return None
