"""The seam between the queues and whatever runs a reward: `Call` goes in, `Answers` come back. Plain data between processes.

RewardWorkers     worker processes, or threads for functions that no other process can import
RemoteRewards     a server: the scorer of this machine, a reward server, the process that started the run
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from async_rlhf.actors.rewards import Answer


class Call(NamedTuple):
    """One call of one reward, by its name.

    members: of each completion, its fields and the columns of its prompt's row that the reward uses. timeout_s: longest run.
    prefetch: the completions are unfinished and only read, not scored. stream: of a single completion that was or is
    prefetched. forgotten: streams to drop, in a prefetch. tokens: expected cost.
    """

    id: int
    name: str
    members: tuple[Mapping[str, Any], ...]
    timeout_s: float
    prefetch: bool = False
    stream: int | None = None
    forgotten: tuple[int, ...] = ()
    tokens: int = 0


Answers = tuple[Answer, ...]
"""One for each member of a call, or one for all of them."""

Answered = Callable[[int, Answers], None]
"""Takes the answers of a call by its id, -1 when the executor has ended; called from the executor's thread."""

Shown = Callable[[str, tuple[int, ...], Answer], None]
"""Takes a finished prefetch: reward, streams, and when it ran or why it failed."""


class Executor(Protocol):
    """Runs calls and answers each once, through the `Answered` given at construction. Never blocks its caller."""

    def submit(self, call: Call) -> None: ...

    def discard(self, call_ids: set[int]) -> None:
        """The answers of these calls are no longer needed; those it can stop are answered at once."""
        ...

    def check(self) -> None:
        """Raises RewardError when it cannot recover."""
        ...

    def close(self, deadline_s: float) -> None:
        """Kills what runs; unanswered calls get no answer. Raises DeadlineError if something is left after `deadline_s`."""
        ...


def timed_out(timeout_s: float, reason: str = "") -> Answer:
    """A transient failure: it may be retried."""
    now, reason = time.time(), reason or f"timed out after {timeout_s:g} s (scoring.timeout_s)"
    return Answer(None, reason, began=now - timeout_s, ended=now, retry_after_s=0.0)
