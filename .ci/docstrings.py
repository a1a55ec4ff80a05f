"""For the page of the Python API: a line of our docstrings that begins with names and a colon becomes an item of a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

_NAMED = re.compile(r"(?m)^ *(?=[a-z_])((?:\w+, )*\w+): +(?=\S)")
_FACT = re.compile(r"(?m)^ *(owns|waits for|woken by|on close) {2,}")


class Items(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = _NAMED.sub(r"\n- `\1`: ", obj.docstring.value)
            obj.docstring.value = _FACT.sub(r"\n- \1: ", text)
