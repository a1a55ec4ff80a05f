"""Paths and commands that the documents name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from async_rlhf.cli.commands import app

REPOSITORY = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    path for path in [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("experiments/*/README.md")]
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_a_document_names_only_what_exists(document: Path) -> None:
    text = document.read_text()
    for path in re.findall(r"`((?:async_rlhf|actors|learner|buffers|configs|experiments|tests|docs)/[\w./-]+)`", text):
        assert (REPOSITORY / path).exists(), f"{document.name} names {path}"
    for target in re.findall(r"\]\(([\w./-]+)\)", text):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"
    verbs = set(get_command(app).commands)  # type: ignore[attr-defined]
    for verb in re.findall(r"(?m)^\s*async-rlhf ([a-z-]+)", text):
        assert verb in verbs, f"{document.name} shows async-rlhf {verb}"
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in re.findall(r"`make (\w+)`", text):
        assert f"\n{target}:" in makefile, f"{document.name} shows make {target}"
