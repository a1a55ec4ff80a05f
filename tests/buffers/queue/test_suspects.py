"""A group that was lost with its actor again and again is tried alone before it is quarantined."""

from __future__ import annotations

import pytest

from async_rlhf.buffers.errors import RefusedError
from async_rlhf.buffers.queue.admission import Actor, Admission
from async_rlhf.buffers.queue.bound import Bound
from tests.buffers.queue.ready import Ready, entry


def hub_with(max_attempts: int) -> Ready:
    return Ready(Bound(groups_per_batch=4, max_staleness=1, num_groups=40), max_attempts=max_attempts)


def lose(hub: Ready, name: str = "a", *, seen: bool = True, **actor: object) -> None:
    """An actor with what it is given, and its end, if that is seen."""
    hub.join(name, **actor)
    hub.credits()
    hub.fleet.leave(name, seen=seen)


def stand_still(hub: Ready, *stuck: int, known: int = 8, life: str = "") -> None:
    """Of the groups that the actor works on these make no progress for 11 s, of which 10 are too many."""
    actor = hub.join("a", life=life)
    hub.credits()
    actor.progressed([(number, 1) for number in range(known)], 0.0)
    hub.fleet.overdue(0.0, 10.0)
    actor.progressed([(number, 1 + (number not in stuck)) for number in range(known)], 9.0)
    assert hub.fleet.overdue(11.0, 10.0) == [("a", number) for number in stuck]


def test_a_machine_that_breaks_quarantines_nothing() -> None:
    """Eight groups are lost twice with their actor; on a good machine all of them are made."""
    hub = hub_with(max_attempts=3)
    for _ in range(2):
        lose(hub, "broken")
    hub.join("good")
    for number in range(8):
        assert hub.give() == {"good": [number]}  # one at a time
        hub.make(number, name="good")
    assert hub.num_quarantined == 0 and hub.ledger.failed == 16 and hub.ledger.closes


def test_only_the_group_that_ends_an_actor_alone_is_quarantined() -> None:
    hub = hub_with(max_attempts=3)
    for _ in range(2):
        lose(hub)
    hub.join("a")
    hub.join("b")
    assert hub.give() == {"a": [0], "b": [1]}
    hub.fleet.leave("a")
    assert hub.remember().quarantined == (0,)
    hub.make(1, name="b")
    assert hub.give() == {"b": [2]}
    assert hub.ledger.closes


def test_an_actor_that_tries_a_suspect_is_given_nothing_else_and_others_go_on() -> None:
    hub = hub_with(max_attempts=2)
    lose(hub, capacity=1)
    hub.join("a")
    hub.join("b")
    assert hub.give() == {"a": [0], "b": [1, 2, 3, 4, 5, 6, 7]}


def test_silence_counts_against_no_group_however_often() -> None:
    hub = hub_with(max_attempts=2)
    for _ in range(20):
        lose(hub, "slow", seen=False)
    assert not hub.fleet.failures.suspects and hub.num_quarantined == 0 and hub.ledger.failed == 160
    hub.join("slow")
    assert hub.credits()["slow"][0].attempt == 20


def test_the_end_of_a_silent_actor_counts_once_it_is_seen() -> None:
    """First the lease ends, then the supervisor sees the process end."""
    hub = hub_with(max_attempts=2)
    lose(hub, seen=False)
    assert not hub.fleet.failures.suspects
    hub.fleet.leave("a", "ended")
    assert hub.fleet.failures.suspects == set(range(8))
    hub.fleet.leave("a", "ended")
    assert hub.num_quarantined == 0, "one end counts once"


def test_the_return_of_a_silent_actor_as_another_process_counts_and_as_the_same_does_not() -> None:
    hub = hub_with(max_attempts=2)
    for life, counted in (("1", False), ("1", False), ("2", True)):
        hub.join("by-hand", capacity=1, life=life)
        assert bool(hub.fleet.failures.suspects) == counted
        hub.credits()
        hub.fleet.leave("by-hand", seen=False)


def test_a_group_that_silences_its_maker_alone_again_and_again_is_quarantined_when_it_returns() -> None:
    hub = hub_with(max_attempts=2)
    for life in "123":
        lose(hub, "by-hand", seen=False, capacity=1, life=life)
    assert hub.remember().quarantined == (0,) and hub.ledger.closes
    attempts, reasons = hub.fleet.failures.quarantined[0]
    assert attempts == 2 and "came back as another process" in reasons[-1]


