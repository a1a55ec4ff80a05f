"""Laws of what seeds can say: intervals, many comparisons, power, and words."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rlhf.experiments.statistics import (
    LEVEL,
    Mean,
    detectable,
    estimate,
    half_interval,
    holm,
    paired,
    seeds_needed,
    worded,
)

numbers = st.integers(-1000, 1000).map(lambda n: n / 8)


def test_three_values_have_a_t_interval_two_have_none_and_none_have_no_estimate() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found is not None
    assert (found.mean, found.count) == (2.0, 3)
    assert found.half_width == pytest.approx(4.30265 / 3**0.5, rel=1e-5)
    two = estimate([1.0, None, 3.0])
    assert two is not None and two.mean == 2.0 and two.half_width is None and estimate([None]) is None
    assert paired([1.0, 3.0], [0.0, 0.0]) == Mean(2.0, 1.0, 3.0, 2, None, math.sqrt(2))
    with pytest.raises(ValueError, match="3 and 2 values cannot be paired"):
        paired([1.0, 2.0, 3.0], [1.0, 2.0])


@given(st.lists(st.tuples(numbers, numbers), min_size=3, max_size=30), numbers)
@settings(max_examples=30)
def test_a_paired_interval_holds_its_mean_turns_with_its_sides_and_does_not_see_what_both_share(
    both: list[tuple[float, float]], shift: float
) -> None:
    after, before = map(list, zip(*both, strict=True))
    found, turned = paired(after, before), paired(before, after)
    shifted = paired([each + shift for each in after], [each + shift for each in before])
    assert found == shifted
    assert found.low <= found.mean + 1e-9 and found.mean - 1e-9 <= found.high
    assert (turned.mean, turned.low, turned.high, turned.p) == pytest.approx((-found.mean, -found.high, -found.low, found.p))
    assert found.p is not None and 0 <= found.p <= 1
    if found.p < LEVEL - 1e-3:
        assert found.low > 0 or found.high < 0
    if found.p > LEVEL + 1e-3:
        assert found.low <= 0 <= found.high


def drawn(noise: str, count: int) -> list[Mean]:
    """What 4,000 worlds show in which nothing differs."""
    worlds = getattr(np.random.default_rng(1), noise)(size=(4000, count))
    return [paired(world.tolist(), [0.0] * count) for world in worlds]


# Three standard errors of a share of 0.05 of 4,000 are 0.010. For heavy tails t is too careful, never the other way.
@pytest.mark.parametrize(("noise", "least"), [("standard_normal", 0.04), ("laplace", 0.02)])
@pytest.mark.parametrize("count", [3, 5, 10])
def test_an_interval_leaves_the_truth_out_in_five_of_100_worlds_and_p_is_that_of_the_interval(
    noise: str, least: float, count: int
) -> None:
    found = drawn(noise, count)
    p_values = [each.p for each in found if each.p is not None]
    assert len(p_values) == len(found)
    assert least <= sum(each.low > 0 or each.high < 0 for each in found) / 4000 <= 0.06
    assert all((p < LEVEL) == (each.low > 0 or each.high < 0) for p, each in zip(p_values, found, strict=True))
    for level in (0.025, 0.01):  # what Holm compares with
        assert sum(p < level for p in p_values) / 4000 <= level + 3 * math.sqrt(level * (1 - level) / 4000)
    families = [p_values[i : i + 8] for i in range(0, 4000, 8)]
    assert sum(min(holm(family)) < LEVEL for family in families) / 500 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 500)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_holm_keeps_the_order_and_lies_between_the_value_alone_and_bonferroni(p_values: list[float]) -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02]) and holm([]) == []
    for alone, adjusted in zip(p_values, holm(p_values), strict=True):
        assert alone <= adjusted <= min(1.0, len(p_values) * alone)
    in_order = [holm(p_values)[i] for i in sorted(range(len(p_values)), key=lambda i: p_values[i])]
    assert in_order == sorted(in_order)


def test_power_is_what_it_says_in_simulated_worlds_and_the_seeds_needed_are_the_fewest_that_suffice() -> None:
    worlds = np.random.default_rng(0).standard_normal((4000, 8)) + detectable(deviation=1.0, count=8)
    t = worlds.mean(1) / (worlds.std(1, ddof=1) / math.sqrt(8))
    assert (np.abs(t) > half_interval(1.0, 7)).mean() == pytest.approx(0.8, abs=0.03)
    assert [Mean(0.1, 0.0, 0.2, count, 0.5, 0.0).detectable for count in (1, 2)] == [None, 0.0], "one seed shows nothing"
    for difference in (0.1, 0.5, 2.0):
        count = seeds_needed(1.0, difference)
        assert detectable(1.0, count) <= difference
        assert count == 2 or detectable(1.0, count - 1) > difference


def test_a_sentence_says_no_more_than_its_interval() -> None:
    clear, alone, none = (Mean(0.3, 0.1, 0.5, 8, 0.001, 0.3, 0.01), Mean(-0.3, -0.5, -0.1, 8, 0.03, 0.3, 0.3),
                          Mean(0.1, -0.1, 0.3, 8, 0.4, 0.3, 1.0))  # fmt: skip
    assert worded("A", "B", clear, 10) == "A lies above B: +0.300 (+0.100 to +0.500)."
    assert "lies below 0 when looked at alone, and is not shown" in worded("A", "B", alone, 10)
    said = worded("A", "B", none, 10)
    assert "no difference shown; differences outside -0.100 to +0.300 are unlikely; 8 seeds show one of 0.346" in said
    assert "too few for an interval" in worded("A", "B", Mean(1.0, 0.0, 2.0, 2, None), 1)
