"""Changes of a run that goes on: every step is made with the same values each time it is made, whatever is killed when."""

from __future__ import annotations

import errno
import fcntl
import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.buffers.composition import Composition
from async_rlhf.buffers.errors import DamagedError, DivergedError
from async_rlhf.buffers.files import Disk
from async_rlhf.learner.config import GuardConfig
from async_rlhf.learner.loop.changes import (
    Applied,
    Change,
    ChangeHistory,
    ChangeLedger,
    ChangeRequest,
    Line,
    LiveChanges,
    Undone,
    described,
)
from async_rlhf.learner.loop.trainer import TrainerConfig
from tests.conftest import file_size_limit
from tests.learner.lives import Killed, Live, make_batches

RATE = "learner.learning_rate"


def ask(run: Path, value: Any, key: str = RATE) -> None:
    ChangeLedger(run).append(
        lambda history: [ChangeRequest(number=history.last_number + 1, values={key: (history.asked().get(key), value)})]
    )


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
        ChangeLedger(self.run).append(lambda history: [Undone(step=step), *history.apply(step + 1)])
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
            case "tear" if ChangeLedger(learner.run).path.exists():
                with ChangeLedger(learner.run).path.open("a") as file:
                    file.write('{"kind": "asked", "numb')
            case ("go back", back) if back <= learner.checkpoint:
                learner.go_back(back)
    newest = ChangeLedger(learner.run).read().asked()
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
        ChangeRequest(number=1, values={RATE: (1.0, 2.0)}),
        Applied(number=1, step=5),
        ChangeRequest(number=2, values={RATE: (2.0, 3.0)}),
        Applied(number=2, step=8),
    ]
    history = ChangeHistory().then(lines)
    assert [history.in_force(step).get(RATE) for step in (4, 5, 7, 8)] == [None, 2.0, 2.0, 3.0]
    back = ChangeHistory().then([*lines, Undone(step=7)])
    assert back.in_force(100) == {RATE: 2.0} and back.last_number == 2
    assert described(back.changes[0]) == f"{RATE} 1.0 -> 2.0, from step 5 on"


def test_a_torn_last_line_is_cut_off_by_the_next_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    ask(tmp_path, 1.0)
    path = ChangeLedger(tmp_path).path
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:-9])
    assert [change.number for change in ChangeLedger(tmp_path).read().changes] == [1]
    ask(tmp_path, 2.0)
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [1, 2]
    path.write_bytes(whole[:20] + b"\n" + whole)
    with pytest.raises(DamagedError, match=r"changes\.jsonl is damaged"):
        ChangeLedger(tmp_path).read()


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


def test_where_there_is_room_for_a_part_of_a_line_nothing_is_applied(tmp_path: Path) -> None:
    ask(tmp_path, 0.5)
    with file_size_limit(ChangeLedger(tmp_path).path.stat().st_size + 20), pytest.raises(OSError):
        ChangeLedger(tmp_path).append(lambda history: history.apply(1))
    assert [change.step for change in ChangeLedger(tmp_path).read().changes] == [None]


def test_an_operator_who_hangs_while_asking_holds_up_no_step(tmp_path: Path) -> None:
    learner = Learner(tmp_path)
    ask(tmp_path, 0.5)
    with ChangeLedger(tmp_path).path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        learner.train()
        learner.train()
    learner.train()
    assert learner.made == {1: {}, 2: {}, 3: {RATE: 0.5}}


@pytest.mark.usefixtures("network_file_system")
def test_a_change_is_asked_for_and_applied_on_a_network_file_system(tmp_path: Path) -> None:
    learner = Learner(tmp_path)
    ask(tmp_path, 0.5)
    for _ in range(2):
        learner.train()
    assert learner.made[2] == {RATE: 0.5}


def test_of_two_who_ask_at_once_the_second_decides_by_what_the_first_has_asked(tmp_path: Path) -> None:
    decided = threading.Event()

    def first(history: ChangeHistory) -> list[Line]:
        other.start()
        assert not decided.wait(0.2), "the ledger is locked from the reading of it to the last line"
        return [ChangeRequest(number=history.last_number + 1, values={RATE: (history.asked().get(RATE), 1.0)})]

    def second(history: ChangeHistory) -> list[Line]:
        decided.set()
        return [ChangeRequest(number=history.last_number + 1, values={RATE: (history.asked().get(RATE), 2.0)})]

    other = threading.Thread(target=ChangeLedger(tmp_path).append, args=(second,))
    ChangeLedger(tmp_path).append(first)
    other.join(60)
    asked = [(change.number, change.values[RATE]) for change in ChangeLedger(tmp_path).read().changes]
    assert asked == [(1, (None, 1.0)), (2, (1.0, 2.0))]


