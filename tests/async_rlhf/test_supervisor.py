"""What the supervisor does about ends that were not asked for, crash loops, frozen processes and full disks: real processes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rlhf.buffers.clients.control import control
from async_rlhf.buffers.errors import ConfigError, DamagedError, DeadlineError
from async_rlhf.inspect import status
from async_rlhf.launch.exit_codes import WORKER_LOST, WorkerLostError, ending
from async_rlhf.launch.local import LocalLauncher, LocalProcess
from async_rlhf.launch.program import Node
from async_rlhf.launch.sockets import hub_address, socket_directory
from async_rlhf.preparation import prepare
from async_rlhf.run.display import Progress
from async_rlhf.run.processes.evaluation import record_evaluation
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_dir import RunDir, RunEnd
from async_rlhf.run.supervision import supervisor as supervising
from async_rlhf.run.supervision.supervisor import Supervisor
from tests.async_rlhf.test_rank_processes import Idle, Idling
from tests.conftest import Train, file_size_limit, steps, trained_groups, wait_for


class Heard(Progress):
    """Keeps what the supervisor says; `on_step` is called with each step."""

    def __init__(self, on_step: Callable[[], None] = lambda: None) -> None:
        self.events: list[str] = []
        self.on_step = on_step

    def event(self, text: str) -> None:
        self.events.append(text)

    def step(self, record: dict[str, Any], max_steps: int) -> None:
        self.on_step()


class Spoiling(LocalLauncher):
    """Starts the learner with arguments that it cannot be run with."""

    def start(self, run_dir: Path, node: Node) -> LocalProcess:
        spoilt = replace(node, arguments=("one", "two", "too many"))
        return super().start(run_dir, spoilt if node.role == "learner" else node)


def told(run: RunDir) -> str:
    """The address of a live run's hub, once it listens."""

    def look() -> str:
        sockets = run.sockets() if run.exists else None
        return hub_address(sockets) if sockets is not None and (sockets / "hub").exists() else ""

    return wait_for(look, "the hub to listen")


def assert_no_hole(run: RunDir) -> None:
    """Every step once and in order, every group of them once; more are committed than the hub's last status may have."""
    assert [record["step"] for record in run.read_metrics()] == list(range(1, steps(run.path) + 1))
    assert sorted(trained_groups(run.path)) == list(range(4 * steps(run.path)))


@pytest.mark.rest
def test_a_hub_that_ends_with_code_0_is_started_again_and_a_drain_reaches_one_that_was_away(training: Train) -> None:
    """Any local process may halt a hub without keys."""
    started = training(max_steps=100_000)
    started.reach(3)
    with control(told(started.run), timeout_s=60) as asked:
        asked.halt()
    wait_for(lambda: started.run.read_restarts().get("hub") == 1, "another hub")
    started.go_on()
    started.end("hub")
    started.drain("hub ended with code 0; starting it again", "drained")
    assert_no_hole(started.run)


@pytest.mark.rest
def test_a_frozen_role_is_killed_after_the_watchdogs_time_and_none_where_all_of_the_run_was_frozen(training: Train) -> None:
    """The second for longer than the watchdog's time, as on a machine that sleeps; nothing is started again."""
    started = training(**{"max_steps": 100_000, "watchdog_s": 20.0, "queue.lease_s": 60.0})
    started.reach(3)
    for role in ("hub", "learner"):
        frozen = started.child(role)
        frozen.suspend()
        psutil.wait_procs([frozen], 120)
        assert not frozen.is_running()
        started.go_on()
    restarts = started.run.read_restarts()
    os.killpg(started.process.pid, signal.SIGSTOP)
    with pytest.raises(psutil.TimeoutExpired):
        psutil.Process(started.process.pid).wait(22)  # the time itself is what is tested
    os.killpg(started.process.pid, signal.SIGCONT)
    started.go_on()
    assert started.run.read_restarts() == restarts
    started.drain("hub is frozen: no beat for 2", "learner is frozen: no beat for 2")
    assert_no_hole(started.run)


