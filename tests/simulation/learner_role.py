"""A fake learner around the real `LearnerClient`; its checkpoints are durable the moment they are made.

It is the driver: while it waits or computes, the world turns, and its death is an exception out of that.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TypeVar

import numpy as np

from async_rlhf.buffers.clients.learner import LearnerClient, SuspectGroup, WeightUpload
from async_rlhf.buffers.errors import DeadlineError, HubRestartedError, RefusedError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.tensors import RawTensor
from tests.simulation.actor_role import STILL
from tests.simulation.errand import Errand, ErrandLink, SimUpload
from tests.simulation.ether import SimBroadcaster
from tests.simulation.hub_role import HubRole
from tests.simulation.world import SimLink, ViolationError

AnyLink = TypeVar("AnyLink", bound=SimLink)


class LearnerKilledError(Exception):
    """The learner's process ended here."""


class LearnerLink(SimLink):
    """While the learner waits, the world turns."""

    role: LearnerRole

    def receive(self, timeout_s: float) -> wire.Frames | None:
        self.role.turn_until(self.clock() + timeout_s, self)
        return super().receive(timeout_s)


class LearnerRole:
    """Lives of the learner, each from a checkpoint that is kept; the same calls in the same order as `trainer`."""

    def __init__(
        self, hub: HubRole, seed: int, *, max_steps: int, publish_every: int, save_every: int, keep_last: int, poison: float
    ) -> None:
        self._hub, self._world = hub, hub.world
        self.trains = False
        self._poisonous = lambda number: Random(f"poison {seed} {number}").random() < poison
        self._max_steps, self._publish_every, self._save_every = max_steps, publish_every, save_every
        self._keep_last, self._choice = keep_last, Random(f"goes back {seed}")
        self._kept: list[tuple[int, tuple[int, ...]]] = []  # steps and the groups trained on until then, oldest first
        self._given_up = 0  # the highest step it ever began to commit
        self._killed = False
        self.link: LearnerLink | None = None
        self.weight_link: ErrandLink | None = None
        self.errand: Errand | None = None
        self._broadcaster: SimBroadcaster | None = None
        self._num_lives = 0

    def run(self) -> None:
        """Until a life ends by itself."""
        while True:
            try:
                self._live()
                return
            except (LearnerKilledError, DeadlineError):
                self._world.note("learner ended")
                self._hub.observer.learner_ended()
                self._hub.machine.end("learner")
                if self.errand is not None:
                    self.errand.abandon()
                if self._hub.ether is not None and self._broadcaster is not None:
                    self._hub.ether.learner_ended(self._broadcaster.store)
                for each in (self.link, self.weight_link):
                    if each is not None:
                        each.close()
                self.link, self.weight_link, self._killed = None, None, False
                self.turn_until(self._world.now + self._world.rng.uniform(0.1, 1.0))

    def kill(self) -> None:
        self._killed = self.link is not None

    def replace(self) -> None:
        """A frozen learner is replaced, wakes up, and says what it was about to say."""
        if self.link is None:
            return
        fence, step, link = self._client.fence, self._step, self.link
        self.kill()
        messages: list[wire.Message] = [wire.Commit(fence=fence, step=self._committed)]
        if fence > 0:  # it would take its place back
            messages.append(wire.Register(step=step, committed=self._committed, learner=self._client._life, fence=fence))
        for later in (step, step + 1, step + 2):
            messages += [wire.Take(fence=fence, step=later), wire.Trained(fence=fence, step=later)]

        def speak(left: int) -> None:
            identity = link.identity
            self._hub.arrive(identity, wire.encode(messages[left], request=1000 + left))
            if left + 1 < len(messages):
                self._world.after(self._world.rng.uniform(0.001, 0.1), "zombie", lambda: speak(left + 1))

        self._world.after(self._world.rng.uniform(0.1, 1.2), "zombie", lambda: speak(0))

    def turn_until(self, until: float, link: SimLink | None = None) -> None:
        """The world turns until then, or until there is something to receive."""
        world = self._world
        while not (link is not None and link.inbox):
            if world.next_at() > until:
                world.now = max(world.now, until)
                return
            world.step()
            if self._killed:
                raise LearnerKilledError

    def _live(self) -> None:
        world, rng = self._world, self._world.rng
        self._step, seen = self._go_back()
        self._give_up(*self._floor)
        self.link, self.weight_link, self.errand = self._connect(LearnerLink), self._connect(ErrandLink), None
        self.link.role = self
        links = {"learner": self.link, "learner-weights": self.weight_link}
        self._hub.machine.begin("learner")
        self._client = LearnerClient(
            self._hub.address, timeout_s=self._hub.pace.timeout_s, connect=lambda _, name: links[name],
            weights=self._hub.weights, start=self._begin_publication, broadcaster=self._open_broadcaster(),
        )  # fmt: skip
        self._registered = self.trains = False
        while True:
            try:
                if not self._registered:
                    self._client.register(self._step, self._committed)
                    if self._step < self._max_steps:
                        self._publish(whole=True)
                    self._registered = True
                batch = self._client.take(self._step)
                if isinstance(batch, SuspectGroup):
                    self._hub.observer.tried(batch.number)
                    self.turn_until(world.now + rng.uniform(0.005, 0.05))
                    self._digest(batch.number)
                    self._client.tried(batch)
                    self._hub.observer.trying = None
                    continue
            except HubRestartedError:
                self._registered = False
                continue
            except RefusedError as error:
                raise ViolationError("refused", f"at step {self._step} the learner was refused: {error}") from error
            if isinstance(batch, str):
                break
            self._hub.observer.trained(self._step, batch.groups, seen)
            self.trains = True
            self.turn_until(world.now + rng.uniform(0.005, 0.05))
            for group in batch.groups:
                self._digest(group.number)
            seen = (*seen, *(group.number for group in batch.groups))
            step = self._step
            self._tell(lambda: self._client.trained(step))  # noqa: B023  (called at once)
            self._step, self.trains = step + 1, False
            if self._step % self._publish_every == 0 and self._step < self._max_steps:
                self._tell(lambda: self._publish(whole=self._hub.bound.exact))
            if self._step % self._save_every == 0 or self._step == self._max_steps:
                self._save(seen)
        if self._step > max((step for step, _ in self._kept), default=0):
            self._save(seen)
        self._commit(self._step, seen)
        if not self._registered:
            self._client.register(self._step, self._committed)
        self._hub.observer.ended(seen)

    def _digest(self, number: int) -> None:
        if self._poisonous(number):
            self._world.note("poison")
            raise LearnerKilledError

    def _go_back(self) -> tuple[int, tuple[int, ...]]:
        """The newest checkpoint, or one before it that the queue still has the groups after: those after it are set aside."""
        choices = [each for each in ((0, ()), *self._kept) if each[0] >= self._given_up]
        chosen = choices[-1] if self._choice.random() < 0.5 else self._choice.choice(choices)
        if chosen != choices[-1]:
            self._world.note("the learner goes back")
        self._kept = [each for each in self._kept if each[0] <= chosen[0]]
        return chosen

    @property
    def _floor(self) -> tuple[int, tuple[int, ...]]:
        """As `async_rlhf.learner.checkpoint.store.Checkpoints.floor`."""
        return self._kept[0] if len(self._kept) == self._keep_last else (0, ())

    def _save(self, seen: tuple[int, ...]) -> None:
        self.turn_until(self._world.now + self._world.rng.uniform(0, 0.02))
        self._kept = [*self._kept, (self._step, seen)][-self._keep_last :]
        self.turn_until(self._world.now + self._world.rng.uniform(0, 0.02))
        if self._floor[0] > self._committed:
            self._commit(*self._floor)

    def _commit(self, step: int, seen: tuple[int, ...]) -> None:
        self._give_up(step, seen)
        self._tell(lambda: self._client.commit(step))

    def _give_up(self, step: int, seen: tuple[int, ...]) -> None:
        """From now on the hub may hear that the groups trained on in the steps before `step` are needed no more."""
        self._committed, self._given_up = step, max(self._given_up, step)
        self._hub.observer.durable |= frozenset(seen)

    def _connect(self, kind: type[AnyLink]) -> AnyLink:
        network = self._hub.network
        link = kind(network, "learner", f"learner-{len(network.links)}".encode(), lambda: None)
        network.links[link.identity] = link
        if network.listening:
            link.reconnect()
        return link

    def _begin_publication(self, work: Callable[[], None]) -> WeightUpload:
        """Goes on while batches are taken and trained on."""
        assert self.weight_link is not None
        publication = SimUpload(work, self._world, self.turn_until, lambda: self._hub.machine.run("learner"))
        self.errand = self.weight_link.errand = publication.errand
        return publication

    def _open_broadcaster(self) -> SimBroadcaster | None:
        if self._hub.ether is None:
            return None
        link, self._num_lives = self.weight_link, self._num_lives + 1
        assert link is not None
        self._broadcaster = SimBroadcaster(self._hub.ether, f"store {self._num_lives}", lambda: link.errand)
        return self._broadcaster

    def _publish(self, *, whole: bool) -> None:
        """whole: wait until the hub has it, as `async_rlhf.learner.loop.source` does."""
        content = np.full(3, self._step, "<i4").tobytes()
        moving, still = RawTensor("int32", (3,), content), RawTensor("int32", (STILL.size,), STILL.tobytes())
        tensors = {"w": moving, "still": still, "b": moving}  # those that change are in the first part and in the last
        publication = self._client.begin_publish(self._step, tensors)
        if whole:
            publication.wait()

    def _tell(self, operation: Callable[[], object]) -> None:
        if not self._registered:
            return
        try:
            operation()
        except HubRestartedError:
            self._registered = False
        except RefusedError as error:
            raise ViolationError("refused", f"at step {self._step} the learner was refused: {error}") from error
