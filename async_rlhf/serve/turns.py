"""The runs of the queue to start, end or give up next: a function of the observed states.

No file, no clock and no process: the daemon observes (`SeenRun`), calls `plan`, and carries it out.

    state      what happens                                    state after it
    waiting    its turn has come                               running
    running    it ends with nothing left to train on           finished
               an error ends it                                failed
               it is drained by `stop RUN_DIR`                 stopped
               it is lost: no end was recorded                waiting; failed, when that goes on without a new step
               an operator stops it                            stopping, and stopped when it has ended
               the daemon is to end                            pausing, and waiting when it has ended
    waiting    an operator stops or cancels it                 stopped, cancelled
    stopped    an operator resumes or cancels it               waiting, cancelled
    failed     an operator resumes or cancels it               waiting, cancelled

A run keeps its number whatever happens to it, and the lowest number that waits is started first: what was interrupted goes on
before anything else begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

State = Literal["waiting", "running", "pausing", "stopping", "stopped", "finished", "failed", "cancelled"]
ACTIVE: tuple[State, ...] = ("running", "pausing", "stopping")
"""States of a run that was started, and whose end has not been seen."""
Request = Literal["cancel", "stop", "resume"]
AFTER: Mapping[Request, Mapping[State, State]] = {
    "cancel": {"waiting": "cancelled", "stopped": "cancelled", "failed": "cancelled"},
    "stop": {"waiting": "stopped", "running": "stopping", "pausing": "stopping"},
    "resume": {"stopped": "waiting", "failed": "waiting"},
}
"""The next state of a run, by the operator's request and its present state."""
MAX_LOSSES = 6
"""Lives in a row without a new step and without a recorded end; as many as a role of a run may have."""


@dataclass(frozen=True)
class QueueEntry:
    """A run of the queue."""

    number: int
    name: str
    state: State = "waiting"
    reason: str = ""
    """Why it is in this state, where that is not plain."""
    drain_sent: bool = False
    """It was requested to end, once."""
    losses: int = 0
    """Lives in a row that were lost without a new step."""
    steps: int = 0
    """Steps done when it was started last."""
    cwd: str = ""
    """Where it was submitted from, for rewards that are named by import path."""

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE


@dataclass(frozen=True)
class RecordedEnd:
    """The end that a run has recorded."""

    finished: bool = False
    """Nothing is left to train on."""
    failed: str = ""
    """Why, where an error ended it."""


@dataclass(frozen=True)
class SeenRun:
    """The observed state of an active entry."""

    alive: bool
    """Whether a process of it lives."""
    ended: RecordedEnd | None = None
    """None where no end was recorded."""
    steps: int = 0
    """Steps done."""


@dataclass(frozen=True)
class QueuePlan:
    """The next states of the queue, and the actions that lead to them."""

    entries: tuple[QueueEntry, ...]
    """All entries, in their next states."""
    start: tuple[int, ...] = ()
    """Numbers of runs to start, in order; they are `running` in entries."""
    drain: tuple[int, ...] = ()
    """Numbers of runs to end."""


def requested(entry: QueueEntry, what: Request) -> QueueEntry | None:
    """The entry after an operator's request; None where its state does not allow it."""
    state = AFTER[what].get(entry.state)
    # A run that was requested to end is not requested again: a second signal would force it.
    return (
        None
        if state is None
        else replace(entry, state=state, reason="", drain_sent=entry.drain_sent and entry.is_active, losses=0)
    )


def plan(entries: Sequence[QueueEntry], seen: Mapping[int, SeenRun], *, at_once: int = 1, closing: bool = False) -> QueuePlan:
    """seen: of every active entry. at_once: runs at a time. closing: the daemon ends; its runs go on when it is back."""
    now = [_settled(entry, seen[entry.number], closing) if entry.is_active else entry for entry in entries]
    room = 0 if closing else at_once - sum(entry.is_active for entry in now)
    waiting = sorted(entry.number for entry in now if entry.state == "waiting")
    start = tuple(waiting[: max(0, room)])
    now = [replace(entry, state="running", reason="", drain_sent=False) if entry.number in start else entry for entry in now]
    drain = tuple(entry.number for entry in now if entry.state in ("pausing", "stopping") and not entry.drain_sent)
    return QueuePlan(tuple(now), start, drain)


def _settled(entry: QueueEntry, seen: SeenRun, closing: bool) -> QueueEntry:
    """An active entry after a look at its run."""
    if seen.alive:
        return replace(entry, state="pausing") if closing and entry.state == "running" else entry
    ended = seen.ended
    if ended is not None and ended.finished:
        return replace(entry, state="finished", reason="")
    if entry.state == "stopping":
        return replace(entry, state="stopped", reason="" if ended is None else ended.failed)
    if entry.state == "pausing" and (ended is None or not ended.failed):
        return replace(entry, state="waiting", reason="the daemon ended", losses=0)
    if ended is None:
        return _lost(entry, seen.steps)
    if ended.failed:
        return replace(entry, state="failed", reason=ended.failed)
    return replace(entry, state="stopped", reason="stopped by its own directory")


def _lost(entry: QueueEntry, steps: int) -> QueueEntry:
    """The run was killed, or the machine went down. A run that is lost repeatedly without a new step fails."""
    losses = 1 if steps > entry.steps else entry.losses + 1
    if losses >= MAX_LOSSES:
        return replace(entry, state="failed", losses=losses, reason=f"lost {losses} times in a row without a new step")
    return replace(entry, state="waiting", losses=losses, reason="interrupted")
