"""Curves stay short, lose no spike, and are told in parts that add up to the whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.watch.series import MAX_BUCKETS, MAX_METRICS, History, ages, numbers


def history(values: Iterable[float], max_buckets: int = 8) -> History:
    made = History(max_buckets)
    for step, value in enumerate(values, 1):
        made.add(step, {"reward": value})
    return made


def curve(made: History) -> dict[str, list[float]]:
    return made.after(["reward"])["curves"]["reward"]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300))
def test_however_long_it_is_a_curve_is_short_and_keeps_its_smallest_and_largest(values: list[float]) -> None:
    made = history(values)
    found = curve(made)
    assert len(found["step"]) <= 8
    assert min(found["min"]) == min(values) and max(found["max"]) == max(values)
    assert all(low <= mean + 1e-6 and mean <= high + 1e-6
               for low, mean, high in zip(found["min"], found["mean"], found["max"], strict=True))  # fmt: skip
    counted = [sum(1 for step in range(1, len(values) + 1) if step // made.width == at // made.width) for at in found["step"]]
    whole = sum(mean * count for mean, count in zip(found["mean"], counted, strict=True))
    assert whole == pytest.approx(sum(values), abs=1e-3)


def test_a_million_steps_have_as_many_points_as_a_picture_has_columns() -> None:
    made = History()
    for step in range(0, 1_000_000, 7):
        made.add(step, {"reward": float(step)})
    assert MAX_BUCKETS // 2 <= len(curve(made)["step"]) <= MAX_BUCKETS
    assert curve(made)["max"][-1] == 999_999 // 7 * 7


@given(st.lists(st.integers(1, 12), max_size=60), st.data())
def test_a_reader_who_is_told_only_what_changed_knows_all(back: list[int], data: st.DataObject) -> None:
    """Whatever is restored and made again meanwhile. The reader joins parts as the page does."""
    made, step, known = History(8), 0, dict[str, Any](layout="", last=0, curve={"step": [], "mean": []})
    for by in back:
        step = max(1, step + 1 if by < 11 else step - by)
        made.add(step, {"reward": float(data.draw(st.integers(0, 9)))})
        if by % 3 == 0:
            told = made.after(["reward"], known["last"], known["layout"])
            kept = [i for i, at in enumerate(known["curve"]["step"]) if at < told["from"] and told["layout"] == known["layout"]]
            joined = {k: [known["curve"][k][i] for i in kept] + told["curves"]["reward"][k] for k in ("step", "mean")}
            known = {"layout": told["layout"], "last": told["last"], "curve": joined}
            assert joined == {k: curve(made)[k] for k in ("step", "mean")}


def test_a_learner_that_goes_on_from_a_checkpoint_takes_its_later_steps_back() -> None:
    made = History()
    for step in (1, 2, 3, 2):
        made.add(step, {"reward": float(step)}, {0: 10})
    assert curve(made) == {"step": [1, 2], "mean": [1, 2], "min": [1, 2], "max": [1, 2]}
    assert made.after([])["ages"] == {"step": [1, 2], "tokens": [{0: 10}, {0: 10}]}


def test_tokens_by_age_are_summed_in_a_bucket_and_the_oldest_are_one() -> None:
    made = History(2)
    for step in range(4):
        made.add(step, {}, {0: 3, 10**6: 1})
    assert made.after([])["ages"] == {"step": [0, 2], "tokens": [{0: 6, 32: 2}, {0: 6, 32: 2}]}


def test_only_finite_numbers_are_drawn_and_names_that_a_damaged_file_invents_cost_no_memory() -> None:
    made = History()
    for step in range(10):
        made.add(step, {f"{step}/{i}": 0.0 for i in range(100)})
    assert len(made.metrics) == MAX_METRICS
    record = {"a": 1, "b": True, "c": None, "d": float("nan"), "e": float("inf"), "f": "1", "g": 10**400, "h": [1], "i": -2.5}
    assert numbers(record) == {"a": 1.0, "i": -2.5}
    assert ages({"staleness/histogram": {"0": 5, "x": 1, "2": None, "3": 2}}) == {0: 5, 3: 2}
    assert ages({"staleness/histogram": [1, 2]}) == {}
