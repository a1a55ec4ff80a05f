"""One peer's end of the hub: `Link` moves frames (the seam that a simulator replaces), `Connection` numbers requests on it and
waits for answers, each with a deadline.

A DEALER socket reconnects by itself when the connection broke or the hub comes back at the same address; `was_remade`
reports it, because messages may then be lost both ways. ZeroMQ does not report a handshake that fails, and tries again for
ever or never again: the socket's monitor is watched, and an error gives the reason.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from async_rlhf.buffers.errors import ConfigError, DeadlineError, HubRestartedError, RefusedError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.transport.frames import HANDSHAKES_FAILED, Waker, bytes_received, receive, send, watch_connections
from async_rlhf.buffers.transport.keys import PeerKeys, load_peer

# HWM counts messages, not bytes, and only those that wait. Sent to a hub that is away: a minute's beats and every group an
# actor holds, after which `send` refuses. Received: an actor requests a few chunks of weights of 1 MiB at a time.
_SEND_HWM = 1000
_RECEIVE_HWM = 1000
# A handshake that breaks off may be a hub that was killed in the middle of it; at the pauses below these take a second.
_MAX_FAILED_HANDSHAKES = 20
_RETRY_S = 2.0  # a request unanswered so long is sent again, and then after twice as long: it may have been lost
_MAX_GAP_S = 5.0  # of silence; in a longer gap this process was asleep
_UNREADABLE = 0  # the request number in an answer to an unreadable message


class Link(Protocol):
    """One thread sends and receives; `wake` may come from any."""

    def send(self, frames: wire.Frames) -> bool:
        """Hand frames over without waiting; False when the queue is full."""

    def receive(self, timeout_s: float) -> wire.Frames | None:
        """The next message; None after `timeout_s`, or earlier after `wake` or when the connection was made."""

    def was_remade(self) -> bool:
        """Whether the connection broke and was made again since the last call."""

    def is_receiving(self) -> bool:
        """Whether bytes have come since the last call, be it of a message that is not whole yet (TCP, on Linux)."""

    def wake(self) -> None:
        """End a waiting `receive`."""

    def clock(self) -> float:
        """Seconds of the clock that deadlines are counted on."""

    def close(self) -> None: ...


Connect = Callable[[str, str], Link]
"""(address, name of the peer) -> its link."""


class SocketLink:
    """A DEALER socket, with `keys` an encrypted one that connects only to the hub whose public key they hold.

    Owns its context and a bell to be woken by; on close drops what was not sent within half a second.
    `receive` and `was_remade` raise DeadlineError, with the reason, when the handshake is refused or fails again and again.
    """

    def __init__(self, address: str, name: str, *, keys: PeerKeys | None = None) -> None:
        self._address, self._keyed = address, keys is not None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, f"{name}-{secrets.token_hex(6)}".encode())
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_HWM)
        self._socket.setsockopt(zmq.RCVHWM, _RECEIVE_HWM)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        watch_connections(self._socket)
        if keys is not None:
            keys.apply(self._socket)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | HANDSHAKES_FAILED
        )
        self._descriptor: int | None = None  # of the connection, while there is one
        self._received = 0
        self._socket.connect(address)
        self._connected = self._remade = False
        self._num_failed = 0
        self._waker = Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(self._waker.descriptor, zmq.POLLIN)

    @property
    def sockets(self) -> list[Any]:
        """The sockets and descriptors to poll when several links are polled together."""
        return [self._socket, self._monitor, self._waker.descriptor]

    def send(self, frames: wire.Frames) -> bool:
        return send(self._socket, frames)

    def receive(self, timeout_s: float) -> wire.Frames | None:
        until = time.monotonic() + timeout_s
        while True:
            ready = dict(self._poller.poll(max(0, int((until - time.monotonic()) * 1000))))
            if self._waker.descriptor in ready:
                self._waker.clear()
            is_made = self._monitor in ready and self._watch()
            if self._socket in ready:
                return receive(self._socket)
            if is_made or not ready or self._waker.descriptor in ready:
                return None

    def was_remade(self) -> bool:
        self._watch()
        remade, self._remade = self._remade, False
        return remade

    def is_receiving(self) -> bool:
        if self._descriptor is None:
            return False
        try:
            before, self._received = self._received, bytes_received(self._descriptor)
        except OSError:  # it has just been closed
            return False
        return self._received > before

    def wake(self) -> None:
        self._waker.ring()

    def clock(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()
        self._waker.close()

    def _watch(self) -> bool:
        """Read the monitor's events; returns whether the connection was made."""
        is_made = False
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            if event["event"] in (zmq.EVENT_CONNECTED, zmq.EVENT_DISCONNECTED):
                is_counted = event["event"] == zmq.EVENT_CONNECTED and self._address.startswith("tcp:")
                self._descriptor = event["value"] if is_counted else None
                self._received = 0
                continue
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._remade, self._connected = self._remade or self._connected, True
                self._num_failed, is_made = 0, True
                continue
            self._num_failed += 1
            # After these two events ZeroMQ does not connect again, and nothing would ever be received.
            final = event["event"] in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
            if final or self._num_failed >= _MAX_FAILED_HANDSHAKES:
                raise DeadlineError(f"the handshake failed: {self._address}: {self._reason(event['event'])}")
        return is_made

    def _reason(self, event: int) -> str:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "this key is not allowed; its public key must be in allowed/ of the hub's machine"
        if self._keyed:
            return "hub.public in security.keys is not the key of that hub, or that hub has no keys"
        return "that hub needs keys (security.keys), or it is no hub"


def connector(directory: Path | None) -> Connect:
    """Makes links with the keys in this directory, or without keys. Raises ConfigError when they cannot be read."""
    if directory is None:
        return SocketLink
    check_curve()
    return partial(SocketLink, keys=load_peer(directory))


