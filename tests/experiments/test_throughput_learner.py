"""The learner benchmark gives every side the same samples. No rate is asserted."""

from __future__ import annotations

import numpy as np
import pytest

from async_rlhf.experiments.throughput.learner import (
    Seconds,
    bare,
    bare_batches,
    beside,
    diagnostics_seconds,
    long_tailed,
    make_groups,
    ours,
)
from async_rlhf.experiments.throughput.trl import MODEL


def test_lengths_are_long_tailed_and_always_the_same() -> None:
    lengths = long_tailed(200, 8)
    assert np.array_equal(lengths, long_tailed(200, 8))
    assert lengths.min() >= 1 and lengths.max() == 256
    assert np.median(lengths) == pytest.approx(48, rel=0.1)
    assert lengths.mean() > 1.3 * np.median(lengths)


def test_the_bare_loop_learns_from_the_tokens_that_we_learn_from() -> None:
    groups = make_groups(long_tailed(3, 4), vocabulary=99)
    borne = sum(int(batch.bears_loss.sum()) for batch in bare_batches(groups))
    assert borne == sum(group.num_tokens for group in groups)


def test_a_ratio_is_the_median_over_turns_and_above_one_where_ours_is_faster() -> None:
    seconds = {
        "ours": [Seconds(1.0, 1.0), Seconds(2.0, 1.0), Seconds(1.0, 1.0)],
        "bare": [Seconds(1.2, 0.5), Seconds(2.2, 0.5), Seconds(9.0, 0.5)],
    }
    (found,) = beside("tiny, alone", 100, seconds)
    assert (found.ratio, found.lowest, found.highest, found.turns) == (1.2, 1.1, 9.0, 3)
    assert found.figures["cpu_ratio"] == 0.5 and found.sides["ours"] == 100.0
    assert found.goal == "at least 0.9, reached"


def test_every_side_of_this_process_makes_steps_and_diagnostics_are_a_part_of_ours() -> None:
    groups = make_groups(np.array([[3, 5], [2, 4]]), vocabulary=99)
    for step in (ours(MODEL, groups, 1), bare(MODEL, groups)):
        assert step().wall > 0
    whole, diagnostics = diagnostics_seconds(MODEL, groups, 1)
    assert 0 < diagnostics < whole
