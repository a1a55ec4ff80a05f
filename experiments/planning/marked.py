"""Tables of `docs/planning.md` that are made, between `<!-- planning: NAME -->` and `<!-- end -->`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from async_rlhf.buffers.errors import ConfigError

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "planning.md"
_END = "<!-- end -->"


def filled(text: str, parts: Mapping[str, str]) -> str:
    """The text with each part, by name, in its place. Raises ConfigError where a marker is missing."""
    for name, part in parts.items():
        begin = f"<!-- planning: {name} -->\n"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(_END)
        if not (found and closed):
            raise ConfigError(f"{DOCUMENT.name} has no {begin.strip()} ... {_END}")
        text = f"{before}{begin}\n{part}\n{_END}{after}"
    return text


def table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    cells = [columns, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"
