"""Why users' code gave no result: one type from the process that ran it to the counters, for rewards and environments alike.

Plain data: it crosses processes and machines. Imports nothing heavy, because every process of users' code carries it.
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from enum import StrEnum
from typing import NamedTuple

_log = logging.getLogger(__name__)
# A failure travels with its rollout; an exception's message can be as long as the completion it quotes.
MAX_REASON_CHARS = 500
# The log has the traceback of a first failure.
_MAX_TRACEBACK_CHARS = 20_000
# A server that demands a pause of a day gets the retry earlier: the wait for a score is bounded.
_LONGEST_PAUSE_S = 600.0


class FailureKind(StrEnum):
    """Failures are counted by it, `failures_KIND_total`."""

    RAISED = "raised"
    """The code raised."""
    TIMED_OUT = "timed_out"
    """A call, a step or an episode took longer than its limit."""
    DIED = "died"
    """Its process ended, memory that ran out included."""
    UNREADABLE = "unreadable"
    """What it was to be given cannot travel, or what it gave is not what was expected or is too large."""
    NO_TURN = "no_turn"
    """The episode ended before the model wrote anything."""
    REPORTED = "reported"
    """The code itself said so, `Score(failure=...)`."""
    REFUSED = "refused"
    """A limit does not allow the call, or the server did not take it."""
    LOST = "lost"
    """The server that ran it began anew, or was silent."""


class Failure(NamedTuple):
    """traceback: of an exception. retry_after_s: the cause may pass, and the call may be made again after so many seconds;
    None: it would fail again."""

    kind: FailureKind
    reason: str
    traceback: str = ""
    retry_after_s: float | None = None


def count(counts: Counter[FailureKind], failure: Failure, what: str) -> None:
    """The log gets the first failure of each kind with its traceback. what: failed."""
    if failure.kind not in counts:
        _log.warning(
            "%s failed (%s), later ones are only counted: %s\n%s", what, failure.kind, failure.reason, failure.traceback
        )
    counts[failure.kind] += 1


def raised(error: BaseException, retry_on: tuple[type[BaseException], ...] = ()) -> Failure:
    """The failure of code that raised, with its traceback. Call it while the exception is being handled."""
    # TracebackException survives an exception whose own __str__ raises.
    described = traceback.TracebackException.from_exception(error)
    after_s = getattr(error, "after_s", 0.0)
    pause_s = float(min(after_s, _LONGEST_PAUSE_S)) if isinstance(after_s, int | float) and after_s > 0 else 0.0
    return Failure(
        FailureKind.RAISED,
        f"{type(error).__name__}: {described}"[:MAX_REASON_CHARS],
        "".join(described.format())[:_MAX_TRACEBACK_CHARS],
        pause_s if isinstance(error, retry_on) else None,
    )


def timed_out(what: str) -> Failure:
    """The failure of a step that took too long, which may be quicker when it is made again."""
    return Failure(FailureKind.TIMED_OUT, what, retry_after_s=0.0)


def late(limit_s: float, setting: str) -> Failure:
    """The failure of a step that took longer than this setting allows."""
    return timed_out(f"timed out after {limit_s:g} s ({setting})")
