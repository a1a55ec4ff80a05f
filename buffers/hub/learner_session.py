"""The learner's side of the hub: which learner is registered, and its requests. One at a time, by its fence. Also the hub's
messages (`Outbox`), those that are held back until the journal is durable among them.

Knows no socket and no clock, like `exchange`, which passes on a learner's messages and looks for the answer to a Take whenever
something has changed. What rests on a decision is held back in the outbox until the journal is durable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from async_rlhf.buffers.errors import RefusedError, WireError
from async_rlhf.buffers.protocol import broadcasts, packing, wire
from async_rlhf.buffers.queue.admission import Admission
from async_rlhf.buffers.queue.journal import Journal
from async_rlhf.buffers.weights.server import WeightServer

_log = logging.getLogger(__name__)
_IMPLIES = wire.Take | wire.Commit | wire.Publish | broadcasts.Gather  # that the step before is done


class Outbox:
    """messages: to be sent now, each [identity, header, arrays...], in order. Sends nothing: `hub` empties them."""

    def __init__(self) -> None:
        self.messages: list[wire.Frames] = []
        self._held: list[tuple[bytes, wire.Message, int, Sequence[int]]] = []
        # By actor: what it put since the last release, and its newest Put, which the one Ack answers.
        self._put: dict[bytes, tuple[list[tuple[int, int]], int]] = {}

    def send(self, identity: bytes, message: wire.Message, arrays: wire.Frames | None = None, request: int = 0) -> None:
        """Send at once."""
        self.messages.append([identity, *wire.encode(message, arrays, request)])

    def hold(self, identity: bytes, message: wire.Message, request: int = 0, numbers: Sequence[int] = ()) -> None:
        """Send with the next release, together with the groups `numbers`."""
        self._held.append((identity, message, request, numbers))

    def acknowledge(self, identity: bytes, group: tuple[int, int], request: int) -> None:
        """Send one Ack for all groups of an actor with the next release."""
        self._put[identity] = [*self._put.get(identity, ([], 0))[0], group], request

    def release(self, read: Callable[[int], memoryview]) -> None:
        """The journal is durable: send what was held back. read: the bytes of a group, by number."""
        for identity, (groups, request) in self._put.items():
            self.send(identity, wire.Ack(groups=groups), request=request)
        self._put.clear()
        for identity, message, request, numbers in self._held:
            arrays = [frame for number in numbers for frame in packing.from_bytes(read(number))]
            self.send(identity, message, arrays, request)
        self._held.clear()


class LearnerSession:
    """Owns the present registration and the Take that waits for its batch. `incarnation` is the hub's."""

    def __init__(
        self,
        admission: Admission,
        journal: Journal,
        weights: WeightServer,
        outbox: Outbox,
        incarnation: str,
        telemetry: Callable[[int], Mapping[str, float]],
    ) -> None:
        """telemetry: what the batch of a step carries beside the actors'."""
        self._admission, self._journal, self._weight_server = admission, journal, weights
        self._outbox, self._incarnation, self._telemetry = outbox, incarnation, telemetry
        self._registration: tuple[bytes, int, wire.Registered] | None = None
        self._parked: tuple[bytes, int, wire.Take] | None = None
        self._newest_request = 0  # of the present learner

    @property
    def waits(self) -> bool:
        """Whether a learner waits for its batch."""
        return self._parked is not None

    def handle(
        self, identity: bytes, request: int, message: wire.Message, arrays: wire.Frames, full: str
    ) -> wire.Message | None:
        """The answer, or None when it comes later. full: why nothing can be written now.

        Raises RefusedError and WireError for what the present learner may not send, WeightsError for weights.
        """
        if isinstance(message, wire.Register):
            return self._register(identity, request, message, full)
        admission = self._admission
        self._check_fence(message)
        if self._registration is not None and identity == self._registration[0]:
            overtaken = request < self._newest_request
            self._newest_request = max(self._newest_request, request)
            if overtaken and isinstance(message, wire.Take | wire.Tried):
                return None  # repeated; a later message decides
        # A learner that goes on from here has trained on the batch before, also when its message was lost.
        if isinstance(message, _IMPLIES) and _steps_done(message) == admission.step + 1:
            admission.trained(admission.step)
        match message:
            case wire.Take():
                admission.target_staleness = message.target_staleness
                self._parked = (identity, request, message)
                return None
            case wire.Tried():
                admission.tried(message.step, message.number, done=message.done)
            case wire.Trained():
                if message.step >= admission.step:  # a repeated message changes nothing
                    admission.trained(message.step)
            case wire.Commit() if full:
                return wire.Waiting(step=message.step, detail=full)
            case wire.Commit():
                deletable = admission.commit(message.step)
                self._journal.state(admission.remember(), deletable)
                self._outbox.hold(identity, wire.Done(), request)
                return None
            case wire.SealedPart():
                self._weight_server.sealed(message, admission)
                return None
            case broadcasts.Gather():
                return self._weight_server.broadcasts.gather(message, admission)
            case broadcasts.Broadcast():
                return self._weight_server.broadcasts.broadcast(message, admission)
            case wire.Publish() | wire.Chunk() | wire.Check():
                return self._weight_server.receive(message, arrays, admission)
            case _:
                raise WireError(f"{message.type!r} is not for the hub, or came at the wrong time")
        return wire.Done()

    def answer(self) -> str:
        """Answer a Take that can be answered now. Returns why no further batch will come, or an empty text."""
        if self._parked is None:
            return ""
        identity, request, take = self._parked
        admission = self._admission
        if take.enough and take.step == admission.step:
            self._parked = None
            return self._finish(identity, request)
        fresh = take.step == admission.step and admission.batch(take.step) is None
        try:
            numbers = admission.take(take.step)
        except RefusedError as error:
            self._parked = None
            self._outbox.send(identity, wire.Refused(reason=error.reason, detail=error.detail), request=request)
            return ""
        if numbers is not None:
            if fresh:
                self._journal.take(take.step, numbers)
            self._parked = None
            alone = admission.trial(take.step)
            if alone is not None:
                self._outbox.hold(identity, wire.Trial(step=take.step, number=alone), request, [alone])
                return ""
            telemetry = {
                **admission.fleet.telemetry(),
                "queue/depth": float(admission.num_queued),
                "groups/filtered": float(admission.num_filtered),
                "actors": float(len(admission.fleet.actors)),
                **self._telemetry(take.step),
            }
            self._outbox.hold(identity, wire.Batch(step=take.step, telemetry=telemetry), request, numbers)
        elif admission.at_end:
            self._parked = None
            reason = "drained" if admission.num_left else "finished"
            self._outbox.hold(identity, wire.Ended(reason=reason), request)
            return reason
        return ""

    def _finish(self, identity: bytes, request: int) -> str:
        """The learner takes no further batch: give no credits; groups in progress are lost and do not count as failures."""
        self._admission.draining = True
        self._admission.fleet.disband("the run has ended")
        self._outbox.hold(identity, wire.Ended(reason="finished"), request)
        return "finished"

    def remind(self, full: str) -> None:
        """Tell a learner that waits for its batch what it waits for. full: why nothing can be written now."""
        if self._parked is not None:
            identity, request, take = self._parked
            self._outbox.send(identity, wire.Waiting(step=take.step, detail=full or self.waiting_for()), request=request)

    @property
    def waits_for_prompts(self) -> bool:
        """Whether no batch can be made before further prompts come: all that are there have been made."""
        admission = self._admission
        can_come = admission.bound.coming and not admission.draining
        return can_come and admission.order.next_number() is None and not admission.fleet.leased

    def waiting_for(self) -> str:
        """A sentence that says why the learner waits."""
        admission = self._admission
        if self.waits_for_prompts:
            if made := admission.bound.num_numbers:
                return f"no prompts in the spool: all {made} groups of those that came were made"
            return "no prompts in the spool: none has come yet"
        ledger, actors = admission.ledger, admission.fleet.actors
        if not actors:
            return "no actor has joined"
        holders = ", ".join(f"{name}: {len(actor.leases)}" for name, actor in actors.items())
        return f"{ledger.queued} groups are ready, {ledger.leased} are being made ({holders})"

    def _check_fence(self, message: wire.Message) -> None:
        """Whether this is the present learner. Raises RefusedError: `fenced` for one that was replaced, which is for good;
        `unregistered` when the hub forgot the present one."""
        claimed = getattr(message, "fence", None)
        if not isinstance(claimed, int):
            raise WireError(f"{message.type!r} is not for the hub", "unknown-type")
        if 0 < claimed < self._admission.fence:
            raise _fenced(claimed, self._admission.fence)
        if self._registration is None or claimed != self._admission.fence:
            raise RefusedError("unregistered", f"fence {claimed} is not the present learner's; register")

    def _register(self, identity: bytes, request: int, register: wire.Register, full: str) -> wire.Message | None:
        if full:
            return wire.Waiting(step=register.step, detail=full)
        if self._registration is not None and self._registration[:2] == (identity, request):
            self._outbox.hold(identity, self._registration[2], request)
            return None  # repeated while the hub was away: one registration, one fence
        admission = self._admission
        # Another process has this learner's place since it got its fence: two living ones must not alternate.
        if register.fence > 0 and register.learner != admission.owner:
            raise _fenced(register.fence, admission.fence)
        fence = admission.fence + 1
        deletable = admission.register(fence, register.step, register.committed, register.learner)
        self._journal.state(admission.remember(), deletable)
        answer = wire.Registered(fence=fence, incarnation=self._incarnation, begun=admission.order.next)
        self._registration, self._parked, self._newest_request = (identity, request, answer), None, request
        self._weight_server.forget()
        self._outbox.hold(identity, answer, request)
        _log.info("learner registered at step %d under fence %d", register.step, fence)
        return None


def _steps_done(message: wire.Take | wire.Commit | wire.Publish | broadcasts.Gather) -> int:
    return message.version if isinstance(message, wire.Publish | broadcasts.Gather) else message.step


def _fenced(claimed: int, fence: int) -> RefusedError:
    return RefusedError("fenced", f"fence {claimed} is over: another learner holds {fence}. This one must end")
