"""Values of a configuration as nested tables: from dotted keys, from sections, and laid one upon another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from async_rlhf.buffers.config import REVEALED
from async_rlhf.buffers.errors import ConfigError


def nested(dotted: str, value: Any) -> dict[str, Any]:
    """`a.b = value` as tables. Raises ConfigError for a key that is no text."""
    if not isinstance(dotted, str):
        raise ConfigError(f"unknown key {dotted!r}: a key is a text, as in {{'max_steps': 3}}")
    for part in reversed(dotted.split(".")):
        value = {part: value}
    return dict(value)


def plain(value: Any) -> Any:
    """A copy with tables for mappings, and for sections what was set in them."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_unset=True, context=REVEALED)
    return {key: plain(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def lay(under: dict[str, Any], over: Mapping[str, Any], where: str = "") -> None:
    """Lay tables upon others, as `load` describes. Raises ConfigError for a table upon a value."""
    for key, value in over.items():
        known = under.get(key)
        if isinstance(value, dict) and value and known is not None:
            if not isinstance(known, dict):
                raise ConfigError(f"override {f'{where}{key}.{next(iter(value))}'!r}: {key!r} is a value, not a section")
            lay(known, value, f"{where}{key}.")
        else:
            under[key] = value


def numbered(value: Any) -> Any:
    """With tables by their numbers in place of lists of tables."""
    if isinstance(value, tuple) and value and isinstance(value[0], dict):
        value = {str(number): each for number, each in enumerate(value)}
    return {key: numbered(each) for key, each in value.items()} if isinstance(value, dict) else value


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Tables as dotted keys."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def in_toml(value: Any) -> Any:
    """A copy of plain values with None as it is written there."""
    if isinstance(value, dict):
        return {key: in_toml(each) for key, each in value.items()}
    if isinstance(value, list):
        return [in_toml(each) for each in value]
    return "none" if value is None else value
