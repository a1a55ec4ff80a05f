"""Which checkpoints evaluations keep: the best, and those that are still to be evaluated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.learner.checkpoint.evaluated import Cadence, best_step, link_best, needed, num_since_best
from async_rlhf.learner.checkpoint.store import Checkpoints


@pytest.fixture
def evaluations(tmp_path: Path) -> Path:
    return tmp_path / "evaluations.jsonl"


def write(file: Path, *rewards: tuple[int, float | None]) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = [{"label": "step", "step": step, "mean_reward": reward} for step, reward in rewards]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return records


def test_retention_removes_neither_the_best_nor_what_waits_for_its_evaluation(tmp_path: Path, evaluations: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, needed=lambda: needed(evaluations, Cadence([(1, 2)]).is_due))
    for step in (1, 2, 3, 4):
        checkpoints.save(step, lambda directory: None, {})
    assert [path.name for path in checkpoints.all()] == ["step_000002", "step_000004"]
    write(evaluations, (0, 0.9), (2, 0.5), (4, 0.4))
    checkpoints.save(5, lambda directory: None, {})
    assert [path.name for path in checkpoints.all()] == ["step_000002", "step_000005"]
    link_best(tmp_path / "checkpoints", write(evaluations, (2, 0.5), (4, 0.4)))
    assert (tmp_path / "checkpoints" / "best").resolve() == tmp_path / "checkpoints" / "step_000002"
    checkpoints.save(6, lambda directory: None, {})
    write(evaluations, (2, 0.5), (4, 0.4), (6, 0.7))
    checkpoints.save(7, lambda directory: None, {})
    assert [path.name for path in checkpoints.all()] == ["step_000006", "step_000007"]
    link_best(tmp_path / "checkpoints", [])
    assert not (tmp_path / "checkpoints" / "best").is_symlink()


def test_the_best_is_the_earliest_of_equal_ones_and_was_judged(evaluations: Path) -> None:
    records = write(evaluations, (1, 0.2), (2, 0.5), (3, 0.5), (4, None))
    missing = {"label": "step", "step": 5, "missing": "skipped"}
    assert best_step([*records, missing, {"label": "step", "mean_reward": 1.0}]) == 2
    assert best_step(records, among=[1, 3]) == 3
    assert best_step([missing]) is None


def test_greedy_completions_and_groups_are_not_compared() -> None:
    of_one = [{"step": 1, "mean_reward": 1.0}, {"step": 2, "mean_reward": 1.0, "group_size": None}]
    in_groups = [{"step": 3, "mean_reward": 0.4, "group_size": 8}, {"step": 4, "mean_reward": 0.3, "group_size": 8}]
    assert best_step(of_one) == 1 and best_step([*of_one, *in_groups]) == 3
    assert num_since_best([*of_one, *in_groups]) == 1


@given(st.lists(st.tuples(st.integers(1, 12), st.floats(0, 1), st.sampled_from([None, 4, 8])), max_size=12), st.integers(0, 12))
def test_what_becomes_the_best_later_was_kept_at_every_moment_before(
    found: list[tuple[int, float, int | None]], now: int
) -> None:
    """The learner reads the file at one moment, the supervisor sets the link at a later one."""
    by_step = {step: (reward, size) for step, reward, size in found}
    records = [{"step": step, "mean_reward": reward, "group_size": size} for step, (reward, size) in by_step.items()]
    judged = {record["step"] for record in records[:now]}
    later = best_step(records)
    assert later is None or later not in judged or later == best_step(records[:now])


@given(st.lists(st.tuples(st.integers(1, 30), st.sampled_from([None, 0, 1, 3, 7])), max_size=4), st.integers(0, 30))
def test_a_cadence_lists_exactly_the_steps_that_are_due(changed: list[tuple[int, int | None]], last: int) -> None:
    cadence = Cadence([(1, 5), *sorted(changed, key=lambda part: part[0])])
    assert cadence.steps(last) == [step for step in range(last + 1) if cadence.is_due(step)]
