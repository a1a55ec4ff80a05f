"""A checkpoint is whole or not there, whatever is killed when; and which ones evaluations keep."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.buffers.errors import DamagedError
from async_rlhf.learner.checkpoint.evaluated import Cadence, best_step, link_best, needed, num_since_best
from async_rlhf.learner.checkpoint.store import SCHEMA, CheckpointError, Checkpoints, verified


class Killed(BaseException):
    """Stands for the end of the process: nothing of ours may catch it."""


def writer(content: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "model").mkdir()
        (directory / "model" / "weights").write_text(content)
        (directory / "optimizer").write_text(content)

    return write


def content(checkpoints: Checkpoints) -> tuple[int, str]:
    """Step and content of the newest checkpoint, which must be whole; the link must lead there too."""
    path = checkpoints.all()[-1]
    state = verified(path)
    text = (path / "model" / "weights").read_text()
    assert (path / "optimizer").read_text() == text
    assert path.name == f"step_{state['step']:06d}"
    return state["step"], text


CHANGES = (
    (Path, "mkdir"),
    (Path, "write_text"),
    (Path, "rename"),
    (Path, "replace"),
    (Path, "symlink_to"),
    (Path, "unlink"),
    (os, "fsync"),
    (os, "unlink"),
    (os, "rmdir"),
)


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """`kill_at(n)`: the n-th change to the disk from now on does not happen, nor anything after it."""
    left = [1 << 30]

    def spied(function: Callable[..., object]) -> Callable[..., object]:
        def spy(*args: object, **named: object) -> object:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return function(*args, **named)

        return spy

    for owner, name in CHANGES:
        monkeypatch.setattr(owner, name, spied(getattr(owner, name)))

    def arm(count: int) -> None:
        left[0] = count

    yield arm
    left[0] = 1 << 30


@pytest.fixture
def killed_everywhere(tmp_path: Path, kill_at: Callable[[int], None]) -> Callable[..., Iterator[Path]]:
    """`killed_everywhere((1, 2), change)`: for each change to the disk that `change` makes of checkpoints of these steps, the
    directory in which it was killed at that; the last time it went to its end."""

    def directories(steps: Sequence[int], change: Callable[[Checkpoints], object], keep_last: int) -> Iterator[Path]:
        for count in range(1000):
            checkpoints = Checkpoints(tmp_path / str(count), keep_last=keep_last)
            for step in steps:
                checkpoints.save(step, writer(str(step)), {})
            kill_at(count)
            try:
                change(checkpoints)
                finished = True
            except Killed:
                finished = False
            kill_at(1 << 30)
            yield tmp_path / str(count)
            if finished:
                assert count > 5, "the spies saw nothing"
                return
        pytest.fail("never finished")

    return directories


@pytest.mark.parametrize("new_step", [30, 20], ids=["the next step", "the same step again"])
def test_killed_at_any_change_to_the_disk_the_old_or_the_new_one_is_there_whole(
    killed_everywhere: Callable[..., Iterator[Path]], new_step: int
) -> None:
    for directory in killed_everywhere((10, 20), lambda before: before.save(new_step, writer("new"), {}), keep_last=2):
        after = Checkpoints(directory, keep_last=2)  # the process that comes next
        assert content(after) in [(20, "20"), (new_step, "new")]
        for path in after.all():
            assert {"state.json", "optimizer", "model"} == {part.name for part in path.iterdir()}
        linked = (directory / "latest").resolve()
        assert (linked / "model" / "weights").read_text() in ("20", "new")
        assert {path.name for path in directory.iterdir()} == {"latest", *(path.name for path in after.all())}
        # and it goes on as if nothing had been
        after.save(new_step, writer("newer"), {})
        assert content(after) == (new_step, "newer") and (directory / "latest").resolve() == after.all()[-1]


def test_killed_while_it_sets_aside_what_is_left_is_whole_and_it_can_be_done_again(
    killed_everywhere: Callable[..., Iterator[Path]],
) -> None:
    for directory in killed_everywhere((1, 2, 3), lambda before: before.set_aside(after=1), keep_last=3):
        after = Checkpoints(directory, keep_last=3)
        newest, text = content(after)
        assert [path.name for path in after.all()] == [f"step_00000{step}" for step in range(1, newest + 1)]
        assert text == str(newest) and (directory / "latest").resolve() == after.all()[-1]
        after.set_aside(after=1)
        assert content(after) == (1, "1")


def test_a_full_disk_leaves_the_previous_one_and_can_be_tried_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    checkpoints.save(1, writer("one"), {})

    def full(directory: Path) -> None:
        (directory / "model").mkdir()
        (directory / "model" / "weights").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    for step in (1, 2):
        with pytest.raises(OSError, match="No space left"):
            checkpoints.save(step, full, {})
        assert content(checkpoints) == (1, "one") and len(checkpoints.all()) == 1
        assert not list(tmp_path.glob(".*")), "half a checkpoint would keep the disk full"
    checkpoints.save(2, writer("two"), {})
    assert content(checkpoints) == (2, "two")


def test_every_file_is_durable_before_the_checkpoint_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a loss of power could leave a name with nothing behind it."""
    done: list[Path] = []
    rename = Path.rename

    def renamed(path: Path, target: Path) -> Path:
        done.append(target)
        return rename(path, target)

    monkeypatch.setattr("async_rlhf.learner.checkpoint.store.DISK", SimpleNamespace(sync_path=done.append))
    monkeypatch.setattr(Path, "rename", renamed)
    path = Checkpoints(tmp_path, keep_last=1).save(1, writer("one"), {})
    before, after = done[: done.index(path)], done[done.index(path) + 1 :]
    assert {"weights", "optimizer", "state.json", "model"} < {each.name for each in before} and tmp_path in after


