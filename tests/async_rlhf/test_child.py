"""When a role is started again, given up or called frozen: on a clock that the test moves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from async_rlhf.launch.program import Node, Process
from async_rlhf.run.supervision.child import MAX_DEATHS, Child, SupervisedTime

PROCESS = cast(Process, object())


def child(role: str = "actor") -> Child:
    return Child(Node(role, role, (), Path("log")))


def lives(made: Child, now: float, lived_s: float, *, progress: bool) -> float:
    """One life from `now` on and its end; returns the pause that follows."""
    made.started(PROCESS, now)
    if progress:
        made.progressed()
    return made.died(now + lived_s, 0.5)


def test_pauses_double_and_deaths_add_up_while_a_role_only_starts() -> None:
    made = child()
    assert [lives(made, 1000.0 * i, 900.0, progress=False) for i in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert made.deaths == 8 > MAX_DEATHS


def test_a_life_with_work_ten_times_as_long_as_the_pause_before_it_forgives_all_deaths() -> None:
    made = child()
    for i in range(4):
        lives(made, 100.0 * i, 1.0, progress=False)  # the last pause is 4 s
    assert lives(made, 1000.0, 39.9, progress=True) == 8 and made.deaths == 5
    assert lives(made, 2000.0, 80.0, progress=True) == 0.5 and made.deaths == 1


def test_a_role_that_works_a_little_each_time_is_given_up_too() -> None:
    made = child()
    lives(made, 0.0, 0.0, progress=False)
    for i in range(1, MAX_DEATHS):
        lives(made, 100.0 * i, 4.9, progress=True)
    assert made.deaths == MAX_DEATHS


def test_work_of_an_earlier_life_counts_for_nothing_and_a_start_that_failed_is_a_death() -> None:
    made = child()
    lives(made, 0.0, 100.0, progress=True)
    lives(made, 1000.0, 100.0, progress=False)
    made.died(1200.0, 0.5)  # it could not be started
    assert made.deaths == 3


def test_a_lost_host_is_no_death_and_its_pauses_grow_until_it_works_again() -> None:
    made = child()
    assert [made.lost(100.0 * i, 0.5, "no route") for i in range(8)] == [
        (0.5, True), (1, False), (2, False), (4, False), (8, False), (16, False), (30, False), (30, False),
    ]  # fmt: skip
    assert made.deaths == 0 and made.start_at == 730.0
    assert made.lost(1000.0, 0.5, "refused") == (30, True)
    made.started(PROCESS, 2000.0)
    made.progressed()
    assert made.lost(2001.0, 0.5, "refused") == (0.5, True)
    assert lives(made, 3000.0, 1.0, progress=False) == 0.5 and made.deaths == 1


def test_what_came_after_its_end_is_no_part_of_a_life() -> None:
    """An actor ended with code 0; the hub was away for long, and then said that the run goes on."""
    made = child()
    lives(made, 0.0, 0.0, progress=False)
    made.started(PROCESS, 10.0)
    made.progressed()
    made.ends_well(11.0)
    made.died(500.0, 0.5)
    assert made.deaths == 2


def test_a_host_that_is_lost_again_after_a_long_life_of_its_relay_is_news() -> None:
    made = child("relay")
    assert [made.lost(float(i), 0.5, "no route") for i in range(3)][-1] == (2, False)
    made.started(PROCESS, 1000.0)
    assert made.lost(2000.0, 0.5, "no route") == (0.5, True)


def test_a_scorer_which_does_not_say_what_it_did_has_worked_after_five_minutes() -> None:
    made = child("scorer")
    lives(made, 0.0, 299.0, progress=False)
    assert made.deaths == 1
    lives(made, 1000.0, 299.0, progress=False)
    assert made.deaths == 2
    lives(made, 2000.0, 300.0, progress=False)
    assert made.deaths == 1


def test_a_supervisor_that_was_frozen_finds_nobody_silent() -> None:
    clock: dict[str, Any] = {"now": 50.0}
    time = SupervisedTime(lambda: clock["now"])
    made = child()
    made.started(PROCESS, time())
    for _ in range(40):
        clock["now"] += 0.1
        time()
    assert made.silent_s(time()) == pytest.approx(4.0)
    clock["now"] += 3600.0
    assert made.silent_s(time()) == pytest.approx(5.0), "of the hour that it could not look, one second counts"
    made.process = cast(Process, SimpleNamespace(read_beats=lambda: b"."))
    assert made.beats(time()) == b"." and made.silent_s(time()) == 0.0


def test_a_role_that_has_never_worked_is_given_up_when_it_ends_by_the_same_error_twice() -> None:
    made = child("learner")
    for error in ("OSError: no room", "ValueError: no such thing", ""):
        made.started(PROCESS, 0.0)
        made.died(5.0, 0.5, error)
        assert not made.given_up(MAX_DEATHS)
    for _ in range(2):
        made.started(PROCESS, 0.0)
        made.died(5.0, 0.5, "ValueError: no such thing")
    assert made.given_up(MAX_DEATHS), "twice in a row"


def test_the_same_error_of_a_role_that_has_worked_before_is_an_accident_until_there_are_too_many() -> None:
    made = child("learner")
    made.started(PROCESS, 0.0)
    made.has_worked = True
    for deaths in range(1, MAX_DEATHS + 1):
        made.died(5.0, 0.5, "ValueError: no such thing")
        assert made.given_up(MAX_DEATHS) == (deaths >= MAX_DEATHS)
