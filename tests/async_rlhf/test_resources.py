"""Logs that grow too long begin anew while their process goes on writing, and little room is one event; a run that waits for
prompts, or for room on the disk, has not stalled, as long as its hub reports it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from async_rlhf.run.display.console import beginning
from async_rlhf.run.processes.roles import little_room
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.supervision.resources import OperatorWait, RunDisk

WORDS = {
    "waits_for_prompts": ("waiting for prompts: the spool has none", "there are prompts again", "the spool has no prompts"),
    "waits_for_room": (
        "waiting for room on the disk (disk_pause_bytes)",
        "there is room on the disk again",
        "the disk has too little room",
    ),
}


class Usage(NamedTuple):
    free: int


@pytest.fixture
def look(tmp_path: Path) -> Callable[[float], list[str]]:
    """Looks at the run's disk at this time; returns all that it has said."""
    (tmp_path / "logs").mkdir()
    said, now = list[str](), [0.0]
    disk = RunDisk(RunDir(tmp_path), 100, 1 << 18, said.append, said.append, lambda: now[0])

    def at(seconds: float) -> list[str]:
        now[0] = seconds
        disk.look()
        return said

    return at


def test_a_log_that_has_grown_too_long_begins_anew_under_the_process_that_writes_it(tmp_path: Path, look: Any) -> None:
    log, before = tmp_path / "logs" / "actor-0.log", tmp_path / "logs" / "actor-0.log.1"
    with log.open("ab", buffering=0) as held:
        held.write(b"a" * 100)
        look(0.0)
        assert log.stat().st_size == 100, "it is no longer than it may be"
        held.write(b"b")
        look(9.9)
        assert not before.exists(), "logs are looked at every ten seconds only"
        look(10.0)
        held.write(b"c")
    assert log.read_bytes() == b"c" and before.read_bytes() == b"a" * 100 + b"b"


def test_little_room_is_told_once_and_again_when_it_is_over_and_a_disk_that_cannot_be_measured_ends_nothing(
    look: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, free in enumerate((1 << 21, 1 << 19, 1 << 18, 1 << 21, 1 << 21)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: Usage(free))
        said = look(10.0 * number)
    assert [text.partition(",")[0].partition(" has ")[2] for text in said] == ["0 MiB left", "2 MiB again"]
    assert "less than 4 times disk_pause_bytes (1 MiB): make room" in said[0]
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "copyfile", None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: os.stat("/no/such/place"))
    assert look(100.0)[2].startswith("the run's disk cannot be looked after: [Errno 2]")


def test_little_room_has_a_reason_and_a_disk_that_says_nothing_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert little_room(tmp_path, 0) == "" and little_room(tmp_path / "none", 1 << 62) == ""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(3 << 20))
    assert little_room(tmp_path, 3 << 20) == ""
    said = "the disk has 3 MiB left, less than disk_pause_bytes (4 MiB): no group is begun"
    assert little_room(tmp_path, 4 << 20) == said


@pytest.mark.parametrize("lack", WORDS)
def test_a_run_waits_for_its_operator_only_as_long_as_its_hub_says_so(tmp_path: Path, lack: str) -> None:
    run, now, said = RunDir(tmp_path), [0.0], list[str]()
    watch = OperatorWait(run, said.append, lambda: now[0])

    def seen(at: float, *lacks: str) -> bool:
        """At this time, when the hub has just written what it lacks; where nothing is given it has not written."""
        now[0] = at
        if lacks:
            run.ledger.write_text(json.dumps(dict.fromkeys(lacks, True)))
            os.utime(run.ledger, ns=(0, int(at * 1e9) + 1))
        return watch.waits()

    assert not seen(2.0, "nothing") and seen(4.0, lack) and seen(4.5) and seen(6.0)
    assert not seen(20.0), "a hub that writes nothing any more has not said that it waits"
    assert seen(22.0, lack) and not seen(24.0, "nothing")
    begins, ends, before_the_first_step = WORDS[lack]
    assert said == [begins, ends] * 2
    other = next(each for each in WORDS if each != lack)
    assert seen(26.0, lack) and seen(28.0, other) and said[4:] == [begins, ends, WORDS[other][0]], "a wait becomes another"
    assert beginning({"version": 0, "actors": {"a": {}}, lack: True}, 4)[0] == before_the_first_step
