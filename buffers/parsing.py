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

import pydantic_core

_LOWEST, _HIGHEST = -(1 << 63), (1 << 64) - 1
_LIMITS = f"numbers are integers from {_LOWEST} to {_HIGHEST}, or floats up to 1.8e308"
_LONG = re.compile(r"(?<![.0-9])[0-9]{19}|[eE]\+?[0-9]{3}")  # without one of these no number is beyond them
# An expression is tried at every place of a text. Where every digit is 0, such a number is one of a few words.
_ALL_ZERO = bytes.maketrans(b"123456789E", b"000000000e")
_DIGITS = re.compile(r"(?<![0-9_])[0-9_]{4000}")  # Python's own limit is 4300, and its message names no key


def json_value(text: str | bytes, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Like `json.loads`. Raises ValueError, which names the field of a number beyond the limits."""
    text = text.decode() if isinstance(text, bytes) else text
    try:
        if parse_constant is None and not _has_long(text):
            return loads(text)
        value = json.loads(text, parse_int=lambda digits: int(digits[:21]), parse_float=_float, parse_constant=parse_constant)
        return _within(value)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def loads(text: str | bytes) -> Any:
    """Like `json.loads`, in a third of its time, with numbers of any size. Raises ValueError and RecursionError."""
    try:
        return pydantic_core.from_json(text, cache_strings="keys")
    except ValueError:
        return json.loads(text)  # its error names what is wrong, and it takes half of a surrogate pair and 200 levels


def toml_table(text: str) -> dict[str, Any]:
    """Like `tomllib.loads`. Raises ValueError, which names the key of a number beyond the limits."""
    try:
        return dict(_within(tomllib.loads(text, parse_float=_float)))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        if isinstance(error, tomllib.TOMLDecodeError) or (digits := _DIGITS.search(text)) is None:
            raise
        before = text[: digits.start()].split("\n")
        raise ValueError(f"{before[-1].partition('=')[0].strip()[:200]} (line {len(before)}): {_LIMITS}") from error


def _has_long(text: str) -> bool:
    zeros = text.encode("utf-8", "surrogatepass").translate(_ALL_ZERO)
    return (b"e000" in zeros or b"e+000" in zeros or b"0000000000000000000" in zeros) and _LONG.search(text) is not None


def _float(text: str) -> float:
    return _HIGHEST + 1 if math.isinf(value := float(text)) and "inf" not in text else value


def _within(value: Any, where: str = "") -> Any:
    """The value itself. Raises ValueError."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _within(item, f"{where}[{key}]" if isinstance(value, list) else f"{where}.{key}" if where else str(key))
    elif isinstance(value, int) and not _LOWEST <= value <= _HIGHEST:
        raise ValueError(f"{where or 'it'}: {_LIMITS}")
    return value
