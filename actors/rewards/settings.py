"""The settings of a reward and the `@reward` decorator that leaves them on the function.

    @reward(...)   ->  Declaration     on the function
    configuration  ->  overrides it    scoring.stages.NAME (`actors.config.StageConfig`)
    resolve        ->  RewardSpec      what travels to the processes that score

All three are `RewardSettings`, so a setting is one field here. A function without the decorator has the defaults.
`@environment` is declared the same way (`declares`, `declared`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, cast, overload

from async_rlhf.buffers.errors import ConfigError, RewardError, did_you_mean

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
Declared = TypeVar("Declared")
Parameters = ParamSpec("Parameters")

SETTINGS, GIVEN = "__async_rlhf_settings__", "__async_rlhf_given__"


class Decorator(Protocol[Parameters]):
    """`@NAME`, or `@NAME(...)` with these parameters."""

    @overload
    def __call__(self, function: Decorated, /) -> Decorated: ...
    @overload
    def __call__(self, *args: Parameters.args, **settings: Parameters.kwargs) -> Callable[[Decorated], Decorated]: ...


def declares(declaration: Callable[Parameters, Any]) -> Callable[[Callable[..., Any]], Decorator[Parameters]]:
    """Turns a function that has a name and a docstring into the decorator that leaves a `declaration` on what it decorates."""
    make = cast(Callable[..., Any], declaration)

    def named_like(named: Callable[..., Any]) -> Decorator[Parameters]:
        @wraps(named)
        def decorator(function: Decorated | None = None, /, **settings: Any) -> Any:
            for name in settings:
                if name not in (known := list(inspect.signature(make).parameters)):
                    raise ConfigError(f"@{named.__name__}({name}=...): there is no such setting; {did_you_mean(name, known)}")

            def mark(marked: Decorated) -> Decorated:
                if not callable(marked) or not hasattr(marked, "__dict__"):
                    raise ConfigError(f"@{named.__name__}: a function of your own was expected, got {marked!r:.80}")
                setattr(marked, SETTINGS, make(**settings))
                setattr(marked, GIVEN, settings)
                return marked

            return mark if function is None else mark(function)

        return cast(Decorator[Parameters], decorator)

    return named_like


def declared(function: Callable[..., Any], declaration: type[Declared]) -> Declared:
    """The arguments of the function's decorator, else the defaults."""
    found = getattr(function, SETTINGS, None)
    return found if isinstance(found, declaration) else declaration()


def is_number(value: Any, above: float = -math.inf) -> bool:
    """Whether it is a finite one above that."""
    return isinstance(value, int | float) and above < value < math.inf


RewardFunction = Callable[..., Any]
Scope = Literal["completion", "group"]
# The lowest of the settings that count.
_COUNTS = {"retries": 0, "workers": 0, "stream_tokens": 0, "batch_size": 1, "max_concurrency": 1}
_COUNTS |= {"requests_per_minute": 1, "tokens_per_minute": 1}


class TransientError(RewardError):
    """Raised by a reward for a passing cause: a busy server, a lost connection. Retried as `retries` allows.

    after_s: seconds to wait before the retry, 600 at most.
    """

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


# Other exceptions are defects of the reward, and a retry would raise them again.
TRANSIENT: tuple[type[BaseException], ...] = (TransientError, ConnectionError, TimeoutError)


