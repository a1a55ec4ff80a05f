"""The hub's side of every conversation: frames in, `admission` decides, `journal` remembers, frames out.

Knows no socket and reads no clock of its own: `hub` feeds it and sends what it finds in the outbox; a simulator can do
the same on virtual time. Never decides about a group and never looks into one beyond checking that it is well formed.

    a peer that dies   its leases end (actor), or its batches are offered again when it registers anew (learner)
    a bad frame        is counted, dropped, and answered with Refused

`settle` makes the journal durable once for everything received since the last time (group commit), and only then puts
the acknowledgements into the outbox. So a group is acknowledged when it is on disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from buffers import packing, status, wire
from buffers.admission import Actor, Admission
from buffers.bound import Bound
from buffers.config import QueueConfig, WeightsConfig
from buffers.errors import RefusedError, WeightsError, WireError
from buffers.journal import Journal
from buffers.ledger import Entry
from buffers.peers import Peers
from buffers.publication import Publication
from buffers.weight_store import WeightStore

_log = logging.getLogger(__name__)


class Exchange:
    """Owns the queue's state, the journal and the weight store; begins where the journal ends.

    outbox: messages to send, each [identity, header, arrays...], in order. stopped: whether a Halt came.
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
    ) -> None:
        self._config, self._journal, self._publication = config, journal, Publication(weights, weights_config)
        self._clock, self._incarnation = clock, incarnation
        self._admission = _restored(Admission(bound, max_attempts=config.max_attempts, lease_s=config.lease_s), journal)
        self._peers = Peers()
        self._acks: list[tuple[bytes, int, wire.Ack]] = []
        self._parked: tuple[bytes, int, wire.Take] | None = None
        self._registration: tuple[bytes, int, wire.Registered] | None = None
        self._num_quarantined = self._admission.num_quarantined
        self._stop_reason = ""
        self._malformed = 0
        self.outbox: list[wire.Frames] = []
        self.stopped = False

    def settle(self) -> None:
        """Make what was received durable, acknowledge it, and do everything that follows from it."""
        if self._acks:
            self._journal.sync()
            for identity, request, ack in self._acks:
                self._send(identity, ack, request=request)
            self._acks.clear()
        self._pump()

    def receive(self, identity: bytes, frames: list[bytes]) -> None:
        """Take one message in; what there is to say goes to the outbox, acknowledgements only with `settle`."""
        request = 0
        try:
            request, message, arrays = wire.decode(frames, max_frame_bytes=self._config.max_frame_bytes)
            answer = self._handle(identity, request, message, [frames[0], *arrays])
        except WireError as error:
            self._malformed += 1
            _log.warning("dropped a malformed message of %s: %s", self._peers.name(identity) or identity.hex(), error)
            answer = wire.Refused(reason="malformed", detail=str(error))
        except (RefusedError, WeightsError) as error:
            reason = error.reason if isinstance(error, RefusedError) else "weights"
            answer = wire.Refused(reason=reason, detail=str(error))
        if answer is not None:
            self._send(identity, answer, request=request)

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
                self._send(identity, *self._publication.serve(message), request)
                return None
            case wire.GetStatus():
                return wire.Status(status=self.status())
            case wire.Gone(actor=name):
                self._leave(name)
            case wire.Drain():
                self._admission.draining = True
            case wire.Halt():
                self.stopped = True
            case _:
                return self._hear_learner(identity, request, message, frames[1:])
        return wire.Done()

    # -- actors ------------------------------------------------------------------------------------------------------

    def _hello(self, identity: bytes, hello: wire.Hello) -> wire.Message:
        if self._stop_reason:
            return wire.Stop(reason=self._stop_reason)
        name, before = hello.actor, self._peers.name(identity)
        if before is not None and before != name:
            self._leave(before)
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
                self._leave(name)
        return wire.Done()

    def _leave(self, name: str) -> None:
        self._admission.leave(name)
        self._peers.forget(name)

    def _put(self, identity: bytes, request: int, put: wire.Put, frames: wire.Frames) -> wire.Message | None:
        name = self._known(identity)
        group = packing.unpack_group(put.group, frames[1:])
        entry = Entry(group.attempt, group.oldest_version, group.newest_version, group.num_tokens)
        ack = wire.Ack(number=group.number, attempt=group.attempt, accepted=True)
        try:
            self._admission.put(name, group.number, entry)
        except RefusedError as error:
            _log.info("refused group %d of %s: %s", group.number, name, error)
            return ack.model_copy(update={"accepted": False, "reason": error.reason})
        self._journal.put(group.number, entry, packing.to_bytes(frames))
        self._acks.append((identity, request, ack))
        return None

    # -- learner -----------------------------------------------------------------------------------------------------

    def _hear_learner(self, identity: bytes, request: int, message: wire.Message, arrays: wire.Frames) -> wire.Message | None:
        admission = self._admission
        if isinstance(message, wire.Register):
            return self._register(identity, request, message)
        claimed = getattr(message, "fence", None)
        if self._registration is None or claimed != admission.fence:
            raise RefusedError("unregistered", f"fence {claimed} is not the present learner's ({admission.fence}); register")
        match message:
            case wire.Take():
                self._parked = (identity, request, message)
                return None
            case wire.Trained():
                if message.step >= admission.step:  # a repeated message changes nothing
                    admission.trained(message.step)
            case wire.Commit():
                numbers = admission.commit(message.step)
                self._journal.state(admission.remember(), numbers)
            case wire.Publish() | wire.Chunk() | wire.Check():
                if isinstance(message, wire.Publish):
                    admission.check_version(message.version)
                answer, whole = self._publication.hear(message, arrays, admission.published)
                if whole is not None:
                    admission.publish(whole.version)
                return answer
            case _:
                raise WireError(f"{message.type!r} is not for the hub, or came at the wrong time")
        return wire.Done()

    def _register(self, identity: bytes, request: int, register: wire.Register) -> wire.Message:
        if self._registration is not None and self._registration[:2] == (identity, request):
            return self._registration[2]  # asked again while the hub was away: one registration, one fence
        fence = self._admission.fence + 1
        numbers = self._admission.register(fence, register.step, register.committed)
        self._journal.state(self._admission.remember(), numbers)
        answer = wire.Registered(fence=fence, incarnation=self._incarnation)
        self._registration, self._parked = (identity, request, answer), None
        self._publication.forget()
        _log.info("learner registered at step %d under fence %d", register.step, fence)
        return answer

    # -- what follows from a change ----------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Point actors to their version, give what credits can be given, answer a waiting learner."""
        admission = self._admission
        if admission.num_quarantined != self._num_quarantined:
            # Durable before a credit or a batch relies on it: what is behind a quarantined group moves up.
            self._num_quarantined = admission.num_quarantined
            self._journal.state(admission.remember())
        for identity, adopt in self._publication.adoptions(admission, self._peers, self._clock()):
            self._send(identity, adopt)
        for name, credits in admission.credits().items():
            items = [wire.CreditItem(number=c.number, attempt=c.attempt, lowest_version=c.lowest_version) for c in credits]
            self._send(self._peers[name].identity, wire.Credits(credits=items))
        if admission.published is not None:
            self._publication.store.drop_below(admission.lowest_needed_version())
        if self._parked is not None:
            self._answer_take(*self._parked)

    def _answer_take(self, identity: bytes, request: int, take: wire.Take) -> None:
        admission = self._admission
        fresh = take.step == admission.step and not admission.has_batch(take.step)
        try:
            numbers = admission.take(take.step)
        except RefusedError as error:
            self._parked = None
            self._send(identity, wire.Refused(reason=error.reason, detail=error.detail), request=request)
            return
        if numbers is not None:
            if fresh:
                self._journal.take(take.step, numbers)
                self._journal.state(admission.remember())
            self._parked = None
            puts = [frame for number in numbers for frame in packing.from_bytes(self._journal.read(number))]
            batch = wire.Batch(step=take.step, telemetry=status.fleet(admission, self._peers))
            self._send(identity, batch, puts, request)
        elif admission.at_end:
            self._parked = None
            self._stop_reason = "drained" if admission.num_left else "end of data"
            self._send(identity, wire.Ended(reason=self._stop_reason), request=request)
            for actor_identity in self._peers.identities:
                self._send(actor_identity, wire.Stop(reason=self._stop_reason))

    def tick(self) -> None:
        """Time has passed: silent actors lose their leases, a waiting learner is told for whom it waits."""
        for name in self._publication.late(self._admission, self._peers, self._clock()):
            self._leave(name)
            _log.warning("%s adopted no weights in its time: its groups go to others", name)
        for name in self._admission.expire(self._clock()):
            self._peers.forget(name)
            _log.warning("%s was silent for %.0f s: its groups go to others", name, self._config.lease_s)
        if self._parked is not None:
            identity, request, take = self._parked
            self._send(identity, wire.Waiting(step=take.step, detail=status.waiting_for(self._admission)), request=request)

    def status(self) -> dict[str, Any]:
        """Everything an operator asks: plain values, ready for JSON."""
        return {
            "incarnation": self._incarnation,
            "state": self._stop_reason or ("draining" if self._admission.draining else "running"),
            "waiting_for": status.waiting_for(self._admission) if self._parked else "",
            "malformed_frames": self._malformed,
            "journal_bytes": self._journal.num_bytes,
            "weights": self._publication.status(),
            **status.describe(self._admission, self._peers, self._clock()),
        }

    def _send(self, identity: bytes, message: wire.Message, arrays: wire.Frames | None = None, request: int = 0) -> None:
        self.outbox.append([identity, *wire.encode(message, arrays, request)])


def _restored(admission: Admission, journal: Journal) -> Admission:
    replay = journal.replay
    admission.restore(replay.state, replay.entries)
    for step in sorted(replay.batches):
        admission.assign(step, replay.batches[step])
    return admission
