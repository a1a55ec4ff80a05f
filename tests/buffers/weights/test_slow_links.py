"""An actor whose link is slower than a step: what it fetches is not taken from under it while it can earn a credit."""

from __future__ import annotations

from collections.abc import Callable

from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.bound import Bound
from tests.buffers.hub.place import DEADLINE_S, Place, tensors, train, until


def test_a_slow_actor_is_told_of_a_newer_set_only_when_the_one_it_fetches_can_earn_nothing_more(
    place: Callable[..., Place],
) -> None:
    hub = place(Bound(groups_per_batch=1, max_staleness=4, num_groups=40))
    fast, slow, learner = hub.actor("fast", capacity=1), hub.stranger("slow"), hub.learner(publishes=False)
    told: list[int] = []

    def listen() -> bool:
        while (received := slow.receive(0.0)) is not None:
            if isinstance(received[1], wire.Adopt):
                told.append(received[1].version)
        return bool(told)

    hello = wire.Hello(actor="slow", life="1", capacity=1, fence=0, version=-1)
    assert isinstance(slow.ask(hello, timeout_s=DEADLINE_S)[0], wire.Welcome)
    learner.publish(0, tensors(0))
    for step in range(12):
        until(listen, fast)
        fast.makes(step)
        assert train(learner, step) == [step]
        slow.send(wire.Beat(capacity=1, fence=0, version=-1))
        asked = wire.Fetch(fence=learner.fence, version=told[-1])
        if told[-1] >= step - 1:  # within the bound of what is begun next
            assert isinstance(slow.ask(asked, timeout_s=DEADLINE_S)[0], wire.Manifest), "the set is still there"
    listen()
    assert told == sorted(set(told)) and told[0] == 0
    assert 2 <= len(told) <= 5, f"of 12 versions it was told of {told}"
