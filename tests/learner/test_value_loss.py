"""The critic's loss against its twin, and what its clip is for."""

from __future__ import annotations

import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.learner.model.critic import value_loss

number = st.floats(-5, 5, width=32)
rows = st.lists(st.tuples(number, number, number), min_size=1, max_size=10)


@given(rows, st.one_of(st.none(), st.floats(0.05, 2)))
def test_it_is_the_twin(drawn: list[tuple[float, float, float]], clip: float | None) -> None:
    value, old, target = (torch.tensor(column, dtype=torch.float64) for column in zip(*drawn, strict=True))
    expected = [oracles.value_loss(*row, clip) for row in drawn]
    assert value_loss(value, old, target, clip).tolist() == [pytest.approx(each, abs=1e-9) for each in expected]


def test_a_value_that_has_moved_beyond_the_clip_towards_its_target_is_pulled_no_further() -> None:
    value = torch.tensor([0.5, 0.5, 0.1], requires_grad=True)
    value_loss(value, torch.zeros(3), torch.tensor([1.0, -1.0, 1.0]), clip=0.2).sum().backward()  # type: ignore[no-untyped-call]
    assert value.grad is not None
    # moved 0.5 towards 1: stop; moved 0.5 away from -1: back; moved 0.1: on
    assert value.grad.tolist() == pytest.approx([0.0, 1.5, -0.9])
