"""TensorBoard: event files in `tensorboard/`; each life of the process begins another, and they are shown as one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

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

    def images(self, name: str, step: int, at: float, shown: Mapping[str, Any]) -> None:
        """Numbered, so that it has as many rows of them as a step has images."""
        values = []
        for number, image in enumerate(shown.values(), 1):
            image.save(file := BytesIO(), "PNG")
            own = Summary.Image(height=image.height, width=image.width, colorspace=3, encoded_image_string=file.getvalue())
            values.append(Summary.Value(tag=f"{name}/{number}", image=own))
        self._writer.add_event(Event(step=step, wall_time=at, summary=Summary(value=values)))
