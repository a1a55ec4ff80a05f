"""Fitted constants: exact where the points are, never negative, and no worse than any other choice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.model.costs import Costs, fit

constants = st.tuples(*[st.sampled_from([0.0, 1e-6, 3e-4, 0.02])] * 3).filter(any)
POINTS = [(1, rows, rows * context) for rows in (1, 4, 16, 64) for context in (8, 64, 512)]


@given(constants, st.booleans())
def test_the_constants_of_exact_points_are_found(wanted: tuple[float, float, float], relative: bool) -> None:
    seconds = [float(np.dot(row, wanted)) for row in POINTS]
    if min(seconds) > 0:
        found = fit(POINTS, seconds, relative=relative)
        assert found.constants == pytest.approx(wanted, rel=1e-6, abs=1e-11)
        assert found.points == len(POINTS) and found.worst < 1e-6


@given(st.lists(st.floats(1e-4, 1.0), min_size=12, max_size=12), constants)
def test_no_other_constants_without_a_negative_one_come_closer(seconds: list[float], other: tuple[float, float, float]) -> None:
    found = fit(POINTS, seconds)
    matrix, target = np.array(POINTS, float), np.array(seconds)

    def loss(constants: tuple[float, ...]) -> float:
        return float(np.sum(((matrix @ np.array(constants) - target) / target) ** 2))

    assert min(found.constants) >= 0
    assert loss(found.constants) <= loss(other) + 1e-9
    for place in range(3):  # nor a little beside them
        for factor in (0.99, 1.01):
            beside = tuple(value * (factor if place == number else 1) for number, value in enumerate(found.constants))
            assert loss(found.constants) <= loss(beside) + 1e-9


def test_points_that_scatter_keep_their_mean_where_errors_are_not_relative() -> None:
    seconds = [1.0, 3.0, 1.0, 3.0]
    rows = [(1.0, 10.0), (1.0, 10.0), (1.0, 20.0), (1.0, 20.0)]
    step, token = fit(rows, seconds, relative=False).constants
    assert step + 15 * token == pytest.approx(2.0)
    step, token = fit(rows, seconds).constants
    assert step + 15 * token < 1.5


def test_stages_cost_what_the_constants_say() -> None:
    costs = Costs(decode=(1.0, 0.1, 0.01), prefill=(2.0, 0.2, 0.02), training=(3.0, 0.3, 0.03))
    assert costs.decode_s(4, 10) == pytest.approx(1 + 4 * (0.1 + 0.1))
    assert costs.prefill_s(2, 5) == pytest.approx(2 + 2 * (0.2 + 0.1))
    assert costs.training_s(prompts=2, prompt_tokens=5, completion_tokens=40, updates=3) == pytest.approx(3 + 0.9 + 0.03 * 50)


def test_what_cannot_be_fitted_and_constants_that_give_time_back_are_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to fit: 0 points"):
        fit([], [])
    with pytest.raises(ConfigError, match=r"a duration of 0.0 s cannot be fitted"):
        fit([(1.0,)], [0.0])
    with pytest.raises(ValidationError, match="seconds, 0 or more"):
        Costs(decode=(0.0, -1.0, 0.0), training=(0.0, 0.0, 0.0))
