"""An admission with a learner that has registered and published, whose actors are as good as told."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from async_rlhf.buffers.queue.admission import Actor, Admission
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.record import Entry


def entry(attempt: int = 0, version: int = 0, num_tokens: int = 1) -> Entry:
    """Of a group whose tokens are all of one version."""
    return Entry(attempt, version, version, num_tokens, num_bytes=0)


class Ready(Admission):
    """Version 0 is published."""

    def __init__(self, bound: Bound, **settings: Any) -> None:
        super().__init__(bound, **settings)
        self.register(1, 0, 0, "learner 1")
        self.publish(0)

    def join(self, name: str = "anna", holding: Iterable[tuple[int, int]] = (), **actor: Any) -> Actor:
        """With a capacity of eight unless another is given, and at version 0."""
        joined = Actor(**{"capacity": 8, "fence": 1, "version": 0, "last_seen": 0.0} | actor)
        self.fleet.join(name, joined, holding)
        return joined

    def give(self) -> dict[str, list[int]]:
        """Credits: to whom which numbers."""
        return {name: [credit.number for credit in credits] for name, credits in self.credits().items()}

    def make(self, *numbers: int, name: str = "anna", **put: Any) -> None:
        """Puts what the actor holds a lease of, by the version that it serves."""
        actor = self.fleet.actors[name]
        for number in numbers:
            self.put(name, number, entry(actor.leases[number].attempt, actor.version), **put)

    def train(self) -> list[int]:
        """The next batch; all actors serve the version that comes of it."""
        batch = self.take(self.step)
        assert batch is not None
        self.trained(self.step)
        self.publish(self.step)
        for actor in self.fleet.actors.values():
            actor.version = self.step
        return batch
