"""How long a window between two weight updates takes in verl's fully asynchronous trainer, event by event.

A window trains on W rows, in equal parts as soon as so many have ended; behind the last part the generator gets new weights.
Before update n it may have begun (n + 1 + s) W rows, s the staleness threshold (volcengine/verl, docs/advance/fully_async.md).
Rows that decode go on across an update (its `partial_rollout`). With s = 0 nothing of the next window begins early.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from async_rlhf.buffers.errors import ConfigError

_WINDOWS = 7
_WARM = 2  # windows before the measured ones


@dataclass(kw_only=True)
class _Generator:
    """All engines as one: rows advance together, a token a step. position: steps so far, whole or not."""

    step_s: Callable[[float, float], float]
    position: float = 0.0
    ends: list[float] = field(default_factory=list)
    begun_at: float = 0.0  # the sum of the positions at which the alive rows began
    begins: dict[float, list[float]] = field(default_factory=dict)

    def begin(self, tokens: int) -> None:
        end = self.position + tokens
        heappush(self.ends, end)
        self.begins.setdefault(end, []).append(self.position)
        self.begun_at += self.position

    def seconds_of_a_step(self) -> float:
        alive = len(self.ends)
        return self.step_s(alive, self.position - self.begun_at / alive)

    def end_one(self) -> None:
        end = heappop(self.ends)
        begins = self.begins[end]
        self.begun_at -= begins.pop()
        if not begins:
            del self.begins[end]


def window_s(
    completions: Sequence[int],
    *,
    threshold: float,
    most_alive: int,
    step_s: Callable[[float, float], float],
    update_s: float,
    parts: int = 4,
) -> float:
    """The mean over some windows after the first ones; their rows are `completions`, over and over.

    step_s(alive, produced): of one decode step, with so many rows alive on all engines and so many tokens of each in the mean.
    update_s: training of a whole window. Raises ConfigError where a part has no row or the threshold is below 0.
    """
    rows = len(completions)
    if rows < parts or parts < 1 or threshold < 0 or most_alive < 1:
        raise ConfigError(
            f"{rows} rows in {parts} parts, threshold = {threshold}, most_alive = {most_alive}: at least a row a part, "
            "threshold 0 or more, most_alive 1 or more"
        )
    engine = _Generator(step_s=step_s)
    now, started, ended, taken, trained, trained_at = 0.0, 0, 0, 0, 0, math.inf
    synced_s: list[float] = []
    while len(synced_s) < _WINDOWS:
        allowed = math.floor((len(synced_s) + 1 + threshold) * rows)
        while started < allowed and len(engine.ends) < most_alive:
            engine.begin(completions[started % rows])
            started += 1
        needed = rows * (trained % parts + 1) // parts - rows * (trained % parts) // parts
        if math.isinf(trained_at) and ended - taken >= needed:
            taken, trained_at = taken + needed, now + update_s / parts
        seconds = engine.seconds_of_a_step() if engine.ends else math.inf
        ends_at = now + (engine.ends[0] - engine.position) * seconds if engine.ends else math.inf
        if ends_at <= trained_at:
            now, engine.position = ends_at, engine.ends[0]
            engine.end_one()
            ended += 1
        else:
            engine.position += (trained_at - now) / seconds if engine.ends else 0.0
            now, trained_at, trained = trained_at, math.inf, trained + 1
            if trained % parts == 0:
                synced_s.append(now)
    return (synced_s[-1] - synced_s[_WARM - 1]) / (_WINDOWS - _WARM)
