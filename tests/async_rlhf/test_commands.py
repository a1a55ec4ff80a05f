"""What `--help` lists: every command once, under its purpose, and each in a line that is not cut off."""

from __future__ import annotations

import re

from typer.main import get_command
from typer.testing import CliRunner

from async_rlhf.cli.app import PANELS
from async_rlhf.cli.commands import app

NEWCOMER = ["init", "check", "train", "status", "watch", "plot", "evaluate", "stop"]


def test_every_command_stands_in_one_panel_and_a_newcomers_in_the_first() -> None:
    names = [name for panel in PANELS.values() for name in panel]
    assert sorted(names) == sorted(get_command(app).commands)  # type: ignore[attr-defined]
    assert len(names) <= 20 and list(PANELS["Start here"]) == NEWCOMER


def test_help_says_of_each_command_in_a_whole_line_what_it_does() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).output
    lines = dict(re.findall(r"^  ([a-z-]+) {2,}(\S.*)$", shown, re.M))
    assert set(get_command(app).commands) <= set(lines)  # type: ignore[attr-defined]
    assert all(len(line) < 70 and not line.endswith("...") for line in lines.values())
