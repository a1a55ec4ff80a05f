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
from tests.async_rlhf.test_faults import steps, trained_groups
from tests.async_rlhf.test_rank_processes import Idle, Idling
from tests.conftest import Command, file_size_limit, wait_for


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
    """Starts the role of this name with arguments that it cannot be run with, but for its first `good` lives."""

    def __init__(self, run: RunDir, name: str, *arguments: str, good: int = 1) -> None:
        super().__init__(run.lock)
        self._name, self._arguments, self._good, self._lives = name, arguments, good, 0

    def start(self, run_dir: Path, node: Node) -> LocalProcess:
        self._lives += node.name == self._name
        spoilt = node.name == self._name and self._lives > self._good
        return super().start(run_dir, replace(node, arguments=self._arguments) if spoilt else node)


def told(run: Path) -> str:
    """The address of a live run's hub, once it listens."""

    def look() -> str:
        sockets = RunDir.existing(run).sockets() if (run / "config.toml").exists() else None
        return hub_address(sockets) if sockets is not None and (sockets / "hub").exists() else ""

    return wait_for(look, "the hub to listen")


def assert_no_hole(run: Path) -> None:
    """Every step once and in order, every group of them once; more are committed than the hub's last status may have."""
    assert [record["step"] for record in RunDir(run).read_metrics()] == list(range(1, steps(run) + 1))
    assert sorted(trained_groups(run)) == list(range(4 * steps(run)))


@pytest.mark.rest
def test_a_hub_that_ends_with_code_0_is_started_again_and_a_drain_reaches_one_that_was_away(
    command: Callable[..., Command], small_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Any local process may halt a hub without keys."""
    started = command(*small_arguments(max_steps=100_000))
    run = tmp_path / "runs" / "quick"
    wait_for(lambda: steps(run) >= 3, "step 3")
    with control(told(run), timeout_s=60) as asked:
        asked.halt()
    wait_for(lambda: RunDir(run).read_restarts().get("hub") == 1, "another hub")
    reached = steps(run)
    wait_for(lambda: steps(run) > reached + 1, "a step with it")
    hub = started.child("hub")
    hub.kill()
    psutil.wait_procs([hub], 30)
    started.process.send_signal(signal.SIGTERM)
    code, output = started.finish()
    assert code == 0 and "hub ended with code 0; starting it again" in output and "drained" in output, output
    assert_no_hole(run)


@pytest.mark.rest
def test_a_frozen_role_is_killed_after_the_watchdogs_time_and_none_where_all_of_the_run_was_frozen(
    command: Callable[..., Command], small_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """The second for longer than the watchdog's time, as on a machine that sleeps; nothing is started again."""
    started = command(*small_arguments(**{"max_steps": 100_000, "watchdog_s": 20.0, "queue.lease_s": 60.0}))
    run = tmp_path / "runs" / "quick"
    wait_for(lambda: steps(run) >= 3, "step 3")
    for role in ("hub", "learner"):
        frozen, reached = started.child(role), steps(run)
        frozen.suspend()
        psutil.wait_procs([frozen], 120)
        assert not frozen.is_running()
        wait_for(lambda reached=reached: steps(run) > reached + 1, "a step after it")
    restarts, reached = RunDir(run).read_restarts(), steps(run)
    os.killpg(started.process.pid, signal.SIGSTOP)
    with pytest.raises(psutil.TimeoutExpired):
        psutil.Process(started.process.pid).wait(22)  # the time itself is what is tested
    os.killpg(started.process.pid, signal.SIGCONT)
    wait_for(lambda: steps(run) > reached + 1, "a step after it")
    assert RunDir(run).read_restarts() == restarts
    started.process.send_signal(signal.SIGTERM)
    code, output = started.finish()
    assert code == 0 and all(f"{role} is frozen: no beat for 2" in output for role in ("hub", "learner")), output
    assert_no_hole(run)


@pytest.mark.rest
def test_a_role_that_dies_again_and_again_is_given_up_while_the_others_make_steps(small: Any) -> None:
    config = small(**{"max_steps": 100_000, "actors.count": 2})
    run, heard = RunDir.create(config), Heard()
    supervisor = Supervisor(config, run, Spoiling(run, "actor-1", "ipc:///nowhere", "actor-1", "", "one too many"), heard)

    def kill_once() -> None:
        heard.on_step = lambda: None
        os.kill(supervisor.processes()["actor-1"].pid, signal.SIGKILL)

    heard.on_step = kill_once
    with pytest.raises(WorkerLostError, match=r"actor-1 ended 6 times.*code 1 \(TypeError: .*takes"):
        supervisor.run()
    assert [text.split("again in ")[1] for text in heard.events if "actor-1" in text] == [
        "0.5 s", "1.0 s", "2.0 s", "4.0 s", "8.0 s",
    ]  # fmt: skip
    assert not run.is_alive()


def test_a_run_that_cannot_begin_ends_at_once_keeps_the_reason_and_leaves_its_name_free(small: Any) -> None:
    config = small()
    run = RunDir.create(config)
    supervisor = Supervisor(config, run, Spoiling(run, "learner", "one", "two", "too many", good=0))
    with pytest.raises(WorkerLostError, match=r"learner ended 2 times.*code 1 \(TypeError: .*takes") as raised:
        supervisor.run()
    assert run.end() == RunEnd(code=WORKER_LOST, reason=str(raised.value), finished=False)
    found = status.read(Reading(run))
    assert found["state"] == "failed" and f"ended with code 5: {raised.value}" in status.lines(run, found)

    again = RunDir.create(config)
    assert again.is_alive() and again.end() is None and not again.log("hub").exists()
    with pytest.raises(ConfigError, match=rf"a run that goes on \(process {os.getpid()} on host .*--set name=NAME, or stop it"):
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
        (
            "tracker",
            ["hub", "learner", "actor-0"],
            "tracker-tensorboard ended before it began: no room; starting it again in 0.5 s",
        ),
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
def test_an_actor_started_by_hand_without_input_works_and_ends_in_order(
    command: Callable[..., Command], small_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """As with nohup or systemd. The hub knows of its end long before its lease is over: it said goodbye."""
    started = command(*small_arguments(**{"max_steps": 100_000, "queue.lease_s": 600.0}))
    run = tmp_path / "runs" / "quick"
    arguments = [sys.executable, "-m", "async_rlhf.run.processes.roles", "actor", str(run), told(run), "by-hand"]
    actor = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        address = told(run)

        def actors() -> set[str]:
            with control(address, timeout_s=60) as asked:
                return set(asked.status()["actors"])

        wait_for(lambda: "by-hand" in actors(), "the actor that was started by hand")
        actor.terminate()
        _, said = actor.communicate(timeout=300)
        assert actor.returncode == 0 and "ended at the request of SIGTERM" in said, said
        wait_for(lambda: "by-hand" not in actors(), "the hub to know of its end")
    finally:
        actor.kill()
        actor.communicate(timeout=300)
    started.process.send_signal(signal.SIGTERM)
    assert started.finish()[0] == 0


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


def test_the_sockets_of_a_killed_supervisor_are_removed_by_the_next_start_and_a_living_ones_are_not(
    small: Any, tmp_path: Path
) -> None:
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
