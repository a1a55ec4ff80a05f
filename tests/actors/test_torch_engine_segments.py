"""Segments cover every row as far as it reaches, and cost no more than one for all rows would."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.actors.torch_engine.llama import BLOCK, COST, segments

POSITIONS = st.lists(st.integers(0, 2000), min_size=1, max_size=70)


def cost(parts: list[tuple[int, int, int]]) -> int:
    return sum((stop - start) * length + COST for start, stop, length in parts)


@given(POSITIONS)
def test_every_row_is_in_one_segment_that_reaches_its_token(positions: list[int]) -> None:
    found = segments(positions)
    assert [row for segment in found for row in range(segment.start, segment.stop)] == list(range(len(positions)))
    for start, stop, length in found:
        assert length == max(positions[start:stop]) + 1


@given(POSITIONS)
def test_segments_never_cost_more_than_blocks_apart(positions: list[int]) -> None:
    blocks = [positions[start : start + BLOCK] for start in range(0, len(positions), BLOCK)]
    apart = sum(len(block) * (max(block) + 1) + COST for block in blocks)
    assert cost([tuple(segment) for segment in segments(positions)]) <= apart


def test_rows_of_one_length_are_one_segment_and_a_long_one_does_not_drag_the_others_along() -> None:
    assert segments([30] * 64) == [(0, 64, 31)]
    one_long = [40] * 64
    one_long[0] = 900
    assert segments(one_long) == [(0, 4, 901), (4, 64, 41)]
