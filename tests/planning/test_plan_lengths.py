"""Lengths of completions: the batch has the mean that was asked for, and what is no source of lengths is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.placement.lengths import LengthsConfig


@given(st.integers(2, 5000), st.floats(0, 2), st.integers(8, 600), st.floats(1.05, 20))
def test_a_log_normal_has_its_mean_after_it_is_cut(mean: int, spread: float, rows: int, times: float) -> None:
    longest = int(mean * times) + 1
    found = LengthsConfig(mean=mean, spread=spread, longest=longest).batch(rows)
    assert len(found) == rows and list(found) == sorted(found, reverse=True)
    assert min(found) >= 1 and max(found) <= longest
    assert sum(found) / rows == pytest.approx(mean, abs=0.51)


def test_a_wider_spread_has_a_longer_tail_at_the_same_mean() -> None:
    longest = [LengthsConfig(mean=100, spread=spread, longest=10_000).batch(500)[0] for spread in (0.0, 0.5, 1.0)]
    assert longest == sorted(longest) and longest[0] == 100 < longest[2]


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), min_size=1, max_size=6))
def test_a_histogram_gives_each_length_its_share(pairs: list[tuple[int, int]]) -> None:
    weights = {length: 0 for length, _ in pairs}
    for length, weight in pairs:
        weights[length] += weight
    total = sum(weights.values())
    if not total:
        return
    found = LengthsConfig(histogram=tuple((length, float(w)) for length, w in pairs), longest=50).batch(1000)
    for length, weight in weights.items():
        assert found.count(length) / 1000 == pytest.approx(weight / total, abs=0.0021)


def test_lengths_of_a_run_are_those_of_its_rollouts_and_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    groups = [{"rollouts": [{"tokens": [0] * 3}, {"tokens": [0] * 9}]}, {"rollouts": [{"tokens": [0] * 6}, {"tokens": []}]}]
    path.write_text("".join(json.dumps(group) + "\n" for group in groups))
    assert LengthsConfig(rollouts=str(path), longest=8).batch(3) == (8, 6, 3)


def test_a_file_without_completions_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path / "empty.jsonl"):
        if path.stem == "empty":
            path.write_text('{"step": 1}\n')
        with pytest.raises(ConfigError, match="no completions in it"):
            LengthsConfig(rollouts=str(path), longest=8).batch(3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "none is given; of mean, histogram and rollouts give exactly one"),
        ({"mean": 5, "rollouts": "x"}, "mean and rollouts are given"),
        ({"mean": 100}, "mean = 100 must be below longest = 100"),
        ({"histogram": ((101, 1.0),)}, "lengths are 1 to longest = 100"),
        ({"histogram": ((5, 0.0),)}, "all weights are 0"),
    ],
)
def test_what_says_no_lengths_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LengthsConfig.model_validate({"longest": 100, **values})
