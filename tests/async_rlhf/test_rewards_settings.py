"""What rewards say of themselves and what a configuration says of them, before a run."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.score import Score
from async_rlhf.preparation import with_reward_settings
from async_rlhf.run.checks.preflight import preflight
from async_rlhf.run.config import Config
from async_rlhf.run.loading import dump, load, override
from tests.conftest import QUICK

JUDGES = """
from async_rlhf import reward
from async_rlhf.buffers.errors import ConfigError

def look(level=1):
    if level > 3: raise ConfigError(f"level = {level}; highest: 3")

@reward(weight=0.5, stop_when=("</answer>",), check=look)
def tagged(completion, level=1): return 1.0

@reward(weight=2.0)
def other(completion): return 1.0
"""


@pytest.fixture
def judges(tmp_path: Path) -> str:
    (tmp_path / "judges.py").write_text(JUDGES)
    return str(tmp_path / "judges.py")


def test_weights_and_stop_strings_of_rewards_are_written_into_the_runs_configuration(judges: str) -> None:
    functions = [f"{judges}:tagged", f"{judges}:other"]
    config = load(QUICK, {"rewards.functions": functions, "rewards.weights": {"other": 3.0}, "generation.stop": ["\n"]})
    resolved = with_reward_settings(config)
    assert resolved.rewards.weights == {"tagged": 0.5, "other": 3.0}
    assert resolved.generation.stop == ("\n", "</answer>")
    assert with_reward_settings(resolved) == resolved  # a resumed run finds the same


def test_a_rewards_own_check_is_made_before_the_run(judges: str) -> None:
    config = load(QUICK, {"rewards.functions": [f"{judges}:tagged"], "rewards.options.tagged.level": 3})
    assert preflight(config).num_prompts > 0
    with pytest.raises(ConfigError, match="level = 4; highest: 3"):
        preflight(override(config, {"rewards.options.tagged.level": 4}))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"generation.stop": ["answer>"]}, "'</answer>' is never reached: 'answer>' is a part of it"),
    ({"generation.stop": ["done<eos>"]}, "'done<eos>' never comes: '<eos>' is a special token of the model"),
    ({"rewards.weights": {"taged": 1.0}}, "rewards.weights names 'taged'.*did you mean 'tagged'"),
    ({"rewards.gates": ["tagged", "other"]}, "names every reward"),
    ({"rewards.clip": {"tagged": [1.0, 0.0]}}, "is an empty range"),
    ({"rewards.options": {"taged": {"level": 1}}}, "rewards.options.taged: there is no reward of this name"),
    ({"scoring.stages": {"taged": {"retries": 1}}}, "stages.taged: there is no stage of this name.*did you mean 'tagged'"),
    ({"scoring.stages": {"tagged": {"batch_size": 4}}}, "has batch_size = 4 but takes one completion"),
    ({"rewards.options": {"tagged": {"levl": 1}}}, "rewards.options.tagged.levl.*did you mean 'level'"),
    ({"rewards.by_source": {"words": []}}, "source is 'words' have no environment, and no reward judges them"),
    ({"rewards.by_source": {"words": ["taged"]}}, r"by_source.words names 'taged', .*did you mean 'tagged'"),
    ({"rewards.by_source": {"words": {"tagged": "much"}}}, r"by_source.words.tagged = 'much': Input should be a valid number"),
    ({"rewards.by_source": {"wrods": ["tagged"]}}, r"names 'wrods', .*the source of no row; did you mean 'words'"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_what_cannot_be_meant_is_refused_before_a_run_with_the_way_out(
    judges: str, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    rows = [{"prompt": f"{n}", "source": source} for n in range(4) for source in ("words", "sums")]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixed = {"source": str(tmp_path / "mixed.jsonl"), "held_out": 0, "options": {}}
    settings = {"data": mixed, "rewards.functions": [f"{judges}:tagged", f"{judges}:other"]}
    assert preflight(load(QUICK, {**settings, "rewards.by_source": {"words": ["tagged"]}})).num_prompts == 8
    with pytest.raises(ConfigError, match=message):
        preflight(load(QUICK, {**settings, **changed}))


@pytest.mark.parametrize(
    ("decorate", "message"),
    [
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"retries": -1}, "retries=-1"),
        ({"scope": "all"}, "choose 'completion' or 'group'"),
        ({"weight": float("nan")}, "it must be a finite number"),
        ({"scope": "group", "batch_size": 2}, "a group is a batch already"),
        ({"stop_when": "</answer>"}, "it must be a tuple of texts"),
    ],
)
def test_a_decorator_that_cannot_be_meant_is_refused_where_it_stands(decorate: dict[str, Any], message: str) -> None:
    from async_rlhf import reward

    mark: Callable[..., Any] = reward(**decorate)
    with pytest.raises(ConfigError, match=message):
        mark(lambda completion: 1.0)


def test_a_source_names_its_rewards_or_weighs_them_and_both_outlive_the_runs_file(judges: str) -> None:
    config = load(QUICK, {"rewards.functions": [f"{judges}:tagged", f"{judges}:other"], "rewards.weights": {"tagged": 3.0}})
    mixed = override(config, {"rewards.by_source": {"maths": ["tagged"], "chat": {"other": 0.25, "tagged": "none"}}})
    kept = Config.model_validate(tomllib.loads(dump(mixed)))
    assert kept == mixed
    scores = {"tagged": Score(1.0), "other": Score(1.0)}
    of = {source: kept.rewards.composition.of({"source": source}).reward(scores) for source in ("maths", "chat")}
    assert of == {"maths": 3.0 + 1.0, "chat": 3.0 + 0.25}
