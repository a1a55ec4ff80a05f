"""A run that its daemon gives up reaches the run's hooks; one that ended by its own account has told them itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.run.run_dir import RunDir, RunEnd
from async_rlhf.serve.daemon import Daemon
from async_rlhf.serve.queue_dir import QueueDir
from async_rlhf.serve.turns import MAX_LOSSES, QueueEntry
from tests.conftest import wait_for

Given = Callable[..., QueueEntry]


@pytest.fixture
def queue(tmp_path: Path) -> QueueDir:
    return QueueDir.made(tmp_path / "serve")


@pytest.fixture
def lost(queue: QueueDir, small: Callable[..., Any], tmp_path: Path) -> Given:
    """A run that was lost as often as may be but once; its hook writes what it reads to `told`."""
    keep = ["/bin/sh", "-c", f"cat > {tmp_path}/telling && mv {tmp_path}/telling {tmp_path}/told"]

    def make(name: str = "run", command: list[str] = keep) -> QueueEntry:
        entry = queue.submit(small(name=name, **{"hooks.command": command}), tmp_path / "gone")
        queue.keep(replace(entry, state="running", losses=MAX_LOSSES - 1))
        return entry

    return make


def told(tmp_path: Path) -> dict[str, Any]:
    wait_for((tmp_path / "told").exists, "the hook")
    found: dict[str, Any] = json.loads((tmp_path / "told").read_text())
    return found


def test_a_run_that_cannot_begin_is_told_of(queue: QueueDir, lost: Given, tmp_path: Path) -> None:
    queue.keep(replace(lost(), state="waiting"))
    Daemon(queue, say=lambda line: None).look()
    found, entry = told(tmp_path), queue.find("run")
    assert (found["event"], found["run_dir"]) == ("failed", str(queue.runs / "run"))
    assert f"cannot be started in {tmp_path / 'gone'}" in found["text"]
    assert entry.state == "failed" and entry.reason in found["text"] and not queue.is_alive(entry)


def test_a_run_that_is_lost_again_and_again_is_told_of_once(queue: QueueDir, lost: Given, tmp_path: Path) -> None:
    lost()
    said: list[str] = []
    daemon = Daemon(queue, say=said.append)
    daemon.look()
    assert f"lost {MAX_LOSSES} times in a row without a new step" in told(tmp_path)["text"]
    (tmp_path / "told").unlink()
    wait_for(lambda: daemon.look() or not daemon._hooks, "the daemon to let go of the hook")
    daemon.close()
    assert not (tmp_path / "told").exists() and len(said) == 1


def test_a_run_that_has_said_how_it_ended_is_not_told_of_again(
    queue: QueueDir, lost: Given, small: Callable[..., Any], tmp_path: Path
) -> None:
    lost()
    run = RunDir.create(small(name="run", output_dir=str(queue.runs)))
    run.record_end(RunEnd(code=4, reason="stalled", finished=False))
    run.retire()
    daemon = Daemon(queue, say=lambda line: None)
    daemon.look()
    daemon.close()
    assert queue.find("run").reason == "stalled" and not (tmp_path / "told").exists()


def test_a_hook_that_fails_and_an_unreadable_configuration_are_named_and_hold_up_nothing(queue: QueueDir, lost: Given) -> None:
    said: list[str] = []
    daemon = Daemon(queue, say=said.append)
    lost("fails", ["/bin/false"])
    (queue.folder(lost("damaged")) / "config.toml").write_text("= no toml")
    wait_for(lambda: daemon.look() and any("the hook for 'failed' failed" in line for line in said), "what is said of it")
    assert any(line.startswith("damaged has failed, and its hooks cannot run: ") for line in said)
