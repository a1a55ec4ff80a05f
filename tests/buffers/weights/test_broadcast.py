"""Who takes part in a broadcast, and what an engine makes of what comes: pure decisions, in every order of events."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.buffers.protocol import broadcasts
from async_rlhf.buffers.protocol.broadcasts import EngineDevice
from async_rlhf.buffers.weights.broadcast import Membership
from async_rlhf.buffers.weights.standby import Received, Standby, Target
from async_rlhf.buffers.weights.weight_set import WeightSet

ANNA, BERT, CARL = ("anna", "1"), ("bert", "1"), ("carl", "1")
FREE = EngineDevice()


def in_epoch(fence: int, number: int) -> EngineDevice:
    return EngineDevice(epoch_id=(fence, number), is_member=True)


def left(fence: int, number: int) -> EngineDevice:
    return EngineDevice(epoch_id=(fence, number))


def test_an_epoch_serves_version_after_version_until_someone_joins_or_ends() -> None:
    membership = Membership()
    first = membership.gather(1, {ANNA: FREE, BERT: FREE})
    assert first.members == (ANNA, BERT) and first.id == (1, 1)
    assert membership.gather(1, {ANNA: FREE, BERT: in_epoch(1, 1)}) is first, "anna has not reported yet that it came"
    joined = membership.gather(1, {ANNA: in_epoch(1, 1), BERT: in_epoch(1, 1), CARL: FREE})
    assert joined.members == (ANNA, BERT, CARL) and joined.id == (1, 2)
    assert membership.gather(1, {ANNA: in_epoch(1, 2), CARL: in_epoch(1, 2)}).members == (ANNA, CARL)
    again = membership.gather(1, {ANNA: in_epoch(1, 3), ("carl", "2"): FREE})
    assert again.members == (ANNA, ("carl", "2")), "another process under the same name is another member"
    assert membership.gather(2, {ANNA: in_epoch(1, 4)}).id == (2, 1), "another learner, another epoch"


def test_an_engine_that_left_by_itself_comes_into_the_next_epoch() -> None:
    membership = Membership()
    membership.gather(1, {ANNA: FREE, BERT: FREE})
    assert membership.gather(1, {ANNA: left(1, 1), BERT: in_epoch(1, 1)}).id == (1, 2)


def test_after_a_failure_an_engine_that_reports_nothing_is_not_waited_for_again() -> None:
    membership = Membership()
    membership.gather(1, {ANNA: FREE, BERT: FREE, CARL: FREE})
    membership.failed()
    # Bert's process beats and has heard nothing, carl's has come and hangs since.
    now = {ANNA: left(1, 1), BERT: FREE, CARL: in_epoch(1, 1)}
    assert membership.gather(1, now).members == (ANNA,)
    assert membership.gather(1, {**now, ANNA: in_epoch(1, 2)}).members == (ANNA,)
    assert membership.gather(2, {**now, ANNA: in_epoch(1, 2)}).members == (ANNA,), "another learner changes nothing about it"
    assert membership.gather(2, {**now, ANNA: in_epoch(2, 1), CARL: left(1, 1)}).members == (ANNA, CARL)
    membership.joined(BERT)
    assert membership.gather(2, {**now, ANNA: in_epoch(2, 2), CARL: in_epoch(2, 2)}).members == (ANNA, BERT, CARL)


EVENTS = st.sampled_from(["stays", "leaves", "hello", "ends", "comes", "fails", "gathers", "gathers", "another learner"])


@given(st.lists(st.tuples(EVENTS, st.sampled_from([ANNA, BERT, CARL])), max_size=40))
def test_an_engine_of_an_epoch_that_failed_is_in_no_other_before_it_has_reported(
    events: list[tuple[str, tuple[str, str]]],
) -> None:
    membership, states, fence = Membership(), {ANNA: FREE, BERT: FREE, CARL: FREE}, 1
    epochs: dict[tuple[str, str], tuple[int, int]] = {}
    owing: set[tuple[str, str]] = set()  # members of an epoch that failed, until they report
    highest = (0, 0)
    for event, member in events:
        if event == "gathers":
            before, epoch = membership.epoch, membership.gather(fence, states)
            assert set(epoch.members) <= states.keys() - owing
            assert epoch is before or epoch.id > highest
            assert epoch is before or set(epoch.members) == states.keys() - owing
            highest, epochs = epoch.id, epochs | dict.fromkeys(epoch.members, epoch.id)
        elif event == "another learner":
            fence += 1
        elif event == "fails":
            if membership.epoch is not None and membership.epoch.id[0] == fence:
                membership.failed()
                owing |= {
                    each for each in membership.epoch.members if each in states and epochs.get(each) == membership.epoch.id
                }
                owing -= {each for each in owing if states[each] == left(*epochs[each])}
        elif event == "comes":
            if member not in states:
                states[member] = FREE
                membership.joined(member)
        elif member in states:
            if event == "ends":
                del states[member]
                epochs.pop(member, None)
                owing.discard(member)
            elif event == "hello":
                membership.joined(member)
                epochs.pop(member, None)
                owing.discard(member)
            elif member in epochs and event == "leaves":
                states[member] = left(*epochs[member])
                owing.discard(member)
            elif member in epochs and states[member] != left(*epochs[member]):  # none comes back to an epoch that it left
                states[member] = in_epoch(*epochs[member])


class FakeSeat:
    def __init__(self, epoch: broadcasts.Receive, done: Received) -> None:
        self.epoch, self.done = epoch.epoch, done
        self.orders: list[Target] = []
        self.is_left = False

    def do(self, target: Target) -> None:
        self.orders.append(target)

    def leave(self) -> None:
        self.is_left = True


class Engine:
    """A `Standby` whose seats the test has in its hands, on a clock that it sets."""

    def __init__(self) -> None:
        self.now, self.woken = 0.0, 0
        self.seats: list[FakeSeat] = []
        self.standby = Standby(self._take_seat, lambda: self.now, 10.0, self._wake)

    def _take_seat(self, epoch: broadcasts.Receive, done: Received) -> FakeSeat:
        self.seats.append(FakeSeat(epoch, done))
        return self.seats[-1]

    def _wake(self) -> None:
        self.woken += 1

    def announce(self, version: int, number: int = 1, fence: int = 1) -> None:
        self.standby.receive(broadcasts.Receive(fence=fence, version=version, epoch=number, store="s", rank=1, size=2))

    def come(self, version: int, seat: int = -1) -> WeightSet:
        weights = WeightSet(1, version, (), b"")
        self.seats[seat].done(weights)
        return weights


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_set_that_came_is_reported_and_given_out_once(engine: Engine) -> None:
    engine.announce(3)
    assert engine.standby.look() == EngineDevice(epoch_id=(1, 1), is_member=True)
    weights = engine.come(3)
    assert engine.woken == 1
    assert engine.standby.look() == EngineDevice(epoch_id=(1, 1), is_member=True, received=(1, 3))
    assert engine.standby.take((1, 3), weights.digest) is weights
    engine.announce(4)
    assert engine.seats[0].orders == [(1, 3), (1, 4)]
    assert engine.standby.take((1, 3), weights.digest) is None, "then it is fetched"


def test_what_is_announced_twice_or_too_late_changes_nothing(engine: Engine) -> None:
    engine.announce(3)
    engine.announce(3)
    assert engine.seats[0].orders == [(1, 3)]
    engine.announce(4, number=2)
    engine.announce(3)
    assert [seat.is_left for seat in engine.seats] == [True, False] and engine.seats[1].orders == [(1, 4)]
    engine.standby.disband((1, 1))
    assert not engine.seats[1].is_left


def test_nothing_that_comes_of_an_epoch_that_was_left_is_taken(engine: Engine) -> None:
    engine.announce(3)
    engine.announce(4, number=2)
    engine.come(3, seat=0)
    assert engine.standby.look().received == (0, -1)


@pytest.mark.parametrize(
    "end",
    [
        lambda engine: engine.seats[-1].done(None),
        lambda engine: setattr(engine, "now", engine.now + 11),
        lambda engine: engine.standby.disband((1, 1)),
    ],
    ids=["failed", "late", "disbanded"],
)
def test_an_epoch_that_ends_is_left_for_good(engine: Engine, end: Callable[[Engine], None]) -> None:
    engine.announce(3)
    end(engine)
    assert engine.standby.look() == EngineDevice(epoch_id=(1, 1)) and engine.seats[0].is_left
    engine.announce(4)
    assert len(engine.seats) == 1, "the same epoch was announced late"
    engine.announce(4, number=2)
    assert engine.standby.look() == EngineDevice(epoch_id=(1, 2), is_member=True)


LOSSES: list[Callable[[Engine, int], object]] = [
    lambda engine, number: engine.seats[-1].done(None),
    lambda engine, number: engine.standby.disband((1, number)),
    lambda engine, number: (engine.come(number), engine.standby.look(), engine.standby.take((1, number), "0" * 32)),
]


@given(st.lists(st.sampled_from([None, *LOSSES]), max_size=9))
def test_an_engine_that_lost_three_seats_in_a_row_takes_part_no_more(
    events: list[Callable[[Engine, int], object] | None],
) -> None:
    """However it lost them; only what it adopted ends the row (None)."""
    engine, num_lost = Engine(), 0
    for number, lose in enumerate(events, start=1):
        engine.announce(number, number)
        if num_lost < 3 and lose is None:
            weights = engine.come(number)
            engine.standby.look()
            assert engine.standby.take((1, number), weights.digest) is weights
            num_lost = 0
        elif num_lost < 3 and lose is not None:
            lose(engine, number)
            num_lost += 1
        assert bool(engine.standby.look().out) == (num_lost == 3)
    num_seats = len(engine.seats)
    engine.announce(10, 10)
    assert len(engine.seats) == num_seats + (num_lost < 3)


def test_a_set_that_is_not_what_was_broadcast_is_counted_and_said_to_be_there_no_more(engine: Engine) -> None:
    engine.announce(3)
    weights = engine.come(3)
    engine.standby.look()
    assert engine.standby.take((1, 2), weights.digest) is None, "another version"
    assert engine.standby.look() == EngineDevice(epoch_id=(1, 1), is_member=True, received=(1, 3), num_refused=1)
    assert engine.standby.take((1, 3), "0" * 32) is None
    assert engine.standby.look() == EngineDevice(epoch_id=(1, 1), num_refused=2) and engine.seats[0].is_left
