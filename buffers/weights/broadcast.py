"""The hub's half of the device channel: which engines take part in a broadcast of the learner's, and which adopt what came.

No torch, no socket and no clock: `server` hands it the messages. An *epoch* is a number, a place where its processes
meet, and the engines in it with their ranks (the learner has rank 0). The same epoch serves version after version, until an
engine joins, leaves or ends, or a broadcast failed; then the next version has a new one:

    learner  Gather ->     hub     -> Receive  each engine of the epoch
             <- Receive                        they broadcast among themselves; each engine takes the digests of what came
             Broadcast ->          <- Beat     "received": it has that version whole
                                   -> Adopt    with the learner's digest, which the engine compares with its own

So a version exists when the learner has broadcast it, before its bytes are at the hub; they follow, for engines outside of the
epoch, for those that join later, for one whose digest differs, and for exact mode, which needs older versions again.

An engine that was in an epoch that failed takes part again when it has reported that it left: one that hangs reports nothing
of it, although a thread of its process goes on beating. One that sends Hello begins anew. Epochs are ordered by (fence,
number): the fence rises with each learner and each start of the hub, so that no number means two epochs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from async_rlhf.buffers.protocol import broadcasts, wire
from async_rlhf.buffers.protocol.broadcasts import EngineDevice
from async_rlhf.buffers.queue.admission import Actor, Admission

Member = tuple[str, str]
"""An actor's name, and the life of its process."""


@dataclass(frozen=True)
class Epoch:
    id: tuple[int, int]
    """(fence, number)."""
    members: tuple[Member, ...]
    """By rank, from 1 on."""


class Membership:
    """Owns the newest epoch, and which one each engine was given last."""

    def __init__(self) -> None:
        self.epoch: Epoch | None = None
        self._is_whole = False
        self._given: dict[Member, tuple[int, int]] = {}

    def gather(self, fence: int, states: Mapping[Member, EngineDevice]) -> Epoch:
        """The epoch of the next broadcast. states: what the engines that are there report."""
        self._given = {member: given for member, given in self._given.items() if member in states}
        newest, number = self.epoch, 1
        if newest is not None and newest.id[0] == fence:
            stays = self._is_whole and all(self.is_in(member, states.get(member)) for member in newest.members)
            if stays and set(newest.members) == {member for member in states if self._may_come(member, states)}:
                return newest
            number = newest.id[1] + 1
        members = tuple(sorted(member for member in states if self._may_come(member, states)))
        self.epoch, self._is_whole = Epoch((fence, number), members), True
        self._given |= dict.fromkeys(members, self.epoch.id)
        return self.epoch

    def failed(self) -> None:
        """The newest epoch is over."""
        self._is_whole = False

    def joined(self, member: Member) -> None:
        """A member sent Hello: its epoch may be lost, and it does not hang."""
        self._given.pop(member, None)

    def is_in(self, member: Member, state: EngineDevice | None) -> bool:
        """Whether it was given the newest epoch, which is not over, and has not left it."""
        given, epoch = self._given.get(member), self.epoch
        is_given = self._is_whole and epoch is not None and given == epoch.id
        return is_given and state is not None and (state.epoch_id != given or state.is_member)

    def _may_come(self, member: Member, states: Mapping[Member, EngineDevice]) -> bool:
        given = self._given.get(member)
        is_in_whole = self._is_whole and self.epoch is not None and given == self.epoch.id
        return given is None or is_in_whole or (states[member].epoch_id == given and not states[member].is_member)


class Broadcasts:
    """Owns the membership and the newest broadcast. messages: to be sent, (identity, message). counters: for the status."""

    def __init__(self) -> None:
        self.membership, self.messages = Membership(), list[tuple[bytes, wire.Message]]()
        self.counters = {"epochs": 0, "broadcasts": 0, "broadcasts_failed": 0, "broadcasts_refused": 0}
        self._newest: broadcasts.Broadcast | None = None

    def gather(self, message: broadcasts.Gather, admission: Admission) -> broadcasts.Receive:
        """The answer to the learner. Raises RefusedError for a version that may not come."""
        admission.check_version(message.version)
        actors = _actors(admission)
        states = {member: actor.device for member, actor in actors.items() if actor.device and not actor.device.out}
        before, epoch = self.membership.epoch, self.membership.gather(message.fence, states)
        self.counters["epochs"] += epoch is not before
        learner, *others = (
            broadcasts.Receive(**dict(message), epoch=epoch.id[1], rank=rank, size=len(epoch.members) + 1)
            for rank in range(len(epoch.members) + 1)
        )
        self.messages += [(actors[member].identity, each) for member, each in zip(epoch.members, others, strict=True)]
        return learner

    def broadcast(self, message: broadcasts.Broadcast, admission: Admission) -> wire.Done:
        """A version has been broadcast, and may be served by the engines that received it; or the broadcast has failed."""
        epoch = self.membership.epoch
        if message.digest is not None:
            if message.version != admission.published:
                admission.publish(message.version)
            self.counters["broadcasts"] += self._newest != message
            self._newest = message
        elif epoch is not None and epoch.id == (message.fence, message.epoch):
            self.membership.failed()
            self.counters["broadcasts_failed"] += 1
            actors = _actors(admission)
            self.messages += [(actors[member].identity, message) for member in epoch.members if member in actors]
        return wire.Done()

    def reported(self, actor: Actor, device: EngineDevice | None) -> None:
        """Take an actor's report. An announced set that the actor has lost is announced again."""
        before, actor.device = actor.device, device
        if before is None:
            return
        refused = 0 if device is None else device.num_refused
        self.counters["broadcasts_refused"] += max(0, refused - before.num_refused)
        had, has = before.received, None if device is None else device.received
        if had != has and had == actor.announced != (actor.fence, actor.version):
            actor.announced = None

    @property
    def newest(self) -> tuple[int, int] | None:
        """Fence and version of the newest set that was broadcast."""
        return None if self._newest is None else (self._newest.fence, self._newest.version)

    def has_received(self, actor: Actor, target: tuple[int, int]) -> bool:
        """Whether the target is the newest broadcast, and the actor has it whole."""
        return target == self.newest and actor.device is not None and actor.device.received == target

    def is_expected(self, name: str, actor: Actor, target: tuple[int, int]) -> bool:
        """Whether the actor is about to have the target, which was broadcast to it: it need not fetch it."""
        newest, epoch = self._newest, self.membership.epoch
        if newest is None or epoch is None or target != self.newest or epoch.id != (newest.fence, newest.epoch):
            return False
        return not self.has_received(actor, target) and self.membership.is_in((name, actor.life), actor.device)

    def offer(self, actor: Actor, target: tuple[int, int]) -> dict[str, Any]:
        """Further fields of an Adopt for this target."""
        if self._newest is None or not self.has_received(actor, target):
            return {}
        return {"digest": self._newest.digest, "canary": self._newest.canary}


def _actors(admission: Admission) -> dict[Member, Actor]:
    """The connected actors."""
    return {(name, actor.life): actor for name, actor in admission.fleet.actors.items()}
