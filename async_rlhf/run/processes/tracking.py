"""A tracker's process: what a run's files hold, step by step and evaluation by evaluation, is sent on to one service.

    owns        the service's library; `tracking.KIND.json`, and the lock beside it
    waits for   nothing; what the library waits for is its own affair
    woken by    the clock, every `_SEND_S`
    on close    the service is given the rest

It only reads what the run has written, so it can hold up nothing. Everything is sent at least once, in order: its file holds
how far it was, and is written afterwards. A step that is done again is shown as it was the first time; a run that is set back
goes on as another one of the service, which gets the steps before as well.
"""

from __future__ import annotations

import fcntl
import json
import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError, DamagedError
from async_rlhf.buffers.files import write_whole
from async_rlhf.buffers.images.store import ImageStore
from async_rlhf.launch.program import Node
from async_rlhf.run.config import Config
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.run_files import is_step, read_lines, read_small
from async_rlhf.run.tracking import KINDS, Row, Tracker, opened
from async_rlhf.run.watching import TrackerKind

_SEND_S = 2.0
# A service's answer without an end fills no more than this of the machine.
_MOST_MEMORY = 2 << 30
_KEPT = 500  # lines after which it is written how far it is
# Limits of a table: steps between groups, rows, and characters of a text; and images of a step.
_SAMPLED_EVERY, _MOST_ROWS, _LONGEST, _MOST_IMAGES = 25, 32, 4000, 8
# Keys of a line that are not measurements.
_NO_MEASURES = ("step", "time", "version", "num_prompts")


class _Sent(BaseModel):
    """The state of sending: the step of the last sent line, the number of evaluations, the last step with a table of its
    groups; and the branch that it sends to."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    step: int = Field(default=0, ge=0)
    evaluations: int = Field(default=0, ge=0)
    sampled: int = Field(default=0, ge=0)
    branch: int = Field(default=1, ge=1)


def tracker_nodes(config: Config, run: RunDir) -> list[Node]:
    kinds = dict.fromkeys(config.tracking.kind)
    return [Node(f"tracker-{kind}", "tracker", (kind,), run.log(f"tracker-{kind}")) for kind in kinds]


def run_tracker(run: RunDir, config: Config, kind: TrackerKind, *, progress: Callable[[], None] = lambda: None) -> None:
    """The process, until the run's roles have ended and all is sent. Raises ConfigError where another process sends."""
    _send(run, kind, run.is_announced, progress)


def track(run: RunDir, kind: str, say: Callable[[str], None]) -> None:
    """The command: sends all lines that the service lacks, and follows a live run to its end. Raises ConfigError, DamagedError,
    and AsyncRLHFError for what the service or its library refuses."""
    if kind not in KINDS:
        raise ConfigError(f"--to {kind!r} is no tracker; choose one of: {', '.join(KINDS)}")
    if run.is_alive():
        say(f"sends what {run.path} has, and what it adds, to its end; Ctrl-C ends this, not the run")
    try:
        sent = _send(run, kind, run.is_alive)
    except AsyncRLHFError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(f"--to {kind} needs the package {error.name}: pip install {error.name}") from error
    except Exception as error:  # whatever a service or its library raises
        raise AsyncRLHFError(f"{kind} fails: {error!r}. The same command goes on where it was") from error
    say(f"{kind} has {sent.step} steps and {sent.evaluations} evaluations of {run.path}")


def _send(run: RunDir, kind: TrackerKind, goes_on: Callable[[], bool], progress: Callable[[], None] = lambda: None) -> _Sent:
    """Send while the run goes on, and then the rest; returns the state of sending."""
    with _alone(run, kind), _bounded_memory():
        sent = _read(run, kind)
        tracker, lines = opened(kind, run, sent.branch), _UnsentLines(Reading(run))
        while True:
            is_last = not goes_on()  # looked at before the files are: after it nothing more is written
            for now_sent in lines.send(tracker, sent, is_last=is_last):
                if now_sent != sent:
                    tracker.flush()
                    write_whole(run.tracked(kind), now_sent.model_dump_json() + "\n")
                    sent = now_sent
                    progress()
            if is_last:
                break
            time.sleep(_SEND_S)
        tracker.close()
    return sent


