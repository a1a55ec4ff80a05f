"""What our documents show, as a reader takes it out of a page: its files, command lines, programs and configurations."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def blocks(document: str, heading: str) -> list[str]:
    """The blocks of code of the section that begins with this line."""
    begin = document.index(heading)
    end = document.find("\n## ", begin + 1)
    return re.findall(r"```(?:\w+)?\n(.*?)```", document[begin : end if end > 0 else None], re.S)


def lines(block: str) -> list[str]:
    """Without comments and without what is optional; a line that goes on behind a backslash is one."""
    found = (re.sub(r"\[.*?\]", "", line.partition("#")[0]).strip() for line in block.replace("\\\n", " ").splitlines())
    return [line for line in found if line]


class Page:
    """A page of docs/, whose files begin with a line `# file: NAME`."""

    def __init__(self, name: str) -> None:
        self.text = (REPOSITORY / "docs" / name).read_text()
        self._blocks: list[tuple[str, str]] = re.findall(r"```(\w+)\n(.*?)```", self.text, re.DOTALL)

    def of(self, kind: str) -> list[str]:
        """Its blocks of this language that are no files."""
        return [text for own, text in self._blocks if own == kind and not text.startswith("# file:")]

    def commands(self) -> list[str]:
        return [line for text in self.of("bash") for line in text.splitlines()]

    def write_files(self, folder: Path) -> None:
        for _, text in self._blocks:
            if named := re.match(r"# file: (\S+)\n", text):
                (folder / named[1]).write_text(text[named.end() :])
