"""The hub's side of every conversation: frames in, `admission` decides, `journal` remembers, frames out.

Knows no socket and reads no clock of its own: `hub` feeds it and sends what it finds in the outbox; a simulator can do
the same on virtual time. Never decides about a group and never looks into one beyond checking that it is well formed and
fits the run (`GroupSchema`). Where the hub decides which prompt a number has, that is in `prompts`; which actors are
connected in `sessions`; the learner's requests in `learner_session`.

    a peer that dies   its leases end (actor), or its batches are offered again when it registers anew (learner)
    a bad frame        is counted by its reason, dropped, and answered with Refused; so is a message that runs into a defect of
                       the hub's own, with its traceback in the log, once for each place it comes from
    a full disk        a Put is answered with Later, what else must be remembered with Waiting; nothing is acknowledged and
                       nothing given or published until there is room; the status shows it

Rule: nothing that rests on a decision leaves before the decision is in the journal as `queue.fsync` promises. `settle` decides
for everything received since the last time, makes the journal durable once (group commit), and only then hands out what
was held back: acknowledgements, batches, credits. So a crash loses only what was never sent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from async_rlhf.buffers.config import MAX_FRAME_BYTES, QueueConfig, WeightsConfig
from async_rlhf.buffers.errors import DiskFullError, JournalError, RefusedError, WireError
from async_rlhf.buffers.hub.learner_session import LearnerSession, Outbox
from async_rlhf.buffers.hub.prompts import Prompts
from async_rlhf.buffers.hub.sessions import ActorSessions
from async_rlhf.buffers.protocol import packing, wire
from async_rlhf.buffers.protocol.packing import GroupSchema
from async_rlhf.buffers.queue.admission import Credit
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.queue.journal import Journal
from async_rlhf.buffers.queue.recovery import QuarantineFile, recovered
from async_rlhf.buffers.transport.keys import KeyHolder, check_sender
from async_rlhf.buffers.transport.server import Refusals
from async_rlhf.buffers.weights.server import WeightServer
from async_rlhf.buffers.weights.store import WeightStore

_log = logging.getLogger(__name__)
_ROWS_BYTES = 2 << 20  # of a message with credits; a row has half of that at most
_LATER_S = 0.5  # an actor puts a group again after this long when there was no room for it


class Exchange:
    """Owns the queue's state, the journal and the weight store; begins where the journal ends.

    prompts: where the hub decides which one a number has. outbox: what there is to send. stopped: whether a Halt came.
    counters: what else the status shows. max_frame_bytes: taken from a peer.
    """

    def __init__(
        self,
        config: QueueConfig,
        bound: Bound,
        journal: Journal,
        store: WeightStore,
        clock: Callable[[], float],
        incarnation: str,
        weights: WeightsConfig | None = None,
        quarantine: QuarantineFile | None = None,
        *,
        counters: Mapping[str, int] = MappingProxyType({}),
        schema: GroupSchema | None = None,
        shared: Mapping[str, str] = MappingProxyType({}),
        prompts: Prompts | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._config, self._journal, self._weight_server = config, journal, WeightServer(store, weights)
        self._clock, self._incarnation, self._max_frame_bytes = clock, incarnation, max_frame_bytes
        self._prompts = prompts or Prompts()
        self._admission = recovered(config, bound, journal)
        self._quarantine, self._counters, self._schema = quarantine, counters, schema
        welcome = wire.Welcome(incarnation=incarnation, max_frame_bytes=max_frame_bytes)
        self._sessions = ActorSessions(self._admission, self._weight_server, config, shared, welcome)
        self._refusals = Refusals()
        self.outbox = Outbox()
        self._session = LearnerSession(
            self._admission, journal, self._weight_server, self.outbox, incarnation, self._prompts.telemetry
        )
        self._num_dead = self._admission.num_quarantined, self._admission.num_filtered
        self._full = ""  # why nothing can be written now
        self.little_room = ""  # why no group is begun now, although one could be
        self._retry = False
        self._later = 0
        self._stop_reason = ""
        self.stopped = False

    def settle(self) -> None:
        """Decide, make the decisions durable, and only then send them."""
        if self._full and not self._retry:
            return
        self._retry = False
        try:
            if self._full:
                self._weight_server.store_again(self._admission)
                self._journal.sync()  # raises while there is no room: then nothing is decided
            self._pump()  # also after that: the Ack of a filtered group rests on what this writes
            self._journal.sync()
            with self._journal.disk():
                self._prompts.learn(self._admission, self._journal.read)
        except DiskFullError as error:
            self._note_full(error)
            return
        if self._full:
            _log.warning("there is room on the disk again")
        self._full = ""
        if self._admission.published is not None:
            # Only after the sync: in exact mode a group that is lost in a crash is made again by the version that made it.
            self._weight_server.drop_old(self._admission)
        self.outbox.release(self._journal.read)

    def _note_full(self, error: DiskFullError) -> wire.Message:
        if not self._full:
            _log.error("%s", error)
        self._full = f"the disk is full: {error}"
        return wire.Waiting(step=self._admission.step, detail=self._full)

    def receive(self, identity: bytes, frames: list[bytes], holder: KeyHolder | None = None) -> None:
        """Take one message in, sent with the key of `holder` where there are keys.

        Answers go to the outbox, acknowledgements only with `settle`.
        """
        request = 0
        try:
            request, message, arrays = wire.decode(frames, max_frame_bytes=self._max_frame_bytes)
            check_sender(holder, message)
            answer = self._handle(identity, request, message, [frames[0], *arrays])
            if answer is not None:
                self.outbox.send(identity, answer, request=request)
        except DiskFullError as error:
            self.outbox.send(identity, self._note_full(error), request=request)
        except JournalError:
            raise
        except Exception as error:  # noqa: BLE001 (one peer's message, whatever it met, must not end the others' run)
            request = request or getattr(error, "request", 0)
            refused = self._refusals.note(error, self._admission.fleet.name(identity) or identity[:40].hex())
            self.outbox.send(identity, refused, request=request)

    def work(self) -> bool:
        """Verify a piece of the incoming weights, for about ten milliseconds; whether there is more to do."""
        return self._weight_server.verify()

    def arrives(self, identity: bytes) -> None:
        """Bytes of a message that is not whole yet arrive from this peer."""
        self._sessions.arrives(identity, self._clock())

    def _handle(self, identity: bytes, request: int, message: wire.Message, frames: wire.Frames) -> wire.Message | None:
        """The answer to one message, or None when it needs none or is answered later. `frames` are as they came."""
        match message:
            case wire.Put():
                return self._put(identity, request, message, frames)
            case wire.Hello() if self._stop_reason:
                return wire.Stop(reason=self._stop_reason)
            case wire.Hello():
                return self._sessions.hello(identity, message, self._clock())
            case wire.Beat() | wire.Release() | wire.Bye():
                name = self._sessions.name_of(identity, self._clock())
                return self._sessions.handle(name, message, self._clock())
            case wire.Fetch() | wire.FetchChunk():
                for answer, arrays in self._weight_server.serve(message):
                    self.outbox.send(identity, answer, arrays, request)
                return None
            case wire.GetStatus():
                return wire.Status(status=self.status())
            case wire.Gone(actor=name):
                self._admission.fleet.leave(name, "ended: its process is gone")
            case wire.Quarantine(number=number, reason=reason):
                self._admission.quarantine(number, reason)
                self.outbox.hold(identity, wire.Done(), request)
                return None
            case wire.Drain():
                self._admission.draining = True
            case wire.Halt():
                self.stopped = True
            case _:
                return self._session.handle(identity, request, message, frames[1:], self._full)
        return wire.Done()

    def _put(self, identity: bytes, request: int, put: wire.Put, frames: wire.Frames) -> wire.Message | None:
        name, group = self._sessions.name_of(identity, self._clock()), put.group
        self._admission.fleet.actors[name].has_put(group.number, self._clock())
        try:
            entry = packing.check_group(group, frames, self._schema)
        except WireError as error:
            self._admission.blame(name, group.number, str(error))
            raise
        if self._full:
            self._later += 1
            return wire.Later(number=group.number, attempt=group.attempt, wait_s=_LATER_S, reason=self._full)
        try:
            entered = self._admission.put(name, group.number, entry, constant=put.constant)
        except RefusedError as error:
            refused = self._refusals.note(error, name)
            return wire.Rejected(number=group.number, attempt=group.attempt, reason=refused.reason)
        if entered:
            self._journal.put(group.number, entry, *packing.to_parts(frames))
        else:
            self._prompts.filtered(group)
        self.outbox.acknowledge(identity, (group.number, group.attempt), request)
        return None

    # -- what follows from a change ----------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Point actors to their version, give what credits can be given, answer a waiting learner."""
        admission = self._admission
        with self._journal.disk():
            self._prompts.extend(admission)
        num_dead = admission.num_quarantined, admission.num_filtered
        if num_dead != self._num_dead:
            # Durable before a credit or a batch relies on it: the numbers behind a dead one move up.
            if self._quarantine is not None:
                with self._journal.disk():
                    self._quarantine.write(admission.fleet.failures.quarantined)
            self._num_dead = num_dead
            self._journal.state(admission.remember(), admission.fleet.failures.quarantined)
        for identity, adopt in self._weight_server.adoptions(admission, self._clock()):
            self.outbox.send(identity, adopt)
        for name, credits in ({} if self.little_room else admission.credits()).items():
            for message in self._messages(credits):
                self.outbox.hold(admission.fleet.actors[name].identity, message)
        if reason := self._session.answer():
            self._stop_reason = reason
            for actor in admission.fleet.actors.values():
                self.outbox.hold(actor.identity, wire.Stop(reason=reason))

    def _messages(self, credits: Sequence[Credit]) -> Iterator[wire.Credits]:
        """Credits, with their rows for a run with a spool: as many in a message as its header holds."""
        items, num_bytes = list[wire.CreditItem](), 0
        for credit in credits:
            item = wire.CreditItem.model_validate(vars(credit) | self._prompts.of(credit.number))
            if items and num_bytes + len(item.row.encode()) > _ROWS_BYTES:
                yield wire.Credits(credits=items)
                items, num_bytes = [], 0
            num_bytes += len(item.row.encode())
            items.append(item)
        yield wire.Credits(credits=items)

    def tick(self) -> None:
        """Time has passed: silent actors lose their leases, a waiting learner gets the reason."""
        self._sessions.tick(self._clock())
        self._refusals.report()
        self._retry = True
        self._session.remind(self._full or self.little_room)

    def status(self) -> dict[str, Any]:
        """The state of the hub for an operator: plain values, ready for JSON."""
        admission, session = self._admission, self._session
        doing = "draining" if admission.draining else "paused" if self.little_room else "running"
        waits = session.waits and not self._full
        return {
            "incarnation": self._incarnation,
            "state": self._stop_reason or ("disk full" if self._full else doing),
            "waiting_for": self._full or (self.little_room or session.waiting_for() if session.waits else ""),
            "refused": dict(self._refusals.counts),
            "waits_for_room": waits and bool(self.little_room),
            "waits_for_prompts": waits and session.waits_for_prompts,
            **self._prompts.status(),
            "puts_later": self._later,
            "journal_bytes": self._journal.num_bytes,
            "weights": self._weight_server.status(),
            "fsync": self._config.fsync,
            "step": admission.step,
            "committed_step": admission.committed_step,
            "fence": admission.fence,
            "version": admission.published,
            "ledger": admission.ledger.as_dict(),
            "actors": self._sessions.status(self._clock()),
            "bits": self._sessions.bits(),
            **self._counters,
        }
