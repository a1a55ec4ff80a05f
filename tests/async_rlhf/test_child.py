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


@pytest.mark.parametrize(
    ("role", "lived", "pauses", "deaths"),
    [
        ("actor", [(900.0, False)] * 8, [0.5, 1, 2, 4, 8, 16, 30, 30], 8),  # pauses double while a role only starts
        ("actor", [(1.0, False)] * 4 + [(39.9, True)], [0.5, 1, 2, 4, 8], 5),
        ("actor", [(1.0, False)] * 4 + [(40.0, True)], [0.5, 1, 2, 4, 0.5], 1),  # ten times as long as the pause before it
        ("actor", [(0.0, False)] + [(4.9, True)] * 5, [0.5, 1, 2, 4, 8, 16], MAX_DEATHS),  # works a little each time
        ("actor", [(100.0, True), (100.0, False)], [0.5, 1], 2),  # work of an earlier life counts for nothing
        ("scorer", [(299.0, False)] * 2, [0.5, 1], 2),  # it does not say what it has done
        ("scorer", [(299.0, False)] * 2 + [(300.0, False)], [0.5, 1, 0.5], 1),
    ],
)
def test_deaths_add_up_and_pauses_double_until_a_life_was_one_of_work(
    role: str, lived: list[tuple[float, bool]], pauses: list[float], deaths: int
) -> None:
    made = child(role)
    assert [lives(made, 1000.0 * i, s, progress=progress) for i, (s, progress) in enumerate(lived)] == pauses
    assert made.deaths == deaths
    made.died(made.start_at, 0.5)  # it could not be started
    assert made.deaths == deaths + 1


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
    relay = child("relay")
    assert [relay.lost(float(i), 0.5, "no route") for i in range(3)][-1] == (2, False)
    relay.started(PROCESS, 1000.0)
    assert relay.lost(2000.0, 0.5, "no route") == (0.5, True), "after a long life it is news"


def test_what_came_after_its_end_is_no_part_of_a_life() -> None:
    """An actor ended with code 0; the hub was away for long, and then said that the run goes on."""
    made = child()
    lives(made, 0.0, 0.0, progress=False)
    made.started(PROCESS, 10.0)
    made.progressed()
    made.ends_well(11.0)
    made.died(500.0, 0.5)
    assert made.deaths == 2


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


@pytest.mark.parametrize("has_worked", [False, True])
def test_the_same_error_twice_in_a_row_gives_up_a_role_that_has_never_worked(has_worked: bool) -> None:
    made, given_up = child("learner"), list[bool]()
    made.has_worked = has_worked
    for error in ("OSError: no room", "", *["ValueError: no such thing"] * (MAX_DEATHS - 2)):
        made.started(PROCESS, 0.0)
        made.died(5.0, 0.5, error)
        given_up.append(made.given_up(MAX_DEATHS))
    first = MAX_DEATHS if has_worked else 4
    assert given_up == [number >= first for number in range(1, MAX_DEATHS + 1)]
