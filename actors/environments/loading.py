"""From a name to an environment and back: `resolve` in the supervisor, `load` in the process that runs its episodes.

As with rewards, an environment travels as a name, and is proven good before any process starts. One that is written for another
system is named with its form before the target, `trl:file.py:MyEnvironment`, and played as ours:

    form        what the target is                                                        settings it reads
    trl         what `GRPOTrainer` takes as `environment_factory`, or as `tools`: a list     options.rewards, .response_template
    verifiers   a `Taskset`                                                              options are its `[env]` block
    openenv     the address of a server of OpenEnv                                       options.action, .observation
    harbor      a directory of its tasks, and what runs them: docker, podman or process      options.network
    remote      the address of a server that plays one (`server`)                            options.keys
    (none)      an agent: a function of ours with a parameter `llm` and without a yield      options.response_template

Each adapter makes a generator of ours from the foreign object, which stays unchanged. The tools that the model is shown are
known before the run, and travel with the spec; those of an agent come with its calls.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any, Literal

from async_rlhf.actors.data.images import Read as ReadImage
from async_rlhf.actors.data.images import take_none
from async_rlhf.actors.environments.settings import (
    EnvironmentDeclaration,
    EnvironmentFunction,
    EnvironmentSettings,
    settings_of,
)
from async_rlhf.actors.environments.tool_calls import Tool, schema_of
from async_rlhf.actors.rewards.loading import absolute, found_in, split_form
from async_rlhf.actors.rewards.signature import Signature, check_parameters
from async_rlhf.actors.workers import CALLER
from async_rlhf.buffers.errors import ConfigError, EpisodeError, RewardError

FIELDS = frozenset({"prompt", "seed"})
"""Of every episode, beside the columns of its row. seed: int, the same for all members of a group."""
MAX_TURNS = 64
"""Of an adapted environment that sets no limit itself; the length of an episode bounds it as well."""
ADAPTERS: Mapping[str, str] = {
    "harbor": "environments.from_harbor:from_harbor",
    "trl": "environments.from_trl:from_trl",
    "verifiers": "agents.from_verifiers:from_verifiers",
    "openenv": "environments.from_openenv:from_openenv",
    "remote": "environments.remote:from_server",
}
"""By form the module of actors and its function, which makes of target and options what is `Adapted`: imported where it is
used."""

_AGENT, _ENDPOINT = "agents.adapter:from_function", "agents.endpoint:endpoint"
_FORM = (
    "an environment is a generator: it yields the prompt, and gets what the model wrote back ('text = yield question'); "
    "an agent has a parameter llm, and returns its reward; one of another system is named with its form (trl:file.py:Name)"
)


@dataclass(frozen=True)
class Adapted:
    """A generator of ours, called with the fields of an episode, and what it or its foreign object declares."""

    function: EnvironmentFunction
    settings: EnvironmentDeclaration
    required: tuple[str, ...] = ()
    """Columns that every row must have."""
    tools: tuple[Tool, ...] = ()
    """JSON schemas for the model's chat template."""
    judges: bool = True
    """Whether it gives a score; else rewards must."""
    fields: tuple[str, ...] | None = None
    """The fields and columns it takes, None for all."""