def new_pair() -> tuple[bytes, bytes]:
    """A fresh (public, secret) CURVE key pair in Z85."""
    check_curve()
    return zmq.curve_keypair()


def check_curve() -> None:
    """Raises ConfigError when ZeroMQ was built without encryption."""
    if not zmq.has("curve"):
        raise ConfigError("security.keys: this pyzmq was built without CURVE; install a wheel of pyzmq that has it")


class Patience:
    """How long the other side has been silent while this one polled. A process that was stopped, or busy elsewhere,
    received nothing because it did not poll: of each gap between two polls only `_MAX_GAP_S` count.
    """

    def __init__(self, clock: Callable[[], float], limit_s: float) -> None:
        self._clock, self._limit_s = clock, limit_s
        self.reset()

    def reset(self) -> None:
        self._silent_s, self._looked_at = 0.0, self._clock()

    def is_over(self) -> bool:
        """Checked whenever the link was read."""
        now = self._clock()
        self._silent_s += min(_MAX_GAP_S, now - self._looked_at)
        self._looked_at = now
        return self._silent_s >= self._limit_s


class Connection:
    """Numbered messages over one link.

    Raises WireError for a message larger than the hub takes, DeadlineError when so much waits to be sent that no more fits.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._last_request = 0
        self.max_frame_bytes = wire.MAX_FRAME_BYTES  # until the hub announces its own

    def send(self, message: wire.Message, arrays: wire.Frames | None = None) -> int:
        """Send without waiting for an answer; returns the request number that the answer will carry."""
        self._last_request += 1
        self._send(self._last_request, message, arrays)
        return self._last_request

    def receive(self, timeout_s: float) -> tuple[int, wire.Message, wire.Frames] | None:
        """The next message, or None after `timeout_s` or a wake."""
        frames = self.link.receive(timeout_s)
        return None if frames is None else wire.decode(frames, max_frame_bytes=wire.MAX_FRAME_BYTES)

    def ask(
        self,
        message: wire.Message,
        arrays: wire.Frames | None = None,
        *,
        timeout_s: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> tuple[wire.Message, wire.Frames]:
        """Send and wait for the answer, as `ask_all` does."""
        ((answer, frames),) = self.ask_all([(message, arrays or [])], ahead=1, timeout_s=timeout_s, meanwhile=meanwhile)
        return answer, frames

    def ask_all(
        self,
        messages: Iterable[tuple[wire.Message, wire.Frames]],
        *,
        ahead: int,
        timeout_s: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[tuple[wire.Message, wire.Frames]]:
        """Send requests, up to `ahead` of them before the first is answered, and wait for all answers. Requests are repeated
        while the hub is away.

        A Waiting answer proves the hub alive and moves the deadline, and so do bytes of an answer that is not whole yet.
        meanwhile: called with every look, to give up by an error. Raises RefusedError, or DeadlineError naming a request.
        """
        coming, open_requests = iter(messages), dict[int, tuple[wire.Message, wire.Frames]]()
        answers, detail = list[tuple[wire.Message, wire.Frames]](), "the hub never answered"
        patience, again = Patience(self.link.clock, timeout_s), _Again(self.link)
        again.is_due()  # the requests are sent right below
        while True:
            meanwhile()
            for message, arrays in itertools.islice(coming, ahead - len(open_requests)):
                open_requests[self.send(message, arrays)] = message, arrays
            if not open_requests:
                return answers
            answer = self.receive(min(_RETRY_S, timeout_s))
            # A request that the hub cannot read it refuses without its number.
            is_ours = answer is not None and (
                answer[0] in open_requests or (answer[0] == _UNREADABLE and isinstance(answer[1], wire.Refused))
            )
            if is_ours or (answer is None and self.link.is_receiving()):
                patience.reset()
                again.put_off()
            if answer is not None and is_ours:
                _raise_refusal(answer[1])
                if isinstance(answer[1], wire.Waiting):
                    detail = answer[1].detail
                else:
                    answers.append(answer[1:])
                    del open_requests[answer[0]]
            elif patience.is_over():
                asked = next(iter(open_requests.values()))[0].type
                raise DeadlineError(f"waited {timeout_s:.0f} s for the answer to {asked!r}: {detail}")
            elif again.is_due():
                for request, (message, arrays) in open_requests.items():
                    self._send(request, message, arrays)

    def _send(self, request: int, message: wire.Message, arrays: wire.Frames | None) -> None:
        frames = wire.encode(message, arrays, request)
        wire.check_size(frames, max_frame_bytes=self.max_frame_bytes)
        if not self.link.send(frames):
            raise DeadlineError(f"{message.type!r} cannot be sent: the hub has been away for too many messages")

    def close(self) -> None:
        self.link.close()


class _Again:
    """When a request is to be sent: now, when the connection was made anew, and after pauses that double, for ZeroMQ may have
    dropped it at a side that was overrun. Not more often: an answer may be large and the link slow.
    """

    def __init__(self, link: Link) -> None:
        self._link, self._pause_s = link, _RETRY_S
        self._at = link.clock()

    def is_due(self) -> bool:
        """Whether to send; the next time is then set."""
        now = self._link.clock()
        if now < self._at and not self._link.was_remade():
            return False
        self._at, self._pause_s = now + self._pause_s, 2 * self._pause_s
        return True

    def put_off(self) -> None:
        """A message came: the hub lives and has the request."""
        self._at = self._link.clock() + self._pause_s


def _raise_refusal(answer: wire.Message) -> None:
    if isinstance(answer, wire.Refused):
        kind = HubRestartedError if answer.reason == "unregistered" else RefusedError
        raise kind(answer.reason, answer.detail)
