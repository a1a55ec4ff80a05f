"""How long a window between two weight updates takes in verl's fully asynchronous trainer, event by event.

A window trains on W prompts, in equal parts as soon as so many have ended: a prompt ends with the longest of its completions.
Behind the last part the generator gets new weights. Before update n it may have begun (n + 1 + s) W prompts, s the staleness
threshold (volcengine/verl, docs/advance/fully_async.md). Rows that decode go on across an update (its `partial_rollout`). With
s = 0 nothing of the next window begins early.
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
    group: int
    position: float = 0.0
    alive: list[tuple[float, float, int]] = field(default_factory=list)  # end, begin, prompt
    begun_at: float = 0.0  # the sum of the positions at which the alive rows began
    ended: dict[int, int] = field(default_factory=dict)  # rows of each prompt, until all have

    def begin(self, tokens: int, row: int) -> None:
        heappush(self.alive, (self.position + tokens, self.position, row // self.group))
        self.begun_at += self.position

    def next_end_s(self) -> float:
        """From now; inf where no row is alive."""
        return (self.alive[0][0] - self.position) * self.seconds_of_a_step() if self.alive else math.inf

    def seconds_of_a_step(self) -> float:
        alive = len(self.alive)
        return self.step_s(alive, self.position - self.begun_at / alive)

    def advance(self, seconds: float) -> None:
        if self.alive:
            self.position += seconds / self.seconds_of_a_step()

    def end_one(self) -> bool:
        """Whether a prompt ends with it."""
        self.position, begun, prompt = heappop(self.alive)
        self.begun_at -= begun
        self.ended[prompt] = self.ended.get(prompt, 0) + 1
        return self.ended[prompt] == self.group and bool(self.ended.pop(prompt))


def window_s(
    completions: Sequence[int],
    *,
    group: int,
    threshold: float,
    most_alive: int,
    step_s: Callable[[float, float], float],
    update_s: float,
    parts: int = 4,
) -> float:
    """The mean over some windows after the first ones; their rows are `completions`, `group` of a prompt, over and over.

    step_s(alive, produced): of one decode step, with so many rows alive on all engines and so many tokens of each in the mean.
    update_s: training of a whole window. Raises ConfigError where a part has no prompt or the threshold is below 0.
    """
    prompts = len(completions) // group
    if prompts < parts or parts < 1 or threshold < 0 or most_alive < 1:
        raise ConfigError(
            f"{prompts} prompts in {parts} parts, threshold = {threshold}, most_alive = {most_alive}: at least a prompt a "
            "part, threshold 0 or more, most_alive 1 or more"
        )
    engine = _Generator(step_s=step_s, group=group)
    now, started, ended, taken, trained, trained_at = 0.0, 0, 0, 0, 0, math.inf
    synced_s: list[float] = []
    while len(synced_s) < _WINDOWS:
        allowed = math.floor((len(synced_s) + 1 + threshold) * prompts) * group
        while started < allowed and len(engine.alive) < most_alive:
            engine.begin(completions[started % (prompts * group)], started)
            started += 1
        needed = prompts * (trained % parts + 1) // parts - prompts * (trained % parts) // parts
        if math.isinf(trained_at) and ended - taken >= needed:
            taken, trained_at = taken + needed, now + update_s / parts
        ends_at = now + engine.next_end_s()
        if ends_at <= trained_at:
            now = ends_at
            ended += engine.end_one()
        else:
            engine.advance(trained_at - now)
            now, trained_at, trained = trained_at, math.inf, trained + 1
            if trained % parts == 0:
                synced_s.append(now)
    return (synced_s[-1] - synced_s[_WARM - 1]) / (_WINDOWS - _WARM)
