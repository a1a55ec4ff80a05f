"""Who may begin which group, what a batch is, who is refused. Under every disorder that a run can meet: `tests/simulation`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from async_rlhf.buffers.errors import RefusedError
from async_rlhf.buffers.queue.admission import Actor, Admission
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.queue.ledger import QueueSnapshot
from async_rlhf.buffers.record import Entry
from tests.buffers.queue.ready import Ready, entry


@pytest.mark.parametrize("actor", [{"version": 1 << 40}, {"version": -1}, {"fence": 2}])
def test_an_actor_that_serves_no_published_version_is_given_no_work(actor: dict[str, int]) -> None:
    hub = Ready(Bound(2, 1, 10))
    hub.join(**actor)
    assert hub.credits() == {}


def test_work_that_no_version_can_have_begun_is_not_leased_to_who_claims_it() -> None:
    hub = Ready(Bound(2, 0, 1 << 40))
    liar = hub.join("liar", [(1, 0), (2, 0), ((1 << 40) - 1, 0), (1 << 50, 0), (-1, 0)], capacity=0)
    assert list(liar.leases) == [1]
    assert hub.ledger.leased == 1


def test_a_credit_that_was_lost_on_the_way_is_given_again_under_a_new_attempt() -> None:
    """Anna works on attempt 0 in vain; attempt 1 is credited to her while she is cut off. Her hello tells it apart."""
    hub = Ready(Bound(1, 0, 10))
    hub.join(capacity=1)
    hub.credits()
    hub.fleet.leave("anna")
    hub.join("ben", capacity=1)
    assert hub.credits()["ben"][0].attempt == 1
    assert not hub.join("anna", [(0, 0)], capacity=1).leases
    hub.fleet.leave("ben")
    assert hub.credits()["anna"][0].attempt == 2
    anna = hub.join("anna", [(0, 0)], capacity=1)
    assert anna.leases[0].attempt == 0 and hub.ledger.failed == 3  # what she works on is wanted again


def test_a_group_may_overtake_those_in_its_window_and_no_others() -> None:
    hub = Ready(Bound(groups_per_batch=2, max_staleness=3, num_groups=20, window=3))
    hub.join()
    hub.credits()
    hub.make(3, 4)
    assert hub.take(0) is None, "0 is the head: its window ends with 2"
    hub.make(2)
    assert hub.take(0) is None
    hub.make(0)
    assert hub.take(0) == [0, 2]
    hub.trained(0)
    assert hub.take(1) is None, "1 is the head: its window ends with 3, though 2 is consumed"
    hub.make(1)
    assert hub.take(1) == [1, 3]


def test_what_was_lost_is_given_again_the_lowest_number_first() -> None:
    hub = Ready(Bound(4, 0, 100))
    hub.join("anna", capacity=2)
    hub.join("ben", capacity=2)
    assert hub.give() == {"anna": [0, 2], "ben": [1, 3]}
    hub.fleet.leave("ben")
    hub.fleet.leave("anna")
    hub.join("carl")
    assert hub.give() == {"carl": [0, 1, 2, 3]}


def test_in_exact_mode_a_quarantine_makes_groups_of_the_wrong_version_again() -> None:
    """Groups 0 and 1 are step 0, 2 and 3 step 1; when 1 is quarantined, 2 moves to step 0 and its version 0 is too new."""
    hub = Ready(Bound(1, 1, 10, exact=True))
    hub.join()
    hub.credits()
    hub.make(0)
    assert hub.take(0) == [0]
    hub.trained(0)
    hub.publish(1)
    hub.join("ben", version=1)
    assert hub.give()["ben"] == [2]
    hub.make(2, name="ben")
    for _ in range(3):
        hub.fleet.leave("anna")
        hub.join(capacity=1)
        given = hub.give()
    assert hub.remember().quarantined == (1,)
    assert given["anna"] == [2]
    assert hub.lowest_needed_version() == 0
    hub.put("anna", 2, entry(num_tokens=5))
    assert hub.take(1) == [2]
    ledger = hub.ledger
    assert ledger.closes
    assert (ledger.stale, ledger.tokens_stale, ledger.tokens_put) == (1, 1, 1 + 1 + 5)


def test_in_exact_mode_a_restarted_hub_does_not_take_up_what_a_quarantine_dropped() -> None:
    """The journal still holds group 2 as it was put, of version 1; since group 1 is quarantined it needs version 0."""
    hub = Admission(Bound(1, 1, 10, exact=True))
    hub.restore(QueueSnapshot(fence=1, quarantined=(1,)), {0: entry(), 2: entry(version=1)})
    hub.assign(0, [0])
    hub.register(2, 1, 0)
    hub.publish(1)
    assert hub.take(1) is None
    hub.fleet.join("anna", Actor(1, 2, 0, 0.0))
    assert [credit.number for credit in hub.credits()["anna"]] == [2]


def test_a_hub_that_was_restarted_takes_the_work_of_its_actors_before_the_learner_is_back() -> None:
    hub = Ready(Bound(1, 1, 10))
    hub.join()
    hub.credits()
    hub.make(0)
    assert hub.take(0) == [0]
    # The learner trained and published version 1, the actor serves it and has begun group 2: then the hub dies.
    again = Admission(hub.bound)
    again.restore(hub.remember(), {0: entry()})
    again.assign(0, [0])
    again.fleet.join("anna", Actor(100, 1, 1, 0.0), [(1, 0), (2, 0)])
    again.put("anna", 1, Entry(0, 0, 1, 1))
    again.put("anna", 2, entry(version=1))
    again.register(2, 1, 0)
    again.publish(1)
    assert again.take(1) == [1]
    assert again.ledger.stale == 0


def test_a_run_that_is_to_go_no_further_than_it_went_is_at_its_end() -> None:
    """Its journal holds batches of steps that it is no longer to make, the last of them taken and not trained."""
    hub = Admission(Bound(groups_per_batch=2, max_staleness=1, num_groups=2))
    hub.restore(QueueSnapshot(fence=1), {number: entry() for number in range(4)})
    hub.assign(0, [0, 1])
    hub.assign(1, [2, 3])
    hub.register(2, 1, 0)
    hub.publish(1)
    assert hub.at_end and hub.take(1) is None and hub.num_left == 0
    assert not hub.credits() and hub.ledger.closes


def test_what_is_committed_is_remembered_by_number_only_where_it_must_be() -> None:
    hub = Ready(Bound(2, 2, 100, window=4))
    hub.join(capacity=100)
    hub.make(*(number for number in hub.give()["anna"] if number != 0))
    assert hub.train() == [1, 2]
    assert hub.commit(1) == [1, 2]
    state = hub.remember()
    assert (state.head, state.consumed, state.committed_groups) == (0, (1, 2), 2)


def test_silence_for_longer_than_a_lease_gives_an_actors_groups_to_others_and_counts_against_none() -> None:
    hub = Ready(Bound(2, 0, 10), max_attempts=1, lease_s=10.0)
    hub.join("anna", last_seen=0.0)
    assert hub.give() == {"anna": [0, 1]}
    hub.join("ben", last_seen=5.0)
    assert hub.fleet.expire(10.0) == [] and hub.fleet.expire(10.1) == ["anna"]
    assert hub.give() == {"ben": [0, 1]} and hub.ledger.failed == 2
    assert not hub.num_quarantined and not hub.fleet.failures.suspects


def test_two_actors_that_wait_for_each_others_work_in_exact_mode_do_not_leave_their_own() -> None:
    """Each is to adopt what its own next group needs, however often the other takes or loses one."""
    hub = Ready(Bound(2, 1, 6, exact=True))
    hub.join("anna", capacity=1)
    hub.join("ben", capacity=1)
    assert hub.give() == {"anna": [0], "ben": [1]}
    hub.fleet.leave("anna", seen=False)
    hub.join("anna", capacity=0)
    assert [hub.target(name) for name in ("anna", "ben")] == [0, 0]
    hub.join("anna", capacity=1)
    assert hub.give() == {"anna": [0]}
    hub.make(0, name="anna")
    hub.make(1, name="ben")
    assert hub.take(0) == [0, 1]


PUTS = {
    "unknown": (10, entry()), "duplicate": (0, entry()), "superseded": (1, entry(attempt=3)),
    "future": (1, Entry(0, 0, 9, 1)), "stale": (2, Entry(0, -1, 0, 1)),
}  # fmt: skip


@pytest.mark.parametrize("reason", PUTS)
def test_a_put_that_may_not_enter_is_refused_and_only_impossible_versions_cost_the_lease(reason: str) -> None:
    hub = Ready(Bound(2, 1, 10))
    hub.join()
    hub.credits()
    hub.make(0)
    number, given = PUTS[reason]
    with pytest.raises(RefusedError, match=reason):
        hub.put("anna", number, given)
    ledger, cost = hub.ledger, int(reason in ("future", "stale"))
    assert ledger.closes and (ledger.stale, ledger.leased, ledger.queued) == (cost, 3 - cost, 1)
    assert ledger.duplicates_refused == (reason in ("duplicate", "superseded"))


REFUSED: dict[str, list[Callable[[Ready], object]]] = {
    "fenced": [lambda hub: hub.register(hub.fence, 1, 1)],
    "unknown-step": [lambda hub: hub.register(9, 3, 0)],
    "committed": [lambda hub: hub.register(9, 0, 0)],
    "order": [
        *(lambda hub, step=step: hub.take(step) for step in (0, 2)),
        *(lambda hub, step=step: hub.trained(step) for step in (0, 1, 2)),
        *(lambda hub, step=step: hub.publish(step) for step in (0, 2)),
        lambda hub: hub.commit(2),
    ],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_learner_out_of_step_with_an_old_fence_or_of_another_run_is_refused_and_changes_nothing(reason: str) -> None:
    hub = Ready(Bound(1, 1, 10))
    hub.join()
    hub.credits()
    hub.make(0, 1)
    hub.train()
    hub.commit(1)
    before = hub.remember()
    for call in REFUSED[reason]:
        with pytest.raises(RefusedError, match=reason):
            call(hub)
    assert hub.remember() == before and hub.take(1) == [1]
