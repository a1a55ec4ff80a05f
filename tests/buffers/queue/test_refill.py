"""Refill: a batch is made of groups that say something, within the bound, up to a cap, and whatever the hub forgets."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.queue.admission import Admission
from async_rlhf.buffers.queue.bound import Bound
from tests.buffers.queue.ready import Ready, entry

ENDLESS = 1 << 40


def ready(bound: Bound) -> Ready:
    hub = Ready(bound)
    hub.join(capacity=1000)
    return hub


def make(hub: Ready, constant: set[int] | None, random: Random | None = None) -> None:
    """Everything that can be begun is put, at once or in a random order; all is constant, or these numbers are."""
    anna = hub.fleet.actors["anna"]
    while True:
        hub.credits()
        if not (leased := sorted(anna.leases)):
            return
        number = random.choice(leased) if random else leased[0]
        made = entry(anna.leases[number].attempt, anna.version, num_tokens=3)
        hub.put("anna", number, made, constant=constant is None or number in constant)
        assert hub.ledger.closes


def test_what_is_behind_a_filtered_group_takes_its_place() -> None:
    hub = ready(Bound(2, 0, 6, refills=3, numbers=ENDLESS))
    for batch in ([1, 3], [6, 7], [8, 9]):
        make(hub, {0, 2, 4, 5})
        assert hub.train() == batch
    assert hub.at_end and hub.num_left == 0
    ledger = hub.ledger
    assert (ledger.credited, ledger.trained, ledger.filtered, ledger.tokens_filtered, ledger.tokens_put) == (10, 6, 4, 12, 30)


def test_where_everything_is_constant_the_cap_lets_batches_through() -> None:
    hub = ready(Bound(2, 0, 4, refills=2, numbers=ENDLESS))
    make(hub, None)
    assert hub.train() == [4, 5]  # of the batch's first 2 x 2 numbers none entered
    make(hub, None)
    assert hub.train() == [10, 11]
    assert hub.ledger.filtered == 8


@given(st.integers(1, 4), st.integers(1, 3), st.sets(st.integers(0, 40)), st.randoms(use_true_random=False))
def test_in_a_synchronous_run_the_order_of_puts_decides_nothing(
    groups_per_batch: int, refills: int, constant: set[int], random: Random
) -> None:
    bound = Bound(groups_per_batch, 0, 3 * groups_per_batch, refills=refills, numbers=ENDLESS)
    in_order, shuffled = ready(bound), ready(bound)
    for _ in range(3):
        make(in_order, constant)
        make(shuffled, constant, random)
        batch = in_order.train()
        assert batch == shuffled.train()
        assert len(batch) == groups_per_batch
    assert in_order.remember() == shuffled.remember()


def test_of_each_batch_only_so_many_are_filtered() -> None:
    bound = Bound(4, 0, 40, refills=2, numbers=ENDLESS)
    hub, random = ready(bound), Random(5)
    constant, first = {number for number in range(200) if random.random() < 0.8}, 0
    for _ in range(10):
        make(hub, constant)
        batch = hub.train()
        range_of_batch = set(range(first, batch[-1] + 1))
        assert range_of_batch - set(batch) == {n for n in range(first, first + 8) if n in constant and n < batch[-1]}
        first = batch[-1] + 1


def test_a_restarted_hub_knows_what_was_filtered_and_forgets_numbers_that_no_longer_matter() -> None:
    bound = Bound(2, 1, 40, refills=3, numbers=ENDLESS)
    hub = ready(bound)
    for step in range(1, 15):
        make(hub, set(range(0, 100, 3)))
        hub.train()
        hub.commit(step)
        state = hub.remember()
        assert len(state.filtered) <= 4, "what is remembered grows"
        again = Admission(bound)
        again.restore(state, hub._queued)
        assert again.remember() == state and again.num_filtered == hub.num_filtered
        assert again.num_left == hub.num_left and again.ledger.closes
    assert hub.num_filtered >= 14


def test_refill_is_refused_where_each_group_has_its_version() -> None:
    with pytest.raises(ConfigError, match=r"queue.exact = true with .*'refill'.*'drop'"):
        Admission(Bound(2, 1, 8, exact=True, refills=1))
