"""The tracker: sends everything at least once, goes on where it was, and can stop no run. Real processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.launch.program import Node
from async_rlhf.run.checks.preflight import check_tracking
from async_rlhf.run.processes.evaluation import record_evaluation
from async_rlhf.run.processes.tracking import measures
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.supervision import supervisor
from async_rlhf.run.supervision.child import Child
from async_rlhf.run.supervision.supervisor import Supervisor
from async_rlhf.run.watching import TrackingConfig
from tests.async_rlhf.test_supervisor import Heard
from tests.conftest import wait_for


class Supervised:
    """A tracker of a run directory in which steps appear as if there were a learner."""

    def __init__(self, config: Any, sockets: Path) -> None:
        self.config, self.sockets = config, sockets
        self.run, self.heard = RunDir.create(config), Heard()
        self.events = self.heard.events
        self.begin_again()

    def begin_again(self) -> None:
        """As a resumed run does."""
        self.run.announce(self.sockets)
        self.supervisor = Supervisor(self.config, self.run, self.run.launcher, self.heard)
        self.tracker = Child(Node("tracker", "tracker", (), self.run.log("tracker")), optional=True)
        self.supervisor._children = {"tracker": self.tracker}

    def look(self) -> None:
        self.supervisor._look_after(self.tracker)

    def steps(self, *steps: int) -> None:
        with self.run.metrics.open("a") as file:
            file.writelines(json.dumps({"step": step, "time": 1e9 + step, "reward": step / 10}) + "\n" for step in steps)

    def wait_until_sent(self, step: int) -> None:
        def look() -> bool:
            self.look()
            return self.run.tracked.exists() and json.loads(self.run.tracked.read_text())["step"] == step

        wait_for(look, f"step {step} to be sent")

    def end(self) -> None:
        self.run.withdraw()
        self.supervisor._finish_tracking()
        self.supervisor.events.close(at_once=True)
        self.run.retire()

    def shown(self) -> list[tuple[int, str, float]]:
        files = sorted((self.run.path / "tensorboard").iterdir())
        events = [event for file in files for event in EventFileLoader(str(file)).Load()]
        return [(e.step, value.tag, round(value.tensor.float_val[0], 3)) for e in events for value in e.summary.value]


@pytest.fixture
def supervised(small: Callable[..., Any], tmp_path: Path) -> Callable[..., Supervised]:
    def make(kind: str, **more: Any) -> Supervised:
        return Supervised(small(**{"tracking.kind": kind, **more}), tmp_path)

    return make


def test_a_killed_tracker_goes_on_where_it_was(supervised: Callable[..., Supervised]) -> None:
    run = supervised("tensorboard")
    run.steps(1, 2)
    run.wait_until_sent(2)
    assert run.tracker.process is not None
    run.tracker.process.kill()
    run.steps(3)
    record_evaluation(run.run, {"label": "step", "step": 2, "mean_reward": 0.5, "missing": "text", "samples": [1]})
    run.wait_until_sent(3)
    run.end()
    assert run.shown() == [(1, "reward", 0.1), (2, "reward", 0.2), (3, "reward", 0.3), (2, "evaluation/mean_reward", 0.5)]
    assert run.events == ["tracker ended by signal 9 (SIGKILL); starting it again in 0.5 s"]


def test_a_tracker_that_always_fails_is_given_up_and_stops_nothing(
    supervised: Callable[..., Supervised], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = supervised("tensorboard")
    monkeypatch.setattr(supervisor, "_PAUSE_S", 0.0)
    (run.run.path / "tensorboard").write_text("in the way")
    run.steps(1)
    wait_for(lambda: run.look() or not run.tracker.wanted, "the tracker to be given up")
    run.end()
    assert len(run.events) == 2 and run.events[1].startswith("tracker ended 2 times without having worked"), run.events


def test_a_tracker_that_hangs_holds_up_nothing_and_what_it_did_not_send_is_sent_when_the_run_goes_on(
    supervised: Callable[..., Supervised], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = supervised("tensorboard")
    run.steps(1)
    run.wait_until_sent(1)
    process = run.tracker.process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    run.steps(2, 3)
    run.look()
    assert process.poll() is None and run.events == [], "nothing waits for it while the run goes on"
    with monkeypatch.context() as impatient:
        impatient.setattr(supervisor, "_TRACKING_S", 0.0)
        run.run.withdraw()
        run.supervisor._finish_tracking()
    assert process.poll() is not None and len(run.events) == 1 and "the tracker was not ready" in run.events[0]
    run.begin_again()
    run.wait_until_sent(3)
    run.end()
    assert run.shown() == [(1, "reward", 0.1), (2, "reward", 0.2), (3, "reward", 0.3)] and len(run.events) == 1


def test_weights_and_biases_writes_offline_without_a_network(
    supervised: Callable[..., Supervised], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = supervised("wandb")
    run.steps(1, 2)
    run.wait_until_sent(2)
    run.end()
    assert run.events == [], run.run.log("tracker").read_text()
    [written] = (run.run.path / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"reward" in written.read_bytes()


def test_finite_numbers_are_sent_and_a_service_whose_library_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"step": 3, "time": 1.0, "loss": 0.5, "applied": True, "nan": float("nan"), "groups": [1], "none": None}
    assert dict(measures({**record, "sampled": {"pass_at": {"4": 0.25}}})) == {
        "loss": 0.5, "applied": 1.0, "sampled/pass_at/4": 0.25,
    }  # fmt: skip
    check_tracking(TrackingConfig())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'async-rlhf\[wandb\]'"):
        check_tracking(TrackingConfig(kind="wandb"))
