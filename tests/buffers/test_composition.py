"""How scores become a reward, and running statistics that do not care where a run was cut."""

from __future__ import annotations

import json
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.buffers.composition import Composition, Statistics
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.score import Score


@pytest.mark.parametrize(
    ("scores", "weights", "total"),
    [
        ({"a": Score(2.0), "b": Score(3.0)}, {}, 5.0),
        ({"a": Score(2.0), "b": Score(3.0)}, {"b": 0.5}, 3.5),
        ({"a": Score(2.0), "b": Score()}, {}, 2.0),
        ({"a": Score(0.0)}, {}, 0.0),
        ({"a": Score(), "b": Score()}, {}, None),
        ({"a": Score(2.0), "b": Score(failure="raised")}, {}, None),
        ({}, {}, None),
    ],
)
def test_a_failed_or_missing_score_is_no_number(
    scores: dict[str, Score], weights: dict[str, float], total: float | None
) -> None:
    assert Composition(weights).reward(scores) == total


SCORES = {"a": Score(2.0), "b": Score(3.0), "open": Score(1.0), "shut": Score(0.0), "silent": Score()}


@pytest.mark.parametrize(
    ("rule", "total"),
    [
        (Composition({"b": 2.0}, rule="product", gates=("open", "shut", "silent")), 0.0),
        (Composition({"b": 2.0}, rule="product", gates=("open", "silent"), clip={"shut": (1.0, 9.0)}), 12.0),
        (Composition(gates=("open",)), 5.0),
        (Composition(gates=("shut",)), 0.0),
        (Composition(gates=("silent",)), 6.0),
        (Composition(clip={"b": (0.0, 1.0), "reward": (-1.0, 3.5)}), 3.5),
        (Composition({"a": -1.0}, clip={"a": (0.0, 1.0)}), 3.0),
    ],
)
def test_gates_close_products_multiply_and_clips_hold(rule: Composition, total: float) -> None:
    assert rule.reward(SCORES) == total


def test_a_source_has_weights_of_its_own_over_the_others() -> None:
    rule = Composition({"a": 0.5, "b": 2.0}, by_source={"maths": {"b": 10.0}})
    assert [rule.of(row).reward(SCORES | {"a": Score(4.0)}) for row in ({"source": "maths"}, {"source": "chat"}, {})] == [
        pytest.approx(4.0 * 0.5 + 3.0 * 10.0 + 1.0),
        pytest.approx(4.0 * 0.5 + 3.0 * 2.0 + 1.0),
        pytest.approx(4.0 * 0.5 + 3.0 * 2.0 + 1.0),
    ]


def test_a_failed_gate_is_a_failure_and_not_a_closed_gate() -> None:
    assert Composition(gates=("g",)).reward({"a": Score(1.0), "g": Score(failure="timed out")}) is None


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=40), st.integers(0, 40))
def test_running_statistics_are_those_of_all_values_wherever_they_were_saved(values: list[float], cut: int) -> None:
    rule = Composition(normalise=("a",))
    seen = Statistics()
    seen.observe(rule, [{"a": Score(value), "b": Score(1.0)} for value in values[:cut]])
    seen = Statistics(json.loads(json.dumps(seen.state)))
    seen.observe(rule, [{"a": Score(value)} for value in values[cut:]] + [{"a": Score(failure="no")}, {"a": Score()}])
    mean, std = statistics.fmean(values), statistics.pstdev(values)
    found = rule.reward({"a": Score(7.0)}, seen)
    assert found is not None
    if std > 1e-3:
        assert math.isclose(found, (7.0 - mean) / std, rel_tol=1e-6, abs_tol=1e-6)


def test_before_two_different_values_nothing_is_normalised() -> None:
    rule, seen = Composition(normalise=("a",)), Statistics()
    for _ in range(3):
        assert rule.reward({"a": Score(0.5)}, seen) == 0.5
        seen.observe(rule, [{"a": Score(0.5)}])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Composition({"exakt": 1.0}), "rewards.weights names 'exakt', which is no reward of this run; did you mean 'exact'"),
        (Composition(gates=("nobody",)), "rewards.gates names 'nobody'"),
        (Composition(normalise=("nobody",)), "rewards.normalise names 'nobody'"),
        (Composition(clip={"nobody": (0, 1)}), "rewards.clip names 'nobody'"),
        (Composition(clip={"exact": (1, 1)}), "is an empty range"),
        (Composition(gates=("exact", "judge")), "names every reward"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(rule: Composition, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rule.check(["exact", "judge"])


def test_a_group_is_constant_when_no_member_is_better_and_none_failed() -> None:
    weighed = Composition(weights={"a": 1.0, "watched": 0.0}, clip={"a": (0.0, 1.0)})
    assert weighed.is_constant([{"a": Score(1.0), "watched": Score(3.0)}, {"a": Score(7.0), "watched": Score(5.0)}])
    assert not weighed.is_constant([{"a": Score(1.0)}, {"a": Score(0.5)}])
    assert Composition().is_constant([{"a": Score(1.0)}, {"a": Score()}])  # only one of them counts
    assert Composition().is_constant([{"a": Score(0.1 + 0.2)}, {"a": Score(0.3)}])
    assert not Composition().is_constant([{"a": Score(1.0)}, {"a": Score(1.0)}, {"a": Score(failure="raised")}])
