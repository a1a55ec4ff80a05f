"""The display of a run in a notebook: one output that is redrawn, with the newest steps.

Needs nothing but IPython, which a notebook has.
"""

from __future__ import annotations

import html
import time
from collections import deque
from typing import Any

from async_rlhf.run.display import Progress
from async_rlhf.run.display.console import beginning, evaluating, held_out, line, sample_line

_REDRAW_S = 1.0
_LINES = 5


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which shows printed text under a cell."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None


class NotebookDisplay(Progress):
    """Owns one output of the cell; it is redrawn once a second at most, and when the `with` block ends."""

    def __enter__(self) -> NotebookDisplay:
        from IPython.display import HTML, display

        self._html = HTML
        self._heading, self._drawn_at = "starting the processes", time.monotonic()
        self._rows, self._events = deque[str](maxlen=_LINES), deque[str](maxlen=_LINES)
        self._sample = self._evaluated = ""
        self._output = display(HTML(self._page()), display_id=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._output.update(self._html(self._page()))

    def event(self, text: str) -> None:
        self._events.append(text)
        self._redraw()

    def waiting(self, status: dict[str, Any], wanted: int) -> None:
        stage, detail = beginning(status, wanted)
        self._heading = f"{stage}{detail and ': '}{detail}"
        self._redraw()

    def step(self, record: dict[str, Any], max_steps: int | None) -> None:
        self._heading = f"step {record['step']}" + ("" if max_steps is None else f" of {max_steps}")
        self._rows.append(f"{record['step']:>5}  {line(record)}")
        self._redraw()

    def evaluating(self, what: str, percent: int | None) -> None:
        self._evaluated = "" if percent is None else evaluating(what, percent)
        self._redraw()

    def evaluation(self, record: dict[str, Any]) -> None:
        self.event(held_out(record))

    def sample(self, record: dict[str, Any]) -> None:
        self._sample = sample_line(record)

    def _redraw(self) -> None:
        if time.monotonic() - self._drawn_at >= _REDRAW_S:
            self._drawn_at = time.monotonic()
            self._output.update(self._html(self._page()))

    def _page(self) -> str:
        text = "\n".join((*self._events, *self._rows, self._sample, self._evaluated)).strip()
        return f"<b>{html.escape(self._heading)}</b><pre>{html.escape(text)}</pre>"
