"""The time of a step, held against a plain recurrence over many batches, and the laws that schedules keep."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.model.schedules import AROUND, SCHEDULES, Schedule, Stage, StageTime, schedule, step_time

seconds = st.integers(0, 50).map(float)
stages: tuple[Stage, ...] = ("generate", "score", "train", "publish", "adopt")
even_times = st.fixed_dictionaries({stage: seconds.map(lambda each: StageTime(each, each)) for stage in stages})


@st.composite
def uneven_times(draw: st.DrawFn) -> dict[Stage, StageTime]:
    """Generation spans at least what it keeps busy, and so does scoring; the last score is a part of scoring."""
    times = dict(draw(even_times))
    busy, score = times["generate"].busy_s, times["score"].busy_s
    times["generate"] = StageTime(busy, busy + draw(seconds))
    times["score"] = StageTime(score, score, min(score, draw(seconds)))
    return times


schedules = st.sampled_from(list(SCHEDULES.values()))


def recurrence(plan: Schedule, times: Mapping[Stage, StageTime], batches: int) -> float:
    """Batch after batch: a stage begins when its batch, its lane and, for generation, the weights are ready."""
    lane_of = {stage: number for number, lane in enumerate(plan.lanes) for stage in lane}
    free, adopted = [0.0] * len(plan.lanes), list[float]()
    for batch in range(batches):
        behind = batch - 1 - int(plan.max_staleness)
        now = adopted[behind] if behind >= 0 else 0.0
        for stage in stages:
            now = max(now, free[lane_of[stage]]) + times[stage].span_s
            free[lane_of[stage]] = now
        adopted.append(now)
    return adopted[-1]


@given(even_times, st.sampled_from(["synchronous", "disaggregated"]))
def test_a_loop_without_staleness_takes_the_sum_of_its_stages(times: dict[Stage, StageTime], name: str) -> None:
    assert step_time(SCHEDULES[name], times).seconds == sum(time.span_s for time in times.values())


@given(even_times, st.integers(0, 5))
def test_batches_one_by_one_take_what_the_largest_circuit_says(times: dict[Stage, StageTime], staleness: int) -> None:
    # Lanes whose stages follow each other in a batch: a batch keeps its lane from the first to the last of them.
    lanes: tuple[tuple[Stage, ...], ...] = (("generate",), ("score",), ("train", "publish"), ("adopt",))
    plan = Schedule(name="chain", lanes=lanes, max_staleness=staleness)
    found = step_time(plan, times).seconds
    # The recurrence is periodic with N + 1 batches once it has settled.
    rounds = 40 * (staleness + 1)
    settled = recurrence(plan, times, 2 * rounds) - recurrence(plan, times, rounds)
    assert settled / rounds == pytest.approx(found, abs=1e-9)


@given(uneven_times(), st.integers(0, 8))
def test_more_staleness_is_never_slower_and_ends_at_the_slowest_lane(times: dict[Stage, StageTime], staleness: int) -> None:
    found = [step_time(schedule("bounded", bound), times).seconds for bound in (staleness, staleness + 1, math.inf)]
    assert found == sorted(found, reverse=True)
    lanes = step_time(schedule("fully_async"), times).circuits
    assert found[-1] == max(circuit.step_s for circuit in lanes if circuit.name != AROUND)


@given(even_times)
def test_one_step_ahead_gains_at_most_twice(times: dict[Stage, StageTime]) -> None:
    serial, ahead = (step_time(SCHEDULES[name], times).seconds for name in ("disaggregated", "one_step"))
    assert ahead <= serial <= 2 * ahead


@given(uneven_times(), schedules)
def test_what_bounds_a_step_is_never_idle_and_shares_lie_between_0_and_1(times: dict[Stage, StageTime], plan: Schedule) -> None:
    found = step_time(plan, times)
    shares = found.idle_shares
    assert len(shares) == len(plan.lanes) and all(0 <= share <= 1 for share in shares.values())
    assert found.bound_by.name == AROUND or shares[found.bound_by.name] == 0


def test_a_batch_that_is_generated_whole_keeps_its_devices_until_its_last_row() -> None:
    times: dict[Stage, StageTime] = {"generate": StageTime(10, 100), "train": StageTime(10, 10)}
    assert step_time(schedule("one_step"), times).seconds == 100
    assert step_time(schedule("bounded", 10), times).seconds == 10


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: schedule("one_stp"), "one_step"),
        (lambda: schedule("bounded", 1.5), "max_staleness = 1.5"),
        (lambda: schedule("bounded", -1), "max_staleness = -1"),
        (lambda: Schedule(name="x", lanes=(("train",), ("train",)), max_staleness=0), "in two lanes"),
        (lambda: step_time(schedule("bounded"), {"train": StageTime(-1, 0)}), "'train'"),
        (lambda: step_time(schedule("bounded"), {"trian": StageTime(1, 1)}), "train"),  # type: ignore[dict-item]
    ],
)
def test_what_is_no_schedule_is_refused(call: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()  # type: ignore[operator]
