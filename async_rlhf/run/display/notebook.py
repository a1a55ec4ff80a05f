"""What a person sees of a run in a notebook: one output that is redrawn, with a table of the newest steps and a curve.

Needs nothing but IPython, which a notebook has.
"""

from __future__ import annotations

import html
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from async_rlhf.run.display.console import beginning, evaluating, held_out, line, sample_line
from async_rlhf.run.display.progress import Progress

_REDRAW_S = 1.0
_ROWS, _EVENTS, _POINTS = 5, 5, 400
_WIDTH, _HEIGHT = 480, 120


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook: what it prints is shown under a cell."""
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
        self._rows: deque[str] = deque(maxlen=_ROWS)
        self._events: deque[str] = deque(maxlen=_EVENTS)
        self._rewards: list[tuple[int, float]] = []
        self._evaluations: list[tuple[int, float]] = []
        self._sample = self._evaluated = ""
        self._output = display(HTML(self._page()), display_id=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._redraw(now=True)

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
        _add(self._rewards, record["step"], record["reward"])
        self._redraw()

    def evaluating(self, what: str, percent: int | None) -> None:
        self._evaluated = "" if percent is None else evaluating(what, percent)
        self._redraw()

    def evaluation(self, record: dict[str, Any]) -> None:
        _add(self._evaluations, record.get("step"), record.get("mean_reward"))
        self.event(held_out(record))

    def sample(self, record: dict[str, Any]) -> None:
        self._sample = sample_line(record)

    def _redraw(self, *, now: bool = False) -> None:
        if now or time.monotonic() - self._drawn_at >= _REDRAW_S:
            self._drawn_at = time.monotonic()
            self._output.update(self._html(self._page()))

    def _page(self) -> str:
        text = "\n".join((*self._events, *self._rows, self._sample, self._evaluated)).strip()
        curve = drawing(self._rewards, self._evaluations)
        return f"<b>{html.escape(self._heading)}</b>{curve}<pre>{html.escape(text)}</pre>"


def drawing(rewards: Sequence[tuple[int, float]], evaluations: Sequence[tuple[int, float]]) -> str:
    """Reward over steps as SVG: a line for training, dots for evaluations; empty before there are two steps."""
    if len(rewards) < 2:
        return ""
    shown = [*rewards[:: -(-len(rewards) // _POINTS)], rewards[-1]]
    last = max(step for step, _ in (*rewards, *evaluations))
    low = min(value for _, value in (*rewards, *evaluations))
    high = max(value for _, value in (*rewards, *evaluations))

    def place(point: tuple[int, float]) -> tuple[str, str]:
        x, y = point[0] / last, (point[1] - low) / (high - low or 1.0)
        return f"{8 + x * (_WIDTH - 16):.1f}", f"{8 + (1 - y) * (_HEIGHT - 16):.1f}"

    path = " ".join(",".join(place(point)) for point in shown)
    dots = "".join('<circle cx="{}" cy="{}" r="4" fill="#d95f02"/>'.format(*place(point)) for point in evaluations)
    label = f"reward {low:.3f} to {high:.3f}, step 0 to {last}" + (" (dots: held-out)" if evaluations else "")
    return (
        f'<div><svg width="{_WIDTH}" height="{_HEIGHT}" style="background:#f6f6f6">'
        f'<polyline points="{path}" fill="none" stroke="#1b6ca8" stroke-width="2"/>{dots}</svg>'
        f"<div><small>{label}</small></div></div>"
    )


def _add(points: list[tuple[int, float]], step: Any, value: Any) -> None:
    """A step that is done again replaces itself and what followed."""
    if type(step) is int and isinstance(value, int | float) and math.isfinite(value):
        while points and points[-1][0] >= step:
            points.pop()
        points.append((step, float(value)))
