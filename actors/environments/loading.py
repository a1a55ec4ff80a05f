"""From a name to an environment and back: `resolve` in the supervisor, `load` in the process that runs its episodes.

As with rewards, an environment travels as a name, and is proven good before any process starts.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any, Literal

from async_rlhf.actors.environments.adapters import Adapted, adapted, form_of
from async_rlhf.actors.environments.settings import EnvironmentFunction, EnvironmentSettings, settings_of
from async_rlhf.actors.environments.tool_calls import Tool, schema_of
from async_rlhf.actors.rewards import absolute
from async_rlhf.actors.rewards.loading import found_in
from async_rlhf.actors.rewards.signature import Signature, check_parameters
from async_rlhf.buffers.errors import ConfigError, EpisodeError, RewardError

FIELDS = frozenset({"prompt", "seed"})
"""Of every episode, beside the columns of its row. seed: int, the same for all members of a group."""

_FORM = "an environment is a generator: it yields the prompt, and gets what the model wrote back ('text = yield question')"


@dataclass(frozen=True)
class EnvironmentSpec(EnvironmentSettings):
    """An environment by name, and how its episodes are bounded. Plain data.

    target: `package.module:name` or `/absolute/file.py:name`, with its form before it (`trl:`) where it is of another system.
    kind: async for an asynchronous generator. required: parameters without a default. fields: the fields and columns it takes,
    None for all. options: values of its other parameters. tools: those that the model is shown. judges: False where it never
    gives a score, so that rewards must.
    """

    name: str
    target: str
    kind: Literal["sync", "async"]
    required: tuple[str, ...] = ()
    fields: tuple[str, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    tools: tuple[Tool, ...] = field(default=(), hash=False)
    judges: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        # A spec is written as JSON on its way to an actor, which turns tuples into lists.
        object.__setattr__(self, "required", tuple(self.required))
        object.__setattr__(self, "tools", tuple(self.tools))
        object.__setattr__(self, "fields", None if self.fields is None else tuple(self.fields))

    def check(self, columns: AbstractSet[str]) -> None:
        """columns: those of every row. Raises ConfigError when a parameter can get no value, and for an unknown option."""
        what, options = f"environment {self.name!r}", self.options.keys()
        check_parameters(what, "environment.options", self.required, self.fields, FIELDS, columns, options)

    def usable(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Those of an episode's fields that the environment can use: only they travel to it."""
        return {name: value for name, value in fields.items() if self.fields is None or name in self.fields}


def resolve(
    target: str,
    base_dir: Path,
    columns: AbstractSet[str] | None = None,
    options: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> EnvironmentSpec:
    """Prove that an environment can be loaded and called; runs in the supervisor before any process starts.

    target: as in `EnvironmentSpec.target`, or `own_name=target`. base_dir: folder that a relative file starts from. columns:
    those of every row; without them parameters are not checked. options: values for parameters that are no columns. settings:
    what overrides its `@environment(...)`.
    Raises EpisodeError for a target that cannot be loaded, ConfigError for one that is no generator, and as `check` does.
    """
    own_name, _, target = absolute(target, base_dir).rpartition("=")
    found, fields = _found(target, options or {})
    name = own_name or found.settings.name or target.rpartition(":")[2].rpartition(".")[2]
    return _checked(name, target, found, fields, options, settings, columns)


def spec_in_process(
    name: str,
    function: EnvironmentFunction,
    options: Mapping[str, Any],
    settings: Mapping[str, Any],
    columns: AbstractSet[str] | None,
) -> EnvironmentSpec:
    """The spec of a function that only this process has; `load` cannot find it. Raises ConfigError."""
    return _checked(name, name, *_of_ours(name, function), options, settings, columns)


def _checked(
    name: str,
    target: str,
    found: Adapted,
    fields: tuple[str, ...] | None,
    options: Mapping[str, Any] | None,
    settings: Mapping[str, Any] | None,
    columns: AbstractSet[str] | None,
) -> EnvironmentSpec:
    given = replace(found.settings, **(settings or {}))
    spec = EnvironmentSpec(
        name,
        target,
        "async" if _is(inspect.isasyncgenfunction, found.function) else "sync",
        found.required,
        fields,
        dict(options or {}),
        found.tools,
        found.judges,
        **{each.name: getattr(given, each.name) for each in dataclass_fields(EnvironmentSettings)},
    )
    if columns is not None:
        spec.check(columns)
    return spec


def load(spec: EnvironmentSpec) -> EnvironmentFunction:
    """The function itself, called with the fields of an episode alone, in the process that will run it.

    Raises EpisodeError when it cannot be had.
    """
    form, rest = form_of(spec.target)
    if form:
        try:
            return adapted(form, rest, spec.options).function
        except ConfigError as error:
            raise EpisodeError(str(error)) from error
    return with_options(_function(spec.target), spec)


def with_options(function: EnvironmentFunction, spec: EnvironmentSpec) -> EnvironmentFunction:
    """A function of ours, called with the fields of an episode alone."""
    return (lambda **fields: function(**{**fields, **spec.options})) if spec.options else function


def _found(target: str, options: Mapping[str, Any]) -> tuple[Adapted, tuple[str, ...] | None]:
    """What the target is, and the fields that it takes (None: all)."""
    form, rest = form_of(target)
    if form:
        found = adapted(form, rest, options)
        return found, found.fields
    return _of_ours(target, _function(target))


def _of_ours(target: str, function: EnvironmentFunction) -> tuple[Adapted, tuple[str, ...] | None]:
    signature = _signature(target, function)
    fields = None if signature.any_column else (*signature.required, *signature.optional)
    declared = settings_of(function)
    return Adapted(function, declared, signature.required, tuple(map(schema_of, declared.tools))), fields


def _function(target: str) -> EnvironmentFunction:
    place, _, name = target.rpartition(":")
    if not place:
        raise EpisodeError(f"environment {target!r} has no module; name it as 'package.module:name' or 'path.py:name'")
    found: EnvironmentFunction = found_in(place, name, "environment", target, EpisodeError)
    return found


def _signature(target: str, function: EnvironmentFunction) -> Signature:
    if not callable(function):
        raise ConfigError(f"environment {target!r} is {type(function).__name__}, no function; {_FORM}")
    if not _is(inspect.isasyncgenfunction, function) and not _is(inspect.isgeneratorfunction, function):
        raise ConfigError(f"environment {target!r} has no yield; {_FORM}")
    try:
        return Signature.of(function)
    except RewardError as error:
        raise ConfigError(f"environment {target!r}: {error}") from error


def _is(kind: Any, function: EnvironmentFunction) -> bool:
    """Also of an object that is called."""
    return bool(kind(function) or kind(getattr(function, "__call__", None)))  # noqa: B004
