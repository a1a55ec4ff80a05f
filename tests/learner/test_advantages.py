"""Advantages from rewards and from a critic's values, and the critic's loss: against twins and numbers by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from async_rlhf.learner.objective.advantages import (
    best,
    constant,
    drop_constant,
    gae,
    group_relative,
    leave_one_out,
    normalised,
    pair,
    reinforce_pp,
    traced,
    v_trace,
)
from async_rlhf.learner.objective.objective import value_loss

rewards = st.floats(-100, 100, allow_nan=False).map(lambda value: round(value, 3))
groups = st.lists(st.one_of(st.none(), rewards), min_size=1, max_size=12)


def near(values: list[float | None]) -> list[object]:
    return [value if value is None else pytest.approx(value, rel=1e-9, abs=1e-9) for value in values]


@given(groups)
@example([0.1] * 7)  # all equal, but for rounding
@example([None, 5.0, None])
@example([None, None])
@example([1e200, 0.0])  # too large to square
def test_what_a_group_is_compared_by_is_the_twin(values: list[float | None]) -> None:
    for scale in (True, False):
        assert group_relative(values, scale_by_std=scale) == near(oracles.group_relative(values, scale_by_std=scale))
    assert leave_one_out(values) == near(oracles.leave_one_out(values))


def test_an_example_by_hand() -> None:
    # mean 1, squares 1 + 1 + 0 + 4 + 4 = 10: variance 10 / 4, as torch.std has it in TRL and verl
    rewards, centred = [0.0, 2.0, None, 1.0, 3.0, -1.0], [-1.0, 1.0, None, 0.0, 2.0, -2.0]
    assert group_relative(rewards, scale_by_std=False) == centred
    expected = [None if each is None else each / math.sqrt(10 / 4) for each in centred]
    assert group_relative(rewards, scale_by_std=True) == near(expected)


@given(groups)
def test_a_pair_is_the_best_and_the_worst_that_count_and_constant_groups_have_none(values: list[float | None]) -> None:
    counting = [value for value in values if value is not None]
    alike = constant(values)
    assert sorted(value for value in pair(values) if value is not None) == ([] if alike else [min(counting), max(counting)])
    assert [value for value in best(values) if value is not None] == ([] if alike else [max(counting)])
    assert drop_constant([values, [0.0, 1.0], [None, 2.0]]) == [
        [None] * len(values) if alike else values, [0.0, 1.0], [None, None],
    ]  # fmt: skip


Columns = list[tuple[float, float, float]]
number = st.floats(-5, 5, width=32)
episodes = st.lists(
    st.lists(st.tuples(number, number, st.floats(-3, 3, width=32)), min_size=1, max_size=8), min_size=1, max_size=3
)
share = st.floats(0, 1)
cap = st.floats(0.2, 3)


def arrays(columns: Columns) -> list[np.ndarray]:
    return [np.array(column, np.float32) for column in zip(*columns, strict=True)]


def ends(parts: Sequence[Sequence[object]]) -> np.ndarray:
    lengths = np.cumsum([len(part) for part in parts])
    return np.isin(np.arange(lengths[-1]), lengths - 1)


def close(values: object) -> object:
    return pytest.approx(values, rel=1e-3, abs=1e-3)


@given(st.lists(st.lists(rewards, min_size=1, max_size=5), min_size=1, max_size=5), st.floats(0, 1))
@example([[0.5], [0.0, 0.5]], 1.0)  # returns that are all equal
def test_normalised_over_the_batch_is_the_twin(completions: list[list[float]], gamma: float) -> None:
    found = reinforce_pp(np.concatenate(completions).astype(np.float32), ends(completions), gamma=gamma)
    assert found.tolist() == close([each for own in oracles.reinforce_pp(completions, gamma) for each in own])


def of_gae(r: list[float], v: list[float], ratios: list[float], s: dict[str, float]) -> tuple[list[float], list[float]]:
    advantages = oracles.gae(r, v, s["gamma"], s["lam"])
    return advantages, [a + own for a, own in zip(advantages, v, strict=True)]


def of_v_trace(
    r: list[float], v: list[float], ratios: list[float], s: dict[str, float], mixed: bool
) -> tuple[list[float], list[float]]:
    targets = oracles.v_trace(r, v, ratios, s["gamma"], s["lam"], s["rho_cap"], s["c_cap"])
    part = s["lam"] if mixed else 1.0
    behind = [part * target + (1 - part) * own for target, own in zip([*targets[1:], 0.0], [*v[1:], 0.0], strict=True)]
    return [one + s["gamma"] * q - own for one, q, own in zip(r, behind, v, strict=True)], targets


def of_traced(r: list[float], v: list[float], ratios: list[float], s: dict[str, float]) -> tuple[list[float], list[float]]:
    advantages = oracles.traced(r, v, ratios, s["gamma"], s["lam"], s["c_cap"])
    return advantages, [own + min(s["rho_cap"], w) * a for own, w, a in zip(v, ratios, advantages, strict=True)]


TWINS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[str, ...]]] = {
    "gae": (gae, of_gae, ("gamma", "lam")),
    **{
        f"v_trace, {kind}": (
            partial(v_trace, bootstrap=kind),
            partial(of_v_trace, mixed=kind == "mixed"),
            ("gamma", "lam", "rho_cap", "c_cap"),
        )
        for kind in ("mixed", "target")
    },
    "traced": (traced, of_traced, ("gamma", "lam", "rho_cap", "c_cap")),
}


@pytest.mark.parametrize("kind", TWINS)
@given(parts=episodes, gamma=share, lam=share, rho_cap=cap, c_cap=cap)
def test_from_values_they_are_the_twins_of_each_completion_alone(kind: str, parts: list[Columns], **settings: float) -> None:
    estimate, twin, names = TWINS[kind]
    found = estimate(*arrays([row for part in parts for row in part]), ends(parts), **{name: settings[name] for name in names})
    expected = [twin(r, v, [math.exp(x) for x in logs], settings) for r, v, logs in (zip(*part, strict=True) for part in parts)]
    for which in (0, 1):  # advantages, and what the critic is fitted to
        assert found[which].tolist() == close([number for each in expected for number in each[which]])


def test_v_trace_by_hand() -> None:
    # two tokens, reward 1 at the end, gamma 1, lam 1, caps 1; ratios 2 and 1/2; values 0.5 and 0.2
    columns = arrays([(0.0, 0.5, math.log(2)), (1.0, 0.2, math.log(0.5))])
    settings = {"gamma": 1.0, "lam": 1.0, "rho_cap": 1.0, "c_cap": 1.0, "bootstrap": "target"}
    advantages, targets = v_trace(*columns, np.array([False, True]), **settings)  # type: ignore[arg-type]
    # v_2 = 0.2 + 0.5 (1 + 0 - 0.2) = 0.6;  v_1 = 0.5 + 1 (0 + 0.2 - 0.5) + 1 (0.6 - 0.2) = 0.6
    assert targets.tolist() == pytest.approx([0.6, 0.6])
    # A_1 = 0 + 0.6 - 0.5, A_2 = 1 + 0 - 0.2
    assert advantages.tolist() == pytest.approx([0.1, 0.8])


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=30))
def test_normalised_advantages_have_mean_0_and_deviation_1_or_are_constant(values: list[float]) -> None:
    found = normalised(np.array(values, np.float32)).astype(np.float64)
    assert float(found.mean()) == pytest.approx(0.0, abs=1e-3)
    assert float(found.std()) == pytest.approx(1.0, abs=1e-3) or float(found.std()) < 1e-5


@given(st.lists(st.tuples(number, number, number), min_size=1, max_size=10))
def test_the_loss_of_a_value_is_the_twin(drawn: list[tuple[float, float, float]]) -> None:
    value, old, target = (torch.tensor(column, dtype=torch.float64) for column in zip(*drawn, strict=True))
    assert value_loss(value, old, target).tolist() == pytest.approx([oracles.value_loss(*row) for row in drawn], abs=1e-9)


def test_a_value_that_has_moved_beyond_the_clip_towards_its_target_is_pulled_no_further() -> None:
    value = torch.tensor([0.5, 0.5, 0.1], requires_grad=True)
    value_loss(value, torch.zeros(3), torch.tensor([1.0, -1.0, 1.0])).sum().backward()  # type: ignore[no-untyped-call]
    assert value.grad is not None
    # moved 0.5 towards 1: stop; moved 0.5 away from -1: back; moved 0.1: on
    assert value.grad.tolist() == pytest.approx([0.0, 1.5, -0.9])
