"""Logs that grow too long begin anew while their process goes on writing, and little room is one event; a run that waits for
prompts, or for room on the disk, has not stalled, as long as its hub reports it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from async_rlhf.run.display.console import beginning
from async_rlhf.run.processes.roles import little_room
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.supervision.resources import OperatorWait, RunDisk

WORDS = {
    "lacks_prompts": ("waiting for prompts: the spool has none", "there are prompts again", "the spool has no prompts"),
    "lacks_room": (
        "waiting for room on the disk (disk_pause_bytes)",
        "there is room on the disk again",
        "the disk has too little room",
    ),
}


class Usage(NamedTuple):
    free: int


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def looked(tmp_path: Path) -> Any:
    """The run's disk, its events and its clock; every look is ten seconds after the last."""
    (tmp_path / "logs").mkdir()
    said, clock = list[str](), Clock()
    disk = RunDisk(tmp_path, 100, 1 << 18, said.append, clock)

    def look() -> list[str]:
        disk.look()
        clock.seconds += 10.0
        return said

    return disk, look


def test_a_log_that_has_grown_too_long_begins_anew_under_the_process_that_writes_it(tmp_path: Path, looked: Any) -> None:
    _, look = looked
    log = tmp_path / "logs" / "actor-0.log"
    with log.open("ab", buffering=0) as held:
        held.write(b"a" * 100)
        look()
        assert log.stat().st_size == 100, "it is no longer than it may be"
        held.write(b"b")
        look()
        held.write(b"c")
    assert log.read_bytes() == b"c" and (tmp_path / "logs" / "actor-0.log.1").read_bytes() == b"a" * 100 + b"b"


def test_little_room_is_told_once_and_again_when_it_is_over(looked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, look = looked
    for free in (1 << 21, 1 << 19, 1 << 18, 1 << 21, 1 << 21):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: Usage(free))
        said = look()
        assert disk.is_low == (free < 1 << 20)
    assert [text.partition(",")[0].partition(" has ")[2] for text in said] == ["0 MiB left", "2 MiB again"]
    assert "less than 4 times disk_pause_bytes (1 MiB): make room" in said[0]


def test_a_disk_that_cannot_be_asked_ends_nothing(looked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> Usage:
        raise PermissionError("not allowed")

    monkeypatch.setattr(shutil, "disk_usage", refuse)
    assert looked[1]() == ["the run's disk cannot be looked after: not allowed"]


def test_logs_are_looked_at_every_ten_seconds_only(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    clock = Clock()
    disk = RunDisk(tmp_path, 0, 0, lambda _: None, clock)
    disk.look()
    log = tmp_path / "logs" / "hub.log"
    log.write_bytes(b"a")
    clock.seconds = 9.9
    disk.look()
    assert os.listdir(tmp_path / "logs") == ["hub.log"]
    clock.seconds = 10.0
    disk.look()
    assert sorted(os.listdir(tmp_path / "logs")) == ["hub.log", "hub.log.1"]


def test_little_room_has_a_reason_and_a_disk_that_cannot_be_asked_has_room(
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

    def seen(at: float, status: dict[str, Any] | None = None) -> bool:
        now[0] = at
        if status is not None:
            run.ledger.write_text(json.dumps(status))
            os.utime(run.ledger, ns=(0, int(at * 1e9) + 1))
        return watch.waits()

    assert not seen(2.0, {lack: False})
    assert seen(4.0, {lack: True}) and seen(4.5) and seen(6.0)
    assert not seen(20.0), "a hub that writes nothing any more has not said that it waits"
    assert seen(22.0, {lack: True}) and not seen(24.0, {lack: False})
    begins, ends, _ = WORDS[lack]
    assert said == [begins, ends] * 2


def test_a_wait_that_becomes_another_is_told(tmp_path: Path) -> None:
    run, now, said = RunDir(tmp_path), [0.0], list[str]()
    watch = OperatorWait(run, said.append, lambda: now[0])
    for at, lack in ((2.0, "lacks_prompts"), (4.0, "lacks_room")):
        now[0] = at
        run.ledger.write_text(json.dumps({lack: True}))
        os.utime(run.ledger, ns=(0, int(at * 1e9) + 1))
        assert watch.waits()
    prompts, room = WORDS["lacks_prompts"], WORDS["lacks_room"]
    assert said == [prompts[0], prompts[1], room[0]]


@pytest.mark.parametrize("lack", WORDS)
def test_before_its_first_step_a_run_shows_what_it_lacks(lack: str) -> None:
    assert beginning({"version": 0, "actors": {"a": {}}, lack: True}, 4)[0] == WORDS[lack][2]
