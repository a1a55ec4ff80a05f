"""A checkpoint is whole or not there, whatever is killed when; which ones evaluations keep, and a run goes on from."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.buffers.errors import ConfigError, DamagedError
from async_rlhf.buffers.queue.journal import Journal
from async_rlhf.buffers.queue.ledger import QueueSnapshot
from async_rlhf.learner.checkpoint import resuming
from async_rlhf.learner.checkpoint.evaluated import best_step, link_best, needed, num_since_best, without_links
from async_rlhf.learner.checkpoint.store import SCHEMA, CheckpointError, Checkpoints, step_of, verified


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
    (Path, "mkdir"), (Path, "write_text"), (Path, "rename"), (Path, "replace"), (Path, "symlink_to"), (Path, "unlink"),
    (os, "fsync"), (os, "unlink"), (os, "rmdir"),
)  # fmt: skip


@pytest.fixture
def killed_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Iterator[Path]]:
    """`killed_everywhere((1, 2), change)`: for each change to the disk that `change` makes of checkpoints of these steps, the
    directory in which it was killed at that, and after which nothing happens; the last time it went to its end."""
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

    def directories(steps: Sequence[int], change: Callable[[Checkpoints], object]) -> Iterator[Path]:
        for count in range(1000):
            checkpoints = saved(tmp_path / str(count), steps, keep_last=len(steps))
            left[0], finished = count, False
            with suppress(Killed):
                change(checkpoints)
                finished = True
            left[0] = 1 << 30
            yield tmp_path / str(count)
            if finished:
                assert count > 5, "the spies saw nothing"
                return
        pytest.fail("never finished")

    return directories


def saved(directory: Path, steps: Iterable[int], **kept: Any) -> Checkpoints:
    checkpoints = Checkpoints(directory, **kept)
    for step in steps:
        checkpoints.save(step, writer(str(step)), {})
    return checkpoints


def test_killed_at_any_change_to_the_disk_the_old_or_the_new_one_is_there_whole(killed_everywhere: Any) -> None:
    for directory in killed_everywhere((10, 20), lambda before: before.save(30, writer("new"), {})):
        after = Checkpoints(directory, keep_last=2)  # the process that comes next
        assert content(after) in [(20, "20"), (30, "new")]
        for path in after.all():
            assert {"state.json", "optimizer", "model"} == {part.name for part in path.iterdir()}
        assert (directory / "latest" / "model" / "weights").read_text() in ("20", "new")
        assert {path.name for path in directory.iterdir()} == {"latest", *(path.name for path in after.all())}
        # and it goes on as if nothing had been
        after.save(30, writer("newer"), {})
        assert content(after) == (30, "newer") and (directory / "latest").resolve() == after.all()[-1]


def test_killed_while_it_sets_aside_what_is_left_is_whole_and_it_can_be_done_again(killed_everywhere: Any) -> None:
    for directory in killed_everywhere((1, 2, 3), lambda before: before.set_aside(after=1)):
        after = Checkpoints(directory, keep_last=3)
        newest, text = content(after)
        assert steps_of(after) == list(range(1, newest + 1)) and text == str(newest)
        assert (directory / "latest").resolve() == after.all()[-1]
        after.set_aside(after=1)
        assert content(after) == (1, "1")


def steps_of(checkpoints: Checkpoints) -> list[int]:
    return [step_of(path) for path in checkpoints.all()]


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


def test_who_may_read_a_checkpoint_is_for_the_umask_to_say(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path, keep_last=1).save(1, lambda made: (made / "weights").touch(0o600), {})
    assert (path / "weights").stat().st_mode == (path / "state.json").stat().st_mode


def refuse(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """The disk has none of these."""

    def refused(*arguments: object, **named: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    for name in names:
        monkeypatch.setattr(Path, name, refused)


def test_on_a_disk_without_links_or_modes_the_newest_and_the_best_are_found_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, lines = tmp_path / "checkpoints", [{"step": 1, "mean_reward": 0.9}, {"step": 2, "mean_reward": 0.1}]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = saved(folder, (1, 2), keep_last=3)
    link_best(folder, lines)
    refuse(monkeypatch, "symlink_to", "chmod")
    before.save(3, writer("three"), {})
    before.save(4, writer("four"), {})
    with pytest.raises(PermissionError):
        link_best(folder, [*lines, {"step": 3, "mean_reward": 1.0}])
    assert {path.name for path in folder.iterdir()} == {"step_000002", "step_000003", "step_000004"}, "no name leads astray"
    assert without_links(folder / "latest" / "model") == folder / "step_000004" / "model"
    assert without_links(folder / "best") == folder / "step_000002", "of those that are there"
    assert caplog.text.count("is no link here (Operation not permitted)") == 1


def test_a_path_is_followed_where_a_link_is_missing_or_was_copied_and_is_else_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    made = saved(folder, (1, 2), keep_last=2)
    for same in (folder / "latest" / "model", tmp_path / "latest", tmp_path / "checkpoints" / "best", folder / "step_000001"):
        assert without_links(same) == same
    (folder / "latest").unlink()
    shutil.copytree(folder / "step_000001", folder / "latest")  # a copy of the run that was not brought up to date
    assert without_links(folder / "latest") == folder / "step_000002"
    made.save(3, writer("three"), {})
    assert (folder / "latest").resolve() == folder / "step_000003", "the link is there again"


def test_the_newest_are_kept_and_every_so_many_for_good_and_counted_as_numbers(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path / "numbers", (5, 999_999, 1_000_000), keep_last=2)  # the last sorts before the second as text
    assert steps_of(checkpoints) == [999_999, 1_000_000] and content(checkpoints) == (1_000_000, "1000000")
    assert os.readlink(tmp_path / "numbers" / "latest") == "step_1000000", "also where the folder is moved to"
    assert steps_of(saved(tmp_path / "every", range(10, 90, 10), keep_last=2, keep_every=20)) == [20, 40, 60, 70, 80]
    kept = Checkpoints(tmp_path / "floor", keep_last=3, keep_every=10)
    floors = [(kept.save(step, writer(""), {}), kept.floor)[1] for step in range(5, 35, 5)]
    assert floors == [0, 0, 5, 10, 15, 20], "the oldest to go on from; the start of the run, while there are fewer"


def test_what_is_set_aside_is_there_until_another_is_saved_or_the_run_begins_at_its_start(tmp_path: Path) -> None:
    saved(tmp_path, (1, 2, 3), keep_last=3).set_aside(after=1)
    again = Checkpoints(tmp_path, keep_last=3)
    assert content(again) == (1, "1") and (tmp_path / "latest").resolve() == again.all()[-1]
    assert {path.name for path in tmp_path.glob(".*")} == {".aside-step_000002", ".aside-step_000003"}
    assert (tmp_path / ".aside-step_000003" / "model" / "weights").read_text() == "3"
    again.save(2, writer("2 again"), {})
    assert content(again) == (2, "2 again") and not list(tmp_path.glob(".*"))
    again.set_aside(after=0)
    assert (again.all(), again.newest, again.floor) == ([], 0, 0) and not (tmp_path / "latest").is_symlink()


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


@pytest.mark.parametrize("harm", [Path.unlink, shorten, flip])
@pytest.mark.parametrize("name", ["model/weights", "optimizer", "state.json"])
def test_a_checkpoint_that_was_torn_is_named_with_the_file(tmp_path: Path, harm: Callable[[Path], None], name: str) -> None:
    path = Checkpoints(tmp_path, keep_last=2).save(3, writer("whole"), {})
    harm(path / name)
    by_size_too = harm is not flip or name == "state.json"
    for contents in (True, False) if by_size_too else (True,):
        with pytest.raises(DamagedError, match=rf"checkpoint step_000003 is torn: {name} "):
            verified(path, contents=contents)
    assert by_size_too or verified(path, contents=False)["step"] == 3, "sizes alone do not tell"


def test_a_checkpoint_of_a_newer_schema_is_named_as_such(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path, keep_last=2).save(3, writer("whole"), {})
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


def lines(*rewards: tuple[int, float | None], size: int | None = None) -> list[dict[str, Any]]:
    return [{"label": "step", "step": step, "mean_reward": reward, "group_size": size} for step, reward in rewards]


def test_retention_removes_neither_the_best_nor_what_waits_for_its_evaluation(tmp_path: Path) -> None:
    folder, file = tmp_path / "checkpoints", tmp_path / "evaluations.jsonl"
    checkpoints = Checkpoints(folder, 1, needed=lambda: needed(file, every=2))

    def kept(step: int, *evaluated: tuple[int, float | None]) -> list[int]:
        """After checkpoints up to this step, with these evaluations."""
        file.write_text("".join(json.dumps(each) + "\n" for each in lines(*evaluated)))
        for new in range(checkpoints.newest + 1, step + 1):
            checkpoints.save(new, lambda directory: None, {})
        return steps_of(checkpoints)

    assert kept(4) == [2, 4]
    assert kept(5, (0, 0.9), (2, 0.5), (4, 0.4)) == [2, 5]
    link_best(folder, lines((2, 0.5), (4, 0.4)))
    assert (folder / "best").resolve() == folder / "step_000002"
    kept(6, (2, 0.5), (4, 0.4))
    assert kept(7, (2, 0.5), (4, 0.4), (6, 0.7)) == [6, 7]
    link_best(folder, [])
    assert not (folder / "best").is_symlink()


def test_the_best_is_the_earliest_of_equal_ones_that_were_judged_in_one_way() -> None:
    records = lines((1, 0.2), (2, 0.5), (3, 0.5), (4, None))
    missing = {"label": "step", "step": 5, "missing": "skipped"}
    assert best_step([*records, missing, {"label": "step", "mean_reward": 1.0}]) == 2
    assert best_step(records, among=[1, 3]) == 3 and best_step([missing]) is None
    in_groups = [*records, *lines((5, 0.4), (6, 0.3), size=8)]  # greedy completions and groups are not compared
    assert best_step(in_groups) == 5 and num_since_best(in_groups) == 1


@given(st.lists(st.tuples(st.integers(1, 12), st.floats(0, 1), st.sampled_from([None, 4, 8])), max_size=12), st.integers(0, 12))
def test_what_becomes_the_best_later_was_kept_at_each_moment_before(
    found: list[tuple[int, float, int | None]], now: int
) -> None:
    """The learner reads the file at one moment, the supervisor sets the link at a later one."""
    by_step = {step: (reward, size) for step, reward, size in found}
    records = [each for step, (reward, size) in by_step.items() for each in lines((step, reward), size=size)]
    judged = {record["step"] for record in records[:now]}
    later = best_step(records)
    assert later is None or later not in judged or later == best_step(records[:now])


def write(directory: Path) -> None:
    (directory / "model").mkdir()
    (directory / "model" / "weights").write_text("weights")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the checkpoints of steps 5, 10, 15 and 20, the queue of which has what came after step 10."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=4)
    for step in (5, 10, 15, 20):
        checkpoints.save(step, write, {})
    commit(tmp_path, 10)
    return tmp_path


def commit(run: Path, step: int) -> None:
    """Segments of several lives, in each of which the queue gave something up."""
    for committed in (0, step):
        journal = Journal(run / "queue")
        journal.state(QueueSnapshot(committed_step=committed))
        journal.close()


def weights(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:06d}" / "model" / "weights"


def refusal(run: Path, step: int | None = None, kind: type[Exception] = DamagedError) -> str:
    with pytest.raises(kind) as raised:
        resuming.newest(run) if step is None else resuming.check_step(run, step)
    return str(raised.value)


def test_a_damaged_newest_is_refused_with_the_command_that_works(run: Path) -> None:
    found = resuming.newest(run)
    assert found is not None and found[0].name == "step_000020" and found[1]["step"] == 20
    assert resuming.resumable(run) == [10, 15, 20]
    weights(run, 20).write_text("weighty")  # sizes do not tell
    assert resuming.newest(run, contents=False) is not None
    assert "has other bytes than were written. Go on from step 15: " in refusal(run)
    weights(run, 20).write_text("weight")
    weights(run, 15).unlink()
    message = refusal(run)
    assert message.startswith("checkpoint step_000020 is torn: model/weights has 6 bytes of 7. Go on from step 10: async-rlhf ")
    assert message.endswith(f"train {run / 'config.toml'} --resume --from-step 10")
    resuming.check_step(run, 10)


def test_when_the_queue_has_given_up_the_groups_a_new_run_is_advised(run: Path) -> None:
    commit(run, 20)
    weights(run, 20).unlink()
    model = run / "checkpoints" / "step_000015" / "model"
    assert refusal(run).endswith(f"train {run / 'config.toml'} --set model={model} --set name=NAME")
    for step in (5, 10, 15):
        weights(run, step).unlink()
    assert "no other to go on from: start a new run with async-rlhf train" in refusal(run)


def test_before_anything_is_given_up_the_run_can_begin_again(tmp_path: Path) -> None:
    assert resuming.newest(tmp_path) is None and resuming.resumable(tmp_path) == [0]
    Checkpoints(tmp_path / "checkpoints", keep_last=2).save(5, write, {})
    weights(tmp_path, 5).unlink()
    assert refusal(tmp_path).endswith("--resume --from-step 0")
    resuming.check_step(tmp_path, 0)
    resuming.go_back(tmp_path, 0)
    assert resuming.newest(tmp_path) is None


GIVEN_UP = r"given up the groups before step 10, .* go on from steps 10, 15, 20. Start a new run: .*"


@pytest.mark.parametrize(
    ("step", "kind", "says"),
    [
        (12, ConfigError, r"--from-step 12: there is no checkpoint of that step. This run can go on from steps 10, 15, 20"),
        (5, ConfigError, rf"{GIVEN_UP}step_000005/model --set name=NAME$"),
        (0, ConfigError, rf"{GIVEN_UP}config.toml --set name=NAME$"),
        (15, DamagedError, r"step_000015 is torn: model/weights has other bytes .*. This run can go on from steps 10, 20"),
    ],
)
def test_a_step_that_cannot_be_gone_on_from_is_refused_by_name(run: Path, step: int, kind: type[Exception], says: str) -> None:
    if step == 15:
        weights(run, 15).write_text("weighty")
    assert re.search(says, refusal(run, step, kind))


def test_going_back_sets_aside_what_came_after(run: Path) -> None:
    resuming.check_step(run, 15)
    resuming.go_back(run, 15)
    found = resuming.newest(run)
    assert found is not None and found[1]["step"] == 15 and resuming.resumable(run) == [10, 15]
    assert (run / "checkpoints" / ".aside-step_000020" / "model" / "weights").read_text() == "weights"