def test_a_run_that_cannot_begin_ends_at_once_keeps_the_reason_and_leaves_its_name_free(small: Any) -> None:
    config = small()
    run = RunDir.create(config)
    supervisor = Supervisor(config, run, Spoiling(run.lock))
    with pytest.raises(WorkerLostError, match=r"learner ended 2 times.*code 1 \(TypeError: .*takes") as raised:
        supervisor.run()
    assert run.end() == RunEnd(code=WORKER_LOST, reason=str(raised.value), finished=False)
    found = status.read(Reading(run))
    assert found["state"] == "failed" and f"ended with code 5: {raised.value}" in status.lines(run, found)

    again = RunDir.create(config)
    assert again.is_alive() and again.end() is None and not again.log("hub").exists()
    with pytest.raises(ConfigError, match=rf"a running run \(process {os.getpid()} on host .*--set name=NAME, or stop it"):
        RunDir.create(config)
    again.retire()
    with pytest.raises(ConfigError, match=r"exists. Continue it with --resume, remove it with --overwrite"):
        RunDir.create(config)  # how it ended is not known: perhaps it was killed
    RunDir.create(config, overwrite=True).retire()


def no_hub(*_: Any) -> Any:
    raise DeadlineError("there is none")


def test_what_is_raised_about_the_last_step_leaves_no_process(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record is read when the learner has ended."""
    config = small()
    run = RunDir.create(config)

    class Learned(Idle):
        def poll(self) -> int | None:
            run.metrics.write_text('{"step": 1}\n')
            return 0

    launcher = Idling(lambda node: Learned() if node.role == "learner" else Idle())

    def refuse(record: dict[str, Any]) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Supervisor, "_ask_for", no_hub)
    monkeypatch.setattr(supervising, "_CLOSE_S", 0.0)
    with pytest.raises(ZeroDivisionError):
        Supervisor(config, run, launcher, on_step=refuse).run()
    assert {name: process.code for name, process in launcher.started.items()} == {"hub": -9, "learner": None, "actor-0": -9}


@pytest.mark.parametrize(
    ("role", "left", "told"),
    [
        ("learner", ["hub"], "the run cannot be started: no room"),
        ("tracker", ["hub", "learner", "actor-0"], "tracker-tensorboard ended .*: no room; starting it again in 0.5 s"),
    ],
)
def test_only_a_role_that_the_run_needs_refuses_it_by_not_starting(
    small: Any, monkeypatch: pytest.MonkeyPatch, role: str, left: list[str], told: str
) -> None:
    config, heard = small(**{"tracking.kind": "tensorboard"}), Heard()

    def make(node: Node) -> Idle:
        if node.role == role:
            raise OSError("no room")
        return Idle()

    def watch(_: Supervisor) -> None:
        raise ConfigError(heard.events[0])

    launcher = Idling(make)
    monkeypatch.setattr(Supervisor, "_watch", watch)
    monkeypatch.setattr(Supervisor, "_ask_for", no_hub)
    monkeypatch.setattr(supervising, "_CLOSE_S", 0.0)
    monkeypatch.setattr(supervising, "_TRACKING_S", 0.0)
    with pytest.raises(ConfigError, match=told):
        Supervisor(config, RunDir.create(config), launcher, heard).run()
    assert list(launcher.started) == left and {each.code for each in launcher.started.values()} == {-9}


def test_damage_that_a_role_finds_ends_the_run_at_once(small: Any) -> None:
    config = small()
    run, heard = RunDir.create(config), Heard()
    (run.path / "run.json").unlink(missing_ok=True)
    supervisor = Supervisor(config, run, LocalLauncher(run.lock), heard)
    config_file = run.path / "config.toml"
    config_file.write_text("= is no TOML")
    with pytest.raises(DamagedError, match=r"config.toml is damaged"):
        supervisor.run()
    assert heard.events == []


@pytest.mark.rest
def test_an_actor_started_by_hand_without_input_works_and_ends_in_order(training: Train) -> None:
    """As with nohup or systemd. The hub knows of its end long before its lease is over: it said goodbye."""
    started = training(**{"max_steps": 100_000, "queue.lease_s": 600.0})
    address = told(started.run)
    arguments = [sys.executable, "-m", "async_rlhf.run.processes.roles", "actor", str(started.run.path), address, "by-hand"]
    actor = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def actors() -> set[str]:
        with control(address, timeout_s=60) as asked:
            return set(asked.status()["actors"])

    try:
        wait_for(lambda: "by-hand" in actors(), "the actor that was started by hand")
        actor.terminate()
        _, said = actor.communicate(timeout=300)
        assert actor.returncode == 0 and "ended at the request of SIGTERM" in said, said
        wait_for(lambda: "by-hand" not in actors(), "the hub to know of its end")
    finally:
        actor.kill()
        actor.communicate(timeout=300)
    started.drain()


def test_a_full_disk_at_the_start_leaves_the_directory_as_it_was(small: Any, tmp_path: Path) -> None:
    """A real limit on the size of files stands for the disk."""
    run = RunDir.create(small())
    run.retire()
    before = (run.path / "config.toml").read_bytes()
    with file_size_limit(300):
        with pytest.raises(ConfigError, match="cannot be written"):
            RunDir.reopen(small())
        with pytest.raises(ConfigError, match="cannot be written"):
            RunDir.create(small(name="new"))
    assert (run.path / "config.toml").read_bytes() == before
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["quick"], "nothing is left of what could not be made"
    RunDir.reopen(small()).retire()


def test_sockets_of_a_killed_supervisor_are_removed_by_the_next_start_and_a_living_ones_not(small: Any, tmp_path: Path) -> None:
    run = RunDir.create(small())
    with socket_directory() as living:
        run.announce(living)
        copied = (run.path / "run.json").read_text()
        run.retire()
        (run.path / "run.json").write_text(copied)  # as in a copy of a live run's directory
        RunDir.reopen(small()).retire()
        assert living.is_dir()
    left = Path(living)
    left.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(left / "hub"))
    (run.path / "run.json").write_text(copied)
    RunDir.reopen(small()).retire()
    assert not left.exists()
    left.mkdir(mode=0o700)
    (left / "something of value").write_text("")
    (run.path / "run.json").write_text(copied)
    RunDir.reopen(small()).retire()
    assert (left / "something of value").exists()
    (left / "something of value").unlink()
    left.rmdir()
    for rubbish in ("", "\0" * 40, "[]", '{"sockets": 3}'):  # does not keep a run from going on
        (run.path / "run.json").write_text(rubbish)
        RunDir.reopen(small()).retire()


def test_a_model_that_is_not_whole_is_refused_before_any_process_starts(small: Any, tmp_path: Path) -> None:
    good, weights = small().model, "model.safetensors"
    for name, spoil, message in (
        (weights, lambda old: old[:-1], "not fully covered"),
        (weights, lambda old: b"", "header too small"),
        ("tokenizer.json", lambda old: b"{", r"tokenizer\.json"),
        ("tokenizer.json", lambda old: old.replace(b'"id": 0', b'"id": 9999'), "it has tokens up to 9999, and the model has"),
        (f"{weights}.index.json", lambda old: b'{"weight_map": {"lost": "2"}}', "tensor 'lost' should be in '2'"),
    ):
        path = tmp_path / "model"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(good, path)
        file = path / name
        file.write_bytes(spoil(file.read_bytes() if file.exists() else b""))
        with pytest.raises(ConfigError, match=message):
            prepare(small(model=str(path)))
    assert not (tmp_path / "runs").exists()


def test_a_reason_is_read_from_the_present_life_only(tmp_path: Path) -> None:
    run, log = RunDir(tmp_path), tmp_path / "role.log"
    log.write_text("fatal: of an earlier life\n")
    process = LocalLauncher().start(tmp_path, Node("role", "hub", ("ipc:///nowhere",), log))
    wait_for(lambda: process.poll() is not None, "its end")
    assert process.poll() == 3 and process.failure_message() == f"{str(run.path)!r} is no run directory (it has no config.toml)"
    log.write_text("cut\n")
    assert process.failure_message() == "cut"
    with log.open("a") as file:
        file.write("of before the start\nterminate called\n  what():  [Rank 1] Watchdog caught a timeout\nframe #9: clone3\n")
    words = process.failure_message()
    assert ending(-6, words) == "by signal 6 (SIGABRT) ([Rank 1] Watchdog caught a timeout)"
    assert [ending(code, words) for code in (-9, 0)] == ["by signal 9 (SIGKILL)", "with code 0"]


def test_a_full_disk_costs_an_evaluation_its_line_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunDir(tmp_path)
    record_evaluation(run, {"label": "start"})
    with file_size_limit(run.evaluations.stat().st_size + 5):
        record_evaluation(run, {"label": "middle"})
    assert "the evaluation middle is lost" in caplog.text and run.read_evaluations() == [{"label": "start"}]
    record_evaluation(run, {"label": "end"})
    assert run.read_evaluations() == [{"label": "start"}, {"label": "end"}]
