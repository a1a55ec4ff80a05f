"""JSON and TOML as others have written them: what comes of it has numbers that 64 bits hold.

A longer integer raises far from its file, where it is shown, divided or sent, and deep nesting raises RecursionError: both are
a ValueError here, as is what is no JSON or TOML.
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
_LONG = re.compile(r"(?<![.0-9])[0-9]{19}|[eE]\+?[0-9]{3}")  # without one of these no number is beyond them
_DIGITS = re.compile(r"(?<![0-9_])[0-9_]{4000}")  # Python's own limit is 4300, and its message names no key


def json_value(text: str | bytes, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """As `json.loads`. Raises ValueError, which names the field of a number beyond the limits."""
    text = text.decode() if isinstance(text, bytes) else text
    try:
        if parse_constant is None and _LONG.search(text) is None:
            return json.loads(text)
        found = json.loads(text, parse_int=lambda digits: int(digits[:21]), parse_float=_float, parse_constant=parse_constant)
        return _within(found)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def toml_table(text: str) -> dict[str, Any]:
    """As `tomllib.loads`. Raises ValueError, which names the key of a number beyond the limits."""
    try:
        return dict(_within(tomllib.loads(text, parse_float=_float)))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        if isinstance(error, tomllib.TOMLDecodeError) or (digits := _DIGITS.search(text)) is None:
            raise
        before = text[: digits.start()].split("\n")
        raise ValueError(f"{before[-1].partition('=')[0].strip()[:200]} (line {len(before)}): {_LIMITS}") from error


def _float(text: str) -> float:
    return _HIGHEST + 1 if math.isinf(value := float(text)) and "inf" not in text else value


def _within(value: Any, where: str = "") -> Any:
    """The value itself. Raises ValueError."""
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            _within(each, f"{where}[{key}]" if isinstance(value, list) else f"{where}.{key}" if where else str(key))
    elif isinstance(value, int) and not _LOWEST <= value <= _HIGHEST:
        raise ValueError(f"{where or 'it'}: {_LIMITS}")
    return value
