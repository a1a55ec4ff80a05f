"""Paths and commands that the documents name exist; `--help` lists every command once, under its purpose, in a whole line."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Annotated, Any

import pytest
import transformers
from pydantic import TypeAdapter
from typer.main import get_command

from async_rlhf.buffers.config import Section
from async_rlhf.cli.app import PANELS
from async_rlhf.cli.commands import app
from async_rlhf.learner.config import AdvantageConfig, LossConfig, own_parameters
from async_rlhf.learner.registry import shipped
from async_rlhf.run.config import Config
from tests.conftest import REPOSITORY, output_of

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


def test_every_setting_that_the_guide_for_newcomers_calls_ours_exists() -> None:
    guide = (REPOSITORY / "docs" / "coming-from.md").read_text()
    tables = re.findall(r"(?ms)^\|[^|\n]* setting \|.*?(?=^[^|]|\Z)", guide)
    ours = [name for table in tables for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[2])]
    assert len(tables) == 5 and len(ours) > 80
    of_functions = {
        section: {name for kind in shipped(section.decorator) for name in own_parameters(section, kind).model_fields}
        for section in (LossConfig, AdvantageConfig)
    }
    for setting in ours:
        key, equals, value = setting.partition(" = ")
        kind: Any = Config
        for part in key.split("."):
            if part in of_functions.get(kind, ()):
                break
            assert part in kind.model_fields, f"coming-from.md names {key}"
            field, kind = kind.model_fields[part], kind.model_fields[part].annotation
        if equals:
            TypeAdapter(Annotated[kind, *field.metadata, field]).validate_json(value)


@pytest.mark.rest
def test_every_setting_of_trl_in_the_guide_for_newcomers_is_one_of_the_trl_that_is_installed() -> None:
    """Those that another name replaces are left out of its fields' documentation."""
    trl = pytest.importorskip("trl")
    table = (REPOSITORY / "docs" / "coming-from.md").read_text().partition("| TRL setting ")[2].partition("\n\n")[0]
    theirs = [name for row in table.splitlines()[2:] for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])]
    of_trainer, inherited = {"environment_factory", "tools"}, {*transformers.TrainingArguments.__dataclass_fields__}
    own = set(theirs) - of_trainer - inherited
    assert all(f" {name} (`" in inspect.getsource(trl.GRPOConfig) for name in own), "documented, and not replaced"
    assert len(own) >= 20 and own <= {*trl.GRPOConfig.__dataclass_fields__}


@pytest.mark.parametrize("section", [AdvantageConfig, LossConfig])
def test_every_setting_of_an_objective_is_in_the_learner_s_document(section: type[Section]) -> None:
    text = (REPOSITORY / "docs" / "learner.md").read_text()
    assert {name for name in section.model_fields if not re.search(rf"`(?:\w+\.)*{name}\b", text)} == set()


NEWCOMER = ["init", "check", "train", "status", "watch", "plot", "evaluate", "stop"]


def test_every_command_stands_in_one_panel_and_a_newcomers_in_the_first() -> None:
    names = [name for panel in PANELS.values() for name in panel]
    assert sorted(names) == sorted(get_command(app).commands)  # type: ignore[attr-defined]
    assert len(names) <= 22 and list(PANELS["Start here"]) == NEWCOMER


def test_help_says_of_each_command_in_a_whole_line_what_it_does() -> None:
    shown = output_of(0, "--help", env={"COLUMNS": "80"})
    lines = dict(re.findall(r"^  ([a-z-]+) {2,}(\S.*)$", shown, re.M))
    assert set(get_command(app).commands) <= set(lines)  # type: ignore[attr-defined]
    assert all(len(line) < 70 and not line.endswith("...") for line in lines.values())


def test_an_evening_is_enough_for_the_six_files_that_are_the_system() -> None:
    first = (REPOSITORY / "ARCHITECTURE.md").read_text().split("\n\n")[1]
    files = re.findall(r"`([\w/]+\.py)`", first)
    assert len(files) == 6 and "1,800 lines" in first
    assert sum(len((REPOSITORY / name).read_text().splitlines()) for name in files) < 1_850
