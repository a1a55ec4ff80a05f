"""A run that goes on beside the calling program, with a reward and a callback that only this program has."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from async_rlhf import start, train
from async_rlhf.api import Run, in_python
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.run.run_dir import RunDir
from tests.conftest import QUICK, SMALL, python


class StopAt(Exception):
    """Raised by a callback."""


def test_a_run_is_iterated_stopped_by_its_caller_and_resumed_until_a_callback_ends_it(tmp_path: Path) -> None:
    """Beside another one of this process; each is scored by its own function."""
    overrides: dict[str, Any] = {**SMALL, "max_steps": 100_000, "output_dir": str(tmp_path)}
    other = {**overrides, "max_steps": 1, "name": "other"}
    with (
        start(QUICK, overrides=overrides, rewards=lambda completion: 1.0) as run,
        start(QUICK, overrides=other, rewards=lambda completion: 2.0) as beside,
    ):
        assert run.run_dir == tmp_path / "quick" and RunDir(run.run_dir).is_alive()
        with pytest.raises(TimeoutError, match="has not ended within 0"):
            run.result(timeout_s=0)
        seen = []
        for record in run:
            seen.append(record["step"])
            if record["step"] == 3:
                run.stop()
        assert [line["rewards/reward_0/mean"] for line in beside.result(timeout_s=200.0).metrics] == [2.0]
    assert not RunDir(run.run_dir).is_alive()
    result = run.result()
    assert seen == [record["step"] for record in result.metrics] and len(seen) >= 3
    assert {record["rewards/reward_0/mean"] for record in result.metrics} == {1.0}
    assert not result.finished and list(run) == []
    assert run.model() == result.checkpoint and (tmp_path / "quick/checkpoints/latest/model").samefile(result.checkpoint or "")

    def stop_at(record: dict[str, Any]) -> None:
        assert record["step"] > seen[-1], "only the steps of this start"
        raise StopAt(f"step {record['step']}")

    with pytest.raises(StopAt):
        train(QUICK, overrides=overrides, rewards=[lambda completion: 1.0], resume=True, on_step=stop_at, quiet=True)
    end = RunDir(run.run_dir).end()
    assert end is not None and end.code == 1 and end.reason == f"step {seen[-1] + 1}"


class Judge:
    def __call__(self, completion: str) -> float:
        return 1.0


def test_a_class_given_as_reward_is_refused_by_name_before_anything_starts(tmp_path: Path) -> None:
    class Local(Judge):
        pass

    for kind in (Judge, Local):
        with pytest.raises(ConfigError, match=f"is the class {kind.__name__}; pass an instance of it"):
            start(QUICK, overrides={**SMALL, "output_dir": str(tmp_path)}, rewards=[kind])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rewards": "exact"}, r"rewards: functions were expected, got 'exact'; .*'rewards.functions'"),
        ({"rewards": 5}, "rewards: functions were expected, got 5"),
        ({"loss": "cispo"}, r"loss must be a function, got 'cispo'; give a name as .*'loss.kind'"),
        ({"rewards": {"a": len}}, "rewards: functions were expected, got {'a'"),
        ({"overrides": "max_steps=3"}, "overrides must be a dictionary such as .* got 'max_steps=3'"),
        ({"overrides": {1: 2}}, "unknown key 1: a key is a text"),
        ({"on_step": 5}, "on_step must be a function of a step's record, got 5"),
        ({"data": 5}, "data is a int, and rows were expected"),
        ({"data": "rows.jsonl"}, "data is a str, and rows were expected: .*'data.source': FILE"),
    ],
)
def test_an_argument_of_another_kind_is_refused_by_name_before_anything_starts(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(QUICK, quiet=True, **arguments)


class Supervised:
    """A run that makes one step, and ends when it is drained, or by an error when it is interrupted."""

    def __init__(self, directory: Path) -> None:
        self.records: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self.directory, self.signals, self.over = directory, 0, threading.Event()
        self.waits = threading.Event()

    def handle(self, records: Any = None) -> Run:
        return Run(self, RunDir(self.directory), records or self.records, ExitStack())  # type: ignore[arg-type]

    def run(self) -> bool:
        self.records.put({"step": 1})
        assert self.over.wait(60.0)
        if self.signals > 1:
            raise ConfigError("forced to end")
        return False

    def drain(self) -> None:
        self.signals = self.signals or 1
        self.waits.set()
        self.over.set()

    def interrupt(self) -> None:
        self.signals += 1
        self.over.set()


class Interrupts(SimpleQueue[Any]):
    """Ctrl-C comes while a step is waited for."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        raise KeyboardInterrupt


@pytest.fixture
def supervised(tmp_path: Path) -> Supervised:
    return Supervised(tmp_path)


def leave_by_break(run: Callable[[], Run]) -> None:
    for _ in run():
        break


