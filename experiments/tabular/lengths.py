"""What an asynchronous queue's rule of admission does to the lengths that are trained on: an emulation by discrete events.

Prompts differ in how long their answers are, and so do answers to one prompt (both log-normal). Slots write a token a tick
each, and the learner takes as long for a batch as the slots take for as many tokens. Three rules:

credit           a prompt is begun only when it can still be trained on within the bound, and batches are in the prompts' order:
                 the rule of `buffers/queue/admission.py` with `queue.window = 1`
dropped          slots never wait; a batch is whatever was finished first; what is older than the bound by then is thrown away
dropped, redone  the same, and the prompt of what was thrown away is begun again, with another answer

Pure. The age of an answer is the learner's step when it takes it minus that in which it was begun. Nothing is learned: lengths
would be the same for any policy that stands still.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

BOUNDS = (1, 2, 4, 8, 16)
CREDIT, DROPPED, REDONE = RULES = ("credit", "dropped", "dropped, redone")
_BATCH, _SLOTS, _STEPS = 64, 128, 64
NUM_ANSWERS = _BATCH * _STEPS
_MEAN, _OF_PROMPTS, _OF_ANSWERS, _LONGEST = 100.0, 0.6, 0.6, 2000


@dataclass(frozen=True)
class Lengths:
    """Tokens of the answers to each prompt: the same for every rule of a seed."""

    seed: int

    @cache  # noqa: B019  a handful of these are made
    def of(self, prompt: int, attempt: int) -> int:
        """At least 1, at most `_LONGEST`; e^(m + a + b), with a drawn once a prompt and b once an answer."""
        own = np.random.default_rng([self.seed, prompt]).normal(0, _OF_PROMPTS)
        answer = np.random.default_rng([self.seed, prompt, 1 + attempt]).normal(
            0, _OF_ANSWERS
        )  # a 0 at the end is no other seed
        middle = math.log(_MEAN) - (_OF_PROMPTS**2 + _OF_ANSWERS**2) / 2
        return min(_LONGEST, max(1, round(math.exp(middle + own + answer))))


@dataclass(frozen=True, order=True)
class _Answer:
    end: int
    """Tick in which its last token is written."""
    prompt: int
    attempt: int
    begun: int
    """The learner's step then."""
    length: int


@dataclass
class Queue:
    """One run of `_STEPS` steps under a rule with a bound on age."""

    rule: str
    bound: int
    lengths: Lengths
    now: int = 0
    step: int = 0
    trained: list[int] = field(default_factory=list)
    """Lengths in the order in which they were trained on."""
    oldest: int = 0
    dropped: list[int] = field(default_factory=list)
    _writing: list[_Answer] = field(default_factory=list)
    _ready: dict[int, _Answer] = field(default_factory=dict)
    _again: deque[tuple[int, int]] = field(default_factory=deque)
    _next: int = 0
    _free_at: int | None = None
    """When the learner has done its batch; None while it waits for one."""

    def run(self) -> Queue:
        while self.step < _STEPS:
            self._take()
            self._begin()
            ends = [self._writing[0].end] if self._writing else []
            self.now = min([*ends, *([] if self._free_at is None else [self._free_at])])
            while self._writing and self._writing[0].end == self.now:
                answer = heapq.heappop(self._writing)
                self._ready[answer.prompt] = answer
            if self._free_at == self.now:
                self.step, self._free_at = self.step + 1, None
        return self

    def _begin(self) -> None:
        while len(self._writing) < _SLOTS and (self.rule != CREDIT or self._next < (self.step + self.bound + 1) * _BATCH):
            if self._again:
                prompt, attempt = self._again.popleft()
            else:
                prompt, attempt, self._next = self._next, 0, self._next + 1
            length = self.lengths.of(prompt, attempt)
            heapq.heappush(self._writing, _Answer(self.now + length, prompt, attempt, self.step, length))

    def _take(self) -> None:
        """Begin a batch, if the learner waits and one is there."""
        if self._free_at is not None:
            return
        if self.rule == CREDIT:
            batch = [self._ready[n] for n in range(self.step * _BATCH, (self.step + 1) * _BATCH) if n in self._ready]
        else:
            for answer in [each for each in self._ready.values() if self.step - each.begun > self.bound]:
                del self._ready[answer.prompt]
                self.dropped.append(answer.length)
                if self.rule == REDONE:
                    self._again.append((answer.prompt, answer.attempt + 1))
            batch = list(self._ready.values())[:_BATCH]  # in the order in which they ended
        if len(batch) == _BATCH:
            for answer in batch:
                del self._ready[answer.prompt]
                self.trained.append(answer.length)
                self.oldest = max(self.oldest, self.step - answer.begun)
            self._free_at = self.now + round(_BATCH * _MEAN / _SLOTS)


def lengths(seeds: Sequence[int]) -> list[dict[str, str | float]]:
    """A row for each rule, bound and seed. length: mean over what was trained on, over that of the first answers to as many
    prompts; first: the same of the first batch; dropped: share of the tokens of finished answers; ticks: a step's, over those
    that its tokens take in slots that never wait."""
    rows: list[dict[str, str | float]] = []
    for seed in seeds:
        drawn = Lengths(seed)
        asked = np.array([drawn.of(prompt, 0) for prompt in range(_STEPS * _BATCH)], float)
        for rule in RULES:
            for bound in BOUNDS:
                found = Queue(rule, bound, drawn).run()
                rows.append(
                    {
                        "arm": rule,
                        "x": bound,
                        "seed": seed,
                        "length": float(np.mean(found.trained) / asked.mean()),
                        "first": float(np.mean(found.trained[:_BATCH]) / asked[:_BATCH].mean()),
                        "dropped": sum(found.dropped) / (sum(found.dropped) + sum(found.trained)),
                        "ticks": found.now / _STEPS / (_BATCH * _MEAN / _SLOTS),
                    }
                )
    return rows
