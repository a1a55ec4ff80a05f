"""Cores that tasks share: nothing is given that is not there, and nothing lies idle that is wanted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.experiments.planning.simulation.virtual_time import Clock, Cores

wants = st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=1, max_size=8)


def ends(clock: Clock) -> float:
    while clock.turn():
        pass
    return clock.now


@given(wants, st.sampled_from([0.5, 1.0, 2.0, 3.0, 8.0]))
def test_busy_stages_get_all_cores_or_all_that_they_want(parallelism: list[float], number: float) -> None:
    clock, cores = Clock(), Cores(number)
    tasks = [clock.begin(1.0, lambda: None, cores, each) for each in parallelism]
    given_cores = [task.rate * task.parallelism for task in tasks]
    assert sum(given_cores) == pytest.approx(min(number, sum(parallelism)))
    short = [cores_given for cores_given, wanted in zip(given_cores, parallelism, strict=True) if cores_given < wanted - 1e-9]
    assert short == pytest.approx([max(given_cores)] * len(short))  # none of those that want more has less than another


@given(wants, st.sampled_from([0.5, 1.0, 2.0, 3.0, 8.0]))
def test_the_last_task_ends_no_earlier_than_the_work_allows(parallelism: list[float], number: float) -> None:
    clock, cores = Clock(), Cores(number)
    for each in parallelism:
        clock.begin(1.0, lambda: None, cores, each)
    assert ends(clock) >= max(1.0, sum(parallelism) / number) - 1e-9


def test_two_tasks_on_one_core_take_twice_as_long_and_the_second_goes_on_alone() -> None:
    clock, core, ended = Clock(), Cores(1.0), list[float]()
    clock.begin(1.0, lambda: ended.append(clock.now), core)
    clock.begin(3.0, lambda: ended.append(clock.now), core)
    ends(clock)
    assert ended == [2.0, 4.0]


def test_a_task_that_is_cancelled_leaves_its_core_to_the_others() -> None:
    clock, core = Clock(), Cores(1.0)
    clock.begin(2.0, lambda: None, core)
    other = clock.begin(9.0, lambda: None, core)
    clock.begin(1.0, lambda: clock.cancel(other))
    assert ends(clock) == 2.5  # half of the core for a second, then all of it


def test_a_shorter_task_ends_earlier_and_what_it_has_had_stays() -> None:
    clock = Clock()
    task = clock.begin(5.0, lambda: None)
    clock.begin(1.0, lambda: clock.shorten(task, clock.left(task) / 2))
    assert ends(clock) == 3.0


def test_what_happens_at_the_same_time_happens_in_the_order_in_which_it_began() -> None:
    clock, order = Clock(), list[int]()
    for number in range(4):
        clock.begin(1.0, lambda number=number: order.append(number))  # type: ignore[misc]
    ends(clock)
    assert order == [0, 1, 2, 3]
