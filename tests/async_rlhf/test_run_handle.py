"""A run that goes on beside the calling program, with a reward and a callback that only this program has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rlhf import start, train
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.run.run_dir import RunDir
from tests.conftest import QUICK, SMALL


class StopAt(Exception):
    """Raised by a callback."""


def test_a_run_is_iterated_stopped_by_its_caller_and_resumed_until_a_callback_ends_it(tmp_path: Path) -> None:
    overrides: dict[str, Any] = {**SMALL, "max_steps": 100_000, "output_dir": str(tmp_path)}
    with start(QUICK, overrides=overrides, rewards=lambda completion: float(len(completion))) as run:
        assert run.run_dir == tmp_path / "quick" and RunDir(run.run_dir).is_alive()
        with pytest.raises(TimeoutError, match="has not ended within 0"):
            run.result(timeout_s=0)
        seen = []
        for record in run:
            seen.append(record["step"])
            if record["step"] == 3:
                run.stop()
    assert not RunDir(run.run_dir).is_alive()
    result = run.result()
    assert seen == [record["step"] for record in result.metrics] and len(seen) >= 3
    assert not result.finished and list(run) == []
    assert run.model() == result.checkpoint and (tmp_path / "quick/checkpoints/latest/model").samefile(result.checkpoint or "")

    def stop_at(record: dict[str, Any]) -> None:
        assert record["step"] > seen[-1], "only the steps of this start"
        raise StopAt(f"step {record['step']}")

    with pytest.raises(StopAt):
        train(
            QUICK,
            overrides=overrides,
            rewards=[lambda completion: float(len(completion))],
            resume=True,
            on_step=stop_at,
            quiet=True,
        )
    end = RunDir(run.run_dir).end()
    assert end is not None and end.code == 1 and end.reason == f"step {seen[-1] + 1}"


def test_two_runs_of_one_process_are_each_scored_by_their_own_functions(tmp_path: Path) -> None:
    overrides: dict[str, Any] = {**SMALL, "max_steps": 1, "output_dir": str(tmp_path)}
    with (
        start(QUICK, overrides={**overrides, "name": "one"}, rewards=lambda completion: 1.0) as one,
        start(QUICK, overrides={**overrides, "name": "two"}, rewards=lambda completion: 2.0) as two,
    ):
        results = [each.result(timeout_s=200.0) for each in (one, two)]
    assert [[line["rewards/reward_0/mean"] for line in result.metrics] for result in results] == [[1.0], [2.0]]


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
