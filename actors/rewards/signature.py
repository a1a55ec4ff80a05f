"""How a reward is called and how its answer is read: the decorator, its parameters, the verdict.

Never here: finding a function by name (`loading`), or what calls it and when (`actors.scoring`).
"""

from __future__ import annotations

import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, overload

from buffers.errors import ConfigError, RewardError, did_you_mean

RewardFunction = Callable[..., Any]
Decorated = TypeVar("Decorated", bound=RewardFunction)

# What every completion has; a reward may ask for these and for any column of the data.
FIELDS = frozenset({"completion", "prompt", "completion_ids", "prompt_ids", "finish_reason"})

# TRL's names for lists of ours. A function with one of these parameters is called TRL's way.
TRL_PLURALS = {"prompts": "prompt", "completions": "completion"}
# What TRL passes and an actor does not have: never passed here, so a function may not require them.
TRL_ONLY = frozenset({"trainer_state", "log_extra", "log_metric", "environments"})

# A failure travels with its rollout; an exception's message can be as long as the completion it quotes.
MAX_FAILURE_CHARS = 500

_NAME = "__reward_name__"


@overload
def reward(function: Decorated, /) -> Decorated: ...
@overload
def reward(*, name: str) -> Callable[[Decorated], Decorated]: ...
def reward(function: RewardFunction | None = None, /, *, name: str | None = None) -> Any:
    """Mark a function as a reward, as `@reward` or `@reward(name="exact")`. It stays callable as it was.

    name: how scores and metrics call it; the function's own name by default.
    """

    def mark(marked: RewardFunction) -> RewardFunction:
        setattr(marked, _NAME, name or marked.__name__)
        return marked

    return mark if function is None else mark(function)


def name_of(function: RewardFunction, default: str) -> str:
    """The name given by `@reward`, else `default`."""
    return str(getattr(function, _NAME, default))


class Answer(NamedTuple):
    """What one call came to: a value, None for not applicable, or why it failed. Plain data: it crosses processes.

    traceback: of an exception, in full. seconds: how long the call ran.
    """

    value: float | None
    failure: str | None = None
    traceback: str = ""
    seconds: float = 0.0


def failed(error: BaseException) -> Answer:
    """The answer of a call that raised, with its traceback. Call it while the exception is being handled."""
    # TracebackException survives an exception whose own __str__ raises.
    told = traceback.TracebackException.from_exception(error)
    return Answer(None, f"{type(error).__name__}: {told}"[:MAX_FAILURE_CHARS], "".join(told.format()))


@dataclass(frozen=True)
class Signature:
    """What a function asks for. required, optional: parameter names as written; any_column: it takes `**columns`."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    any_column: bool
    is_trl: bool
    is_async: bool

    @classmethod
    def of(cls, function: RewardFunction) -> Signature:
        """Raises RewardError for a function whose arguments cannot be given by name."""
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError as error:
            raise RewardError(f"{function!r} does not say what arguments it takes; wrap it in a function") from error
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
        if positional:
            raise RewardError(f"{function!r} takes {positional} by position; arguments are given by name: remove the '/'")
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return cls(
            required=tuple(p.name for p in named if p.default is p.empty),
            optional=tuple(p.name for p in named if p.default is not p.empty),
            any_column=any(p.kind is p.VAR_KEYWORD for p in parameters),
            is_trl=any(p.name in TRL_PLURALS for p in named),
            is_async=any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None)))),  # noqa: B004
        )

    @property
    def fields(self) -> tuple[str, ...] | None:
        """Names of the fields and columns a call can use, None for all: what has to travel to another process."""
        if self.any_column:
            return None
        asked = self.required + self.optional
        return tuple(TRL_PLURALS.get(name, name) if self.is_trl else name for name in asked)

    def check(self, name: str, columns: AbstractSet[str]) -> None:
        """Raises ConfigError when a required parameter is neither a field of a completion nor a column of the data."""
        known = FIELDS | columns | (TRL_PLURALS.keys() if self.is_trl else set())
        for parameter in self.required:
            if self.is_trl and parameter in TRL_ONLY - columns:
                raise ConfigError(
                    f"reward {name!r} requires TRL's {parameter!r}, which an actor does not have; give it a default of None"
                )
            if parameter not in known:
                raise ConfigError(
                    f"reward {name!r} asks for {parameter!r}, which is neither a field of a completion "
                    f"({', '.join(sorted(FIELDS))}) nor a column of the data ({', '.join(sorted(columns)) or 'none'}); "
                    f"{did_you_mean(parameter, known)}"
                )

    def arguments(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of one call; TRL's form gets lists of one element."""
        if self.is_trl:
            plural = {ours: theirs for theirs, ours in TRL_PLURALS.items()}
            fields = {plural.get(name, name): [value] for name, value in fields.items()}
        if self.any_column:
            return dict(fields)
        return {name: fields[name] for name in self.required + self.optional if name in fields}

    def verdict(self, result: Any) -> Answer:
        """Read what the function returned: a finite number (bool counts), None, or a failure that says what it was."""
        if self.is_trl:
            if not isinstance(result, list | tuple) or len(result) != 1:
                return Answer(None, f"returned {_shown(result)} for 1 completion; a list of 1 score was expected")
            result = result[0]
        # Scalars of numpy and torch are zero-dimensional arrays; their `item()` is the plain number.
        if getattr(result, "shape", None) == () and hasattr(result, "item"):
            result = result.item()
        if result is None:
            return Answer(None)
        if inspect.iscoroutine(result):
            result.close()
            return Answer(None, "returned a coroutine; declare the reward with 'async def'")
        if not isinstance(result, numbers.Real):
            return Answer(None, f"returned {_shown(result)}; a number or None was expected")
        value = float(result)
        return Answer(value) if math.isfinite(value) else Answer(None, f"returned {value}; a score must be finite")


def _shown(result: Any) -> str:
    return f"{type(result).__name__} {result!r:.60}"
