"""Which checkpoint a run goes on from: what is damaged is never passed over in silence, and what is advised works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from async_rlhf.buffers.errors import ConfigError, DamagedError
from async_rlhf.buffers.queue.journal import Journal
from async_rlhf.buffers.queue.ledger import QueueSnapshot
from async_rlhf.learner.checkpoint import resuming
from async_rlhf.learner.checkpoint.store import Checkpoints


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
def test_a_step_that_cannot_be_gone_on_from_is_refused_with_those_that_can(
    run: Path, step: int, kind: type[Exception], says: str
) -> None:
    if step == 15:
        weights(run, 15).write_text("weighty")
    assert re.search(says, refusal(run, step, kind))


def test_going_back_sets_aside_what_came_after(run: Path) -> None:
    resuming.check_step(run, 15)
    resuming.go_back(run, 15)
    found = resuming.newest(run)
    assert found is not None and found[1]["step"] == 15 and resuming.resumable(run) == [10, 15]
    assert (run / "checkpoints" / ".aside-step_000020" / "model" / "weights").read_text() == "weights"
