"""What is trained on against what was begun: distances of lengths, ages, and the alarm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pytest

from async_rlhf.actors.loop.length_bias import LengthBiasMonitor


class Bias(NamedTuple):
    mean_ratio: float
    correlation: float
    alarm: float


NOTHING = Bias(mean_ratio=1.0, correlation=0.0, alarm=0.0)


def fates(seed: int, drop: float, from_length: int = 0) -> LengthBiasMonitor:
    """1000 groups of two; those whose mean length reaches `from_length` are dropped with probability `drop`."""
    draw, monitor = np.random.default_rng(seed), LengthBiasMonitor()
    for group in range(1000):
        lengths = draw.lognormal(3, 0.8, 2).astype(int) + 1
        monitor.begin(group, float(group))
        if lengths.mean() >= from_length and draw.random() < drop:
            monitor.dropped(group, of_one_turn(lengths), again=False)
        else:
            monitor.trained(group, of_one_turn(lengths))
    return monitor


def biases(monitor: LengthBiasMonitor) -> list[Bias]:
    """Of tokens, and of turns."""
    found = monitor.report(0.0)
    return [Bias(*(found[f"{kind}_{name}"] for name in Bias._fields)) for kind in ("selection", "selection_turns")]


def of_one_turn(lengths: Iterable[int]) -> list[tuple[int, int]]:
    return [(int(length), 1) for length in lengths]


@pytest.mark.parametrize("seed", range(3))
def test_dropping_at_random_raises_no_alarm_and_dropping_the_long_ones_does(seed: int) -> None:
    tokens, turns = biases(fates(seed, drop=0.3))
    assert not tokens.alarm and abs(tokens.mean_ratio - 1) < 0.05 and turns == NOTHING, "all have one turn"
    tokens, turns = biases(fates(seed, drop=0.5, from_length=40))
    assert tokens.alarm and tokens.correlation > 0.2 and tokens.mean_ratio < 0.95 and turns == NOTHING


def test_dropping_episodes_of_many_turns_raises_the_alarm_of_turns_although_they_have_as_many_tokens() -> None:
    draw, monitor = np.random.default_rng(0), LengthBiasMonitor()
    for group in range(1000):
        own = [(int(draw.integers(10, 50)), turns := int(draw.integers(1, 9)))]
        if turns > 6 and draw.random() < 0.5:
            monitor.dropped(group, own, again=False)
        else:
            monitor.trained(group, own)
    tokens, turns = biases(monitor)
    assert turns.alarm and turns.mean_ratio < 0.95 and not tokens.alarm and abs(tokens.mean_ratio - 1) < 0.05


def test_dropping_the_short_ones_is_no_preference_for_brevity() -> None:
    monitor = LengthBiasMonitor()
    for group in range(100):
        if group % 2:
            monitor.trained(group, of_one_turn([50 + group]))
        else:
            monitor.dropped(group, of_one_turn([1 + group % 5]), again=False)
    found, _ = biases(monitor)
    assert found.correlation < -0.9 and not found.alarm


def test_the_oldest_prompt_keeps_its_age_through_being_begun_again() -> None:
    monitor = LengthBiasMonitor()
    monitor.begin(0, 10.0)
    monitor.begin(1, 20.0)
    monitor.dropped(0, of_one_turn([5, 6]), again=True)
    monitor.begin(0, 30.0)
    assert monitor.report(50.0)["oldest_group_age"] == 40.0
    monitor.trained(0, of_one_turn([5, 6]))
    assert monitor.report(50.0)["oldest_group_age"] == 30.0
    monitor.dropped(1, [], again=False)
    assert monitor.report(50.0)["oldest_group_age"] == 0.0


def test_only_the_window_counts_and_nothing_at_all_is_no_bias() -> None:
    monitor = LengthBiasMonitor(window=10)
    assert biases(monitor) == [NOTHING, NOTHING]
    monitor.dropped(0, of_one_turn(range(1, 100)), again=False)
    monitor.trained(1, of_one_turn([7] * 10))
    assert biases(monitor) == [NOTHING, NOTHING]
