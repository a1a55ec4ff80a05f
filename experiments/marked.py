"""Parts of documents that are made: tables in Markdown, and their places, between `<!-- KIND: NAME -->` and `<!-- end -->`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from async_rlhf.buffers.errors import ConfigError

_END = "<!-- end -->"


def filled(text: str, kind: str, parts: Mapping[str, str]) -> str:
    """The text with each part, by name, in its place. Raises ConfigError where a marker is missing."""
    for name, part in parts.items():
        begin = f"<!-- {kind}: {name} -->\n"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(_END)
        if not (found and closed):
            raise ConfigError(f"the document has no {begin.strip()} ... {_END}")
        text = f"{before}{begin}\n{part}\n\n{_END}{after}"
    return text


def table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """In Markdown; cells as they are."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *lines))
