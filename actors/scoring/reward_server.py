"""Serves one reward to actors, wherever they run: `async-rlhf serve-reward FILE:NAME`.

    owns        a ROUTER socket, a scoring pool with the reward's processes
    waits for   requests, scores, somebody who wants to be let in; looks up twice a second
    woken by    the sockets, and by the pool through a pipe
    on close    the pool's processes are killed; who waits for an answer runs into its time-out and asks again

Without keys it listens on this machine only. With keys only those on the allow-list are let in, as at the hub.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import zmq

from async_rlhf.actors.config import ScoringConfig
from async_rlhf.actors.rewards import RewardSpec
from async_rlhf.actors.scoring.pool import Scored, ScoringPool
from async_rlhf.actors.scoring.served_messages import MAX_BYTES, Ask, Told, pack, unpack
from async_rlhf.buffers.errors import ConfigError, WireError
from async_rlhf.buffers.hub.authenticator import Authenticator
from async_rlhf.buffers.transport import keys
from async_rlhf.buffers.transport.waker import Waker

_log = logging.getLogger(__name__)
_LOOK_MS = 500
# Who asks for more at once is told to come back: nothing here may grow without end.
_MAX_PENDING = 10_000
_BACK_S = 1.0
# Who knocks without a key is told of once in so many seconds.
_REPORT_S = 10.0


class _From(NamedTuple):
    """Who asked, and under which number."""

    peer: bytes
    id: int


class RewardServer:
    """See the module docstring. `run` serves until `stop`. Raises ConfigError for an address it may not or cannot have."""

    def __init__(self, spec: RewardSpec, config: ScoringConfig, address: str, key_dir: Path | None = None) -> None:
        local = address.startswith(("ipc://", "tcp://127.0.0.1:", "tcp://localhost:"))
        if key_dir is None and not local:
            raise ConfigError(
                f"address = {address!r}: without keys a reward is served on this machine only. Use tcp://127.0.0.1:PORT or "
                "an ipc:// path, or make keys (async-rlhf keys new DIR) and name them with --keys."
            )
        access = None if key_dir is None else keys.load_hub(key_dir)
        self._spec, self._stopped = spec, False
        self._deadlines: dict[_From, float] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        self._authenticator = Authenticator(self._context, self._socket, access)
        self._waker = Waker()
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise ConfigError(f"address = {address!r} cannot be used: {error}") from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._pool = ScoringPool[_From]([spec], config, wake=self._waker.ring)
        self.counters = {"asked": 0, "answered": 0, "refused": 0, "too_late": 0}

    def run(self) -> None:
        """Serve until `stop`; raises RewardError when the reward's processes do not come up."""
        poller = zmq.Poller()
        for waited_for in (self._socket, *self._authenticator.sockets, self._waker.descriptor):
            poller.register(waited_for, zmq.POLLIN)
        told = time.monotonic()
        try:
            while not self._stopped:
                if self._waker.descriptor in dict(poller.poll(_LOOK_MS)):
                    self._waker.clear()
                self._authenticator.attend()
                self._take_in()
                for scored in self._pool.poll():
                    self._answer(scored)
                self._give_up()
                if time.monotonic() - told > _REPORT_S:
                    told = time.monotonic()
                    self._authenticator.report()
        finally:
            self._pool.close()
            self._close_sockets()

    def stop(self) -> None:
        """End `run`; may be called from a signal handler or another thread."""
        self._stopped = True
        self._waker.ring()

    def _take_in(self) -> None:
        with suppress(zmq.Again):
            while True:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                try:
                    self._ask(peer, unpack(Ask, b"".join(frames)))
                except WireError as error:
                    self.counters["refused"] += 1
                    _log.warning("refused: %s", error)

    def _ask(self, peer: bytes, ask: Ask) -> None:
        self.counters["asked"] += 1
        asker = _From(peer, ask.id)
        if asker in self._deadlines or self._pool.num_pending >= _MAX_PENDING:
            self._send(asker, Told(id=ask.id, failure=f"{_MAX_PENDING} completions wait already", retry_after_s=_BACK_S))
            return
        self._deadlines[asker] = time.monotonic() + ask.timeout_s
        self._pool.submit(asker, ask.fields)

    def _answer(self, scored: Scored[_From]) -> None:
        del self._deadlines[scored.key]
        score = scored.scores[self._spec.name]
        self.counters["answered"] += 1
        self._send(scored.key, Told(id=scored.key.id, value=score.value, failure=score.failure, metrics=dict(score.metrics)))

    def _send(self, asker: _From, told: Told) -> None:
        with suppress(zmq.Again):  # a peer that does not read asks again
            self._socket.send_multipart([asker.peer, pack(told)], zmq.NOBLOCK)

    def _give_up(self) -> None:
        """Nobody listens any more for what took too long."""
        late = [asker for asker, deadline in self._deadlines.items() if deadline < time.monotonic()]
        self._pool.discard(late)
        for asker in late:
            del self._deadlines[asker]
        self.counters["too_late"] += len(late)

    def _close_sockets(self) -> None:
        self._authenticator.close()
        self._socket.close()
        self._context.term()
        self._waker.close()
