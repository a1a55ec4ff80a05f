"""The preference pipeline: pairs in, a reward model out, its quality told truly."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from random import Random

import pytest

from async_rlhf.actors.rewards import resolve
from async_rlhf.actors.scoring.models import RewardModel
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.reward_model.train import (
    Pair,
    Training,
    gold_pairs,
    gold_reward,
    quality,
    read_pairs,
    split,
    train,
)
from async_rlhf.experiments.warm_start.speller import INSTRUCTION


def test_pairs_of_the_gold_reward_are_repeatable_and_follow_its_odds() -> None:
    pairs = gold_pairs(400, Random(3), sharpness=6.0)
    assert pairs == gold_pairs(400, Random(3), sharpness=6.0)
    margins = [gold_reward(pair.prompt, pair.chosen) - gold_reward(pair.prompt, pair.rejected) for pair in pairs]
    expected = sum(1 / (1 + math.exp(-6.0 * abs(margin))) for margin in margins if margin)
    assert sum(margin > 0 for margin in margins) == pytest.approx(expected, abs=25)  # within three standard deviations
    assert gold_reward(INSTRUCTION + "sun", "nus") == 1.0 and gold_reward(INSTRUCTION + "sun", "xyz") == 0.0


def test_pairs_survive_their_file_and_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    pairs, path = [Pair("p", "a", "b"), Pair("q", "c", "d")], tmp_path / "pairs.jsonl"
    written = "".join(json.dumps(asdict(pair)) + "\n" for pair in pairs)
    path.write_text(written)
    assert read_pairs(path) == pairs
    for line in ('{"prompt": "p"}', '{"prompt":1,"chosen":"","rejected":""}', "no JSON"):
        path.write_text(written + line + "\n")
        with pytest.raises(ConfigError, match="line 3: no object with the texts"):
            read_pairs(path)
    path.write_text("")
    with pytest.raises(ConfigError, match="holds none"):
        read_pairs(path)


def test_no_prompt_is_on_both_sides_of_the_split() -> None:
    pairs = [Pair(f"p{i % 10}", str(i), "x") for i in range(40)]
    training, held_out = split(pairs, 0.2, Random(0))
    assert {pair.prompt for pair in training}.isdisjoint(pair.prompt for pair in held_out)
    assert len(training) == 32 and len(held_out) == 8
    with pytest.raises(ConfigError, match="leave none to train on"):
        split([Pair("p", "a", "b")], 0.5, Random(0))


def test_quality_by_hand() -> None:
    even = math.log(3)  # sigmoid = 0.75
    found = quality([even, even, even, -even])
    assert found.accuracy == 0.75 and found.calibration_error == pytest.approx(0.0)
    assert found.loss == pytest.approx(-(3 * math.log(0.75) + math.log(0.25)) / 4)
    sure_and_wrong = quality([-1e6, 1e6])
    assert sure_and_wrong.accuracy == 0.5 and sure_and_wrong.calibration_error == pytest.approx(0.5)
    assert quality([0.0]).accuracy == 0.5


def test_a_trained_reward_model_prefers_what_was_preferred_and_is_a_reward(tmp_path: Path) -> None:
    # What was written in one letter repeated always loses: a preference that a few updates can learn.
    pairs = [
        Pair(INSTRUCTION + word, word, word[0] * len(word))
        for word in ("".join(Random(i).sample("abcdefghijklm", 5)) for i in range(160))
    ]
    trained = train(pairs, tmp_path / "judge", Training(epochs=2, batch=16, held_out=0.2, threads=1))
    assert trained.num_training == 128 and trained.gold is None
    assert trained.after.accuracy >= 0.9 and trained.after.loss < trained.before.loss
    (spec,) = resolve(["reward_model"], tmp_path, {"reward_model": {"path": str(tmp_path / "judge")}})
    good, bad = RewardModel(tmp_path / "judge").score([INSTRUCTION + "later"] * 2, ["later", "lllll"], 128)
    assert spec.batch_size == 16 and good > bad
    assert json.loads((tmp_path / "judge" / "config.json").read_text())["architectures"] == ["LlamaForSequenceClassification"]
