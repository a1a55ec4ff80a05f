"""A group that is lost with its actor again and again is tried alone before it is quarantined, and so is one of a batch that
ends the learner again and again; an operator takes back what is not trained on yet."""

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


def test_the_end_of_an_actor_that_was_dropped_while_it_lived_says_nothing_of_its_groups() -> None:
    hub = hub_with(max_attempts=1)
    hub.join("a", life="1")
    hub.credits()
    hub.fleet.drop("a", "adopted no weights in its time")
    hub.join("a", life="2")
    hub.fleet.leave("a", "ended")
    assert hub.num_quarantined == 0 and hub.fleet.failures.suspects == frozenset() and hub.ledger.closes


# -- batches that end the learner ------------------------------------------------------------------------------------


MAX_ATTEMPTS = 3


def hub_with_batches(groups_per_batch: int = 3) -> Ready:
    """Two batches are queued, the first learner has registered."""
    hub = Ready(Bound(groups_per_batch, max_staleness=2, num_groups=12), max_attempts=MAX_ATTEMPTS)
    hub.join(capacity=2 * groups_per_batch)
    hub.make(*hub.give()["anna"])
    return hub


def learner_ends(hub: Ready, step: int = 0) -> None:
    """Another one registers in its place."""
    hub.register(hub.fence + 1, step, 0, f"learner {hub.fence + 1}")


def learner_ends_with_batch(hub: Ready, times: int) -> None:
    for _ in range(times):
        assert hub.take(hub.step) is not None and hub.trial(hub.step) is None
        learner_ends(hub, hub.step)


def test_after_so_many_ends_each_group_is_tried_alone_and_the_guilty_one_is_taken_out() -> None:
    hub = hub_with_batches()
    learner_ends_with_batch(hub, MAX_ATTEMPTS)
    assert hub.take(0) == [0, 1, 2] and hub.trial(0) == 0
    hub.tried(0, 0, done=True)
    assert hub.take(0) == [0, 1, 2] and hub.trial(0) == 1
    learner_ends(hub)
    assert hub.num_quarantined == 0, "it never had the group"
    assert hub.take(0) == [0, 1, 2] and hub.trial(0) == 1
    hub.tried(0, 1, done=False)
    learner_ends(hub)
    assert hub.remember().removed == (1,) and hub.num_quarantined == 1 and hub.ledger.closes
    assert hub.take(0) == [0, 2] and hub.trial(0) == 2, "0 has passed"
    hub.tried(0, 2, done=True)
    assert hub.take(0) == [0, 2] and hub.trial(0) is None
    hub.trained(0)
    assert hub.take(1) == [3, 4, 5], "the other steps keep their batches"
    assert "ended the learner alone" in hub.fleet.failures.quarantined[1][1][-1]


def test_groups_that_pass_alone_are_never_quarantined_though_the_whole_goes_on_ending_the_learner() -> None:
    hub = hub_with_batches()
    learner_ends_with_batch(hub, MAX_ATTEMPTS)
    hub.take(0)
    for number in (0, 1, 2):
        assert hub.trial(0) == number
        hub.tried(0, number, done=True)
    learner_ends_with_batch(hub, 5)
    assert hub.num_quarantined == 0 and hub.take(0) == [0, 1, 2]


def test_a_learner_that_comes_back_to_a_restarted_hub_and_one_that_ends_between_batches_count_nothing() -> None:
    hub = hub_with_batches()
    for _ in range(2 * MAX_ATTEMPTS):
        hub.take(0)
        hub.register(hub.fence + 1, 0, 0, hub.owner)  # the same process again
        learner_ends(hub)  # without a batch
    assert hub.take(0) == [0, 1, 2] and hub.trial(0) is None


def test_ends_with_another_batch_do_not_add_up() -> None:
    hub = hub_with_batches()
    learner_ends_with_batch(hub, MAX_ATTEMPTS - 1)
    hub.take(0)
    hub.trained(0)
    hub.publish(1)
    learner_ends_with_batch(hub, MAX_ATTEMPTS - 1)
    assert hub.take(1) == [3, 4, 5] and hub.trial(1) is None


def test_a_batch_of_one_bad_group_is_given_empty_and_the_run_goes_on_to_its_end() -> None:
    hub = hub_with_batches(groups_per_batch=1)
    learner_ends_with_batch(hub, MAX_ATTEMPTS)
    hub.take(0)
    assert hub.trial(0) == 0
    hub.tried(0, 0, done=False)
    learner_ends(hub)
    assert hub.take(0) == [] and hub.trial(0) is None
    hub.trained(0)
    assert hub.take(1) == [1] and hub.num_left == 10


def test_what_was_taken_out_stays_out_when_the_hub_is_restarted() -> None:
    hub = hub_with_batches()
    hub.take(0)
    learner_ends(hub)
    with pytest.raises(RefusedError, match="unregistered"):
        hub.quarantine(1, "an operator said so")
    hub.publish(0)
    hub.quarantine(1, "an operator said so")
    again = Admission(hub.bound, max_attempts=MAX_ATTEMPTS)
    again.restore(hub.remember(), {number: entry() for number in range(6)})
    again.assign(0, [0, 1, 2])
    again.register(hub.fence + 1, 0, 0, "another")
    assert again.take(0) == [0, 2] and again.num_quarantined == 1 and again.ledger.closes


def test_an_operator_takes_back_what_waits_or_is_being_made_and_never_what_the_learner_holds() -> None:
    hub = hub_with_batches()
    hub.take(0)
    hub.published = None
    with pytest.raises(RefusedError, match="unregistered"):
        hub.quarantine(4, "bad")
    hub.publish(0)
    hub.quarantine(4, "bad")
    assert hub.give() == {"anna": [6, 7, 8, 9]}
    hub.quarantine(9, "bad")
    assert hub.remember().quarantined == (4, 9) and hub.ledger.closes
    for number in (0, 4, 9, 11, 1 << 40, -1):
        with pytest.raises(RefusedError, match=r"trained|unknown"):
            hub.quarantine(number, "bad")
    with pytest.raises(RefusedError, match="trained"):
        hub.quarantine(0, "bad", steps_done=1)
