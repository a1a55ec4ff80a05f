"""The command lines of our documents, as a reader takes them out of a page."""

from __future__ import annotations

import re


def blocks(document: str, heading: str) -> list[str]:
    """The blocks of code of the section that begins with this line."""
    begin = document.index(heading)
    end = document.find("\n## ", begin + 1)
    return re.findall(r"```(?:\w+)?\n(.*?)```", document[begin : end if end > 0 else None], re.S)


def lines(block: str) -> list[str]:
    """Without comments and without what is optional; a line that goes on behind a backslash is one."""
    found = (re.sub(r"\[.*?\]", "", line.partition("#")[0]).strip() for line in block.replace("\\\n", " ").splitlines())
    return [line for line in found if line]
