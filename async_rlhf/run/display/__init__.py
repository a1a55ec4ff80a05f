"""A run's reports while it goes on; displays are subclasses."""

from __future__ import annotations

from typing import Any


class Progress:
    """Receives the supervisor's reports. A subclass overrides the methods that it needs."""

    def event(self, text: str) -> None: ...

    def waiting(self, status: dict[str, Any], wanted: int) -> None:
        """Called several times a second before the first step. status: the hub's, empty at first. wanted: groups in a batch."""

    def sample(self, record: dict[str, Any]) -> None:
        """A group that was trained on, as in `rollouts.jsonl`."""

    def step(self, record: dict[str, Any], max_steps: int | None) -> None:
        """max_steps: of the run, as far as its budget of tokens or seconds lets it come at this pace; None: it has no end."""

    def evaluating(self, what: str, percent: int | None) -> None:
        """percent: the finished part of an evaluation; None: it has ended, perhaps in vain."""

    def evaluation(self, record: dict[str, Any]) -> None: ...