def test_the_newest_are_kept_and_counted_as_numbers(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for step in (5, 999_999, 1_000_000):  # the last sorts before the second as text
        checkpoints.save(step, writer(str(step)), {})
        assert content(checkpoints) == (step, str(step))
        assert os.readlink(tmp_path / "latest") == f"step_{step:06d}"
    assert [path.name for path in checkpoints.all()] == ["step_999999", "step_1000000"]


def test_every_so_many_steps_one_is_kept_for_good(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_every=20)
    for step in range(10, 90, 10):
        checkpoints.save(step, writer(str(step)), {})
    assert [path.name for path in checkpoints.all()] == [f"step_0000{step}" for step in (20, 40, 60, 70, 80)]


def test_the_floor_is_the_oldest_of_those_kept_to_go_on_from(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=3, keep_every=10)
    floors = []
    for step in range(5, 35, 5):
        checkpoints.save(step, writer(str(step)), {})
        floors.append(checkpoints.floor)
    assert floors == [0, 0, 5, 10, 15, 20], "the start of the run, while there are fewer"


def test_what_is_set_aside_is_there_until_another_is_saved(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        checkpoints.save(step, writer(str(step)), {})
    checkpoints.set_aside(after=1)
    again = Checkpoints(tmp_path, keep_last=3)
    assert content(again) == (1, "1") and (tmp_path / "latest").resolve() == again.all()[-1]
    assert {path.name for path in tmp_path.glob(".*")} == {".aside-step_000002", ".aside-step_000003"}
    assert (tmp_path / ".aside-step_000003" / "model" / "weights").read_text() == "3"
    again.save(2, writer("2 again"), {})
    assert content(again) == (2, "2 again") and not list(tmp_path.glob(".*"))


def test_set_aside_before_the_first_the_run_begins_at_its_start(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=3)
    checkpoints.save(1, writer("1"), {})
    checkpoints.set_aside(after=0)
    assert (checkpoints.all(), checkpoints.newest, checkpoints.floor) == ([], 0, 0)
    assert not (tmp_path / "latest").is_symlink()


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


@pytest.mark.parametrize("harm", [Path.unlink, shorten, flip])
@pytest.mark.parametrize("name", ["model/weights", "optimizer", "state.json"])
def test_a_checkpoint_that_was_torn_is_named_with_the_file(tmp_path: Path, harm: Callable[[Path], None], name: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    path = checkpoints.save(3, writer("whole"), {"padding": "x"})
    if name == "state.json" and harm is shorten:
        harm = lambda path: path.write_text(path.read_text()[:-3])  # noqa: E731
    harm(path / name)
    with pytest.raises(DamagedError, match=rf"checkpoint step_000003 is torn: {name} "):
        verified(path)
    if harm is flip and name != "state.json":
        assert verified(path, contents=False)["step"] == 3, "sizes alone do not tell"
    else:
        with pytest.raises(DamagedError, match=rf"checkpoint step_000003 is torn: {name} "):
            verified(path, contents=False)


def test_a_checkpoint_of_a_newer_schema_is_named_as_such(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    path = checkpoints.save(3, writer("whole"), {})
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"schema": SCHEMA + 1}))
    with pytest.raises(CheckpointError, match=f"has schema {SCHEMA + 1}, this version reads up to {SCHEMA}"):
        verified(path)


def test_what_is_not_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step_by_step.txt").write_text("notes")
    (tmp_path / ".tmp-step_000007").mkdir()
    (tmp_path / ".tmp-latest").symlink_to("step_000007")
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    assert checkpoints.all() == []
    state = verified(checkpoints.save(1, writer("one"), {"colour": "red"}))
    assert state | {"step": 1, "colour": "red"} == state
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000001", "step_by_step.txt"]


def test_a_reader_on_another_path_can_move_the_folder(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "here", keep_last=1)
    checkpoints.save(1, writer("one"), {})
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert (tmp_path / "there" / "latest" / "optimizer").read_text() == "one"


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
