"""A group that was lost with its actor again and again is tried alone before it is quarantined."""

from __future__ import annotations

import pytest

from async_rlhf.buffers.errors import RefusedError
from async_rlhf.buffers.queue.admission import Actor, Admission
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.record import Entry


def hub_with(max_attempts: int) -> Admission:
    hub = Admission(Bound(groups_per_batch=4, max_staleness=1, num_groups=40), max_attempts=max_attempts)
    hub.register(1, 0, 0)
    hub.publish(0)
    return hub


def join(hub: Admission, name: str) -> None:
    hub.fleet.join(name, Actor(capacity=8, fence=1, version=0, heard_at=0.0))


def numbers(hub: Admission) -> dict[str, list[int]]:
    return {name: [credit.number for credit in credits] for name, credits in hub.credits().items()}


def test_a_machine_that_breaks_quarantines_nothing() -> None:
    """Eight groups are lost twice with their actor; on a good machine all of them are made."""
    hub = hub_with(max_attempts=3)
    for _ in range(2):
        join(hub, "broken")
        assert numbers(hub) == {"broken": list(range(8))}
        hub.fleet.leave("broken")
    join(hub, "good")
    for number in range(8):
        assert numbers(hub) == {"good": [number]}  # one at a time
        hub.put("good", number, Entry(attempt=2, oldest_version=0, newest_version=0, num_tokens=1))
    assert hub.num_quarantined == 0 and hub.ledger.failed == 16 and hub.ledger.closes


def test_only_the_group_that_ends_an_actor_alone_is_quarantined() -> None:
    hub = hub_with(max_attempts=3)
    for _ in range(2):
        join(hub, "a")
        hub.credits()
        hub.fleet.leave("a")
    join(hub, "a")
    join(hub, "b")
    assert numbers(hub) == {"a": [0], "b": [1]}
    hub.fleet.leave("a")
    assert hub.remember().quarantined == (0,)
    hub.put("b", 1, Entry(attempt=2, oldest_version=0, newest_version=0, num_tokens=1))
    assert numbers(hub) == {"b": [2]}
    assert hub.ledger.closes


def test_an_actor_that_tries_a_suspect_is_given_nothing_else_and_others_go_on() -> None:
    hub = hub_with(max_attempts=2)
    join(hub, "a")
    hub.fleet.actors["a"].capacity = 1
    assert numbers(hub) == {"a": [0]}
    hub.fleet.leave("a")
    join(hub, "a")
    join(hub, "b")
    given = numbers(hub)
    assert given == {"a": [0], "b": [1, 2, 3, 4, 5, 6, 7]}


def give_up(hub: Admission, name: str, *, seen: bool) -> None:
    join(hub, name)
    hub.credits()
    hub.fleet.leave(name, seen=seen)


def test_silence_counts_against_no_group_however_often() -> None:
    hub = hub_with(max_attempts=2)
    for _ in range(20):
        give_up(hub, "slow", seen=False)
    assert not hub.fleet.failures.suspects and hub.num_quarantined == 0 and hub.ledger.failed == 160
    join(hub, "slow")
    assert hub.credits()["slow"][0].attempt == 20


def test_the_end_of_a_silent_actor_counts_once_it_is_seen() -> None:
    """First the lease ends, then the supervisor sees the process end."""
    hub = hub_with(max_attempts=2)
    give_up(hub, "a", seen=False)
    assert not hub.fleet.failures.suspects
    hub.fleet.leave("a", "ended")
    assert hub.fleet.failures.suspects == set(range(8))
    hub.fleet.leave("a", "ended")
    assert hub.num_quarantined == 0, "one end counts once"


def test_the_return_of_a_silent_actor_as_another_process_counts_and_as_the_same_does_not() -> None:
    hub = hub_with(max_attempts=2)
    for life, counted in (("1", False), ("1", False), ("2", True)):
        hub.fleet.join("by-hand", Actor(capacity=1, fence=1, version=0, heard_at=0.0, life=life))
        assert bool(hub.fleet.failures.suspects) == counted
        hub.credits()
        hub.fleet.leave("by-hand", seen=False)


def test_a_group_that_silences_its_maker_alone_again_and_again_is_quarantined_when_it_returns() -> None:
    hub = hub_with(max_attempts=2)
    for life in "123":
        hub.fleet.join("by-hand", Actor(capacity=1, fence=1, version=0, heard_at=0.0, life=life))
        hub.credits()
        hub.fleet.leave("by-hand", seen=False)
    assert hub.remember().quarantined == (0,) and hub.ledger.closes
    attempts, reasons = hub.fleet.failures.quarantined[0]
    assert attempts == 2 and "came back as another process" in reasons[-1]


def test_a_group_that_its_actor_does_not_know_of_is_lost_and_does_not_count() -> None:
    """Its credit never arrived."""
    hub = hub_with(max_attempts=2)
    join(hub, "a")
    hub.credits()
    hub.fleet.actors["a"].progressed([(number, 1) for number in range(7)], 0.0)
    hub.fleet.overdue(0.0, 10.0)
    hub.fleet.actors["a"].progressed([(number, 2) for number in range(7)], 9.0)
    assert hub.fleet.overdue(11.0, 10.0) == [("a", 7)]
    assert not hub.fleet.failures.suspects and numbers(hub) == {"a": [7]}


