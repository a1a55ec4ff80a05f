"""The hub's side of every conversation: frames in, `admission` decides, `journal` remembers, frames out.

Knows no socket and reads no clock of its own: `hub` feeds it and sends what it finds in the outbox; a simulator can do
the same on virtual time. Never decides about a group and never looks into one beyond checking that it is well formed.

    a peer that dies   its leases end (actor), or its batches are offered again when it registers anew (learner)
    a bad frame        is counted by its reason, dropped, and answered with Refused
    a full disk        a Put is answered with Later, what else must be remembered with Waiting; nothing is acknowledged and
                       nothing given or published until there is room, and the status says so

Rule: nothing that rests on a decision leaves before the decision is in the journal as `queue.fsync` promises. `settle` decides
for everything received since the last time, makes the journal durable once (group commit), and only then hands out what
was held back: acknowledgements, batches, credits. So a crash at any moment forgets only what nobody was told.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from buffers.config import QueueConfig, WeightsConfig
from buffers.errors import DiskFullError, RefusedError, WeightsError, WireError
from buffers.hub import status
from buffers.hub.outbox import Outbox
from buffers.hub.peers import Peers
from buffers.hub.refusals import Refusals
from buffers.hub.tenure import Tenure
from buffers.protocol import packing, wire
from buffers.queue.admission import Actor, Admission
from buffers.queue.bound import Bound
from buffers.queue.journal import Journal
from buffers.queue.quarantine import Quarantine
from buffers.transport import roles
from buffers.weights.publication import Publication
from buffers.weights.store import WeightStore

_log = logging.getLogger(__name__)
_LATER_S = 0.5  # an actor puts a group again after this long when there was no room for it


class Exchange:
    """Owns the queue's state, the journal and the weight store; begins where the journal ends.

    outbox: what there is to send. stopped: whether a Halt came. counters: what else the status shows.
    """

    def __init__(
        self,
        config: QueueConfig,
        bound: Bound,
        journal: Journal,
        weights: WeightStore,
        clock: Callable[[], float],
        incarnation: str,
        weights_config: WeightsConfig | None = None,
        quarantine: Quarantine | None = None,
        counters: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._config, self._journal, self._publication = config, journal, Publication(weights, weights_config)
        self._clock, self._incarnation = clock, incarnation
        self._admission = _restored(config, bound, journal)
        self._quarantine, self._counters = quarantine, counters
        self._peers = Peers()
        self._refusals = Refusals()
        self.outbox = Outbox()
        self._tenure = Tenure(self._admission, journal, self._publication, self._peers, self.outbox, incarnation)
        self._num_dead = self._admission.num_quarantined, self._admission.num_filtered
        self._full = ""  # why nothing can be written now
        self._retry = False
        self._later = 0
        self._stop_reason = ""
        self.stopped = False

    def settle(self) -> None:
        """Decide, make durable, and only then say what was decided."""
        if self._full and not self._retry:
            return
        self._retry = False
        try:
            if self._full:
                self._publication.store_again(self._admission)
            else:
                self._pump()
            self._journal.sync()
        except DiskFullError as error:
            self._note_full(error)
            return
        if self._full:
            _log.warning("there is room on the disk again")
        self._full = ""
        self.outbox.release(self._journal.read)

    def _note_full(self, error: DiskFullError) -> wire.Message:
        if not self._full:
            _log.error("%s", error)
        self._full = f"the disk is full: {error}"
        return wire.Waiting(step=self._admission.step, detail=self._full)

    def receive(self, identity: bytes, frames: list[bytes], holder: roles.Holder | None = None) -> None:
        """Take one message in, sent with the key of `holder` where there are keys.

        What there is to say goes to the outbox, acknowledgements only with `settle`.
        """
        request = 0
        try:
            request, message, arrays = wire.decode(frames, max_frame_bytes=self._config.max_frame_bytes)
            roles.check(holder, message)
            answer = self._handle(identity, request, message, [frames[0], *arrays])
        except DiskFullError as error:
            answer = self._note_full(error)
        except (WireError, RefusedError, WeightsError) as error:
            request = request or getattr(error, "request", 0)
            answer = self._refusals.note(error, self._peers.name(identity) or identity[:40].hex())
        if answer is not None:
            self.outbox.say(identity, answer, request=request)

    def _handle(self, identity: bytes, request: int, message: wire.Message, frames: wire.Frames) -> wire.Message | None:
        """The answer to one message, or None when it needs none or is answered later. `frames` are as they came."""
        match message:
            case wire.Put():
                return self._put(identity, request, message, frames)
            case wire.Hello():
                return self._hello(identity, message)
            case wire.Beat() | wire.Release() | wire.Bye():
                return self._hear(identity, message)
            case wire.Fetch() | wire.FetchChunk():
                self.outbox.say(identity, *self._publication.serve(message), request)
                return None
            case wire.GetStatus():
                return wire.Status(status=self.status())
            case wire.Gone(actor=name):
                self._leave(name, "ended: its process is gone")
            case wire.Drain():
                self._admission.draining = True
            case wire.Halt():
                self.stopped = True
            case _:
                return self._tenure.hear(identity, request, message, frames[1:], self._full)
        return wire.Done()

    # -- actors ------------------------------------------------------------------------------------------------------

    def _hello(self, identity: bytes, hello: wire.Hello) -> wire.Message:
        if self._stop_reason:
            return wire.Stop(reason=self._stop_reason)
        name, before = hello.actor, self._peers.name(identity)
        if before is not None and before != name:
            self._leave(before, f"said hello as {name}")
        self._peers.join(name, identity)
        actor = Actor(hello.capacity, hello.fence, hello.version, self._clock())
        self._admission.join(name, actor, hello.holding)
        _log.info("%s joined with version %d, holding %d groups", name, hello.version, len(hello.holding))
        return wire.Welcome(incarnation=self._incarnation, max_frame_bytes=self._config.max_frame_bytes)

    def _known(self, identity: bytes) -> str:
        """Name of the living actor behind an identity; hearing from it keeps its leases."""
        name = self._peers.name(identity)
        if name is None or name not in self._admission.actors:
            raise RefusedError("unknown-actor", "say hello first (the hub was restarted, or thought you dead)")
        self._admission.actors[name].heard_at = self._clock()
        return name

    def _hear(self, identity: bytes, message: wire.Beat | wire.Release | wire.Bye) -> wire.Message:
        name = self._known(identity)
        match message:
            case wire.Beat():
                actor, peer = self._admission.actors[name], self._peers[name]
                self._publication.serves(actor, peer, message.fence, message.version)
                actor.capacity, peer.telemetry = message.capacity, dict(message.telemetry)
            case wire.Release(numbers=numbers):
                self._admission.release(name, numbers)
            case wire.Bye():
                self._leave(name, "said goodbye")
        return wire.Done()

    def _leave(self, name: str, reason: str) -> None:
        self._admission.leave(name, reason)
        self._peers.forget(name)

    def _put(self, identity: bytes, request: int, put: wire.Put, frames: wire.Frames) -> wire.Message | None:
        name, group = self._known(identity), put.group
        try:
            entry = packing.check_group(group, frames)
        except WireError as error:
            self._admission.blame(name, group.number, str(error))
            raise
        if self._full:
            return self._put_later(group, self._full)
        try:
            entered = self._admission.put(name, group.number, entry, constant=put.constant)
        except RefusedError as error:
            if error.reason == "later":
                return self._put_later(group, error.detail)
            refused = self._refusals.note(error, name)
            return wire.Rejected(number=group.number, attempt=group.attempt, reason=refused.reason)
        if entered:
            self._journal.put(group.number, entry, *packing.to_parts(frames))
        self.outbox.acknowledge(identity, (group.number, group.attempt), request)
        return None

    def _put_later(self, group: wire.GroupHeader, reason: str) -> wire.Message:
        self._later += 1
        return wire.Later(number=group.number, attempt=group.attempt, wait_s=_LATER_S, reason=reason)

    # -- what follows from a change ----------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Point actors to their version, give what credits can be given, answer a waiting learner."""
        admission = self._admission
        num_dead = admission.num_quarantined, admission.num_filtered
        if num_dead != self._num_dead:
            # Durable before a credit or a batch relies on it: what is behind a dead number moves up.
            self._write_quarantine()
            self._num_dead = num_dead
            self._journal.state(self._admission.remember())
        for identity, adopt in self._publication.adoptions(admission, self._peers, self._clock()):
            self.outbox.say(identity, adopt)
        for name, credits in admission.credits().items():
            items = [wire.CreditItem(number=c.number, attempt=c.attempt, lowest_version=c.lowest_version) for c in credits]
            self.outbox.hold(self._peers[name].identity, wire.Credits(credits=items))
        if admission.published is not None:
            self._publication.store.drop_below(admission.lowest_needed_version())
        if reason := self._tenure.answer():
            self._stop_reason = reason
            for identity in self._peers.identities:
                self.outbox.hold(identity, wire.Stop(reason=reason))

    def _write_quarantine(self) -> None:
        if self._quarantine is not None:
            with self._journal.disk():
                self._quarantine.write(self._admission.failures.quarantined)

    def tick(self) -> None:
        """Time has passed: silent actors lose their leases, a waiting learner is told for whom it waits."""
        for name in self._publication.late(self._admission, self._peers, self._clock()):
            self._leave(name, "adopted no weights in its time")
            _log.warning("%s adopted no weights in its time: its groups go to others", name)
        for name in self._admission.expire(self._clock()):
            self._peers.forget(name)
            _log.warning("%s was silent for %.0f s: its groups go to others", name, self._config.lease_s)
        self._refusals.report()
        self._retry = True
        self._tenure.remind(self._full)

    def status(self) -> dict[str, Any]:
        """Everything an operator asks: plain values, ready for JSON."""
        doing = "draining" if self._admission.draining else "running"
        return {
            "incarnation": self._incarnation,
            "state": self._stop_reason or ("disk full" if self._full else doing),
            "waiting_for": self._full or (status.waiting_for(self._admission) if self._tenure.waits else ""),
            "refused": dict(self._refusals.counts),
            "puts_later": self._later,
            "journal_bytes": self._journal.num_bytes,
            "weights": self._publication.status(),
            "fsync": self._config.fsync,
            **status.describe(self._admission, self._peers, self._clock()),
            **self._counters,
        }


def _restored(config: QueueConfig, bound: Bound, journal: Journal) -> Admission:
    admission = Admission(bound, max_attempts=config.max_attempts, lease_s=config.lease_s, max_bytes=config.max_bytes)
    replay = journal.replay
    admission.restore(replay.state, replay.entries)
    for step in sorted(replay.batches):
        admission.assign(step, replay.batches[step])
    return admission
