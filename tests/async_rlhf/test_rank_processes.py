"""All ranks of a learner as one process: real processes by the real launcher, which do what the test writes for each rank."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from async_rlhf.launch.exit_codes import HOST_LOST
from async_rlhf.launch.local import LocalLauncher, LocalProcess
from async_rlhf.launch.program import Node
from async_rlhf.launch.ranks import RankProcesses, start_ranks
from async_rlhf.launch.sockets import LOOPBACK
from tests.conftest import has_ended, wait_for

# Beats once, by the descriptor that the launcher names, and stays.
STAY = "set -- $ASYNC_RLHF_TETHER; printf . > /dev/fd/$1; exec sleep 1000"


class Idle:
    """A process that does nothing until it is killed."""

    def __init__(self, words: str = "") -> None:
        self.pid, self._words = 0, words
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def read_beats(self) -> bytes:
        return b""

    def failure_message(self) -> str:
        return self._words

    def kill(self) -> None:
        self.code = -9 if self.code is None else self.code


class Idling(LocalLauncher):
    """Starts nothing: each node is what `make` returns for it. started: by name."""

    def __init__(self, make: Callable[[Node], Any] = lambda node: Idle()) -> None:
        super().__init__()
        self._make, self.started = make, dict[str, Any]()

    def start(self, run_dir: Path, node: Node) -> Any:
        self.started[node.name] = self._make(node)
        return self.started[node.name]


class Counting(LocalLauncher):
    """Keeps what it starts; it has room for so many processes."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.started = room, list[psutil.Process]()

    def start(self, run_dir: Path, node: Node) -> LocalProcess:
        if len(self.started) == self.room:
            raise OSError("no room")
        process = super().start(run_dir, node)
        self.started.append(psutil.Process(process.pid))
        return process


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[RankProcesses, Counting]]]:
    """`start(script, ...)`: a learner whose ranks run these lines of a shell, and its launcher. room: as in `Counting`."""
    made: list[Counting] = []

    def start(*scripts: str, room: int = 9) -> tuple[RankProcesses, Counting]:
        cases = [f'"learner_rank {rank}") {script} ;;' for rank, script in enumerate(scripts)][1:]
        python = tmp_path / "python"  # called with -P -m async_rlhf.run.processes.roles ROLE DIRECTORY ARGUMENTS
        python.write_text("\n".join(["#!/bin/sh", 'case "$4 $6" in', *cases, f"*) {scripts[0]} ;;", "esac\n"]))
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr("sys.executable", str(python))
        monkeypatch.setenv("ASYNC_RLHF_FORK_SERVER", "off")
        made.append(Counting(room))
        node = Node("learner", "learner", ("ipc:///nowhere",), tmp_path / "learner.log")
        found = start_ranks(
            made[-1], tmp_path, node, len(scripts), LOOPBACK, lambda node: node, lambda name: tmp_path / f"{name}.log"
        )
        assert isinstance(found, RankProcesses)
        return found, made[-1]

    yield start
    assert all(map(has_ended, (process for each in made for process in each.started)))


@pytest.mark.parametrize(
    ("scripts", "code", "words"),
    [
        ((STAY, "kill -9 $$", STAY), 1, "rank 1 ended by signal 9 (SIGKILL)"),
        ((STAY, STAY, "echo 'fatal: no such device'; exit 3"), 3, "rank 2 ended with code 3 (no such device)"),
        (("kill -6 $$", STAY), -6, ""),
        (("echo 'fatal: rank 1 did not come'; exit 1", STAY), 1, "rank 1 did not come"),
        (("exit 0", STAY, STAY), 0, ""),
        ((STAY, "exit 0", "exit 1"), 1, "rank 2 ended with code 1"),
    ],
)
def test_one_ranks_end_is_the_end_of_all_and_it_is_named(start: Any, scripts: tuple[str, ...], code: int, words: str) -> None:
    process, launcher = start(*scripts)
    assert process.pid == launcher.started[0].pid and len(launcher.started) == len(scripts)
    wait_for(lambda: process.poll() is not None, "the learner's end")
    assert (process.poll(), process.failure_message()) == (code, words)


def test_it_is_as_silent_as_its_most_silent_rank_which_is_named(start: Callable[..., tuple[RankProcesses, Counting]]) -> None:
    process, _ = start(STAY, STAY)
    wait_for(process.read_beats, "a beat of both")
    process.kill()
    process, _ = start(STAY, "exec sleep 1000", STAY)
    wait_for(lambda: process.read_beats() or len(process._beaten) == 2, "the beats of two")
    assert not process.read_beats() and process.poll() is None
    process.kill()
    assert (process.poll(), process.failure_message()) == (1, "rank 1 sent no beats")


def test_a_rank_that_cannot_be_started_leaves_none(start: Callable[..., tuple[RankProcesses, Counting]]) -> None:
    with pytest.raises(OSError, match="no room"):
        start(STAY, STAY, STAY, room=2)


def test_ranks_are_given_one_free_port_of_the_address(start: Any, tmp_path: Path) -> None:
    process, _ = start("echo $6 $7; exec sleep 1000", "echo $6 $7; exec sleep 1000")
    logs = [tmp_path / f"{name}.log" for name in ("learner", "learner-rank-1")]
    wait_for(lambda: all(log.read_text().endswith("\n") for log in logs), "what they were given")
    process.kill()
    (hub, meeting), (rank, same) = (log.read_text().split() for log in logs)
    assert (hub, rank) == ("ipc:///nowhere", "1") and meeting == same and meeting.startswith(f"{LOOPBACK}:")


@pytest.mark.parametrize(("lost", "code", "words"), [(True, HOST_LOST, "rank 1: host 'b' is gone"), (False, 1, "broken pipe")])
def test_the_end_of_rank_0_waits_for_the_news_that_a_host_is_lost_and_is_its_own_where_none_comes(
    start: Callable[..., tuple[RankProcesses, Counting]], monkeypatch: pytest.MonkeyPatch, lost: bool, code: int, words: str
) -> None:
    now = [1000.0]
    near, _ = start("echo 'fatal: broken pipe'; exit 1", STAY)
    (own, _) = near._processes
    far = Idle("host 'b' is gone")
    process = RankProcesses(["", "b"], [own, far])
    wait_for(lambda: own.poll() is not None, "the end of rank 0")
    monkeypatch.setattr("async_rlhf.launch.ranks.time", SimpleNamespace(monotonic=lambda: now[0]))
    assert process.poll() is None
    now[0] += 1.9
    assert process.poll() is None
    if lost:
        far.code = HOST_LOST
    else:
        now[0] += 0.2
    assert (process.poll(), process.failure_message()) == (code, words)
    near.kill()
