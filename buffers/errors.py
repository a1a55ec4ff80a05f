"""The tree of expected errors. Messages give the request, the value, the limit and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable


class AsyncRLHFError(Exception):
    """Root of all errors this project raises on purpose."""


class ConfigError(AsyncRLHFError, ValueError):
    """A setting that is wrong, impossible or would hang; raised before any process starts."""


def check_all(*rules: Callable[[], object]) -> None:
    """Run all rules. Raises the error of one, or one ConfigError with the messages of several, a line each."""
    refused = list[ConfigError]()
    for rule in rules:
        try:
            rule()
        except ConfigError as error:
            refused.append(error)
    if len(refused) > 1:
        raise ConfigError("\n".join(dict.fromkeys(map(str, refused))))
    if refused:
        raise refused[0]


class FormatError(ConfigError):
    """Files of a format that this version does not read. Nothing was changed."""


class SpoolError(ConfigError):
    """A spool whose disk refuses what is put into it (full, read-only). Nothing was put; the same can be tried again."""


class RecordError(AsyncRLHFError, ValueError):
    """A rollout or group that breaks its own invariants; raised where it is made."""


class WireError(AsyncRLHFError):
    """A frame that cannot be what it claims. `reason` is a short word to count by; `request`: its number, where readable."""

    def __init__(self, detail: str, reason: str = "malformed", request: int = 0) -> None:
        super().__init__(detail)
        self.reason, self.request = reason, request


class DeadlineError(AsyncRLHFError, TimeoutError):
    """A named wait that ran out of time."""


class RefusedError(AsyncRLHFError):
    """The hub refused a request; `reason` is a short machine-readable word."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class HubRestartedError(RefusedError):
    """The hub does not know this learner any more: register and publish again."""


class StalenessError(AsyncRLHFError):
    """A token older than the bound was about to be trained on."""


class WeightsError(AsyncRLHFError):
    """A weight set that is not the one its manifest names."""


class JournalError(AsyncRLHFError):
    """The durable queue cannot be read or written."""


class DiskFullError(JournalError):
    """There is no room on the disk. Nothing has changed; the same can be tried again."""


class DamagedError(JournalError):
    """A file of the run is not as it was written. Nothing was changed; starting again would end the same way."""


class EngineError(AsyncRLHFError, ValueError):
    """A request an engine cannot serve."""


class RewardError(AsyncRLHFError):
    """A reward function that cannot be loaded, or fails too often."""


class EpisodeError(AsyncRLHFError):
    """An environment that cannot be loaded, or whose processes do not come up."""


class NonFiniteError(AsyncRLHFError):
    """A loss or gradient that is not a number."""


class DivergedError(AsyncRLHFError):
    """The policy was beyond a limit of the guard for too many steps."""


class MismatchError(AsyncRLHFError):
    """Engine and learner give the same tokens other log-probabilities under the same weights."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """The tail of an error message that names the nearest valid choice, or lists them all when none is near."""
    known = sorted(choices)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"choose one of: {', '.join(known)}"