def leave_by_error(run: Callable[[], Run]) -> None:
    with pytest.raises(ZeroDivisionError):
        for _ in run():
            raise ZeroDivisionError


def leave_unheld(run: Callable[[], Run]) -> None:
    run()


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_error, leave_unheld])
def test_a_run_whose_handle_is_gone_drains_and_says_how_it_goes_on(
    supervised: Supervised, caplog: pytest.LogCaptureFixture, leave: Callable[[Callable[[], Run]], None]
) -> None:
    leave(supervised.handle)
    gc.collect()
    assert supervised.over.wait(10.0) and supervised.signals == 1
    assert f"{supervised.directory} drains (nothing refers to it any more) and writes a checkpoint" in caplog.text


def test_a_loop_that_is_left_drains_nothing_while_the_handle_is_held_and_says_so(
    supervised: Supervised, caplog: pytest.LogCaptureFixture
) -> None:
    run = supervised.handle()
    leave_by_break(lambda: run)
    assert "does not end because the loop over its steps was left: stop() drains it" in caplog.text
    assert not supervised.signals
    run.stop()
    assert not run.result(10.0).finished and list(run) == []


def test_ctrl_c_while_a_step_or_the_end_is_waited_for_drains_and_the_log_says_how_it_ended(
    supervised: Supervised, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = supervised.handle(Interrupts())
    with pytest.raises(KeyboardInterrupt):
        next(iter(run))
    assert supervised.signals == 1 and not run.result(10.0).finished
    assert "drains (Ctrl-C)" in caplog.text and "has drained; resume=True goes on with it" in caplog.text
    other = Supervised(supervised.directory)
    held = other.handle()
    monkeypatch.setattr(held._own.over, "wait", Interrupts().get)
    with pytest.raises(KeyboardInterrupt):
        held.result()
    assert other.over.wait(10.0) and other.signals == 1


def test_a_second_ctrl_c_ends_it_at_once_and_the_log_says_by_what(
    supervised: Supervised, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Supervised, "drain", lambda self: setattr(self, "signals", 1))
    run = supervised.handle()
    wait, waits = run._own.over.wait, iter((KeyboardInterrupt, None))
    monkeypatch.setattr(run._own.over, "wait", lambda *_: Interrupts().get() if next(waits) else wait(10.0))
    with pytest.raises(KeyboardInterrupt), run:
        raise ValueError("of the block")
    assert supervised.signals == 2
    assert "drains (its block was left by ValueError)" in caplog.text and "was ended: forced to end" in caplog.text


ENDS = """
import json, sys
from async_rlhf import start
if __name__ == "__main__":
    run = start(sys.argv[1], overrides=json.loads(sys.argv[2]), rewards=lambda completion: 1.0)
    next(iter(run))
"""


def test_a_program_that_ends_drains_its_run_and_says_how_it_goes_on(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    overrides = {**SMALL, "max_steps": 100_000, "checkpoint.save_every": 1000, "output_dir": str(tmp_path / "runs")}
    done = python("ends.py", QUICK, json.dumps(overrides), cwd=tmp_path)
    assert done.returncode == 0 and "drains (the program ends)" in done.stderr, done.stderr
    assert "has drained; resume=True goes on with it" in done.stderr
    run = RunDir(tmp_path / "runs/quick")
    end = run.end()
    assert end is not None and end.code == 0 and end.reason == "drained" and (run.latest / "model").exists()


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("give --resume too", "give resume=True too"),
        ("--from-step 3 goes on with a run", "from_step=3 goes on with a run"),
        ("go back with --resume --from-step", "go back with resume=True, from_step=STEP"),
        (
            "Continue it with --resume, remove it with --overwrite, or choose another with --set name=NAME",
            "Continue it with resume=True, remove it with overwrite=True, or choose another with overrides={'name': 'NAME'}",
        ),
        (
            "Go on from step 2: async-rlhf train runs/x/config.toml --resume --from-step 2",
            "Go on from step 2: train, config='runs/x/config.toml', resume=True, from_step=2",
        ),
        ("a rate-limit of 3--5 and -- a dash", "a rate-limit of 3--5 and -- a dash"),
    ],
)
def test_messages_name_arguments_of_the_function_that_was_called(message: str, said: str) -> None:
    assert in_python(message) == said


def test_what_start_and_train_refuse_names_their_arguments(tmp_path: Path) -> None:
    overrides = {**SMALL, "output_dir": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"^from_step=3 continues an existing run: give resume=True too"):
        start(QUICK, overrides=overrides, from_step=3)
    (tmp_path / "quick").mkdir()
    (tmp_path / "quick/config.toml").touch()
    with pytest.raises(ConfigError, match=r"exists\. Continue it with resume=True, remove it with overwrite=True"):
        train(QUICK, overrides=overrides, quiet=True)
