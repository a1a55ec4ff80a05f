"""The tracker: sends everything at least once, goes on where it was, and can stop no run. Real processes."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError
from async_rlhf.run import manifest
from async_rlhf.run.checks.machine import check_trackers
from async_rlhf.run.processes.evaluation import record_evaluation
from async_rlhf.run.processes.tracking import (
    _MOST_MEMORY,
    _alone,
    _bounded_memory,
    _Sent,
    _UnsentLines,
    measures,
    rewind,
    track,
    tracker_nodes,
)
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.supervision import supervisor
from async_rlhf.run.supervision.child import Child
from async_rlhf.run.supervision.supervisor import Supervisor
from async_rlhf.run.tracking import opened, to_tensorboard
from tests import image_models
from tests.async_rlhf.test_supervisor import Heard
from tests.conftest import output_of, wait_for


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
        for node in tracker_nodes(self.config, self.run):
            self.tracker, self.kind = Child(node, optional=True), node.arguments[0]
            self.supervisor._children = {node.name: self.tracker}

    def look(self) -> None:
        self.supervisor._look_after(self.tracker)

    def steps(self, *steps: int) -> None:
        with self.run.metrics.open("a") as file:
            file.writelines(json.dumps({"step": step, "time": 1e9 + step, "reward": step / 10}) + "\n" for step in steps)
        rollouts = [{"text": "42", "scores": {"exact": 1.0}}]
        with self.run.samples.open("a") as file:
            file.writelines(json.dumps({"step": s, "prompt": "6 * 7 =", "rollouts": rollouts}) + "\n" for s in steps)

    def wait_until_sent(self, step: int) -> None:
        def look() -> bool:
            self.look()
            tracked = self.run.tracked(self.kind)
            return tracked.exists() and json.loads(tracked.read_text())["step"] == step

        wait_for(look, f"step {step} to be sent")

    def end(self) -> None:
        self.run.withdraw()
        self.supervisor._finish_tracking()
        self.supervisor.events.close(at_once=True)
        self.run.retire()

    def shown(self) -> list[tuple[int, str, float]]:
        return shown(self.run.path / "tensorboard")


def shown(directory: Path) -> list[tuple[int, str, float]]:
    events = [event for file in sorted(directory.iterdir()) for event in EventFileLoader(str(file)).Load()]
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
    assert run.events == ["tracker-tensorboard ended by signal 9 (SIGKILL); starting it again in 0.5 s"]


def test_a_tracker_that_always_fails_is_given_up_and_stops_nothing(supervised: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = supervised("tensorboard")
    monkeypatch.setattr(supervisor, "_PAUSE_S", 0.0)
    (run.run.path / "tensorboard").write_text("in the way")
    run.steps(1)
    wait_for(lambda: run.look() or not run.tracker.wanted, "the tracker to be given up")
    run.end()
    assert len(run.events) == 2 and run.events[1].startswith("tracker-tensorboard ended 2 times without having worked")


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
    assert process.poll() is not None and len(run.events) == 1 and "tracker-tensorboard was not ready" in run.events[0]
    run.begin_again()
    run.wait_until_sent(3)
    run.end()
    assert run.shown() == [(1, "reward", 0.1), (2, "reward", 0.2), (3, "reward", 0.3)] and len(run.events) == 1


def test_weights_and_biases_writes_offline_without_a_network(supervised: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = supervised("wandb")
    run.steps(1, 2)
    run.wait_until_sent(2)
    run.end()
    assert run.events == [], run.run.log("tracker-wandb").read_text()
    [written] = (run.run.path / "wandb").glob("offline-run-*/run-*.wandb")
    [table] = (run.run.path / "wandb").glob("offline-run-*/files/media/table/rollouts_*.table.json")
    wait_for(lambda: b"reward" in written.read_bytes(), "the file of the offline run")
    assert json.loads(table.read_text())["data"] == [[1, "6 * 7 =", "42", '{"exact": 1.0}']]


@pytest.mark.filterwarnings("ignore::pandas.errors.Pandas4Warning")  # its own affair
def test_mlflow_has_steps_settings_and_tables_and_a_run_that_is_resumed_is_the_same_there(
    supervised: Callable[..., Supervised], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    run, said = supervised("none", **{"seed": 7}), list[str]()
    run.steps(1, 2)
    record_evaluation(run.run, {"label": "step", "step": 2, "mean_reward": 0.5, "samples": [{"prompt": "2+2", "reward": 1}]})
    run.run.withdraw()
    run.run.retire()
    track(run.run, "mlflow", said.append)
    run.steps(2, 3)
    track(run.run, "mlflow", said.append)
    assert [line.partition(" of ")[0] for line in said] == [f"mlflow has {step} steps and 1 evaluations" for step in (2, 3)]

    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("async-rlhf")
    [found] = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "reward")
    assert [(each.step, each.value, each.timestamp) for each in history] == [
        (step, step / 10, 1000 * (10**9 + step)) for step in (1, 2, 3)
    ]
    assert (found.data.params["seed"], found.info.status) == ("7", "FINISHED")
    tables = [Path(client.download_artifacts(found.info.run_id, name)) for name in ("rollouts", "evaluation_samples")]
    assert [file.name for table in tables for file in table.iterdir()] == ["step_000001.json", "step_000002.json"]


def test_a_run_that_goes_on_with_other_code_is_the_same_in_its_tracker(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_tensorboard, "Service", lambda run: run)
    run = RunDir.create(config := small())
    run.retire()
    before: Any = opened("tensorboard", run, 1)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "sources", lambda: "f00")
        RunDir.reopen(config).retire()
    assert json.loads((run.path / "manifest.json").read_text())["later"][0]["sources"] == "f00"
    after: Any = opened("tensorboard", run, 1)
    assert after == before


def test_finite_numbers_are_sent_and_a_service_whose_library_is_missing_is_refused(
    monkeypatch: pytest.MonkeyPatch, small: Any
) -> None:
    record = {"step": 3, "time": 1.0, "loss": 0.5, "applied": True, "nan": float("nan"), "groups": [1], "none": None}
    assert dict(measures({"step": 3, "rewards": {"time": 0.5}}, "evaluation/")) == {"evaluation/rewards/time": 0.5}
    assert dict(measures({**record, "sampled": {"pass_at": {"4": 0.25}}})) == {
        "loss": 0.5, "applied": 1.0, "sampled/pass_at/4": 0.25,
    }  # fmt: skip
    check_trackers(small())
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match="the tracker mlflow writes to a server only"):
        check_trackers(small(**{"tracking.kind": ["mlflow"]}))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'async-rlhf\[wandb\]'"):
        check_trackers(small(**{"tracking.kind": ["wandb"]}))
    with pytest.raises(ConfigError, match="async-rlhf track RUN_DIR --to trackio"):
        check_trackers(small(**{"tracking.kind": ["trackio"]}))


def test_weights_and_biases_without_a_key_is_refused_but_not_offline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_CONFIG_DIR", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="the tracker wandb has no key: run wandb login, set WANDB_API_KEY, or WANDB_MODE"):
        check_trackers(small(**{"tracking.kind": ["wandb"]}))
    (tmp_path / ".netrc").touch()
    check_trackers(small(**{"tracking.kind": ["wandb"]}))
    (tmp_path / ".netrc").unlink()
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers(small(**{"tracking.kind": ["wandb"]}))


def test_one_tracker_or_several_each_a_process(small: Any) -> None:
    for given, kinds in (("none", []), ("wandb", ["wandb"]), (["mlflow", "wandb"], ["mlflow", "wandb"])):
        config = small(**{"tracking.kind": given})
        assert [node.arguments for node in tracker_nodes(config, RunDir(config.run_dir))] == [(kind,) for kind in kinds]
    with pytest.raises(ConfigError, match="'tensorboard', 'wandb', 'trackio' or 'mlflow'"):
        small(**{"tracking.kind": "wanbd"})
    with pytest.raises(ConfigError, match="names 'mlflow' twice"):
        check_trackers(small(**{"tracking.kind": ["mlflow", "mlflow"]}))


def test_a_run_without_a_tracker_is_sent_from_its_files_once_and_set_back_it_is_another_run(supervised: Any) -> None:
    run = supervised("none").run
    with run.metrics.open("a") as file:
        file.writelines(json.dumps({"step": step, "time": 1e9, "reward": step / 10}) + "\n" for step in range(1, 1002))
    run.withdraw()
    run.retire()
    arguments = ["track", str(run.path), "--to", "tensorboard"]
    for _ in range(2):
        assert "tensorboard has 1001 steps and 0 evaluations" in output_of(0, *arguments)
    assert [step for step, *_ in shown(run.path / "tensorboard")] == list(range(1, 1002))
    lines = run.metrics.read_text().splitlines(keepends=True)[:10]
    run.metrics.write_text("".join(lines))
    rewind(run, 10)
    assert "10 steps" in output_of(0, *arguments)
    assert len(shown(run.path / "tensorboard")) == 1001 and len(shown(run.path / "tensorboard-2")) == 10


def test_a_table_has_all_groups_of_its_step_also_those_that_come_later_and_each_step_has_one(supervised: Any) -> None:
    run, tables = supervised("none").run, list[tuple[int, list[Any]]]()
    tracker: Any = SimpleNamespace(table=lambda name, step, at, rows: tables.append((step, [row["prompt"] for row in rows])))
    lines, sent = _UnsentLines(Reading(run)), _Sent()
    for done, steps in enumerate(((1,), (1, 2), (25,), (25, 49), (50,))):
        with run.samples.open("a") as file:
            file.writelines(
                json.dumps(
                    {"step": step, "group": f"{done} {at}", "prompt": f"{step} {done}", "rollouts": [{"text": "a"}] * 20}
                )
                + "\n"
                for at, step in enumerate(steps)
            )
        (sent,) = lines.send(tracker, sent.model_copy(update={"step": steps[-1]}), is_last=done == 4)
    assert [(step, len(rows), {*rows}) for step, rows in tables] == [
        (1, 32, {"1 0", "1 1"}), (25, 32, {"25 2", "25 3"}), (50, 20, {"50 4"}),
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore::pandas.errors.Pandas4Warning")  # its own affair
@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "mlflow"])
def test_the_first_images_of_a_step_are_sent_small_and_those_that_are_gone_left_out(
    kind: Any, supervised: Callable[..., Supervised], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    run = supervised("none").run
    digests = [run.images.add(image_models.drawn(200, 100, seed)) for seed in range(10)]
    run.images.path(digests[1]).unlink()
    with run.samples.open("a") as file:
        for number in range(0, 10, 2):
            group = {"step": 1, "group": number, "images": digests[number : number + 2], "rollouts": [{"text": "a"}]}
            file.write(json.dumps({**group, "prompt": "?"}) + "\n")
    tracker = opened(kind, run, 1)
    [*_UnsentLines(Reading(run)).send(tracker, _Sent(step=1), is_last=True)]
    tracker.flush()
    tracker.close()
    places = {"tensorboard": "tensorboard/*", "wandb": "wandb/offline-run-*/files/media/images/**/*", "mlflow": "**/*.png"}
    files = [file for file in (tmp_path if kind == "mlflow" else run.path).glob(places[kind]) if file.is_file()]
    if kind == "tensorboard":
        values = [v for file in files for event in EventFileLoader(str(file)).Load() for v in event.summary.value]
        sent = {value.tag: (int(value.tensor.string_val[0]), int(value.tensor.string_val[1])) for value in values}
        assert sent == {f"images/{number}": (96, 48) for number in range(1, 9)}
    elif kind == "wandb":
        assert len(files) == 8 and all(file.name.startswith("images_") for file in files)
    else:
        assert {file.stem for file in files} == {digests[0], *digests[2:9]}


def test_what_cannot_be_sent_is_refused_with_the_reason(supervised: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = supervised("none").run
    run.withdraw()
    run.retire()
    with pytest.raises(ConfigError, match=r"--to 'tensorbord' is no tracker; choose one of: tensorboard, wandb"):
        track(run, "tensorbord", print)
    with _alone(run, "tensorboard"), pytest.raises(ConfigError, match="is being sent to tensorboard by another process"):
        track(run, "tensorboard", print)
    (run.path / "tensorboard").write_text("in the way")
    with pytest.raises(AsyncRLHFError, match=r"tensorboard fails: FileExistsError.* The same command goes on"):
        track(run, "tensorboard", print)
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match="--to trackio needs the package trackio: pip install trackio"):
        track(run, "trackio", print)


def test_an_answer_without_an_end_fills_no_more_memory_than_a_tracker_may_have() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with _bounded_memory(), pytest.raises(MemoryError):
        bytearray(2 * _MOST_MEMORY)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
