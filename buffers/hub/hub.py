"""The hub's shell: one ROUTER socket around `exchange`, which decides the answers.

    owns        the socket, and through the exchange the journal and the weight store; one thread
    waits for   a frame, or the next tick (liveness, keep-alives, the ledger on disk, what has come into the spool)
    woken by    any peer's message, a connection attempt, an event of the socket's monitor
    on close    journal synced, ledger written, socket closed

A round takes in the messages that are already there, so many or so many bytes at most, then settles: one fsync however many
groups arrived together.

Memory, whatever peers do: of what waits in the queue only numbers (the groups are in the journal); of a round `_ROUND_BYTES`
and one message; of what was not read yet `_UNREAD_BYTES` a connection, then it waits; of a message that does not end the
largest that may be and `UNREAD_BY_ZMQ` (`transport.server`), then it is cut.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pydantic_core
import zmq

from async_rlhf.buffers.config import MAX_FRAME_BYTES, QueueConfig, WeightsConfig
from async_rlhf.buffers.hub.exchange import Exchange
from async_rlhf.buffers.hub.prompts import Prompts
from async_rlhf.buffers.protocol.packing import GroupSchema
from async_rlhf.buffers.protocol.wire import MAX_HEADER_BYTES
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.queue.journal import Journal
from async_rlhf.buffers.queue.recovery import QuarantineFile
from async_rlhf.buffers.transport import keys
from async_rlhf.buffers.transport.server import ServerSocket
from async_rlhf.buffers.weights.store import WeightStore

_log = logging.getLogger(__name__)
_TICK_S = 0.5
_LOOK_S = 0.1  # between two looks at messages that do not end
_ROUND, _ROUND_BYTES = 256, 8 << 20  # taken in before the exchange settles
_UNREAD_BYTES = 256 << 20


class Hub:
    """Replay queue, weight channel and ledger behind one socket.

    Raises JournalError when the directory belongs to a living hub or is damaged, zmq.ZMQError when the address is taken.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        directory: Path,
        config: QueueConfig,
        bound: Bound,
        *,
        clock: Callable[[], float] = time.monotonic,
        access: keys.HubKeys | None = None,
        weights: WeightsConfig | None = None,
        prompt_of: Callable[[int], int] | None = None,
        beat: Callable[[], None] = lambda: None,
        prompts: Prompts | None = None,
        little_room: Callable[[], str] = lambda: "",
        max_frame_bytes: int = MAX_FRAME_BYTES,
        schema: GroupSchema | None = None,
        shared: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """addresses: one or several to listen at, all under the same keys. beat: called with every tick of the loop. prompts:
        where the hub decides which one a number has; the turns of its spool are taken by the loop. little_room: called with
        every tick, returns why no further group should be begun; empty where there is no reason."""
        self._prompts = prompts or Prompts()
        self._clock, self._ledger, self._beat, self._little_room = clock, directory / "ledger.json", beat, little_room
        self._journal = Journal(
            directory / "queue", segment_bytes=config.segment_bytes, fsync=config.fsync, keep=config.keep_rollouts
        )
        store = WeightStore(directory / "weights" if config.exact else None)
        try:
            self._socket = ServerSocket(
                addresses,
                access,
                max_part_bytes=2 * max_frame_bytes,
                max_message_bytes=MAX_HEADER_BYTES + 2 * max_frame_bytes,  # a Put: a header and two arrays
                max_unread=max(2, min(_ROUND, _UNREAD_BYTES // max_frame_bytes)),
                linger_ms=1000,
            )
        except zmq.ZMQError:
            self._journal.close()
            raise
        state = self._journal.replay.state
        self._exchange = Exchange(
            config, bound, self._journal, store, clock, secrets.token_hex(8), weights,
            QuarantineFile(directory / "quarantine.jsonl", prompt_of, (*state.quarantined, *state.removed)),
            counters=self._socket.counters, schema=schema, shared=shared, prompts=prompts, max_frame_bytes=max_frame_bytes,
        )  # fmt: skip

    def run(self) -> None:
        """Serve until a Halt; returns with everything on disk."""
        next_tick = next_look = self._clock()
        spool = self._prompts.spool
        next_turn, is_busy = math.inf if spool is None else next_tick, False
        try:
            while not self._exchange.stopped:
                until = max(0.0, min(next_tick, next_look, next_turn) - self._clock()) + 0.001
                self._socket.wait(0.0 if is_busy else until)
                num_taken, is_all = self._take_in()
                is_busy = self._exchange.work()
                has_news = num_taken > 0
                if is_all and self._clock() >= next_look:
                    next_look = self._clock() + _LOOK_S
                    for identity in self._socket.cut_unfinished():
                        self._exchange.arrives(identity)
                if self._clock() >= next_tick:
                    next_tick, has_news = self._clock() + _TICK_S, True
                    self._beat()
                    self._exchange.little_room = self._little_room()
                    self._exchange.tick()
                    self._socket.report()
                    self._write_ledger()
                if spool is not None and self._clock() >= next_turn:
                    next_turn, has_news = self._clock() if spool.turn() else self._clock() + _TICK_S, True
                if has_news:
                    self._exchange.settle()
                    self._socket.send(self._exchange.outbox.messages)
                    self._exchange.outbox.messages.clear()
        finally:
            self._socket.close()
            self._prompts.close()
            try:
                self._journal.close()
            finally:
                self._write_ledger()

    def _take_in(self) -> tuple[int, bool]:
        """One round: how many messages, and whether they are all there were."""
        num_bytes = 0
        for number in range(_ROUND):
            if num_bytes > _ROUND_BYTES:
                return number, False
            if (received := self._socket.receive()) is None:
                return number, True
            message, holder = received
            num_bytes += sum(map(len, message))
            self._exchange.receive(message[0], message[1:], holder)
        return _ROUND, False

    def _write_ledger(self) -> None:
        """The status, replaced in one step. A full disk costs the file, not the hub: it answers requests for it."""
        temporary = self._ledger.with_suffix(".tmp")
        try:
            # `json` indents in Python: of 64 actors, twice a second, that took more time than all their beats.
            temporary.write_bytes(pydantic_core.to_json(self._exchange.status(), indent=1, inf_nan_mode="constants") + b"\n")
            temporary.replace(self._ledger)
        except OSError as error:
            _log.debug("%s cannot be written: %s", self._ledger, error)
