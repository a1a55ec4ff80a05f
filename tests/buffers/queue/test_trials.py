"""A batch that ends the learner again and again is tried group by group; only what ends it alone is taken out."""

from __future__ import annotations

import pytest

from async_rlhf.buffers.errors import RefusedError
from async_rlhf.buffers.queue.admission import Admission
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.queue.failures import Trials
from tests.buffers.queue.ready import Ready, entry

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


def test_a_trial_of_a_group_that_is_not_in_the_batch_is_refused() -> None:
    hub = hub_with_batches()
    learner_ends_with_batch(hub, MAX_ATTEMPTS)
    hub.take(0)
    hub.trial(0)
    for step, number in ((0, 3), (1, 0)):
        with pytest.raises(RefusedError, match="order"):
            hub.tried(step, number, done=True)


def test_trials_count_only_until_the_batch_is_trained_on() -> None:
    trials = Trials(1)
    trials.ended(4)
    trials.passed(8)
    assert trials.next(4, [8, 9]) == 9
    trials.forget(4, [8, 9])
    assert trials.next(4, [8, 9]) is None
