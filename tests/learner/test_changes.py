"""Changes of a run that goes on: every step is made with the same values each time it is made, whatever is killed when."""

from __future__ import annotations

import errno
import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.buffers.errors import DamagedError
from async_rlhf.buffers.files import Disk
from async_rlhf.learner.loop.changes import Applied, Asked, Change, History, Ledger, Line, LiveChanges, Undone, described

RATE = "learner.learning_rate"


def ask(run: Path, value: Any, key: str = RATE) -> None:
    Ledger(run).append(lambda history: [Asked(number=history.last_number + 1, values={key: (history.asked().get(key), value)})])


class Learner:
    """Makes steps and checkpoints as the real one does, killed where a test likes: what is durable stays in these fields."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.recorded = 0  # the last line of the metrics
        self.checkpoint = 0
        self.made: dict[int, dict[str, Any]] = {}  # with which values each step was made the first time
        self.begin()

    def begin(self) -> None:
        self.changes = LiveChanges(self.run, self.checkpoint, self.recorded)
        self.recorded = self.step = self.checkpoint

    def train(self, *, recorded: bool = True) -> None:
        """A step; not recorded when the learner is killed between its publication and that."""
        values = dict(self.changes.at(self.step + 1))
        self.step += 1
        assert self.made.setdefault(self.step, values) == values, f"step {self.step} is made again in another way"
        self.recorded = self.step if recorded else self.recorded

    def go_back(self, step: int) -> None:
        self.recorded = self.checkpoint = step
        self.made = {made: values for made, values in self.made.items() if made <= step}
        Ledger(self.run).append(lambda history: [Undone(step=step), *history.apply(step + 1)])
        self.begin()


DEEDS = st.one_of(
    st.sampled_from(["train", "train", "save", "kill", "killed before the record", "ask", "tear"]),
    st.integers(0, 20).map(lambda back: ("go back", back)),
)


@given(st.lists(DEEDS, max_size=40))
def test_a_step_that_is_made_again_has_the_values_it_had_and_no_change_is_lost(
    tmp_path_factory: pytest.TempPathFactory, deeds: list[Any]
) -> None:
    learner, asked = Learner(tmp_path_factory.mktemp("run")), 0
    for deed in deeds:
        match deed:
            case "train":
                learner.train()
            case "save":
                learner.checkpoint = learner.step
            case "kill":
                learner.begin()
            case "killed before the record":
                learner.train(recorded=False)
                learner.begin()
            case "ask":
                asked += 1
                ask(learner.run, asked)
            case "tear" if Ledger(learner.run).path.exists():
                with Ledger(learner.run).path.open("a") as file:
                    file.write('{"kind": "asked", "numb')
            case ("go back", back) if back <= learner.checkpoint:
                learner.go_back(back)
    newest = Ledger(learner.run).read().asked()
    for _ in range(60):
        learner.train()
    assert learner.made[learner.step] == newest, "what was asked holds in the end"


def test_what_waits_while_the_learner_is_dead_is_applied_behind_every_step_that_it_may_have_made(tmp_path: Path) -> None:
    learner = Learner(tmp_path)
    for _ in range(4):
        learner.train()
    learner.checkpoint = 2
    ask(tmp_path, 0.5)
    learner.begin()
    for _ in range(4):
        learner.train()
    assert learner.made == {1: {}, 2: {}, 3: {}, 4: {}, 5: {}, 6: {RATE: 0.5}}  # step 5 may have been made and not recorded
    learner.begin()  # killed again, before another checkpoint: the same border
    for _ in range(4):
        learner.train()


def test_a_later_change_wins_and_going_back_forgets_what_came_after(tmp_path: Path) -> None:
    lines: list[Line] = [
        Asked(number=1, values={RATE: (1.0, 2.0)}),
        Applied(number=1, step=5),
        Asked(number=2, values={RATE: (2.0, 3.0)}),
        Applied(number=2, step=8),
    ]
    history = History().then(lines)
    assert [history.in_force(step).get(RATE) for step in (4, 5, 7, 8)] == [None, 2.0, 2.0, 3.0]
    back = History().then([*lines, Undone(step=7)])
    assert back.in_force(100) == {RATE: 2.0} and back.last_number == 2
    assert described(back.changes[0]) == f"{RATE} 1.0 -> 2.0, from step 5 on"


def test_a_torn_last_line_is_cut_off_by_the_next_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    ask(tmp_path, 1.0)
    path = Ledger(tmp_path).path
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:-9])
    assert [change.number for change in Ledger(tmp_path).read().changes] == [1]
    ask(tmp_path, 2.0)
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [1, 2]
    path.write_bytes(whole[:20] + b"\n" + whole)
    with pytest.raises(DamagedError, match=r"changes\.jsonl is damaged"):
        Ledger(tmp_path).read()


def test_on_a_full_disk_a_change_waits_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(tmp_path)
    learner.train()
    ask(tmp_path, 0.5)

    def full(disk: Disk, file: Any) -> None:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "sync", full)
        learner.train()
        with pytest.raises(OSError, match="no room"):
            ask(tmp_path, 0.7)
    learner.train()
    assert [learner.made[step] for step in (2, 3)] == [{}, {RATE: 0.5}]


def test_an_operator_who_hangs_while_asking_holds_up_no_step(tmp_path: Path) -> None:
    learner = Learner(tmp_path)
    ask(tmp_path, 0.5)
    with Ledger(tmp_path).path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        learner.train()
        learner.train()
    learner.train()
    assert learner.made == {1: {}, 2: {}, 3: {RATE: 0.5}}


def test_a_learner_that_lives_goes_on_with_what_it_knows_beside_a_damaged_ledger(tmp_path: Path) -> None:
    learner = Learner(tmp_path)
    ask(tmp_path, 0.5)
    for _ in range(2):
        learner.train()
    Ledger(tmp_path).path.write_text("edited by hand\n")
    learner.train()
    assert learner.made[3] == {RATE: 0.5}
    with pytest.raises(DamagedError):
        learner.begin()


def test_a_run_without_changes_has_no_ledger_and_one_that_is_there_is_read_where_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, ledger = Learner(tmp_path), Ledger(tmp_path)
    learner.train()
    assert not list(tmp_path.iterdir()) and ledger.read() == History()
    assert described(Change(1, {"guard.target": (None, 2)}, 0.0)) == "guard.target null -> 2, waits for the next step"
    for number in (1, 2):
        ask(tmp_path, 1.0)
        assert len(ledger.read().changes) == number
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "_history", lambda *_: pytest.fail("it is as it was"))
            ledger.read()
    ledger.path.unlink()
    assert ledger.read() == History()
