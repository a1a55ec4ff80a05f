"""What the learner's loop does with a change: from its step on, on every life, and with everything that the value decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.composition import Composition
from async_rlhf.buffers.errors import DivergedError
from async_rlhf.learner.config import GuardConfig
from async_rlhf.learner.loop.changes import Asked, Ledger
from async_rlhf.learner.loop.trainer import TrainerConfig
from tests.learner.lives import Killed, Live, make_batches

STEPS = 8


def changed(config: TrainerConfig, values: Mapping[str, Any]) -> TrainerConfig:
    """As `run.learning` makes it of the whole configuration."""
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
    Ledger(run).append(lambda history: [Asked(number=history.last_number + 1, values=pairs)])
    Ledger(run).append(lambda history: history.apply(step))


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
    guard = GuardConfig(min_reward=0.9, max_diverged_steps=2)
    life = changing(guard=guard)
    with pytest.raises(DivergedError, match=r"for 2 steps in a row .* step 2 had reward 0\.\d+ below guard\.min_reward = 0\.9"):
        life.trainer.run()
    assert [record["step"] for record in life.metrics()] == [1, 2] and life.saved() == []

    apply(tmp_path / "life", 1, guard__min_reward=0.0)  # the limit is moved, and the run goes on
    assert changing(guard=guard).ran().trainer.step == STEPS
