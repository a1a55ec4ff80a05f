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
    """An observation with a score for the turn that the model has just made.

    content: text or chat messages. score: a finite number; None: no score for this turn.
    """

    content: Content
    score: float | None = None


@dataclass(frozen=True)
class Call:
    """A request for the model's turn as an agent makes it; yielded in place of text or messages where `calls` is set.

    conversation: its number; one that was not used before begins a conversation (the first is 0, then 1, ...).
    messages: of a new conversation all of it; else what follows the model's last turn there.
    tools: JSON schemas that the chat template is given; of a new conversation, which keeps them.
    max_tokens: of the turn; None, or more than `generation.max_completion_length`: that.
    stop: further texts that end the turn, beside `generation.stop`.
    trained: whether the turn's tokens are trained on; else they are read, as an observation is.
    """

    conversation: int
    messages: list[Message]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    trained: bool = True


class Beside(NamedTuple):
    """Yielded in place of a Call by an agent with several calls at once, while calls are unanswered.

    call: None: no further one so far. more: done where a step without a reply has one, or the agent's end.
    """

    call: Call | None
    more: Future[None]


class Reply(NamedTuple):
    """The model's answer to a Call, sent to the generator at its yield (after text or messages, `text` alone).

    text: without special tokens. finish_reason: length where the turn's budget of tokens cut it. num_prompt: tokens that stood
    before the turn in its conversation. num_tokens: sampled ones of the turn. conversation: that of the Call.
    """

    text: str
    finish_reason: Literal["stop", "length"]
    num_prompt: int
    num_tokens: int
    conversation: int = 0


@dataclass(frozen=True)
class Scores:
    """The end of an agent's episode; yielded in place of a Score where single calls have scores.

    turns: of each Call in their order, None for none; the last ones may be missing. A score counts for its own turn, and for
    none before it.
    """

    score: Score
    turns: tuple[float | None, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings:
    """How an episode is bounded. Plain data.

    max_turns: turns of the model; what comes after the last of them is not read by it, and the generator is closed.
    timeout_s: seconds from what the model wrote to the next yield, and for closing the generator; the model's own time and
        waiting for a free place (`environment.max_concurrency`) do not count.
    episode_timeout_s: seconds for the whole episode, the model's time included; looked at in the environment's steps. None: no
        such limit.
    at_limit: score of an episode that its number of turns, or the length of its row, ended; None leaves it out of the batch.
    calls: whether it yields Calls (an agent), and nothing else until its end.
    """

    max_turns: int = 8
    timeout_s: float = 10.0
    episode_timeout_s: float | None = None
    at_limit: float | None = 0.0
    calls: bool = False

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
    """The arguments of `@environment`.

    name: how metrics call it; the function's own name by default.
    tools: what the model's chat template is given: functions with type hints and a docstring that names each argument, or their
        JSON schemas. The environment itself calls them.
    """

    name: str | None = None
    tools: Sequence[Callable[..., Any] | Mapping[str, Any]] = ()

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
