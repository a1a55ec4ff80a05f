"""One run directory, one run: who holds it, when it is free, and who may be signalled."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from async_rlhf.buffers.errors import ConfigError, DamagedError
from async_rlhf.launch.exit_codes import INTERRUPTED, InterruptedRunError, exit_code
from async_rlhf.launch.run_lock import LockHolder, RunLock, holder, is_held, signal_holder
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.supervision.supervisor import Supervisor
from tests.async_rlhf.test_rank_processes import Idling
from tests.conftest import Hold, Train, output_of, wait_for


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


def test_who_inherited_it_is_waited_for_and_named(path: Path, hold: Hold) -> None:
    """The roles of a killed supervisor: nothing may begin beside them."""
    parent = hold(path, "print(subprocess.Popen(['sleep', '1000'], pass_fds=(lock.descriptor,)).pid, flush=True)")
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait(60)
    with pytest.raises(ConfigError, match=rf"still hold run .* after 0 s: {child.pid} \(another program\).*kill -9"):
        RunLock.take(path, wait_s=0.0)
    with pytest.raises(ConfigError, match=rf"has no supervisor.*{child.pid}"):
        signal_holder(path, signal.SIGTERM)
    waiting: list[RunLock] = []
    thread = threading.Thread(target=lambda: waiting.append(RunLock.take(path)))
    thread.start()
    child.kill()
    thread.join(30)
    waiting[0].release()


def test_a_lock_that_a_file_system_has_given_to_another_process_is_lost_and_rubbish_is_no_other_process(
    path: Path, hold: Hold
) -> None:
    lock = RunLock.take(path)
    own = path.read_text()
    for rubbish in ("", "{", '{"host": 1, "pid": 2}'):
        path.write_text(rubbish)
        assert not lock.is_lost(path)
    path.write_text(own)
    assert not lock.is_lost(path)
    fcntl.flock(lock.descriptor, fcntl.LOCK_UN)
    process = hold(path)
    assert not RunLock(os.dup(lock.descriptor)).is_lost(path), "who inherited it does not decide"
    assert lock.is_lost(path) and holder(path) == LockHolder(socket.gethostname(), process.pid)


def test_a_run_whose_directory_another_host_has_taken_ends_its_processes_and_leaves_the_directory(small: Any) -> None:
    run = RunDir.create(small())
    supervisor = Supervisor(run.config(), run, Idling())
    run.lock_file.write_text(json.dumps({"host": "elsewhere", "pid": 7}))
    with pytest.raises(InterruptedRunError, match="process 7 on host elsewhere has taken"):
        supervisor.run()
    assert supervisor._children and not supervisor.processes() and run.is_announced() and "ended" not in run.read_ledger()
    assert exit_code(InterruptedRunError()) == INTERRUPTED, "a daemon that started it does not call it failed"


def test_only_who_holds_the_lock_is_signalled(path: Path, hold: Hold) -> None:
    bystander = subprocess.Popen(["sleep", "1000"])
    try:
        said = json.dumps({"host": socket.gethostname(), "pid": bystander.pid})
        path.write_text(said)
        with pytest.raises(ConfigError, match="is not running"):
            signal_holder(path, signal.SIGKILL)
        process = hold(path)
        path.write_text(said)
        with pytest.raises(ConfigError, match=rf"has no supervisor.*{process.pid}"):
            signal_holder(path, signal.SIGKILL)
        path.write_text(json.dumps({"host": "elsewhere", "pid": process.pid}))
        with pytest.raises(ConfigError, match=rf"running on another host \(process {process.pid} on host elsewhere\)"):
            signal_holder(path, signal.SIGKILL)
        wrong = ({"host": 1, "pid": 2}, {"host": "a", "pid": -1}, {"host": "a", "pid": True})
        for rubbish in ("", "{", "[]", "\0" * 9, *map(json.dumps, wrong)):
            path.write_text(rubbish)
            with pytest.raises(ConfigError, match="does not say where"):
                signal_holder(path, signal.SIGKILL)
        assert process.poll() is None and bystander.poll() is None
        path.write_text(json.dumps({"host": socket.gethostname(), "pid": process.pid}))
        assert signal_holder(path, signal.SIGKILL).pid == process.pid
        assert process.wait(30) == -signal.SIGKILL and bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait(30)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("other")])
def test_what_is_no_file_in_its_place_is_refused_at_once(path: Path, make: Callable[[Path], None]) -> None:
    make(path)
    for look in (is_held, RunLock.take):
        with pytest.raises(DamagedError, match="is no regular file"):
            look(path)
    assert holder(path) is None


def test_a_command_on_a_run_that_another_process_has_is_refused_until_that_is_killed(
    small: Any, small_arguments: Callable[..., list[str]], tmp_path: Path, hold: Hold
) -> None:
    RunDir.create(small()).retire()
    process = hold(small().run_dir / "lock")
    assert holder(small().run_dir / "lock") == LockHolder(socket.gethostname(), process.pid)
    output = output_of(3, *small_arguments(), "--resume")
    assert f"is running (process {process.pid} on host" in output and "stop it first: async-rlhf stop" in output
    with pytest.raises(ConfigError, match="is running"):
        RunDir.reopen(small())
    process.kill()
    process.wait(60)
    lock = RunLock.take(small().run_dir / "lock")
    assert holder(small().run_dir / "lock") == LockHolder(socket.gethostname(), os.getpid())
    lock.release()
    assert "is not running" in output_of(3, "stop", small().run_dir)


@pytest.mark.rest
def test_of_two_at_the_same_time_exactly_one_goes_on(training: Train, small: Any) -> None:
    RunDir.create(small(max_steps=100_000)).retire()
    both = [training("--resume", max_steps=100_000) for _ in range(2)]
    lost = wait_for(lambda: next((each for each in both if each.process.poll() is not None), None), "the one that is refused")
    (won,) = (each for each in both if each is not lost)
    lost.ends_with(3, f"process {won.process.pid} on host")
    won.reach(1)
    assert won.process.poll() is None
    with pytest.raises(ConfigError, match="is running"):
        RunDir.reopen(small(max_steps=100_000))
    output_of(0, "stop", won.run.path)
    won.ends_with(0)
    assert not won.run.is_alive()
    output_of(3, "stop", won.run.path)


def test_nothing_begins_beside_a_frozen_learner_of_a_killed_supervisor(training: Train, small: Any) -> None:
    started, config = training(max_steps=500), small(max_steps=500)
    started.reach(1)
    learner, family = started.child("learner"), started.family()
    learner.suspend()
    started.process.kill()
    try:
        assert psutil.wait_procs([each for each in family if each != learner], 120)[1] == [], "they end by themselves"
        with pytest.raises(ConfigError, match=rf"processes of an earlier start still hold .*: {learner.pid} \(learner\)"):
            RunDir.reopen(config)
        seen = "has no supervisor that can be seen from here; processes that hold its lock:"
        assert f"{seen} {learner.pid} (learner)" in output_of(3, "stop", config.run_dir)
    finally:
        learner.kill()
    run = RunDir.reopen(config)
    assert run.is_alive()
    run.retire()


def test_a_replay_holds_the_directory_that_it_writes(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from async_rlhf.inspect import rollouts
    from async_rlhf.run.processes import learner as learning

    source, config = RunDir.create(small(name="source")), small(name="again")
    held: list[bool] = []
    trainer = SimpleNamespace(run=lambda: held.append(RunDir.existing(config.run_dir).is_alive()))
    monkeypatch.setattr(rollouts, "read_batches", lambda queue: iter([SimpleNamespace(step=0)]))
    monkeypatch.setattr(learning, "backend_of", lambda run, config, meeting: nullcontext())
    monkeypatch.setattr(learning, "make_trainer", lambda *_: trainer)
    again = rollouts.replay(source, config)
    assert held == [True] and not again.is_alive()
    with pytest.raises(ConfigError, match="exists"):
        rollouts.replay(source, config)
