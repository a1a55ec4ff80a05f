"""JSON and TOML as others have written them: what comes of it has numbers that 64 bits hold.

A longer integer raises far from its file, where it is shown, divided or sent; nesting of thousands of levels ends the
interpreter's stack. Here both are a ValueError, as is what is no JSON or TOML.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable
from typing import Any

_LOWEST, _HIGHEST = -(1 << 63), (1 << 64) - 1
_LIMITS = f"numbers are integers from {_LOWEST} to {_HIGHEST}, or floats up to 1.8e308"
# Without one of these a text has no number to look at.
_LONG = re.compile(r"(?<![.0-9])[0-9]{19}|[eE]\+?[0-9]{3}")
_DIGITS = re.compile(r"[0-9_]{4000}")  # Python's own limit is 4300, and its message names no key


def json_value(text: str | bytes, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """As `json.loads`. Raises ValueError, which names the field of a number beyond the limits."""
    text = text.decode() if isinstance(text, bytes) else text
    try:
        if parse_constant is None and _LONG.search(text) is None:
            return json.loads(text)
        return _within(json.loads(text, parse_int=_integer, parse_float=_float, parse_constant=parse_constant))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def toml_table(text: str) -> dict[str, Any]:
    """As `tomllib.loads`. Raises ValueError, which names the key of a number beyond the limits."""
    try:
        found: dict[str, Any] = _within(tomllib.loads(text, parse_float=_float))
        return found
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        if isinstance(error, tomllib.TOMLDecodeError) or (digits := _DIGITS.search(text)) is None:
            raise
        line = text.count("\n", 0, digits.start()) + 1
        key = text[: digits.start()].rpartition("\n")[2].partition("=")[0].strip()
        raise ValueError(f"{key[:200] or 'a value'} (line {line}): {_LIMITS}") from error


def _integer(text: str) -> int:
    return int(text) if len(text) <= len(str(_LOWEST)) else _HIGHEST + 1


def _float(text: str) -> float:
    value = float(text)
    return _HIGHEST + 1 if math.isinf(value) and "inf" not in text else value


def _within(value: Any) -> Any:
    """The value itself. Raises ValueError."""
    if (where := _beyond(value, "")) is not None:
        raise ValueError(f"{where or 'it'}: {_LIMITS}")
    return value


def _beyond(value: Any, where: str) -> str | None:
    """Where the first number beyond the limits is."""
    if isinstance(value, dict):
        inner = ((f"{where}.{key}" if where else str(key), each) for key, each in value.items())
    elif isinstance(value, list):
        inner = ((f"{where}[{index}]", each) for index, each in enumerate(value))
    else:
        return where if isinstance(value, int) and not _LOWEST <= value <= _HIGHEST else None
    return next((found for name, each in inner if (found := _beyond(each, name)) is not None), None)