@dataclass(frozen=True)
class Stream:
    """Incremental scoring: how a reward reads unfinished completions, in the process that will score them."""

    prefetch: Callable[..., object]
    """Called with the arguments of the reward, completions as far as they are written. Both also get `stream_ids`, which name
    completions from call to call; None in the reward's is one without a prefetch."""
    forget: Callable[..., object]
    """Called with the `stream_ids` of completions that will not be scored, and the reward's options."""
    check: Callable[..., object] | None = None
    """Called with the reward's options before a run starts; raises ConfigError where incremental scoring is impossible."""


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """How a reward is called. Plain data."""

    scope: Scope = "completion"
    """"completion", or "group" for a function that judges all completions of a prompt together: `completions`, `completion_ids`
    and `finish_reasons` are then lists, everything else is the prompt's, and a list is returned."""
    weight: float = 1.0
    """Weight in the sum, where `rewards.weights` gives none."""
    timeout_s: float | None = None
    """Seconds one call may take; `scoring.timeout_s` by default. Waiting in the queue does not count."""
    retries: int = 0
    """Retries of a call after one of the errors in `retry_on` (a time-out among them by default), or `TransientError`; after
    0.5, 1, 2, ... seconds, or the time that the error asks for."""
    max_concurrency: int | None = None
    """Calls of one actor at once."""
    requests_per_minute: int | None = None
    """Calls of one actor in any 60 seconds."""
    tokens_per_minute: int | None = None
    """Likewise, tokens of prompt and completion, or the call's metric `tokens`."""
    batch_size: int = 1
    """Most completions in one call of a function that takes lists (`prompts`, `completions`, columns)."""
    batch_wait_s: float = 0.01
    """Longest time for which these are gathered."""
    workers: int = 0
    """Processes of its own for a synchronous reward; 0 shares those of `scoring.workers`."""
    stop_when: tuple[str, ...] = ()
    """Texts after which nothing more need be written (`("</answer>",)`); they are added to `generation.stop`."""
    stream_tokens: int = 0
    """Incremental scoring each time a completion has grown by this number of tokens; 0: none."""

    def __post_init__(self) -> None:
        for name, least in _COUNTS.items():
            value = getattr(self, name)
            if value is not getattr(RewardSettings, name) and not (isinstance(value, int) and value >= least):
                raise ConfigError(f"@reward({name}={value!r}): it must be a whole number of {least} or more")
        if not is_number(self.weight):
            raise ConfigError(f"@reward(weight={self.weight!r}): it must be a finite number")
        if self.timeout_s is not None and not is_number(self.timeout_s, above=0):
            raise ConfigError(f"@reward(timeout_s={self.timeout_s!r}): it must be above 0")
        if not is_number(self.batch_wait_s) or self.batch_wait_s < 0:
            raise ConfigError(f"@reward(batch_wait_s={self.batch_wait_s!r}): it must be 0 or more")
        texts = self.stop_when if isinstance(self.stop_when, list | tuple) else [None]
        if not all(isinstance(text, str) and text for text in texts):
            raise ConfigError(f"@reward(stop_when={self.stop_when!r}): it must be a tuple of texts, none of them empty")
        if self.scope not in ("completion", "group"):
            raise ConfigError(f"@reward(scope={self.scope!r}): choose 'completion' or 'group'")
        if self.batch_size > 1 and self.scope == "group":
            raise ConfigError("@reward(batch_size=...) gathers single completions; a group is a batch already: leave it out")


@dataclass(frozen=True, kw_only=True)
class RewardDeclaration(RewardSettings):
    """The arguments of `@reward`: the settings, and functions that stay in the process."""

    name: str | None = None
    """The name in scores and metrics; the function's own name by default."""
    retry_on: tuple[type[BaseException], ...] = TRANSIENT
    """Errors after which a call is retried."""
    check: Callable[..., object] | None = None
    """Called with the reward's options before a run starts; raises ConfigError for those that cannot work."""
    prepare: Callable[..., object] | None = None
    """Called with the reward's options in each process that will call it, before the first call; models load here."""
    stream: Stream | None = None
    """Incremental scoring (`Stream`), used where `stream_tokens` is above 0."""


@declares(RewardDeclaration)
def reward(function: RewardFunction | None = None, /, **settings: Any) -> None:
    """Mark a function as a reward, as `@reward` or `@reward(weight=0.5)`. It stays callable as it was.

    The settings are those of `RewardSettings` and `RewardDeclaration`. Raises ConfigError.
    """


def settings_of(function: RewardFunction) -> RewardDeclaration:
    """The function's `@reward` arguments, else the defaults."""
    return declared(function, RewardDeclaration)
