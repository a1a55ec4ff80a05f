"""Decorators that leave settings on a function: `@NAME`, or `@NAME(...)` with the parameters of a class of settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar, cast, overload

from async_rlhf.buffers.errors import ConfigError, did_you_mean

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
Declared = TypeVar("Declared")
Parameters = ParamSpec("Parameters")

SETTINGS = "__async_rlhf_settings__"


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
                setattr(marked, SETTINGS, make(**settings))
                return marked

            return mark if function is None else mark(function)

        return cast(Decorator[Parameters], decorator)

    return named_like


def declared(function: Callable[..., Any], declaration: type[Declared]) -> Declared:
    """What its decorator left on the function, else the defaults."""
    found = getattr(function, SETTINGS, None)
    return found if isinstance(found, declaration) else declaration()
