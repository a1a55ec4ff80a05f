"""A set that is on its way while the learner takes, trains on and finishes the next batch."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from async_rlhf.buffers.clients.learner import WeightUpload
from async_rlhf.buffers.errors import HubRestartedError, RefusedError
from async_rlhf.buffers.queue.bound import Bound
from tests.buffers.hub.place import DEADLINE_S, Place, come_back, taken, tensors, until


class Gate:
    """Publications begin when it is open."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()

    def begin(self, work: Callable[[], None]) -> WeightUpload:
        def late() -> None:
            assert self.opened.wait(DEADLINE_S)
            work()

        return WeightUpload(late)


def test_the_next_batch_is_taken_meanwhile_and_its_step_counts_when_the_set_is_there(place: Callable[..., Place]) -> None:
    hub, gate = place(Bound(groups_per_batch=1, max_staleness=1, num_groups=4)), Gate()
    anna, learner = hub.actor(), hub.learner(start=gate.begin)
    anna.makes(0, 1)
    assert taken(learner, 0) == [0]
    learner.trained(0)
    gate.opened.clear()
    publication = learner.begin_publish(1, tensors(1))
    assert taken(learner, 1) == [1], "made by version 0, which the bound allows"
    assert hub.status()["version"] == 0
    finishing = hub.meanwhile(lambda: learner.trained(1))
    gate.opened.set()
    finishing.result(DEADLINE_S)
    publication.check()
    assert hub.status()["version"] == 1, "step 2 is not counted before version 1 is whole"
    learner.begin_publish(2, tensors(2))
    until(lambda: anna.version == 2, anna)
    assert anna.tensors == {name: bytes(tensor.data) for name, tensor in tensors(2).items()}


def test_a_batch_that_needs_the_version_on_its_way_waits_for_it(place: Callable[..., Place]) -> None:
    hub, gate = place(Bound(groups_per_batch=1, max_staleness=0, num_groups=2)), Gate()
    anna, learner = hub.actor(), hub.learner(start=gate.begin)
    anna.makes(0)
    assert taken(learner, 0) == [0]
    learner.trained(0)
    gate.opened.clear()
    learner.begin_publish(1, tensors(1))
    taking = hub.meanwhile(lambda: taken(learner, 1))
    until(lambda: hub.status()["step"] == 1, anna)
    assert (anna.begun, anna.version) == ({}, 0), "with staleness 0 nothing is begun by version 0"
    gate.opened.set()
    anna.makes(1)
    assert anna.version == 1
    until(taking.done, anna)
    assert taking.result() == [1]


def test_a_learner_that_waits_for_its_batch_hears_of_a_refused_set_and_of_a_restarted_hub(place: Callable[..., Place]) -> None:
    hub, gate = place(Bound(groups_per_batch=1, max_staleness=1, num_groups=4)), Gate()
    learner = hub.learner(start=gate.begin)
    gate.opened.clear()
    learner.begin_publish(0, tensors(1))  # of this version there is a set already: the hub wants no other
    hub.restart()
    taking = hub.meanwhile(lambda: learner.take(0))
    with pytest.raises(HubRestartedError):
        taking.result(DEADLINE_S)
    gate.opened.set()
    come_back(learner)

    learner.begin_publish(3, tensors(3))
    with pytest.raises(RefusedError, match="done 0 steps and cannot publish version 3"):
        learner.take(0)
    come_back(learner)