def test_a_group_without_progress_counts_and_its_actor_is_given_nothing_until_it_moves() -> None:
    hub = hub_with(max_attempts=2)
    join(hub, "a")
    hub.credits()
    hub.fleet.actors["a"].progressed([(number, 1) for number in range(8)], 0.0)
    hub.fleet.overdue(0.0, 10.0)
    hub.fleet.actors["a"].progressed([(number, 1 + (number != 3)) for number in range(8)], 9.0)
    assert hub.fleet.overdue(11.0, 10.0) == [("a", 3)]
    assert hub.fleet.failures.suspects == {3} and hub.credits() == {}
    for number in (0, 1, 2, 4, 5, 6, 7):
        hub.put("a", number, Entry(0, 0, 0, 1))
    hub.fleet.actors["a"].progressed([(3, 1)], 12.0)
    assert hub.credits() == {}, "it holds the group still, and that has not moved"
    hub.fleet.actors["a"].progressed([], 13.0)
    assert numbers(hub) == {"a": [3]}


def test_a_stuck_group_is_not_taken_up_again_by_the_actor_that_holds_it() -> None:
    hub = hub_with(max_attempts=3)
    join(hub, "a")
    hub.credits()
    hub.fleet.actors["a"].progressed([(number, 1) for number in range(8)], 0.0)
    hub.fleet.overdue(0.0, 10.0)
    hub.fleet.overdue(11.0, 10.0)
    hub.fleet.join("a", Actor(capacity=8, fence=1, version=0, heard_at=0.0), [(0, 0), (1, 0)])
    assert not hub.fleet.actors["a"].leases


def test_attempts_and_what_counts_survive_the_hub() -> None:
    hub = hub_with(max_attempts=3)
    give_up(hub, "a", seen=False)
    give_up(hub, "a", seen=True)
    again = Admission(hub.bound, max_attempts=3)
    again.restore(hub.remember(), {})
    assert again.fleet.failures.attempt(0) == 2 and again.fleet.failures.remember() == hub.fleet.failures.remember()
    again.register(2, 0, 0)
    again.publish(0)
    again.fleet.join("b", Actor(capacity=8, fence=2, version=0, heard_at=0.0))
    again.credits()
    again.fleet.leave("b")
    assert again.fleet.failures.suspects == set(range(8))


def test_a_suspect_is_made_beside_groups_that_only_wait_for_room() -> None:
    """They wait until the next batch is taken, which cannot do without the suspect."""
    hub = Admission(Bound(groups_per_batch=2, max_staleness=1, num_groups=8), max_attempts=2, max_bytes=10)
    hub.register(1, 0, 0)
    hub.publish(0)
    hub.fleet.join("a", Actor(capacity=1, fence=1, version=0, heard_at=0.0))
    hub.fleet.join("b", Actor(capacity=3, fence=1, version=0, heard_at=0.0))
    assert numbers(hub) == {"b": [0, 1, 3], "a": [2]}
    hub.fleet.leave("b", "ended")
    assert hub.fleet.failures.suspects == {0, 1, 3} and hub.credits() == {}
    hub.fleet.actors["a"].has_put(2, 1.0)
    with pytest.raises(RefusedError, match="later"):
        hub.put("a", 2, Entry(0, 0, 0, 1, num_bytes=100))
    hub.fleet.actors["a"].capacity = 2  # the finished group takes no room in its engine
    assert numbers(hub) == {"a": [0]}


def test_an_actor_that_is_dropped_and_comes_back_is_as_stuck_as_it_was() -> None:
    hub = hub_with(max_attempts=9)
    hub.fleet.join("a", Actor(capacity=8, fence=1, version=0, heard_at=0.0, life="1"))
    hub.credits()
    hub.fleet.actors["a"].progressed([(number, 1) for number in range(8)], 0.0)
    hub.fleet.overdue(0.0, 10.0)
    hub.fleet.overdue(11.0, 10.0)
    hub.fleet.drop("a", "adopted no weights in its time")
    hub.fleet.join("a", Actor(capacity=8, fence=1, version=0, heard_at=0.0, life="1"))
    assert hub.credits() == {}
    hub.fleet.join("a", Actor(capacity=8, fence=1, version=0, heard_at=0.0, life="2"))
    assert numbers(hub) == {"a": list(range(8))}


def test_the_end_of_an_actor_that_was_dropped_while_it_lived_says_nothing_of_its_groups() -> None:
    hub = hub_with(max_attempts=1)
    hub.fleet.join("a", Actor(capacity=8, fence=1, version=0, heard_at=0.0, life="1"))
    hub.credits()
    hub.fleet.drop("a", "adopted no weights in its time")
    hub.fleet.join("a", Actor(capacity=8, fence=1, version=0, heard_at=0.0, life="2"))
    hub.fleet.leave("a", "ended")
    assert hub.num_quarantined == 0 and hub.fleet.failures.suspects == frozenset() and hub.ledger.closes