@contextmanager
def _alone(run: RunDir, kind: str) -> Iterator[None]:
    """Within, no other process sends the run to this service. Raises ConfigError."""
    with run.tracked(kind).with_suffix(".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"run {str(run.path)!r} is being sent to {kind} by another process") from error
        yield


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """Limit the memory that this process may take beyond its present size, and that of its children. Linux."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if held := getattr(psutil.Process().memory_info(), "data", 0):
        most = held + _MOST_MEMORY
        resource.setrlimit(resource.RLIMIT_DATA, (most if soft == resource.RLIM_INFINITY else min(most, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


class _UnsentLines:
    """Logs the lines of a run's files that were not sent yet."""

    def __init__(self, reading: Reading) -> None:
        self._reading, self._num_evaluations = reading, 0
        self._groups: dict[tuple[int, Any], dict[str, Any]] = {}  # by step and number: those of a step that may get others

    def send(self, tracker: Tracker, sent: _Sent, *, is_last: bool) -> Iterator[_Sent]:
        """Gives how far it is, now and then and at the end. is_last: nothing more is written."""
        for number, record in enumerate(self._reading.steps.rest(), 1):
            if record["step"] > sent.step:
                tracker.log(record["step"], _time(record), dict(measures(record)))
                sent = sent.model_copy(update={"step": record["step"]})
                if number % _KEPT == 0:
                    yield sent
        for record in self._reading.evaluations.rest():
            self._num_evaluations += 1
            if is_step(record) and self._num_evaluations > sent.evaluations:
                tracker.log(record["step"], _time(record), dict(measures(record, "evaluation/")))
                if rows := _rows(record, record.get("samples")):
                    tracker.table("evaluation_samples", record["step"], _time(record), rows)
                sent = sent.model_copy(update={"evaluations": self._num_evaluations})
        for group in self._reading.samples.rest():
            if is_step(group) and (step := group["step"]) > sent.sampled and (step == 1 or step % _SAMPLED_EVERY == 0):
                self._groups[step, group.get("group")] = group
        for step in sorted({step for step, _ in self._groups if step < sent.step or is_last}):
            of_step = [self._groups.pop(key) for key in list(self._groups) if key[0] == step]
            if rows := [row for each in of_step for row in _rows(each, each.get("rollouts"))]:
                tracker.table("rollouts", step, _time(of_step[0]), rows[:_MOST_ROWS])
            if shown := _thumbnails(self._reading.run.images, of_step):
                tracker.images("images", step, _time(of_step[0]), shown)
            sent = sent.model_copy(update={"sampled": step})
        yield sent


def measures(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers of a record by name, those of its parts as `part/name`."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from measures(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            if name in _NO_MEASURES and not prefix.endswith("/rewards/"):  # there a reward has the name
                continue
            yield f"{prefix}{name}", float(value)


def _rows(record: Mapping[str, Any], samples: Any) -> list[Row]:
    """A table of what was written, of an evaluation's samples or a group's rollouts; what has another form is left out."""
    rows: list[Row] = [
        {
            "step": record["step"],
            "prompt": _text(sample.get("prompt", record.get("prompt"))),
            "completion": _text(sample.get("completion", sample.get("text"))),
            "scores": _text(sample.get("reward", sample.get("scores"))),
        }
        for sample in (samples if isinstance(samples, list) else ())
        if isinstance(sample, Mapping)
    ]
    return rows[:_MOST_ROWS]


def _thumbnails(store: ImageStore, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The first few images of the groups' prompts, by digest; those that are there."""
    named = [digest for group in groups for digest in group.get("images") or ()]
    found = dict[str, Any]()
    for digest in dict.fromkeys(filter(lambda each: isinstance(each, str), named)):
        if len(found) < _MOST_IMAGES:
            with suppress(DamagedError):
                found[digest] = store.small(digest)
    return found


def _text(value: Any) -> str:
    """Half of a surrogate pair, which no service takes, as a question mark."""
    return (value if isinstance(value, str) else json.dumps(value))[:_LONGEST].encode(errors="replace").decode()


def _time(record: Mapping[str, Any]) -> float:
    return float(record.get("time") or time.time())


def _read(run: RunDir, kind: TrackerKind) -> _Sent:
    """The state of sending. A damaged file counts as missing, and everything is sent again."""
    try:
        return _Sent.model_validate_json(read_small(run.tracked(kind)))
    except (FileNotFoundError, ValidationError):
        return _Sent()


def rewind(run: RunDir, step: int) -> None:
    """The run goes back to `step`, and its evaluations after it are cut off already: where a tracker has more of it, what
    follows is another run for it."""
    left = len(read_lines(run.evaluations))
    for kind in KINDS:
        if (sent := _read(run, kind)).step > step or sent.evaluations > left:
            write_whole(run.tracked(kind), _Sent(branch=sent.branch + 1).model_dump_json() + "\n")
