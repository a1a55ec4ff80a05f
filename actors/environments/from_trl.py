"""TRL's environments (`environment_factory`) and tools (`tools`), played as `GRPOTrainer` plays them.

    reset(**row)     its text is appended to the last message of the prompt; None: nothing is
    other methods    are tools, by their names, type hints and docstrings; so are the functions of a list
    get_reward()     the score, where there is one

A turn with calls of tools is answered by one message of role `tool` for each call; one without ends the episode. Where a tool
raises, or there is none of that name, the model reads `{'error': ...}`. Source of the rules: `GRPOTrainer.__init__`,
`_generate_and_score_completions` and `_tool_call_loop` of TRL 1.16. TRL itself is not needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from async_rlhf.actors.data.images import is_image
from async_rlhf.actors.environments.loading import MAX_TURNS, Adapted, located
from async_rlhf.actors.environments.rendering import as_messages
from async_rlhf.actors.environments.settings import EnvironmentDeclaration, EnvironmentFunction, Message, counted
from async_rlhf.actors.environments.tool_calls import TEMPLATE, ParsedTurn, Tool, checked, read_turn, schema_of
from async_rlhf.actors.rewards.adapters import taken
from async_rlhf.actors.rewards.loading import found_in
from async_rlhf.buffers.errors import ConfigError, did_you_mean
from async_rlhf.buffers.score import Score

_OPTIONS = ("rewards", "response_template")
_RESERVED = ("reset", "get_reward")
# What a reward of TRL is given beside the columns.
_GIVEN = ("prompts", "completions", "environments")
# What else it may ask for, and an episode does not have.
_ABSENT = ("completion_ids", "trainer_state", "log_extra", "log_metric")


def from_trl(named: str, options: Mapping[str, Any]) -> Adapted:
    """options: `rewards`, names of TRL rewards beside the target, which are called with `environments`; `response_template`,
    how the model writes a call. Raises EpisodeError for what is not there, ConfigError."""
    place, name_of_it, target = located(named)
    for name in options:
        if name not in _OPTIONS:
            raise ConfigError(
                f"environment.options.{name}: a TRL environment has no such option; {did_you_mean(name, _OPTIONS)}"
            )
    rewards = {
        name: _reward(found_in(place, name, "reward", f"{place}:{name}", ConfigError), name)
        for name in options.get("rewards", ())
    }
    if isinstance(target, list | tuple) and target and all(map(callable, target)):
        make, shown, methods, reset = None, list(target), {}, None
    elif callable(target):
        make = target
        kind = _kind(target, name_of_it)
        methods = {name: tool for name, tool in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}
        reset = methods["reset"]
        shown = [_bound(kind, name) for name in methods if name not in _RESERVED]
    else:
        hint = "; a run has one environment: name one" if isinstance(target, Mapping) else ""
        raise ConfigError(
            f"environment {name_of_it!r} is {type(target).__name__}; an environment_factory or a list of tools was "
            f"expected{hint}"
        )
    schemas = tuple(map(schema_of, shown))
    template = checked(options["response_template"]) if "response_template" in options else TEMPLATE
    functions = [] if make is not None else shown
    player = _Player(make, {tool.__name__: tool for tool in functions}, rewards, schemas, template)
    needed = [*_required(_bound(kind, "reset"))] if reset is not None else []
    needed += [name for reward in rewards.values() for name in _required(reward) if name not in _GIVEN]
    is_async = any(map(inspect.iscoroutinefunction, [*methods.values(), *functions, *rewards.values()]))
    return Adapted(
        player.play if is_async else plain(player.play),
        EnvironmentDeclaration(name=name_of_it, max_turns=MAX_TURNS),
        tuple(dict.fromkeys(needed)),
        schemas,
        judges=bool(rewards) or "get_reward" in methods,
    )


@dataclass
class _Player:
    """Plays episodes."""

    make: Callable[[], Any] | None
    """Makes an environment; None where there are tools alone."""
    tools: Mapping[str, Callable[..., Any]]
    rewards: Mapping[str, Callable[..., Any]]
    schemas: Sequence[Tool]
    template: Mapping[str, Any]
    idle: list[Any] = field(default_factory=list)
    """Environments that wait for `reset`."""

    async def play(self, prompt: str | list[Message], seed: int, **columns: Any) -> AsyncGenerator[Any, str]:
        world = None if self.make is None else self.idle.pop() if self.idle else self.make()
        row = {**columns, "prompt": as_messages(prompt)}
        messages = row["prompt"] if world is None else _reset(world, row, seed)
        tools = {**self.tools, **_methods(world)}
        counts = Counter({"tool_calls": 0, "tool_failures": 0, "unparsed_turns": 0})
        said: list[Message] = []
        observed = messages
        while observed:
            turn = read_turn((yield observed), self.schemas, self.template)
            counts["unparsed_turns"] += turn.is_unparsed
            observed = await answers(turn, tools, counts)
            said += [turn.message, *observed]
        values = await self._judged(world, {**row, "prompt": messages}, said)
        known = [value for value in values.values() if value is not None]
        metrics = {name: value for name, value in values.items() if value is not None and len(values) > 1}
        if world is not None:
            self.idle.append(world)  # Only of an episode that came to its end: nothing of it runs on.
        yield counted(Score(sum(known) if known else None, metrics=metrics), counts)

    async def _judged(self, world: Any, row: Mapping[str, Any], said: list[Message]) -> dict[str, float | None]:
        """By the environment itself, and by the rewards, each with weight 1."""
        values = {}
        if hasattr(world, "get_reward"):
            values["get_reward"] = await _value(world.get_reward())
        given = {name: [value] for name, value in row.items() if name != "prompt"}
        given |= {"prompts": [row["prompt"]], "completions": [said]} | ({} if world is None else {"environments": [world]})
        for name, reward in self.rewards.items():
            (values[name],) = await _value(reward(**taken(reward, given)))
        return {name: None if value is None else float(value) for name, value in values.items()}


def _reset(world: Any, row: Mapping[str, Any], seed: int) -> list[Message]:
    """The prompt, and behind it what `reset` returned. It gets the seed where it names one."""
    given = {**row, "seed": seed} if "seed" in inspect.signature(world.reset).parameters else row
    observed = world.reset(**taken(world.reset, given))
    *before, last = row["prompt"]
    if observed is None:
        return [*before, last]
    if not isinstance(observed, str | list):
        raise TypeError(f"reset returned {type(observed).__name__}; text, or a list of parts of a message was expected")
    said = last["content"]
    if type(said) is not type(observed):
        said, observed = ([{"type": "text", "text": each}] if isinstance(each, str) else each for each in (said, observed))
    return [*before, {**last, "content": said + observed}]


async def answers(turn: ParsedTurn, tools: Mapping[str, Callable[..., Any]], counts: Counter[str]) -> list[Message]:
    """A message for each call of a tool: those of plain functions in the order of the calls, then those that were awaited."""
    results: list[tuple[str, Any]] = []
    waiting: list[tuple[str, Any]] = []
    for call in turn.calls:
        counts["tool_calls"] += 1
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        try:
            if name not in tools:
                raise ValueError(f"Tool {name} not found.")
            result = tools[name](**arguments)
            (waiting if inspect.iscoroutine(result) else results).append((name, result))
        except Exception as error:  # noqa: BLE001  the model reads what a tool raises
            results.append((name, error))
    awaited = await asyncio.gather(*(result for _, result in waiting), return_exceptions=True) if waiting else ()
    results += [(name, result) for (name, _), result in zip(waiting, awaited, strict=True)]
    counts["tool_failures"] += sum(isinstance(result, Exception) for _, result in results)
    return [{"role": "tool", "name": name, "content": _shown(result)} for name, result in results]


def _shown(result: Any) -> Any:
    if is_image(result):
        return [{"type": "image", "image": result}]
    if isinstance(result, list) and result and all(isinstance(part, Mapping) and "type" in part for part in result):
        return result
    return str({"error": str(result)} if isinstance(result, Exception) else result)


def _methods(world: Any) -> dict[str, Callable[..., Any]]:
    """The tools: public methods of its class, so that no property is read."""
    names = [name for name, _ in inspect.getmembers(type(world), inspect.isfunction)] if world is not None else []
    return {name: getattr(world, name) for name in names if name not in _RESERVED and not name.startswith("_")}


def _kind(factory: Any, name: str) -> type:
    """The class of the environments that a factory makes."""
    try:
        kind = factory if isinstance(factory, type) else type(factory())
    except Exception as error:  # the factory is the user's own code
        raise ConfigError(f"environment {name!r} raised {type(error).__name__}: {error}") from error
    if not inspect.isfunction(getattr(kind, "reset", None)):
        raise ConfigError(f"environment {name!r} makes a {kind.__name__}, which has no method 'reset'; TRL needs one")
    return kind


def _bound(kind: type, name: str) -> Callable[..., Any]:
    """A method without its first parameter: what it is bound to does not matter to who only reads its signature."""
    found = inspect.getattr_static(kind, name)
    return found.__func__ if isinstance(found, staticmethod) else MethodType(found, kind)


def _reward(function: Any, name: str) -> Callable[..., Any]:
    if not callable(function):
        raise ConfigError(f"environment.options.rewards: {name!r} is a {type(function).__name__}, not a function")
    if absent := [each for each in _required(function) if each in _ABSENT]:
        raise ConfigError(
            f"environment.options.rewards: {name!r} asks for {absent[0]!r}, which an episode's process does not have"
        )
    checked: Callable[..., Any] = function
    return checked


def _required(function: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters that need a value."""
    named = inspect.signature(function).parameters.values()
    return tuple(p.name for p in named if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


async def _value(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def plain(play: Callable[..., AsyncGenerator[Any, Any]]) -> EnvironmentFunction:
    """An asynchronous generator that never waits, as a plain one: its tools may then block, each step in a thread."""

    @functools.wraps(play)
    def stepped(**fields: Any) -> Generator[Any, Any, None]:
        generator, sent = play(**fields), None
        try:
            while True:
                try:
                    generator.asend(sent).send(None)
                except StopIteration as step:
                    sent = yield step.value
        except StopAsyncIteration:
            return
        finally:
            with contextlib.suppress(StopIteration):
                generator.aclose().send(None)

    return stepped
