"""A run that waits for prompts, or for room on the disk, has not stalled, as long as its hub says so."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.run.display.console import beginning
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.supervision.waiting import OperatorWait

WORDS = {
    "lacks_prompts": ("waiting for prompts: the spool has none", "there are prompts again", "the spool has no prompts"),
    "lacks_room": (
        "waiting for room on the disk (disk_pause_bytes)",
        "there is room on the disk again",
        "the disk has too little room",
    ),
}


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
