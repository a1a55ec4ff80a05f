"""Whose turn it is: laws of the function that decides it, under any course of events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rlhf.serve.turns import MAX_LOSSES, QueueEntry, QueuePlan, RecordedEnd, Request, SeenRun, State, plan, requested

DRAINED, FINISHED, BROKEN = RecordedEnd(), RecordedEnd(finished=True), RecordedEnd(failed="it broke")


class Machine:
    """Runs, a daemon that asks `plan`, and everything that may befall them. Checks the laws at every look."""

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self.entries = [QueueEntry(number, f"run-{number}") for number in (1, 2, 3, 4)]
        self.alive: set[int] = set()
        self.drain_sent: set[int] = set()
        self.ended: dict[int, RecordedEnd | None] = {}
        self.steps: dict[int, int] = {}
        self.closing = False

    def seen(self) -> Mapping[int, SeenRun]:
        return {
            entry.number: SeenRun(entry.number in self.alive, self.ended.get(entry.number), self.steps.get(entry.number, 0))
            for entry in self.entries
            if entry.is_active
        }

    def look(self) -> QueuePlan:
        made = plan(self.entries, self.seen(), at_once=self.at_once, closing=self.closing)
        for number in made.start:
            assert number not in self.alive, "started twice at once"
            waiting = [entry.number for entry in made.entries if entry.state == "waiting"]
            assert all(number < other for other in waiting), "first in, first out"
            self.alive.add(number)
            self.ended[number] = None
            self.drain_sent.discard(number)
        assert len(self.alive) <= self.at_once
        assert not (self.closing and made.start)
        assert not self.drain_sent & set(made.drain), "asked twice, which would force it to end"
        self.drain_sent |= set(made.drain)
        self.entries = [
            replace(entry, steps=self.steps.get(entry.number, 0))
            if entry.number in made.start
            else replace(entry, drain_sent=entry.drain_sent or entry.number in made.drain)
            for entry in made.entries
        ]
        assert self.alive <= {entry.number for entry in self.entries if entry.is_active}, "what lives is watched"
        return made

    def end(self, number: int, ended: RecordedEnd | None) -> None:
        self.alive.discard(number)
        self.ended[number] = ended


REQUESTS: tuple[Request, ...] = ("stop", "resume", "cancel")
ENDS: dict[str, RecordedEnd | None] = {"drain": DRAINED, "finish": FINISHED, "break": BROKEN, "kill": None}
KINDS = ("submit", *REQUESTS, *ENDS, "step", "power fails", "daemon ends", "daemon begins")
EVENTS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5)), max_size=60)


@given(EVENTS, st.integers(1, 3))
@settings(max_examples=400)
def test_whatever_happens_runs_begin_in_order_never_twice_and_all_end(events: list[tuple[str, int]], at_once: int) -> None:
    machine = Machine(at_once)
    for kind, which in events:
        if kind == "submit":
            machine.entries.append(QueueEntry(len(machine.entries) + 1, f"run-{len(machine.entries) + 1}"))
        elif kind.startswith("daemon"):
            machine.closing = kind == "daemon ends"
        elif kind == "power fails":
            for number in list(machine.alive):
                machine.end(number, None)
        elif kind in REQUESTS and machine.entries:
            place = which % len(machine.entries)
            entry = machine.entries[place]
            machine.entries[place] = requested(entry, kind) or entry
        elif machine.alive:
            number = sorted(machine.alive)[which % len(machine.alive)]
            if kind == "step":
                machine.steps[number] = machine.steps.get(number, 0) + 1
            else:
                machine.end(number, ENDS[kind])
        machine.look()
    machine.closing = False
    for _ in range(3 * len(machine.entries) + 3):
        machine.look()
        for number in list(machine.alive):
            machine.end(number, FINISHED)
    assert not machine.alive
    assert {entry.state for entry in machine.entries} <= {"finished", "stopped", "failed", "cancelled"}


def after(entry: QueueEntry, seen: SeenRun, *, closing: bool = False) -> QueueEntry:
    (found,) = plan([entry], {entry.number: seen}, closing=closing).entries
    return found


@pytest.mark.parametrize(
    ("state", "ended", "then"),
    [
        ("running", FINISHED, "finished"), ("running", BROKEN, "failed"), ("running", DRAINED, "stopped"),
        ("stopping", FINISHED, "finished"), ("stopping", DRAINED, "stopped"), ("stopping", None, "stopped"),
        ("stopping", BROKEN, "stopped"), ("pausing", FINISHED, "finished"), ("pausing", BROKEN, "failed"),
    ],
)  # fmt: skip
def test_a_run_that_has_ended_starts_again_where_it_was_interrupted(
    state: State, ended: RecordedEnd | None, then: State
) -> None:
    found = after(QueueEntry(1, "run", state), SeenRun(False, ended))
    assert found.state == then and (found.reason == "it broke") == (ended == BROKEN)


@pytest.mark.parametrize(("state", "ended"), [("running", None), ("pausing", None), ("pausing", DRAINED)])
def test_what_the_machine_or_the_end_of_the_daemon_interrupted_goes_on_before_anything_else_begins(
    state: State, ended: RecordedEnd | None
) -> None:
    entries: Sequence[QueueEntry] = [QueueEntry(1, "old"), QueueEntry(2, "run", state), QueueEntry(3, "new")]
    made = plan([replace(entries[0], state="finished"), *entries[1:]], {2: SeenRun(False, ended)})
    assert made.start == (2,) and made.entries[2].state == "waiting"


def test_a_run_that_is_lost_again_and_again_without_a_step_is_given_up_and_one_that_works_is_not() -> None:
    idle = busy = QueueEntry(1, "run", "running")
    for number in range(1, MAX_LOSSES):
        idle = after(idle, SeenRun(False, None, steps=0))
        assert idle.state == "running" and idle.losses == number
    for number in range(3 * MAX_LOSSES):
        busy = replace(after(busy, SeenRun(False, None, steps=number + 1)), steps=number + 1)
        assert busy.state == "running"
    given_up = after(idle, SeenRun(False, None, steps=0))
    assert given_up.state == "failed" and given_up.reason == f"lost {MAX_LOSSES} times in a row without a new step"


def test_fewer_runs_at_a_time_than_before_let_those_that_run_end_first() -> None:
    both = [QueueEntry(1, "a", "running"), QueueEntry(2, "b", "running"), QueueEntry(3, "c")]
    assert plan(both, {1: SeenRun(True), 2: SeenRun(True)}, at_once=1) == QueuePlan(tuple(both))
    one = plan(both, {1: SeenRun(True), 2: SeenRun(False, None)}, at_once=1)
    assert one.start == () and one.entries[1].state == "waiting"
