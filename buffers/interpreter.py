"""The command that starts a Python process."""

from __future__ import annotations

import sys


def python(*arguments: str) -> list[str]:
    """The command line of a process of this interpreter. Modules are never taken from the folder that it begins in (`-P`): a
    user's folder may have a `random.py`."""
    return [sys.executable, "-P", *arguments]
