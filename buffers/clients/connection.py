"""Numbered messages over one link, and answers awaited with a deadline: what all ends of the hub share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from async_rlhf.buffers.errors import DeadlineError, RefusedError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.transport.link import Link

_RETRY_S = 2.0  # a request unanswered so long is sent again, and then after twice as long: it may have been lost
_MAX_GAP_S = 5.0  # of a silence: what is longer this process slept through
_UNREADABLE = 0  # the request number of an answer to what the hub could not read


class HubRestartedError(RefusedError):
    """The hub does not know this learner any more: register and publish again."""


class Patience:
    """How long the other side has been silent while this one listened. A process that was stopped, or busy elsewhere, heard
    nothing because it did not listen: of each gap between two looks only `_MAX_GAP_S` count.
    """

    def __init__(self, clock: Callable[[], float], limit_s: float) -> None:
        self._clock, self._limit_s = clock, limit_s
        self.heard()

    def heard(self) -> None:
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
        """Send and wait for the answer, repeating the request while the hub is away.

        A Waiting answer proves the hub alive and moves the deadline, and so do bytes of an answer that is not whole yet.
        meanwhile: called with every look, to give up by an error. Raises RefusedError, or DeadlineError naming the request.
        """
        self._last_request += 1
        patience = Patience(self.link.clock, timeout_s)
        again = _Again(self.link)
        detail = "the hub never answered"
        while not patience.is_over():
            meanwhile()
            if again.is_due():
                self._send(self._last_request, message, arrays)
            answer = self.receive(min(_RETRY_S, timeout_s))
            if answer is None and self.link.is_receiving():
                patience.heard()
                again.put_off()
            if answer is None or not self._is_answer(answer[0], answer[1]):
                continue
            patience.heard()
            again.put_off()
            if isinstance(answer[1], wire.Waiting):
                detail = answer[1].detail
            else:
                _raise_refusal(answer[1])
                return answer[1], answer[2]
        raise DeadlineError(f"waited {timeout_s:.0f} s for the answer to {message.type!r}: {detail}")

    def ask_all(self, messages: Iterable[tuple[wire.Message, wire.Frames]], *, ahead: int, timeout_s: float) -> None:
        """Send many requests, up to `ahead` of them before the first is answered; returns when all are.

        What the answers say is dropped but for a refusal. Raises as `ask` does.
        """
        coming, open_requests = iter(messages), dict[int, tuple[wire.Message, wire.Frames]]()
        patience, again = Patience(self.link.clock, timeout_s), _Again(self.link)
        again.put_off()
        while True:
            for message, arrays in itertools.islice(coming, ahead - len(open_requests)):
                open_requests[self.send(message, arrays)] = message, arrays
            if not open_requests:
                return
            answer = self.receive(min(_RETRY_S, timeout_s))
            if answer is not None and (answer[0] in open_requests or answer[0] == _UNREADABLE):
                _raise_refusal(answer[1])
                if open_requests.pop(answer[0], None) is not None:
                    patience.heard()
                    again.put_off()
            if patience.is_over():
                raise DeadlineError(f"waited {timeout_s:.0f} s for the answers to {len(open_requests)} messages")
            if again.is_due():
                for request, (message, arrays) in open_requests.items():
                    self._send(request, message, arrays)

    def _is_answer(self, request: int, message: wire.Message) -> bool:
        """Whether this answers the last request; a request that the hub cannot read it refuses without its number."""
        return request == self._last_request or (request == _UNREADABLE and isinstance(message, wire.Refused))

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
        """Something came: the hub is there and has the request."""
        self._at = self._link.clock() + self._pause_s


def _raise_refusal(answer: wire.Message) -> None:
    if isinstance(answer, wire.Refused):
        kind = HubRestartedError if answer.reason == "unregistered" else RefusedError
        raise kind(answer.reason, answer.detail)
