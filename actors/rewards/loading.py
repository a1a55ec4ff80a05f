"""From a name to a function and back: `resolve` in the supervisor, `load` in the process that calls the reward.

A reward travels between processes as a name, never as an object. The supervisor proves each name good before any
process starts, so a misspelt one costs seconds, not an hour.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from async_rlhf.actors.rewards.adapters import ADAPTERS, adapted
from async_rlhf.actors.rewards.settings import RewardDeclaration, RewardFunction, RewardSettings, settings_of
from async_rlhf.actors.rewards.signature import Signature
from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError, RewardError, did_you_mean
from async_rlhf.buffers.user_files import PRIVATE, MissingFileError, UnfinishedImportError, import_file, is_guarded

# Built-ins are ordinary functions; each in its own module, so that a process imports only the libraries it needs.
_HERE = "async_rlhf.actors.rewards.builtins"
BUILTINS = {
    "exact": f"{_HERE}.text:exact",
    "judge": f"{_HERE}.judge:judge",
    "length": f"{_HERE}.text:length",
    "math_verify": f"{_HERE}.mathematics:math_verify",
    "overlong": f"{_HERE}.text:overlong",
    "reasoning_gym": f"{_HERE}.gym:reasoning_gym",
    "regex": f"{_HERE}.text:regex",
    "remote": "async_rlhf.actors.scoring.remote:remote",
    "reward_model": "async_rlhf.actors.scoring.model_stages:reward_model",
}

_FIX = "another process cannot import it; define it with 'def' at the top level of a module or a .py file"


@dataclass(frozen=True)
class RewardSpec(RewardSettings):
    """A reward by name, and how it is called. Plain data."""

    name: str
    target: str
    """`package.module:name`, `/absolute/file.py:name` or the name of a built-in, behind `FORM:` where the form is given."""
    kind: Literal["sync", "async"]
    fields: tuple[str, ...] | None = None
    """The fields and columns its calls can use, None for all."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Values of its other parameters."""
    holds_model: bool = False
    """Whether its processes load something of unknown size before the first call (`prepare`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # A spec is written as JSON on its way to an actor, which turns tuples into lists; specs are dictionary keys.
        if self.fields is not None:
            object.__setattr__(self, "fields", tuple(self.fields))
        object.__setattr__(self, "stop_when", tuple(self.stop_when))
        if self.batch_size == 1:
            object.__setattr__(self, "batch_wait_s", 0.0)


def resolve(
    targets: Iterable[str],
    base_dir: Path,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[RewardSpec, ...]:
    """Prove that every target can be loaded and called; runs in the supervisor before any process starts.

    targets: each a name as in `RewardSpec.target`, or `own_name=target`. base_dir: folder that relative file targets start
    from. options: by reward name, values for parameters that are no columns. settings: by reward name, what overrides its
    `@reward(...)`.
    Raises RewardError for a target that cannot be loaded, ConfigError for two rewards of one name and for none at all.
    """
    options, settings = options or {}, settings or {}
    specs: dict[str, RewardSpec] = {}
    for given in targets:
        own_name, _, target = absolute(given, base_dir).rpartition("=")
        spec = _spec(own_name, target, options, settings)
        if spec.name in specs:
            raise ConfigError(
                f"two rewards are called {spec.name!r}: {specs[spec.name].target} and {spec.target}; "
                f'rename one ("other_name={spec.target}", or @reward(name="...")) or remove it'
            )
        specs[spec.name] = spec
    if not specs:
        raise ConfigError("no reward is configured, so there is nothing to learn; name one in rewards.functions")
    if unknown := set(options) - set(specs):
        name = min(unknown)
        raise ConfigError(f"rewards.options.{name}: there is no reward of this name; {did_you_mean(name, specs)}")
    return tuple(specs.values())


def _spec(
    own_name: str,
    target: str,
    options: Mapping[str, Mapping[str, Any]],
    given: Mapping[str, Mapping[str, Any]],
) -> RewardSpec:
    function = _function(target)
    settings = settings_of(function)
    name = own_name or settings.name or target.rpartition(":")[2].rpartition(".")[2]
    return _checked(name, target, function, dict(options.get(name, {})), given.get(name, {}))


def check_columns(spec: RewardSpec, columns: AbstractSet[str]) -> None:
    """columns: those of every row that it judges. Raises ConfigError when a parameter can get no value, and what its own checks
    raise."""
    _check_call(spec, _function(spec.target), columns)


def _check_call(spec: RewardSpec, function: RewardFunction, columns: AbstractSet[str]) -> None:
    Signature.of(function).check(spec.name, columns, spec.options.keys())
    settings = settings_of(function)
    if settings.check is not None:
        settings.check(**spec.options)
    if spec.stream_tokens and settings.stream is not None and settings.stream.check is not None:
        settings.stream.check(**spec.options)


def spec_in_process(name: str, function: RewardFunction, columns: AbstractSet[str] | None) -> RewardSpec:
    """The spec of a function that only this process has; `load` cannot find it. Raises ConfigError."""
    spec = _checked(name, f"caller:{name}", function, {}, {})
    if spec.scope == "group" or spec.stream_tokens or spec.holds_model:
        raise ConfigError(f"reward {name!r} judges groups, reads unfinished completions or loads a model: {_FIX}")
    if columns is not None:
        _check_call(spec, function, columns)
    return spec


def _checked(
    name: str,
    target: str,
    function: RewardFunction,
    chosen: dict[str, Any],
    given: Mapping[str, Any],
) -> RewardSpec:
    """chosen: values of its options; given: settings that override its decorator."""
    signature, settings = Signature.of(function), replace(settings_of(function), **given)
    _check_given(name, given, settings, signature.is_async)
    if settings.batch_size > 1 and signature.form != "list":
        raise ConfigError(
            f"reward {name!r} has batch_size = {settings.batch_size} but takes one completion; "
            f"take lists (`prompts`, `completions`), or leave batch_size out"
        )
    if settings.stream_tokens:
        _check_stream(name, settings, signature.is_async)
    return RewardSpec(
        name,
        target,
        "async" if signature.is_async else "sync",
        signature.fields,
        chosen,
        settings.prepare is not None,
        **{field.name: getattr(settings, field.name) for field in dataclass_fields(RewardSettings)},
    )


def _check_given(name: str, given: Mapping[str, Any], settings: RewardDeclaration, is_async: bool) -> None:
    """Raises ConfigError for settings of a stage that would have no effect."""
    where = f"scoring.stages.{name}"
    if is_async and given.get("workers"):
        raise ConfigError(
            f"{where}.workers = {settings.workers}: an 'async def' runs on one event loop; set {where}.max_concurrency, or "
            "leave it out"
        )
    at_once = given.get("max_concurrency") or 0
    if not is_async and settings.workers and at_once > settings.workers:
        raise ConfigError(
            f"{where}.max_concurrency = {at_once} with {settings.workers} processes of its own; "
            f"highest: {settings.workers}, or set {where}.workers = {at_once}"
        )


def _check_stream(name: str, settings: RewardDeclaration, is_async: bool) -> None:
    """Raises ConfigError for a reward that has no incremental scoring."""
    where = f"reward {name!r} has stream_tokens = {settings.stream_tokens}"
    if settings.stream is None or is_async or settings.scope != "completion":
        raise ConfigError(
            f"{where} but has no incremental scoring: only a plain 'def' with @reward(stream=...) has; set it to 0"
        )
    if settings.workers != 1:
        raise ConfigError(f"{where} and workers = {settings.workers}: what was read lies in one process; set workers = 1")


def absolute(target: str, base_dir: Path, forms: Collection[str] = ADAPTERS) -> str:
    """The same target, its file, or directory of tasks, seen from everywhere; what names none stays as it is. forms: that may
    stand before it."""
    own_name, equals, rest = target.rpartition("=")
    scheme, rest = split_form(rest, forms)
    place, _, name = rest.rpartition(":")
    if not place.endswith(".py") and scheme != "harbor":
        return target
    return f"{own_name}{equals}{scheme}{':' * bool(scheme)}{(base_dir / Path(place).expanduser()).resolve()}:{name}"


def load(spec: RewardSpec) -> RewardFunction:
    """The function itself, in the process that will call it. Raises RewardError when it cannot be had."""
    return _function(spec.target)


def spec_of(function: Callable[..., Any]) -> str:
    """The target that names this function object: `module:qualname`, or `file.py:name` for one of a script.

    Raises RewardError for what has no name another process could import: a lambda, a closure, a nested function, a
    `functools.partial`, a bound method, a function typed into an interactive session, one of a script without a guard.
    """
    if isinstance(function, functools.partial):
        raise RewardError(f"{function!r} is a functools.partial: {_FIX}")
    name = getattr(function, "__qualname__", None)
    if name is None or getattr(function, "__self__", None) is not None:
        raise RewardError(f"{function!r} is not a plain function but a {type(function).__name__}: {_FIX}")
    if "<lambda>" in name:
        raise RewardError(f"{name!r} is a lambda: {_FIX}")
    if "<locals>" in name:
        raise RewardError(f"{name!r} is defined inside another function: {_FIX}")
    module = sys.modules.get(function.__module__)
    # A script's module is called __main__ (or __mp_main__ in its children), one loaded from a file has a private name.
    if function.__module__ in ("__main__", "__mp_main__") or function.__module__.startswith(PRIVATE):
        file = getattr(module, "__file__", None)
        if file is None:
            raise RewardError(f"{name!r} was typed into an interactive session, which has no file: {_FIX}")
        if function.__module__ == "__main__" and not is_guarded(Path(file)):
            raise RewardError(
                f"{name!r} is in {file}, and importing that would run it once more; put what it runs under: "
                "if __name__ == '__main__':"
            )
        return f"{Path(file).resolve()}:{name}"
    if module is None or attribute(module, name) is not function:
        raise RewardError(f"{function.__module__}:{name} is not the function that was given: {_FIX}")
    return f"{function.__module__}:{name}"


def _function(target: str) -> RewardFunction:
    scheme, rest = split_form(target, ADAPTERS)
    place, _, name = BUILTINS.get(rest, rest).rpartition(":")
    if not place:
        raise RewardError(
            f"reward {target!r} is no built-in: {did_you_mean(target, BUILTINS)}; "
            f"name your own as 'package.module:name' or 'path.py:name'"
        )
    found = found_in(place, name, "reward", target)
    try:
        return adapted(found, scheme)
    except RewardError as error:
        raise RewardError(f"reward {target!r} {error}") from error


# -- of any kind ----------------------------------------------------------------------------------------------------------


def split_form(target: str, forms: Collection[str]) -> tuple[str, str]:
    """The form before the first colon ("" for none of these), and what follows."""
    form, _, rest = target.partition(":")
    return (form, rest) if form in forms and rest else ("", target)


def found_in(place: str, name: str, kind: str, target: str, error: type[AsyncRLHFError] = RewardError) -> Any:
    """The object `name` at the top level of `place`, a module or a file. kind, target: its names in errors.

    Raises the error for what cannot be imported, and for a name that is not there.
    """
    try:
        module = _file_module(Path(place), kind) if place.endswith(".py") else _module(place, kind, target)
    except RewardError as failed:
        raise error(str(failed)) from failed
    found = attribute(module, name)
    if found is None:
        public = [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")]
        hint = did_you_mean(name, public) if public else "it defines no function"
        raise error(f"{kind} {target!r}: no {name!r} at the top level of {place}; {hint}")
    return found


def attribute(module: ModuleType, name: str) -> Any:
    """The object at a dotted name, None if it does not exist."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _module(name: str, kind: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise RewardError(f"{kind} {target!r}: importing {name} failed: {error}; install what it needs") from error
        raise RewardError(
            f"{kind} {target!r}: there is no module {error.name!r} on Python's path; "
            f"name its file instead ('path/{name.rpartition('.')[2]}.py:{target.rpartition(':')[2]}') or install it"
        ) from error
    except (Exception, SystemExit) as error:  # the module is the user's own code and may raise anything
        raise RewardError(f"{kind} {target!r}: importing {name} raised {type(error).__name__}: {error}") from error


def _file_module(path: Path, kind: str) -> ModuleType:
    try:
        return import_file(path)
    except MissingFileError as error:
        raise RewardError(f"{kind} file {error}") from error
    except UnfinishedImportError as error:
        raise RewardError(f"{error} for its {kind}s; put what starts the run under: if __name__ == '__main__':") from error
    except (Exception, SystemExit) as error:  # the file is the user's own code and may raise anything
        raise RewardError(f"importing {kind} file {path} raised {type(error).__name__}: {error}") from error
