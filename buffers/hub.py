"""The hub's shell: one ROUTER socket around `exchange`, which says what to answer.

    owns        the socket, and through the exchange the journal and the weight store; one thread
    waits for   a frame, or the next tick (liveness, keep-alives, the ledger on disk)
    woken by    any peer's message, a peer that asks to be let in, an event of the socket's monitor
    on close    journal synced, ledger written, socket closed

A round takes in every frame that is already there, then settles: one fsync however many groups arrived together.
With keys only peers on the allow-list are let in (CURVE; `keys.admit` decides). With and without, failed handshakes and
ended connections, of which ZeroMQ says nothing by itself, are counted in the status and logged once a tick.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from buffers import keys, status
from buffers.bound import Bound
from buffers.config import QueueConfig, WeightsConfig
from buffers.exchange import Exchange
from buffers.journal import Journal
from buffers.weight_store import WeightStore

_log = logging.getLogger(__name__)
_TICK_S = 0.5
_ROUND = 256  # messages taken in before the exchange settles
# HWM counts messages, not bytes, for each peer. Received: a round's worth, then TCP makes the peer wait; honest peers have
# no more groups than their credits. Sent: a peer too slow to read a thousand loses the rest and its lease ends.
_RECEIVE_HWM = _ROUND
_SEND_HWM = 1000
_HANDSHAKES_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_MAX_NAMED = 8  # refused addresses named in one line of the log


class Hub:
    """Replay queue, weight channel and ledger behind one address.

    Raises JournalError when the directory belongs to a living hub or is damaged, zmq.ZMQError when the address is taken.
    """

    def __init__(
        self,
        address: str,
        directory: Path,
        config: QueueConfig,
        bound: Bound,
        clock: Callable[[], float] = time.monotonic,
        access: keys.HubKeys | None = None,
        weights: WeightsConfig | None = None,
    ) -> None:
        self._clock, self._ledger = clock, directory / "ledger.json"
        self._journal = Journal(
            directory / "queue",
            segment_bytes=config.segment_bytes,
            fsync=config.fsync,
            interval_s=config.fsync_interval_s,
            keep=config.keep_rollouts,
            clock=clock,
        )
        store = WeightStore(directory / "weights" if config.exact else None)
        self._exchange = _CountingExchange(config, bound, self._journal, store, clock, secrets.token_hex(8), weights)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * config.max_frame_bytes)  # beyond it ZeroMQ cuts the peer by itself
        self._socket.setsockopt(zmq.RCVHWM, _RECEIVE_HWM)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_HWM)
        # A peer that was cut comes back under its name before the old connection is known to be dead.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._gate = _Gate(self._context, self._socket, access)
        self._exchange.counters = self._gate.counters
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self._gate.close()
            self._context.destroy(linger=0)
            self._journal.close()
            raise

    def run(self) -> None:
        """Serve until a Halt; returns with everything on disk."""
        poller = zmq.Poller()
        for waited_for in (self._socket, *self._gate.sockets):
            poller.register(waited_for, zmq.POLLIN)
        next_tick = self._clock()
        try:
            while not self._exchange.stopped:
                wait = max(0.0, next_tick - self._clock())
                if poller.poll(int(wait * 1000) + 1):
                    self._gate.attend()
                    self._take_in()
                if self._clock() >= next_tick:
                    next_tick = self._clock() + _TICK_S
                    self._exchange.tick()
                    self._gate.report()
                    status.write(self._ledger, self.status())
                self._exchange.settle()
                self._send_out()
        finally:
            self._gate.close()
            self._socket.close()
            self._context.term()
            self._journal.close()
            status.write(self._ledger, self.status())

    def status(self) -> dict[str, Any]:
        """Everything an operator asks: plain values, ready for JSON."""
        return self._exchange.status()

    def _take_in(self) -> None:
        for _ in range(_ROUND):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._exchange.receive(identity, frames)

    def _send_out(self) -> None:
        """Never blocks: a peer that is gone, or too slow to read a thousand messages, loses them and its lease ends."""
        for message in self._exchange.outbox:
            self._socket.send_multipart(message, zmq.NOBLOCK)
        self._exchange.outbox.clear()


class _CountingExchange(Exchange):
    """Its status says what happened at the socket too, whoever asks for it."""

    counters: Mapping[str, int] = MappingProxyType({})

    def status(self) -> dict[str, Any]:
        return {**super().status(), **self.counters}


class _Gate:
    """Lets peers in, and counts who failed to come in or went: the ZAP socket and the monitor of the hub's socket.

    Must be made before the socket is bound. With `access` the socket becomes a CURVE server that asks here about every key;
    nobody is let in while nobody answers.

    connections         open now, those in their handshake among them
    connections_ended   by either side: peers that left, died or were cut, and strangers who speak no ZeroMQ
    handshakes_failed   refused, broken off, or without keys where they are asked for
    refused_handshakes  those of them with a key that is not allowed
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], access: keys.HubKeys | None) -> None:
        self._socket = socket
        self._monitor = socket.get_monitor_socket(_HANDSHAKES_FAILED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._allowed = {} if access is None else access.allowed
        self._zap = context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind("inproc://zeromq.zap.01")
        self.sockets = (self._monitor, self._zap)
        self.counters = {"connections": 0, "connections_ended": 0, "handshakes_failed": 0, "refused_handshakes": 0}
        self._reported = dict(self.counters)
        self._refused: set[str] = set()
        if access is not None:
            socket.setsockopt(zmq.ZAP_DOMAIN, keys.ZAP_DOMAIN)
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer a handshake fails rather than succeeds
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, access.secret)

    def attend(self) -> None:
        """Answer everybody who asks to be let in, and take in what the monitor saw. Never blocks."""
        while self._zap.poll(0):
            answer, refused = keys.admit(self._zap.recv_multipart(), self._allowed)
            self._zap.send_multipart(answer)
            if refused:
                self.counters["refused_handshakes"] += 1
                if len(self._refused) < _MAX_NAMED:
                    self._refused.add(refused)
        while self._monitor.poll(0):
            self._count(parse_monitor_message(self._monitor.recv_multipart())["event"])

    def report(self) -> None:
        """One line for everything since the last: somebody who knocks all the time must not fill the disk at his pace."""
        new = {name: count - self._reported[name] for name, count in self.counters.items()}
        self._reported = dict(self.counters)
        if new["refused_handshakes"]:
            _log.warning(
                "refused %d handshakes: unknown keys, from %s", new["refused_handshakes"], ", ".join(sorted(self._refused))
            )
            self._refused.clear()
        if new["handshakes_failed"]:
            _log.warning("%d handshakes failed, the refused ones among them", new["handshakes_failed"])
        if new["connections_ended"]:
            _log.info("%d connections ended, %d are open", new["connections_ended"], self.counters["connections"])

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._zap.close(0)

    def _count(self, event: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self.counters["connections"] += 1
        elif event & _HANDSHAKES_FAILED:
            self.counters["handshakes_failed"] += 1
            self.counters["connections_ended"] -= 1  # its end is told next, and was counted here
        else:
            self.counters["connections"] -= 1
            self.counters["connections_ended"] += 1