def test_a_group_that_its_actor_does_not_know_of_is_lost_and_does_not_count() -> None:
    """Its credit never arrived."""
    hub = hub_with(max_attempts=2)
    stand_still(hub, 7, known=7)
    assert not hub.fleet.failures.suspects and hub.give() == {"a": [7]}


def test_a_group_without_progress_counts_and_its_actor_is_given_nothing_until_it_moves() -> None:
    hub = hub_with(max_attempts=2)
    stand_still(hub, 3)
    assert hub.fleet.failures.suspects == {3} and hub.credits() == {}
    hub.make(0, 1, 2, 4, 5, 6, 7, name="a")
    hub.fleet.actors["a"].progressed([(3, 1)], 12.0)
    assert hub.credits() == {}, "it holds the group still, and that has not moved"
    hub.fleet.actors["a"].progressed([], 13.0)
    assert hub.give() == {"a": [3]}


def test_an_actor_whose_groups_all_stood_still_is_given_nothing_that_another_has_room_for() -> None:
    """It has let go of them, as it was told to; the other is no longer able to begin just now, and is waited for."""
    hub = hub_with(max_attempts=9)
    stand_still(hub, *range(8), life="1")
    hub.join("a", life="1").progressed([], 12.0)
    other = hub.join("b", fence=0)
    assert hub.credits() == {}
    other.fence = hub.fence
    assert hub.give() == {"b": list(range(8))}
    hub.fleet.leave("b")
    assert hub.give() == {"a": list(range(8))}, "better than nothing"
    hub.fleet.actors["a"].progressed([(0, 0)], 13.0)
    assert hub.fleet.actors["a"].doubted, "it works on one, and has made none of it"
    hub.fleet.actors["a"].progressed([(0, 1)], 14.0)
    assert not hub.fleet.actors["a"].doubted


def test_a_stuck_group_is_not_taken_up_again_by_the_actor_that_holds_it() -> None:
    hub = hub_with(max_attempts=3)
    stand_still(hub, *range(8))
    assert not hub.join("a", [(0, 0), (1, 0)]).leases


def test_attempts_and_what_counts_survive_the_hub() -> None:
    hub = hub_with(max_attempts=3)
    lose(hub, seen=False)
    lose(hub)
    again = Admission(hub.bound, max_attempts=3)
    again.restore(hub.remember(), {})
    assert again.fleet.failures.attempt(0) == 2 and again.fleet.failures.remember() == hub.fleet.failures.remember()
    again.register(2, 0, 0)
    again.publish(0)
    again.fleet.join("b", Actor(capacity=8, fence=2, version=0, last_seen=0.0))
    again.credits()
    again.fleet.leave("b")
    assert again.fleet.failures.suspects == set(range(8))


def test_a_suspect_is_made_beside_groups_that_only_wait_for_room() -> None:
    """They wait until the next batch is taken, which cannot do without the suspect."""
    hub = Ready(Bound(groups_per_batch=2, max_staleness=1, num_groups=8), max_attempts=2, max_bytes=10)
    waiting = hub.join("a", capacity=1)
    hub.join("b", capacity=3)
    assert hub.give() == {"b": [0, 1, 3], "a": [2]}
    hub.fleet.leave("b", "ended")
    assert hub.fleet.failures.suspects == {0, 1, 3} and hub.credits() == {}
    waiting.has_put(2, 1.0)
    with pytest.raises(RefusedError, match="later"):
        hub.put("a", 2, entry(num_bytes=100))
    waiting.capacity = 2  # the finished group takes no room in its engine
    assert hub.give() == {"a": [0]}


def test_an_actor_that_is_dropped_and_comes_back_is_as_stuck_as_it_was() -> None:
    hub = hub_with(max_attempts=9)
    stand_still(hub, *range(8), life="1")
    hub.fleet.drop("a", "adopted no weights in its time")
    hub.join("a", life="1")
    assert hub.credits() == {}
    hub.join("a", life="2")
    assert hub.give() == {"a": list(range(8))}


def test_the_end_of_an_actor_that_was_dropped_while_it_lived_says_nothing_of_its_groups() -> None:
    hub = hub_with(max_attempts=1)
    hub.join("a", life="1")
    hub.credits()
    hub.fleet.drop("a", "adopted no weights in its time")
    hub.join("a", life="2")
    hub.fleet.leave("a", "ended")
    assert hub.num_quarantined == 0 and hub.fleet.failures.suspects == frozenset() and hub.ledger.closes