def test_a_learner_that_lives_goes_on_with_what_it_knows_beside_a_damaged_ledger(tmp_path: Path) -> None:
    learner = Learner(tmp_path)
    ask(tmp_path, 0.5)
    for _ in range(2):
        learner.train()
    ChangeLedger(tmp_path).path.write_text("edited by hand\n")
    learner.train()
    assert learner.made[3] == {RATE: 0.5}
    with pytest.raises(DamagedError):
        learner.begin()


def test_a_run_without_changes_has_no_ledger_and_one_that_is_there_is_read_where_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, ledger = Learner(tmp_path), ChangeLedger(tmp_path)
    learner.train()
    assert not list(tmp_path.iterdir()) and ledger.read() == ChangeHistory()
    assert described(Change(1, {"guard.target": (None, 2)})) == "guard.target null -> 2, waits for the next step"
    for number in (1, 2):
        ask(tmp_path, 1.0)
        assert len(ledger.read().changes) == number
        with monkeypatch.context() as patch:
            patch.setattr(ChangeLedger, "_history", lambda *_: pytest.fail("it is as it was"))
            ledger.read()
    ledger.path.unlink()
    assert ledger.read() == ChangeHistory()


STEPS = 8


def changed(config: TrainerConfig, values: Mapping[str, Any]) -> TrainerConfig:
    """As `run.loading.changed` makes it of the whole configuration."""
    sections: dict[str, dict[str, Any]] = {"learner": {}, "checkpoint": {}, "guard": {}}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.get(section, {})[name] = value
    return replace(
        config,
        **{name: getattr(config, name).model_copy(update=update) for name, update in sections.items()},
        composition=Composition({"judge": values.get("rewards.weights.judge", 1.0)}),
    )


@pytest.fixture
def changing(live: Live) -> Live:
    """Of eight steps, with whatever changes lie in its directory."""
    return partial(live, make_batches(STEPS), max_steps=STEPS, changed=changed)


def apply(run: Path, step: int, **values: Any) -> None:
    """A change that the learner takes up at this step."""
    run.mkdir(exist_ok=True)
    pairs = {name.replace("__", "."): (None, value) for name, value in values.items()}
    ChangeLedger(run).append(lambda history: [ChangeRequest(number=history.last_number + 1, values=pairs)])
    ChangeLedger(run).append(lambda history: history.apply(step))


@pytest.mark.parametrize("killed_at", [("publish", 5), ("trained", 4)])
def test_a_learner_that_dies_behind_a_change_ends_with_the_bits_of_one_that_lives(
    tmp_path: Path, changing: Live, killed_at: tuple[str, int]
) -> None:
    for name in ("whole", "killed"):
        apply(tmp_path / name, 4, learner__learning_rate=5e-2, rewards__weights__judge=3.0)
    whole = changing(name="whole", save_every=3).ran()
    assert [record["learning_rate"] for record in whole.metrics()] == [5e-4, 1e-3, 1e-3, *[5e-2] * 5]
    assert [record["changes/in_force"] for record in whole.metrics()] == [0, 0, 0, *[1] * 5]
    assert whole.metrics()[3]["reward"] == pytest.approx(3 * whole.metrics()[2]["reward"], rel=0.5)

    with pytest.raises(Killed):
        changing({killed_at: "kill"}, name="killed", save_every=3).trainer.run()
    again = changing(name="killed", save_every=3)
    assert 3 <= again.trainer.step < 6
    assert again.ran().weights == whole.weights
    assert changing(name="plain", save_every=3).ran().weights != whole.weights


def test_other_checkpoints_and_targets_hold_from_the_step_of_a_change_on(tmp_path: Path, live: Live) -> None:
    apply(tmp_path / "life", 3, checkpoint__save_every=1, checkpoint__keep_last=1, guard__target=0)
    apply(tmp_path / "life", 6, checkpoint__save_every=100, guard__target=None)
    life = live(make_batches(STEPS, lag=0), max_steps=STEPS, changed=changed, save_every=2).ran()
    assert life.saved() == [8]
    assert life.hub.targets[:STEPS] == [None, None, 0, 0, 0, None, None, None]
    assert [record["staleness/target"] for record in life.metrics()] == [1, 1, 0, 0, 0, 1, 1, 1]


def test_a_policy_beyond_a_limit_ends_the_run_after_so_many_steps_in_a_row_and_the_steps_are_recorded(
    tmp_path: Path, changing: Live
) -> None:
    guard = GuardConfig(min_reward=0.9)
    life = changing(guard=guard)
    with pytest.raises(DivergedError, match=r"for 3 steps in a row; step 3 had reward 0\.\d+ below guard\.min_reward = 0\.9"):
        life.trainer.run()
    assert [record["step"] for record in life.metrics()] == [1, 2, 3] and life.saved() == [2]

    apply(tmp_path / "life", 1, guard__min_reward=0.0)  # the limit is moved, and the run goes on
    assert changing(guard=guard).ran().trainer.step == STEPS
