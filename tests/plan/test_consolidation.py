"""Rows shared out to ranks, and the tail of generation moved to few replicas."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.plan.balance import most_loaded
from async_rlhf.plan.consolidation import Fused, consolidated

rows = st.lists(st.integers(1, 50), min_size=1, max_size=30)


@given(rows, st.integers(1, 8))
def test_the_most_loaded_rank_has_between_the_even_share_and_four_thirds_of_the_best(costs: list[int], ranks: int) -> None:
    bound = max(math.ceil(sum(costs) / ranks), max(costs))
    assert bound <= most_loaded(costs, ranks) <= max(costs) + sum(costs) / ranks


def test_one_long_row_decides_however_many_ranks_there_are() -> None:
    assert most_loaded([100, 1, 1, 1], 4) == most_loaded([100, 1, 1, 1], 2) == 100
    with pytest.raises(ConfigError, match="ranks = 0"):
        most_loaded([1], 0)


def fused(lengths: list[int], **changes: Any) -> Fused:
    settings: dict[str, Any] = {"replicas": 4, "threshold": 0.2, "most_rows": 16, "score_s": 100.0}
    return consolidated(lengths, **{**settings, "step_s": lambda alive, produced: 1.0, **changes})


def test_without_a_threshold_scoring_follows_the_longest_row() -> None:
    assert fused([10, 20, 300], threshold=0.0) == Fused(generated_s=300, total_s=400, kept=4)


def test_the_tail_hides_the_scoring_of_what_has_ended() -> None:
    # 8 of 10 rows end at 10; from then on 3 of 4 replicas score their 80 of 680 tokens, while the others take 290 more.
    found = fused([10] * 8 + [300] * 2)
    assert found.kept == 1 and found.generated_s == 300
    assert found.total_s == pytest.approx(400 - 80 / 680 * 100)


def test_free_replicas_score_no_faster_than_their_share() -> None:
    assert fused([10] * 8 + [12] * 2).total_s == pytest.approx(112 - 2 * 3 / 4)


def test_moving_caches_takes_its_time() -> None:
    assert fused([10] * 8 + [300] * 2, move_s=5.0).generated_s == 305


@given(rows, st.sampled_from([0.0, 0.1, 0.3, 1.0]))
def test_it_never_takes_longer_than_without_where_a_step_takes_the_same(lengths: list[int], threshold: float) -> None:
    assert fused(lengths, threshold=threshold).total_s <= fused(lengths, threshold=0.0).total_s + 1e-9


def test_a_threshold_beyond_all_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"threshold = 1\.5"):
        fused([1], threshold=1.5)
