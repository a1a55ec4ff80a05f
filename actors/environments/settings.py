"""The settings of an environment, and the `@environment` decorator that leaves them on the function.

@environment(...)   ->  Declaration       on the function
configuration       ->  overrides it      `EnvironmentConfig`
resolve             ->  EnvironmentSpec   what travels to the processes that run episodes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from async_rlhf.actors.rewards.settings import GIVEN, declared, declares, is_number
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.score import Score

EnvironmentFunction = Callable[..., Any]
Message = dict[str, Any]
"""A chat message: `role`, `content`, and whatever else the model's chat template reads. JSON data."""
Content = str | list[Message]
"""What the model is given to read."""


def counted(score: Score, counts: Mapping[str, float]) -> Score:
    """With what was counted of the episode beside what its maker reports, which is `own/NAME` where a count is called so."""
    reported = {f"own/{name}" if name in counts else name: value for name, value in score.metrics.items()}
    return replace(score, metrics={**reported, **counts})


@dataclass(frozen=True)
class Feedback:
    """An observation with a score for the turn that the model has just made."""

    content: Content
    """Text or chat messages."""
    score: float | None = None
    """A finite number; None: no score for this turn."""


@dataclass(frozen=True)
class Call:
    """A request for the model's turn as an agent makes it; yielded in place of text or messages where `calls` is set."""

    conversation: int
    """Its number; an unused one begins a conversation (the first is 0, then 1, ...)."""
    messages: list[Message]
    """All messages of a new conversation; else those after the model's last turn there."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas for the chat template; a new conversation sets them."""
    max_tokens: int | None = None
    """Limit of the turn, at most `generation.max_completion_length`, which None stands for."""
    stop: tuple[str, ...] = ()
    """Further texts that end the turn, beside `generation.stop`."""
    trained: bool = True
    """Whether the turn's tokens are trained on; else they are read, as an observation is."""


class Beside(NamedTuple):
    """Yielded in place of a Call by an agent with several calls at once, while calls are unanswered."""

    call: Call | None
    """None: no further one so far."""
    more: Future[None]
    """Done at the next step without a reply, or at the agent's end."""


class Reply(NamedTuple):
    """The model's answer to a Call, sent to the generator at its yield (after text or messages, `text` alone)."""

    text: str
    """The turn without special tokens."""
    finish_reason: Literal["stop", "length"]
    """length where the turn's budget of tokens cut it."""
    num_prompt: int
    """Tokens before the turn in its conversation."""
    num_tokens: int
    """Sampled tokens of the turn."""
    conversation: int = 0
    """That of the Call."""


@dataclass(frozen=True)
class Scores:
    """The end of an agent's episode; yielded in place of a Score where single calls have scores."""

    score: Score
    turns: tuple[float | None, ...] = ()
    """The score of each Call in order, None for none; the last ones may be missing. A score counts for its own turn alone."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings:
    """How an episode is bounded. Plain data."""

    max_turns: int = 8
    """Turns of the model; an observation after the last of them is not read by it, and the generator is closed."""
    timeout_s: float = 10.0
    """Seconds from the model's text to the next yield, and for closing the generator; the model's own time and waiting for a
    free place (`environment.max_concurrency`) do not count."""
    episode_timeout_s: float | None = None
    """Seconds for the whole episode, the model's time included; checked in the environment's steps. None: no such limit."""
    at_limit: float | None = 0.0
    """Score of an episode that its number of turns, or the length of its row, ended; None leaves it out of the batch."""
    calls: bool = False
    """Whether it yields Calls (an agent), and nothing else until its end."""

    def __post_init__(self) -> None:
        if type(self.max_turns) is not int or self.max_turns < 1:
            raise ConfigError(f"@environment(max_turns={self.max_turns!r}): it must be a whole number of 1 or more")
        if self.at_limit is not None and not is_number(self.at_limit):
            raise ConfigError(f"@environment(at_limit={self.at_limit!r}): it must be a finite number, or None")
        for name in ("timeout_s", "episode_timeout_s"):
            value = getattr(self, name)
            if value is not getattr(EnvironmentSettings, name) and not is_number(value, above=0):
                raise ConfigError(f"@environment({name}={value!r}): it must be above 0")


@dataclass(frozen=True, kw_only=True)
class EnvironmentDeclaration(EnvironmentSettings):
    """The arguments of `@environment`."""

    name: str | None = None
    """The name in metrics; the function's own name by default."""
    tools: Sequence[Callable[..., Any] | Mapping[str, Any]] = ()
    """Tools for the model's chat template: functions with type hints and a docstring that names each argument, or their JSON
    schemas. The environment itself calls them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        tools = self.tools if isinstance(self.tools, list | tuple) else [None]
        if not all(callable(tool) or isinstance(tool, Mapping) for tool in tools):
            raise ConfigError("@environment(tools=...): it must be a list of functions, or of their JSON schemas")


@declares(EnvironmentDeclaration)
def environment(function: EnvironmentFunction | None = None, /, **settings: Any) -> None:
    """Mark a generator function, or an agent, as an environment, as `@environment` or `@environment(max_turns=4)`.

    It stays callable as it was. The settings are those of `EnvironmentDeclaration`. Raises ConfigError.
    """


def settings_of(function: EnvironmentFunction, **defaults: Any) -> EnvironmentDeclaration:
    """The function's `@environment` arguments, else the defaults. defaults: of a kind of functions, in place of the usual."""
    given = getattr(function, GIVEN, {})
    return replace(
        declared(function, EnvironmentDeclaration), **{name: value for name, value in defaults.items() if name not in given}
    )
