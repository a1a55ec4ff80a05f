"""The tracker: what a run's files hold, step by step and evaluation by evaluation, is sent on to TensorBoard or W&B.

    owns        the service's library; `tracking.json`
    waits for   nothing; what the library waits for is its own affair
    woken by    the clock, every `_SEND_S`
    on close    the service is given the rest

It only reads what the run has written, so it can hold up nothing. Everything is sent at least once, in order: `tracking.json`
holds how far it was, and is written afterwards. A step that is done again is shown as it was the first time.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from async_rlhf.buffers.files import write_whole
from async_rlhf.run.config import Config
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.run_files import Tail, read_lines, read_small

_SEND_S = 2.0
# What a line is about rather than measures.
_NO_MEASURES = ("step", "time", "version", "num_prompts")


class _Sent(BaseModel):
    """How far the tracker has come: the step of the last line it sent, and how many evaluations."""

    model_config = ConfigDict(extra="forbid", strict=True)
    step: int = Field(default=0, ge=0)
    evaluations: int = Field(default=0, ge=0)


def run_tracker(run: RunDir, config: Config, *, progress: Callable[[], None] = lambda: None) -> None:
    """The process: until the run's roles are no longer at work, and all is sent."""
    sink: _TensorBoard | _WandB = _TensorBoard(run) if config.tracking.kind == "tensorboard" else _WandB(run)
    sent, sender = _read(run), _Sender(run, sink)
    while True:
        last = not run.is_announced()  # looked at before the files are: after it nothing more is written
        if (now_sent := sender.send(sent)) != sent:
            sink.flush()
            write_whole(run.tracked, now_sent.model_dump_json() + "\n")
            sent = now_sent
            progress()
        if last:
            break
        time.sleep(_SEND_S)
    sink.close()


class _Sender:
    """Reads what was added to the files, and logs what was not sent yet."""

    def __init__(self, run: RunDir, sink: _TensorBoard | _WandB) -> None:
        self._steps, self._evaluations, self._sink = Tail(run.metrics), Tail(run.evaluations), sink
        self._num_evaluations = 0

    def send(self, sent: _Sent) -> _Sent:
        step, evaluations = sent.step, sent.evaluations
        for record in self._steps.rest():
            if type(record.get("step")) is int and record["step"] > step:
                step = record["step"]
                self._sink.log(step, _time(record), dict(measures(record)))
        for record in self._evaluations.rest():
            self._num_evaluations += 1
            if type(record.get("step")) is int and self._num_evaluations > evaluations:
                self._sink.log(record["step"], _time(record), dict(measures(record, "evaluation/")))
        return _Sent(step=step, evaluations=max(evaluations, self._num_evaluations))


def measures(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers of a record by name, those of its parts as `part/name`."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from measures(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value) and name not in _NO_MEASURES:
            yield f"{prefix}{name}", float(value)


def _time(record: Mapping[str, Any]) -> float:
    return float(record.get("time") or time.time())


def _read(run: RunDir) -> _Sent:
    """A file that is damaged is as none: what was sent is sent again."""
    try:
        return _Sent.model_validate_json(read_small(run.tracked))
    except (FileNotFoundError, ValidationError):
        return _Sent()


def rewind(run: RunDir, step: int) -> None:
    """The run goes back to `step`, and its evaluations after it are cut off already: what follows is sent again."""
    if run.tracked.exists():
        sent = _Sent(step=min(step, _read(run).step), evaluations=len(read_lines(run.evaluations).records))
        write_whole(run.tracked, sent.model_dump_json() + "\n")


# A tracking service has `log` (at: seconds since the epoch), `flush`, after which what was logged is not lost when the process
# dies, and `close`. Whatever it raises ends the process.
class _TensorBoard:
    """An event file in `tensorboard/`; each life of the tracker begins another, which TensorBoard shows as one run."""

    def __init__(self, run: RunDir) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run.path / "tensorboard"))

    def log(self, step: int, at: float, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        shown = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(Event(step=step, wall_time=at, summary=shown))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """A run of the project, shared by the tracker's lives. An evaluation comes after later steps, so each line has its own."""

    def __init__(self, run: RunDir) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "async-rlhf"),
            name=run.path.name,
            id=_name(run),
            resume="allow",
            dir=str(run.path),
            config=json.loads(run.config().model_dump_json()),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, at: float, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, "time": at, **values})

    def flush(self) -> None:
        """Its own process writes what it was given."""

    def close(self) -> None:
        self._run.finish()


def _name(run: RunDir) -> str:
    """The same for all lives of a run, another for every other."""
    begun = (run.path / "manifest.json").read_bytes()
    return hashlib.blake2b(begun + str(run.path.resolve()).encode(), digest_size=8).hexdigest()
