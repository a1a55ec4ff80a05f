"""A fork of a server is a child like one that was started, and the server's death costs nothing."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rlhf.launch import forked
from async_rlhf.launch.forked import ForkedProcess, ForkServer
from async_rlhf.launch.run_lock import RunLock, is_held
from tests.conftest import REPOSITORY

# As a user has them: without the number of threads that tests are held to.
VARIABLES = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | {"PYTHONPATH": str(REPOSITORY)}

# A thread of an executor, as that which writes a checkpoint, waits for a disk that hangs while the learner raises.
STUCK = """
import runpy, threading
from concurrent.futures import ThreadPoolExecutor
from async_rlhf.run.run_dir import RunDir

def existing(*_):
    ThreadPoolExecutor().submit(threading.Event().wait)
    raise RuntimeError("on purpose")

RunDir.existing = existing
runpy.run_module("async_rlhf.run.processes.roles", run_name="__main__")
"""


def report(arguments: list[str]) -> int:
    """What this process has been given, as JSON in its standard output."""
    numpy = sys.modules["numpy"]
    found = {
        "arguments": arguments, "parent": os.getppid(), "cwd": os.getcwd(), "umask": os.umask(0),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "cpus": sorted(os.sched_getaffinity(0)),
        "variable": os.environ.get("SAID"),
        "descriptors": sorted(int(each) for each in os.listdir("/proc/self/fd"))[:-1],  # the last lists the others
        "threads": threading.active_count(),
        "drawn": float(numpy.random.random()),
        "ignores": signal.getsignal(signal.SIGTERM) == signal.SIG_IGN,
    }  # fmt: skip
    sys.stdout.write(json.dumps(found))
    sys.stdout.flush()
    return 7


def wait_on_input(arguments: list[str]) -> int:
    return len(os.read(0, 1))


def fail(arguments: list[str]) -> int:
    raise RuntimeError("on purpose")


@pytest.fixture
def server() -> Iterator[ForkServer]:
    begun = ForkServer.begin(["numpy"], VARIABLES)
    yield begun
    begun.close()


class Forked:
    """A fork with pipes for its input and output."""

    def __init__(self, server: ForkServer, function: str, *more: int, **options: Any) -> None:
        (reads, writes), (self._reads, output) = os.pipe(), os.pipe()
        options = {"variables": VARIABLES, **options}
        entry = f"tests.async_rlhf.test_fork_server:{function}"
        pid = server.fork(entry, ["some", "words"], descriptors=[reads, output, output, *more], **options)
        self.process = ForkedProcess(pid, writes)
        os.close(reads)
        os.close(output)

    def finish(self) -> tuple[int, str]:
        assert self.process.stdin is not None
        self.process.stdin.close()
        with os.fdopen(self._reads) as output:
            said = output.read()
        return self.process.wait(), said


def test_a_fork_is_a_child_with_all_that_it_inherits_and_nothing_of_the_server(server: ForkServer, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    inherited, umask = os.open(tmp_path / "file", os.O_CREAT), os.umask(0o27)
    cpus = os.sched_getaffinity(0)
    cpu = min(cpus)
    try:
        os.sched_setaffinity(0, {cpu})
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        given = {"variables": {**VARIABLES, "SAID": "this \udc80"}, "cwd": str(tmp_path)}
        first, second = (Forked(server, "report", inherited, **given) for _ in range(2))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.umask(umask)
        os.sched_setaffinity(0, cpus)
        os.close(inherited)
    (code, said), (_, also_said) = first.finish(), second.finish()
    found, drawn = json.loads(said), json.loads(also_said)["drawn"]
    assert code == 7
    assert found.pop("drawn") != drawn, "forks draw different numbers"
    assert found == {
        "arguments": ["some", "words"], "parent": os.getpid(), "cwd": str(tmp_path), "umask": 0o27, "files": [soft - 1, hard],
        "cpus": [cpu], "variable": "this \udc80", "descriptors": [0, 1, 2, 3], "threads": 1, "ignores": False,
    }  # fmt: skip


def test_a_fork_ends_by_a_signal_an_error_or_its_closed_input_and_holds_a_lock_as_a_child_does(
    server: ForkServer, tmp_path: Path
) -> None:
    lock = RunLock.take(tmp_path / "lock")
    holding = Forked(server, "wait_on_input", lock.descriptor)
    lock.release()
    assert is_held(tmp_path / "lock")
    holding.finish()
    assert not is_held(tmp_path / "lock") and server.is_there
    killed, closed, failed = (Forked(server, name) for name in ("wait_on_input", "wait_on_input", "fail"))
    assert killed.process.poll() is None
    killed.process.kill()
    killed.process.kill()
    assert killed.finish()[0] == -signal.SIGKILL and closed.finish() == (0, "")
    code, said = failed.finish()
    assert code == 1 and "RuntimeError: on purpose" in said


def test_a_role_that_was_begun_anew_ends_by_an_error_though_a_thread_waits_for_ever() -> None:
    command = [sys.executable, "-c", STUCK, "learner", "runs/none"]
    ended = subprocess.run(command, env=VARIABLES, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1 and "RuntimeError: on purpose" in ended.stderr, ended.stderr


def test_forks_outlive_a_killed_server_and_the_next_is_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "_server", None)

    def fork() -> Forked:
        made: list[Forked] = []

        def ask(server: ForkServer) -> int:
            made.append(Forked(server, "wait_on_input"))
            return made[0].process.pid

        assert forked.fork(["numpy"], VARIABLES, ask)
        return made[0]

    first, server = fork(), forked._server
    assert server is not None
    server.process.kill()
    second, other = fork(), forked._server
    assert other is not server and first.process.poll() is None
    assert forked.warm(["numpy"], {**VARIABLES, "CUDA_VISIBLE_DEVICES": "3"}) is other
    assert forked.warm(["numpy"], {**VARIABLES, "OMP_NUM_THREADS": "7"}) is not other, "a library has read it by now"
    assert first.finish()[0] == second.finish()[0] == 0
    forked._close()


def test_a_server_has_one_thread_no_file_and_no_right_to_orphans_and_ignores_the_terminal(server: ForkServer) -> None:
    assert Forked(server, "wait_on_input").finish()[0] == 0
    process = psutil.Process(server.process.pid)
    assert process.num_threads() == 1 and process.open_files() == [] and process.num_fds() <= 4
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
    assert Forked(server, "wait_on_input").finish()[0] == 0
    orphans = subprocess.run(["sh", "-c", "sleep 300 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True)
    orphan = psutil.Process(int(orphans.stdout))
    assert orphan.ppid() != os.getpid()
    orphan.kill()


def test_a_server_that_hangs_is_an_error_with_a_name_and_one_that_cannot_import_is_done_without(
    monkeypatch: pytest.MonkeyPatch, server: ForkServer
) -> None:
    assert Forked(server, "wait_on_input").finish()[0] == 0
    os.kill(server.process.pid, signal.SIGSTOP)
    server._socket.settimeout(0.1)
    with pytest.raises(OSError, match="the fork server has not answered for 600 s"):
        server.fork("no:matter", [], VARIABLES, [0, 1, 2])
    assert not server.is_there
    monkeypatch.setattr(forked, "_server", None)
    assert forked.fork(["no_such_module"], VARIABLES, lambda each: each.fork("no:matter", [], VARIABLES, [0, 1, 2])) is None
    forked._close()


def test_a_server_serves_only_the_process_it_came_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of the program around has none yet, and what a shell passes on is another's; "off" means none at all."""
    monkeypatch.setattr(forked, "_server", "the parent's")
    told, tell = os.pipe()
    if not (child := os.fork()):
        os.write(tell, str(forked._server).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(told, 9) == b"None" and forked._server is not None
    os.close(told)
    os.close(tell)
    monkeypatch.setenv("ASYNC_RLHF_FORK_SERVER", f"{os.getppid()} 3 4 digest")
    assert ForkServer.inherited() is None and "ASYNC_RLHF_FORK_SERVER" not in os.environ
    monkeypatch.setenv("ASYNC_RLHF_FORK_SERVER", "off")
    assert forked.warm(["numpy"], VARIABLES) is None
