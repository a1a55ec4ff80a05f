"""TensorBoard: event files in `tensorboard/`; each life of the process begins another, and they are shown as one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from async_rlhf.run.tracking import Row, Tracked


class Service:
    def __init__(self, run: Tracked) -> None:
        self._writer = EventFileWriter(str(run.directory / f"tensorboard{run.branch}"))
        self.flush, self.close = self._writer.flush, self._writer.close

    def log(self, step: int, at: float, values: Mapping[str, float]) -> None:
        shown = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(Event(step=step, wall_time=at, summary=shown))

    def table(self, name: str, step: int, at: float, rows: Sequence[Row]) -> None:
        """TensorBoard has no tables."""