@dataclass(frozen=True)
class EnvironmentSpec(EnvironmentSettings):
    """An environment by name, and how its episodes are bounded. Plain data. The other fields: as in `Adapted`."""

    name: str
    target: str
    """`package.module:name` or `/absolute/file.py:name`, after its form (`trl:`) where it is of another system."""
    kind: Literal["sync", "async"]
    """async for an asynchronous generator."""
    required: tuple[str, ...] = ()
    fields: tuple[str, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Values of its other parameters."""
    tools: tuple[Tool, ...] = field(default=(), hash=False)
    judges: bool = True
    one_by_one: bool = False
    """Whether an agent's simultaneous calls are answered one after the other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # A spec is written as JSON on its way to an actor, which turns tuples into lists.
        for name in ("required", "fields", "tools"):
            object.__setattr__(self, name, None if getattr(self, name) is None else tuple(getattr(self, name)))

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
    options: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> EnvironmentSpec:
    """Prove that an environment can be loaded and called; runs in the supervisor before any process starts.

    target: as in `EnvironmentSpec.target`, or `own_name=target`. base_dir: folder that a relative file starts from. options:
    values for parameters that are no columns. settings: what overrides its `@environment(...)`.
    Raises EpisodeError for a target that cannot be loaded, ConfigError for one that is no generator.
    """
    own_name, _, target = absolute(target, base_dir, ADAPTERS).rpartition("=")
    adapted = _found(target, options or {})
    name = own_name or adapted.settings.name or target.rpartition(":")[2].rpartition(".")[2]
    return _spec(name, target, adapted, options or {}, settings or {})


def spec_in_process(
    name: str, function: EnvironmentFunction, options: Mapping[str, Any], settings: Mapping[str, Any]
) -> EnvironmentSpec:
    """The spec of a function that only this process has; `load` cannot find it. Raises ConfigError."""
    return _spec(name, name, _ours(name, function, options), options, settings)


def _spec(name: str, target: str, found: Adapted, options: Mapping[str, Any], settings: Mapping[str, Any]) -> EnvironmentSpec:
    given = replace(found.settings, **settings)
    return EnvironmentSpec(
        name,
        target,
        "async" if _is(inspect.isasyncgenfunction, found.function) else "sync",
        found.required,
        found.fields,
        dict(options),
        found.tools,
        found.judges,
        **{each.name: getattr(given, each.name) for each in dataclass_fields(EnvironmentSettings)},
    )


def load(spec: EnvironmentSpec, image: ReadImage = take_none) -> EnvironmentFunction:
    """The function itself, called with the fields of an episode alone, in the process that will run it. image: reads those that
    agents send.

    Raises EpisodeError when it cannot be had.
    """
    if spec.calls:  # before the user's file is imported, whose clients read then where they connect
        _named(_ENDPOINT)().image = image
    try:
        function = _found(spec.target, spec.options).function
    except ConfigError as error:
        raise EpisodeError(str(error)) from error
    return function if form_of(spec.target)[0] else with_options(function, spec)


def with_options(function: EnvironmentFunction, spec: EnvironmentSpec) -> EnvironmentFunction:
    """A function of ours, called with the fields of an episode alone."""
    return (lambda **fields: function(**{**fields, **spec.options})) if spec.options else function


def located(target: str) -> tuple[str, str, Any]:
    """The module or file of a target, its name there, and what that is. Raises EpisodeError for what is not there."""
    place, _, name = target.rpartition(":")
    if not place:
        raise EpisodeError(f"environment {target!r} has no module; name it as 'package.module:name' or 'path.py:name'")
    return place, name, found_in(place, name, "environment", target, EpisodeError)


def form_of(target: str) -> tuple[str, str]:
    """The form before the first colon ("" for one of ours, also in a module that is called as a form), and what follows."""
    form, rest = split_form(target, ADAPTERS)
    return (form, rest) if ":" in rest or rest.startswith(CALLER) else ("", target)


def _found(target: str, options: Mapping[str, Any]) -> Adapted:
    form, rest = form_of(target)
    if form:
        return _adapted(form, rest, json.dumps(dict(options), sort_keys=True))
    return _ours(target, located(target)[2], options)


@functools.lru_cache(maxsize=16)
def _adapted(form: str, target: str, options: str) -> Adapted:
    """Made once in a process. Raises EpisodeError for what is not there, ConfigError for what is not of the form."""
    try:
        adapter = _named(ADAPTERS[form])
    except ImportError as error:
        raise EpisodeError(f"environment {target!r} of {form} cannot be loaded here: {error}") from error
    found: Adapted = adapter(target, json.loads(options))
    return found


def _named(named: str) -> Callable[..., Any]:
    module, _, name = named.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(f"async_rlhf.actors.{module}"), name)
    return found


def _ours(target: str, function: EnvironmentFunction, options: Mapping[str, Any]) -> Adapted:
    if inspect.isclass(function) or not callable(function):
        raise ConfigError(f"environment {target!r} is {type(function).__name__}, no function; {_FORM}")
    try:
        signature = Signature.of(function)
    except RewardError as error:
        raise ConfigError(f"environment {target!r}: {error}") from error
    if not _is(inspect.isasyncgenfunction, function) and not _is(inspect.isgeneratorfunction, function):
        if "llm" not in (*signature.required, *signature.optional):
            raise ConfigError(f"environment {target!r} has no yield; {_FORM}")
        adapted: Adapted = _named(_AGENT)(target, function, signature, options)
        return adapted
    declared, taken = settings_of(function), (*signature.required, *signature.optional)
    tools = tuple(map(schema_of, declared.tools))
    return Adapted(function, declared, signature.required, tools, fields=None if signature.any_column else taken)


def _is(kind: Any, function: EnvironmentFunction) -> bool:
    """Also of an object that is called."""
    return bool(kind(function) or kind(getattr(function, "__call__", None)))  # noqa: B004  its kind is asked for
