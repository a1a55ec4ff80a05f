"""What a reward says about itself: the `@reward` decorator and the settings it leaves on the function.

A reward that is not decorated has the default settings. Read by `loading`, obeyed by `async_rlhf.actors.scoring`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

from async_rlhf.buffers.errors import ConfigError, RewardError

RewardFunction = Callable[..., Any]
Decorated = TypeVar("Decorated", bound=RewardFunction)
Scope = Literal["completion", "group"]

SETTINGS = "__reward_settings__"


class TransientError(RewardError):
    """Raised by a reward whose cause will pass: a busy server, a lost connection. Tried again when it has `retries`.

    after_s: seconds the other side asked to be left alone; 600 at most are waited.
    """

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


# What may pass by itself. Everything else that a reward raises is a defect, and would be raised again.
TRANSIENT: tuple[type[BaseException], ...] = (TransientError, ConnectionError, TimeoutError)


@dataclass(frozen=True)
class Stream:
    """How a reward reads completions while they are being written, in the process that will score them.

    prefetch: called with what the reward is called with, completions being what there is of them so far. Both are also given
        `stream_ids`, which name completions from call to call; None in the reward's is one that was never shown.
    forget: called with `stream_ids` that nobody waits for any more, and the reward's options. What is scored is not named.
    check: called with the reward's options before a run starts; raises ConfigError for what cannot be read along.
    """

    prefetch: Callable[..., object]
    forget: Callable[..., object]
    check: Callable[..., object] | None = None


@dataclass(frozen=True)
class Settings:
    """See `reward`."""

    name: str | None = None
    scope: Scope = "completion"
    weight: float = 1.0
    timeout_s: float | None = None
    retries: int = 0
    retry_on: tuple[type[BaseException], ...] = TRANSIENT
    max_concurrency: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    batch_size: int = 1
    batch_wait_s: float = 0.01
    workers: int = 0
    stop_when: tuple[str, ...] = ()
    check: Callable[..., object] | None = None
    prepare: Callable[..., object] | None = None
    stream: Stream | None = None
    stream_tokens: int = 0

    def __post_init__(self) -> None:
        positive = ("timeout_s", "max_concurrency", "requests_per_minute", "tokens_per_minute", "batch_size")
        for name in positive:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"@reward({name}={value!r}): it must be above 0")
        for name in ("retries", "batch_wait_s", "workers", "stream_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"@reward({name}={getattr(self, name)!r}): it must be 0 or more")
        if not math.isfinite(self.weight):
            raise ConfigError(f"@reward(weight={self.weight!r}): it must be a finite number")
        if isinstance(self.stop_when, str) or not all(self.stop_when):
            raise ConfigError(f"@reward(stop_when={self.stop_when!r}): it must be a tuple of texts, none of them empty")
        if self.scope not in ("completion", "group"):
            raise ConfigError(f"@reward(scope={self.scope!r}): choose 'completion' or 'group'")
        if self.batch_size > 1 and self.scope == "group":
            raise ConfigError("@reward(batch_size=...) gathers single completions; a group is a batch already: leave it out")


@overload
def reward(function: Decorated, /) -> Decorated: ...
@overload
def reward(
    *,
    name: str | None = None,
    scope: Scope = "completion",
    weight: float = 1.0,
    timeout_s: float | None = None,
    retries: int = 0,
    retry_on: tuple[type[BaseException], ...] = TRANSIENT,
    max_concurrency: int | None = None,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    batch_size: int = 1,
    batch_wait_s: float = 0.01,
    workers: int = 0,
    stop_when: tuple[str, ...] = (),
    check: Callable[..., object] | None = None,
    prepare: Callable[..., object] | None = None,
    stream: Stream | None = None,
    stream_tokens: int = 0,
) -> Callable[[Decorated], Decorated]: ...
def reward(function: RewardFunction | None = None, /, **settings: Any) -> Any:
    """Mark a function as a reward, as `@reward` or `@reward(weight=0.5)`. It stays callable as it was.

    name: how scores and metrics call it; the function's own name by default.
    scope: "completion", or "group" for a function that judges all completions of a prompt together: `completions`,
        `completion_ids` and `finish_reasons` are then lists, everything else is the prompt's, and a list is returned.
    weight: its weight in the sum, where `rewards.weights` gives none.
    timeout_s: seconds one call may take; `scoring.timeout_s` by default. Waiting for a turn does not count.
    retries: times a call is made again after one of the errors in `retry_on` (a time-out among them by default), or
        `TransientError`; after 0.5, 1, 2, ... seconds, or what the error asks for.
    max_concurrency, requests_per_minute, tokens_per_minute: calls at once and in any 60 seconds, of one actor. Tokens are
        the prompt's and the completion's, or what the call reports as metric `tokens`.
    batch_size, batch_wait_s: a function that takes lists (`prompts`, `completions`, columns) is given up to so many
        completions at once, gathered for at most so long.
    workers: processes of its own for a synchronous reward; 0 shares those of `scoring.workers`.
    stop_when: texts after which nothing more need be written (`("</answer>",)`); they are added to `generation.stop`.
    check: called with the reward's options before a run starts; raises ConfigError for what cannot work.
    prepare: called with the reward's options in each process that will call it, before the first call; models load here.
    stream: how it reads along (`Stream`); stream_tokens: each time so many tokens of a completion came, 0: not at all.
    """

    def mark(marked: RewardFunction) -> RewardFunction:
        setattr(marked, SETTINGS, Settings(**settings))
        return marked

    return mark if function is None else mark(function)


def settings_of(function: RewardFunction) -> Settings:
    """What `@reward` left on it, else the defaults."""
    found = getattr(function, SETTINGS, None)
    return found if isinstance(found, Settings) else Settings()
