"""Values of a configuration without the folders of this machine, which name people and clients: a path is its last part."""

from __future__ import annotations

import os
import re
from pathlib import PurePath
from typing import Any

from async_rlhf.run.manifest import published

_LONGEST = 4096
_BEGINS = re.compile(r"(?<![\w/.<>~])~?/(?=[^\s/])")
# The whole of a value, behind a name of its own and a form: NAME=FORM:/folder/file.py:function. Folders have any characters.
_VALUE = re.compile(r"((?:[^/\n]*[=:])?)((?:file://)?~?/[\w.@+-]+/[^\n]*)")
_PLAIN = re.compile(r"~?/(?:[\w.@+~-]+/)+(?=[\w.@+~-])")


def without_folders(value: Any) -> Any:
    """A copy of plain values without folders; models are named as on the Hub."""
    if isinstance(value, dict):
        return {key: without_folders(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_folders(each) for each in value]
    if not isinstance(value, str):
        return value
    if not (whole := _VALUE.fullmatch(value)):
        return _in_text(value)
    known = published(whole[2])
    return whole[1] + (str(known) if known.commit else PurePath(whole[2]).name)


def _in_text(text: str) -> str:
    """Paths that stand in a text end where they no longer are on this disk; of others the folders without a space are known."""
    for start in reversed([found.start() for found in _BEGINS.finditer(text)]):
        rest = text[start : start + _LONGEST]
        there = next((n for n in range(len(rest), 1, -1) if os.path.exists(os.path.expanduser(rest[:n]))), 0)
        if rest.count("/", 0, there) > 1:
            cut = PurePath(rest[:there]).name + rest[there:]
        else:
            cut = rest[value.end() :] if (value := _PLAIN.match(rest)) else rest
        text = text[:start] + cut + text[start + _LONGEST :]
    return text
