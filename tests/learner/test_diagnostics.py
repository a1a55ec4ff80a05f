"""What a step reports of its ratios: against numbers by hand, and the laws of its curve over staleness."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.learner.step.report import StepTokens, measure, step_metrics

rows = st.lists(
    st.tuples(st.floats(-8, 0, width=32), st.floats(-8, 0, width=32), st.floats(-2, 2, width=32), st.integers(0, 3)),
    min_size=1,
    max_size=30,
)


def tokens(drawn: list[tuple[float, float, float, int]]) -> StepTokens:
    proximal, behaviour, advantage, staleness = map(torch.tensor, zip(*drawn, strict=True))
    of_one = torch.zeros(len(drawn), dtype=torch.int64)
    return StepTokens(proximal, behaviour, advantage, staleness, torch.ones(len(drawn), dtype=torch.bool), of_one)


def test_an_example_by_hand() -> None:
    two, half = math.log(2), -math.log(2)
    found = measure(tokens([(0.0, 0.0, 1.0, 0), (two, 0.0, -1.0, 1), (half, 0.0, 1.0, 1), (2 * two, 0.0, -1.0, 2)]), cap=3.0)
    assert found["is/ratio_max"] == pytest.approx(4) and found["is/ratio_mean"] == pytest.approx(7.5 / 4)
    assert found["is/ess"] == pytest.approx(7.5**2 / (4 * (1 + 4 + 0.25 + 16)))
    assert found["is/second_moment"] == pytest.approx((0 + 1 + 1 + 4) * two**2 / 4)
    assert found["is/tail_negative"] == pytest.approx(4 / 7.5)  # only the last is above the cap, and it is disliked
    assert found["kl/behaviour"] == pytest.approx(-2 * two / 4)
    assert found["mismatch/kl"] == 0 and found["mismatch/abs_log_ratio"] == 0
    of_ages = {"1": (2 - 1 - two + 0.5 - 1 + two) / 2, "2": 4 - 1 - 2 * two}
    curve = found["drift/by_staleness"]
    assert curve["0"] == {"kl": 0.0, "tokens": 1} and curve["1"]["tokens"] == 2
    assert {age: curve[age]["kl"] for age in of_ages} == pytest.approx(of_ages)
    assert found["drift/kl"] == pytest.approx((2 * of_ages["1"] + of_ages["2"]) / 3)


@given(rows)
def test_its_names_are_always_all_there_and_the_curve_counts_every_token(drawn: list[tuple[float, float, float, int]]) -> None:
    found = measure(tokens(drawn), cap=None)
    assert set(found) < set(step_metrics())
    assert sum(point["tokens"] for point in found["drift/by_staleness"].values()) == len(drawn)
    assert 0 <= found["is/tail_negative"] <= 1 and 0 < found["is/ess"] <= 1
    assert found["is/ratio_q01"] <= found["is/ratio_q50"] <= found["is/ratio_q99"] <= found["is/ratio_max"] * (1 + 1e-6)


def test_engine_noise_is_told_from_staleness() -> None:
    noisy = [(-1.0 + 0.01 * (-1) ** i, -1.0, 1.0, 0) for i in range(10)]
    stale = [(-1.0 + 0.5 * (-1) ** i, -1.0, 1.0, 4) for i in range(10)]
    found = measure(tokens(noisy + stale), None)
    assert found["mismatch/kl"] == pytest.approx(0.01**2 / 2, rel=0.01)
    assert found["drift/kl"] == pytest.approx(math.cosh(0.5) - 1 - found["mismatch/kl"], rel=1e-3)
    assert measure(tokens(stale), None)["mismatch/kl"] is None and measure(tokens(noisy), None)["drift/kl"] is None


def test_tokens_behind_older_keys_and_values_are_no_engine_noise() -> None:
    exact, mixed = [(-1.0, -1.0, 1.0, 0)] * 3, [(-1.0, -1.5, 1.0, 0)] * 2
    both = tokens(exact + mixed)
    found = measure(both._replace(comparable_N=torch.tensor([True] * 3 + [False] * 2)), None)
    assert (found["mismatch/kl"], found["mismatch/abs_log_ratio"], found["mismatch/tokens"]) == (0, 0, 3)
    assert found["drift/kl"] is None and found["drift/by_staleness"]["0"]["tokens"] == 5
    assert measure(both, None)["mismatch/abs_log_ratio"] == pytest.approx(0.2)
    nothing = measure(both._replace(comparable_N=torch.zeros(5, dtype=torch.bool)), None)
    assert (nothing["mismatch/kl"], nothing["mismatch/abs_log_ratio"], nothing["mismatch/tokens"]) == (None, None, 0)
