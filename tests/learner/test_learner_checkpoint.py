"""A checkpoint is whole or not there, whatever is killed when."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from learner.checkpoint import SCHEMA, CheckpointError, Checkpoints


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
    found = checkpoints.latest()
    assert found is not None
    path, state = found
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


@pytest.mark.parametrize("again", [False, True], ids=["the next step", "the same step again"])
def test_killed_at_any_change_to_the_disk_the_old_or_the_new_one_is_there_whole(
    tmp_path: Path, kill_at: Callable[[int], None], again: bool
) -> None:
    new_step = 20 if again else 30
    for count in range(1000):
        directory = tmp_path / str(count)
        before = Checkpoints(directory, keep_last=2)
        before.save(10, writer("older"), {})
        before.save(20, writer("old"), {})
        kill_at(count)
        try:
            before.save(new_step, writer("new"), {})
            finished = True
        except Killed:
            finished = False
        kill_at(1 << 30)
        after = Checkpoints(directory, keep_last=2)  # the process that comes next
        assert content(after) in [(20, "old"), (new_step, "new")]
        for path in after.all():
            assert {"state.json", "optimizer", "model"} == {part.name for part in path.iterdir()}
        linked = (directory / "latest").resolve()
        assert (linked / "model" / "weights").read_text() in ("old", "new")
        assert {path.name for path in directory.iterdir()} == {"latest", *(path.name for path in after.all())}
        # and it goes on as if nothing had been
        after.save(new_step, writer("newer"), {})
        assert content(after) == (new_step, "newer") and (directory / "latest").resolve() == after.all()[-1]
        if finished:
            assert count > 10, "the spies saw nothing"
            return
    pytest.fail("never finished")


def test_a_full_disk_leaves_the_previous_one_and_can_be_tried_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    checkpoints.save(1, writer("one"), {})

    def full(directory: Path) -> None:
        (directory / "model").mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    for step in (1, 2):
        with pytest.raises(OSError, match="No space left"):
            checkpoints.save(step, full, {})
        assert content(checkpoints) == (1, "one") and len(checkpoints.all()) == 1
    checkpoints.save(2, writer("two"), {})
    assert content(checkpoints) == (2, "two")


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
    with pytest.raises(CheckpointError, match=rf"checkpoint step_000003 is torn: {name} .*Remove .*step_000003' to go on"):
        checkpoints.latest()


def test_a_checkpoint_of_a_newer_schema_is_named_as_such(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    path = checkpoints.save(3, writer("whole"), {})
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"schema": SCHEMA + 1}))
    with pytest.raises(CheckpointError, match=f"has schema {SCHEMA + 1}, this version reads up to {SCHEMA}"):
        checkpoints.latest()


def test_what_is_not_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step_by_step.txt").write_text("notes")
    (tmp_path / ".tmp-step_000007").mkdir()
    (tmp_path / ".tmp-latest").symlink_to("step_000007")
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    assert checkpoints.latest() is None
    checkpoints.save(1, writer("one"), {"colour": "red"})
    found = checkpoints.latest()
    assert found is not None and found[1] | {"step": 1, "colour": "red"} == found[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000001", "step_by_step.txt"]


def test_a_reader_on_another_path_can_move_the_folder(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "here", keep_last=1)
    checkpoints.save(1, writer("one"), {})
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert (tmp_path / "there" / "latest" / "optimizer").read_text() == "one"
