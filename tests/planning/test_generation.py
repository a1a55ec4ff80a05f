"""Continuous batching, held against the sum of a static batch."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.model.generation import generation_ends_s

lists = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def step_s(alive: int, context: float) -> float:
    """Whole numbers, so that sums are exact: weights, then the cache."""
    return 100 + alive * context


def prefill_s(rows: int) -> float:
    return 7 * rows


def run(lengths: list[int], **changes: Any) -> list[float]:
    settings = {"prompt_tokens": 5, "slots": 64, "room_tokens": 10_000, "longest": 40}
    return generation_ends_s(lengths, **{**settings, "step_s": step_s, "prefill_s": prefill_s, **changes})


@given(lists)
def test_with_a_slot_for_each_row_it_is_the_sum_over_the_steps_of_a_static_batch(lengths: list[int]) -> None:
    found = run(lengths)
    steps = [step_s(sum(length >= t for length in lengths), 5 + t) for t in range(1, max(lengths) + 1)]
    assert found == pytest.approx([prefill_s(len(lengths)) + sum(steps[:length]) for length in lengths])


@given(lists, st.integers(1, 12))
def test_stretches_of_steps_with_the_same_rows_take_what_the_steps_take_one_by_one(lengths: list[int], slots: int) -> None:
    waiting, produced, ends, now = deque(range(len(lengths))), dict[int, int](), [0.0] * len(lengths), 0.0
    while waiting or produced:
        begun = min(slots - len(produced), len(waiting))
        now += prefill_s(begun)
        produced.update({waiting.popleft(): 0 for _ in range(begun)})
        now += step_s(len(produced), 5 + 1 + sum(produced.values()) / len(produced))
        for row in list(produced):
            produced[row] += 1
            if produced[row] == lengths[row]:
                del produced[row]
                ends[row] = now
    assert run(lengths, slots=slots) == pytest.approx(ends)


@given(lists)
def test_one_slot_makes_one_row_after_the_other(lengths: list[int]) -> None:
    found = run(lengths, slots=1)
    assert max(found) == pytest.approx(sum(max(run([length])) for length in lengths))
    assert found == sorted(found)


@given(lists, st.integers(1, 12))
def test_room_for_so_many_rows_is_as_good_as_so_many_slots(lengths: list[int], rows: int) -> None:
    assert run(lengths, room_tokens=45 * rows + 44) == run(lengths, slots=rows)


@given(lists, st.integers(1, 12))
def test_steps_lie_between_the_even_share_of_the_slots_and_that_with_the_longest_row_last(
    lengths: list[int], slots: int
) -> None:
    steps = max(run(lengths, slots=slots, step_s=lambda alive, context: 1.0, prefill_s=lambda rows: 0.0))
    least = max(max(lengths), -(-sum(lengths) // slots))
    # Graham, Bounds on multiprocessing timing anomalies, 1969.
    assert least <= steps <= (sum(lengths) + (slots - 1) * max(lengths)) / slots


def test_one_long_row_keeps_the_batch_and_leaves_its_slots_empty() -> None:
    assert max(run([5] * 7 + [40], slots=8)) > 2 * max(run([10] * 8, slots=8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": 0}, "slots = 0"),
        ({"longest": 2}, "a completion of 3 tokens: 1 to longest = 2"),
        ({"room_tokens": 44}, "room for 44 tokens, a row may need 45: nearest longest is 39"),
    ],
)
def test_what_cannot_be_generated_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run([3], **changes)
