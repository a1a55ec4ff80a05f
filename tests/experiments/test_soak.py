"""The soak: what its slopes show and do not show, what its books see, and a short one with real processes."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random

import pytest

from async_rlhf.experiments.soak.report import write
from async_rlhf.experiments.soak.slopes import Slope, SlopeSample, slope
from async_rlhf.experiments.soak.soak import SoakPlan, books, misused, soak
from async_rlhf.run.run_dir import RunDir

WARM_UP_H = 60 / 3600


def samples(values: list[float], life: int = 0) -> list[SlopeSample]:
    """One a second, at 40 steps a second."""
    return [SlopeSample(life, i / 3600, 0.04 * i, value) for i, value in enumerate(values)]


def found(values: list[float]) -> Slope:
    result = slope(samples(values), warm_up_h=WARM_UP_H)
    assert result is not None
    return result


def sawtooth(random: Random, count: int, leak: float = 0.0) -> list[float]:
    """MiB of a process whose memory goes up and down by 1 and leaks `leak` in 1,000 steps."""
    return [40 + (i % 37) / 37 + random.gauss(0, 0.2) + leak * 0.04 * i for i in range(count)]


def test_a_leak_is_found_in_noise_and_without_one_none_is() -> None:
    leaking, tight = found(sawtooth(Random(1), 1200, leak=0.5)), found(sawtooth(Random(1), 1200))
    assert leaking.verdict(0.1) == "grows" and leaking.mean == pytest.approx(0.5, abs=0.1)
    assert tight.verdict(0.1) == "flat" and tight.low < 0 < tight.high
    assert found([12.0] * 200) == Slope(0.0, 0.0, 0.0, 13, 1)


def test_the_interval_holds_the_true_slope_of_a_random_walk_as_often_as_it_says() -> None:
    random = Random(2)
    walks = [found(list(accumulate(random.gauss(0.004, 0.1) for _ in range(600)))) for _ in range(400)]
    held = sum(each.low <= 0.1 <= each.high for each in walks) / len(walks)
    assert 0.90 <= held <= 0.98


def test_what_lies_between_two_lives_and_what_a_process_loads_at_first_is_no_growth() -> None:
    lives = [samples([min(i, 50) + 100 * life for i in range(200)], life) for life in range(4)]
    result = slope([each for life in lives for each in life], warm_up_h=WARM_UP_H)
    assert result == Slope(0.0, 0.0, 0.0, 4 * 13, 4)


def test_what_was_seen_too_briefly_has_no_slope() -> None:
    assert slope(samples([1.0] * 119), warm_up_h=WARM_UP_H) is None
    assert slope(samples([1.0] * 120), warm_up_h=WARM_UP_H) is not None


def test_rows_that_are_lost_twice_bound_or_used_too_often_are_named() -> None:
    twice = Counter(range(6))
    assert misused([0, 1, 2], 3, twice, set(), 2) == []
    assert misused([0, 1, 2], 3, Counter(range(5)), {5}, 2) == []
    assert misused([0, 1, 2], 3, Counter(range(5)), set(), 2) == ["1 rows were not used 2 times: {2: 1}"]
    assert misused([0, 1, 2], 3, twice + Counter([1]), set(), 2) == ["1 rows were not used 2 times: {0: 3}"]
    assert misused([0, 1, 1], 3, twice, set(), 2) == ["the stream has 3 rows, not 0 to 2 in their order"]


def settled(life: list[SlopeSample]) -> list[float]:
    """Without what a process opens while it starts, which takes as long as the machine likes: the run does not get 50 steps on
    while one of its roles is missing."""
    return [each.value for each in life if each.steps >= life[0].steps + 0.05]


def rises(values: list[float]) -> bool:
    """From each third to the next: what is opened once, whenever that is, is no leak."""
    third = len(values) // 3
    parts = values[:third], values[third : 2 * third], values[2 * third :]
    return third >= 4 and all(max(before) < min(after) for before, after in pairwise(parts))


@pytest.mark.rest
def test_a_short_soak_keeps_its_books_and_holds_no_more_than_at_its_beginning(tmp_path: Path) -> None:
    plan = SoakPlan(seconds=600.0, steps=250, kills=3, viewers=2)
    seen = soak(plan, tmp_path)
    kept = books(RunDir.existing(tmp_path / "run"), seen.rows)
    assert seen.exit_code == 0, (tmp_path / "train.log").read_text()[-2000:]
    assert kept.wrong == () and kept.steps == 2 * seen.rows >= 250 and kept.changes > 0
    assert sorted(seen.kills) == ["actor", "hub", "learner"]
    assert seen.rotations and seen.views["answered"] and not seen.views["failed"]
    for (process, measure), taken in seen.samples.items():
        for life in {each.life for each in taken if measure in ("descriptors", "threads")}:
            values = settled([each for each in taken if each.life == life])
            assert not rises(values), (process, measure, values)

    write(plan, seen, kept, tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert "3 kills" in page and "every row was used as often as promised" in page
