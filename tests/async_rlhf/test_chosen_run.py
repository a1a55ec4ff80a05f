"""A run whose prompts are chosen by how often they were solved: it keeps its order over a hub's end, and is replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rlhf.actors.prompts import prompt_number
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.inspect.rollouts import records, replay
from async_rlhf.inspect.status import lines, read
from async_rlhf.run.checks.preflight import preflight
from async_rlhf.run.live import check_resumed
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_data import RunData
from tests.conftest import Train

NUM_STEPS = 40
CHOSEN = {"data.curriculum.reward": "reasoning_gym", "data.curriculum.new_share": 0.2}


@pytest.mark.rest
def test_every_group_has_the_prompt_that_the_order_says_whatever_becomes_of_the_hub(training: Train, small: Any) -> None:
    settings = {**CHOSEN, "data.size": 12, "max_steps": NUM_STEPS, "queue.keep_rollouts": True, "queue.max_staleness": 2}
    settings["learner.learning_rate"] = 1e-6  # no prompt is solved for good, which would end the run
    started = training(**settings)
    started.reach(2)
    started.end("hub")
    started.ends_with(0, "starting it again")

    finished = started.run
    config = finished.config()
    data = RunData(finished.path, config.data)
    order = data.open_order()
    assert order is not None and order.num_steps == NUM_STEPS
    rows = data.epoch()
    made = {record["group"]: record["prompt"] for record in records(Reading(finished))}
    assert sorted(made) == list(range(4 * NUM_STEPS))
    for group, prompt in made.items():
        place = data.prompt_of(config.seed, order, group)
        assert place == prompt_number(config.seed, order.place(group), 12)
        assert str(rows[place].prompt) in prompt
    assert [order.place(group) for group in range(24)] != [*range(12)] * 2
    assert any(line.startswith("curriculum: 12 prompts, 0 not used yet, ") for line in lines(finished, read(Reading(finished))))
    assert all(record["curriculum/new"] <= 12 for record in finished.read_metrics())
    order.close()

    again = replay(finished, config.model_copy(update={"name": "again"}))
    assert [record["groups"] for record in again.read_metrics()] == [record["groups"] for record in finished.read_metrics()]
    with pytest.raises(ConfigError, match="the run began with 'reasoning_gym', and its groups have their prompts by that"):
        check_resumed(finished, small(**{"data.size": 12}))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"data.curriculum.reward": "reasoning_gim"}, "is no reward of this run; did you mean 'reasoning_gym'"),
        ({"data.epochs": 1}, "with data.epochs = 1: each prompt is used once.*lowest: data.epochs = 2"),
        ({"data.source": "spool:SPOOL"}, "with data.epochs = none: each prompt is used once"),
        ({"data.source": "spool:SPOOL", "data.epochs": 2, "queue.exact": True}, "when rows come in. Set queue.exact = false"),
        ({"data.curriculum.reward": ""}, "data.curriculum has settings and no reward"),
        ({"data.curriculum.passes_at": float("inf")}, "data.curriculum.passes_at"),
    ],
)
def test_a_curriculum_that_cannot_be_is_refused_in_time(
    small: Any, tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    if "data.source" in settings:
        settings = {**settings, "data.source": f"spool:{tmp_path}", "data.options": {}, "data.held_out": "none"}
    with pytest.raises(ConfigError, match=says):
        preflight(small(**{**CHOSEN, **settings}))


def test_with_epochs_a_curriculum_makes_as_many_groups_as_they_allow_at_most(small: Any) -> None:
    config = small(**CHOSEN, **{"max_steps": "none", "data.epochs": 3})
    bound = config.bound(64)
    assert (bound.num_groups, bound.num_numbers, bound.coming) == (192, 0, True) and not config.is_endless(bound)
