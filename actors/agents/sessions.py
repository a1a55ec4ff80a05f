"""The calls of one episode, between the server's thread, which takes requests, and the episode's own, which answers them.

owns        the calls so far, by what they ask; the answers, for requests that come again
waits for   nothing: a request waits for its call's `answer`, an episode for what `on_call` is given
on close    `end`: every call without an answer fails with 503; so does each that comes later

A retry is no second call. A request is one by its header (`x-stainless-retry-count`), or when a request like it lost its
connection before it had an answer: it then has the answer of that call, sampled already or not. Two like requests on open
connections are two calls.

A client that goes away leaves its call behind. One that the model answers counts as a turn, for which a retry may come. For one
that is still behind another nothing was sampled: it is left out when its turn comes (`begins`), and a retry that comes later is
a call of its own.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from async_rlhf.actors.agents.request import ChatRequest, RequestError
from async_rlhf.actors.agents.response import ChatResponse


@dataclass(eq=False)
class PendingCall:
    """A call without its request, which grows with the conversation."""

    key: bytes
    """As in `ask`."""
    answer: Future[ChatResponse] = field(default_factory=Future)
    num_waiting: int = 0
    """Connections that wait for the answer."""
    is_given: bool = False
    """Whether one of them got it."""


class IncomingCall(NamedTuple):
    """A call, and what takes the model's turn in answer to it."""

    request: ChatRequest
    pending: PendingCall


class AgentSession:
    """See the module docstring. secret: names it in a URL or as a key. name: in the ids of its answers, and in no others.
    num_joined: requests that were no call of their own. num_left: calls without a connection when their turn came."""

    def __init__(self, on_call: Callable[[IncomingCall], object]) -> None:
        """on_call: takes each call once, in the server's thread."""
        self.secret, self.name = secrets.token_urlsafe(24), secrets.token_hex(4)
        self.num_joined = self.num_left = 0
        self._on_call = on_call
        self._lock = threading.Lock()
        self._calls: dict[bytes, list[PendingCall]] = {}
        self._is_over = False

    def ask(self, key: bytes, request: ChatRequest, is_retry: bool) -> PendingCall:
        """The call whose answer a request waits for, until `left` or `gave`: its own, or one that it is a retry of.

        key: equal for a request and its retries. Raises RequestError when the episode has ended.
        """
        with self._lock:
            if self._is_over:
                raise _over()
            known = self._calls.setdefault(key, [])
            alone = [pending for pending in known if not pending.num_waiting and not pending.is_given]
            call = alone[0] if alone else known[-1] if known and is_retry else None
            if call is not None:
                self.num_joined += 1
                call.num_waiting += 1
                return call
            known.append(call := PendingCall(key, num_waiting=1))
        self._on_call(IncomingCall(request, call))
        return call

    def begins(self, call: PendingCall) -> bool:
        """Whether the turn of a call that arrived may begin; else it has no connection, and is forgotten."""
        with self._lock:
            if call.num_waiting:
                return True
            self._calls[call.key].remove(call)
            self.num_left += 1
            return False

    def left(self, call: PendingCall) -> None:
        """A request has lost its connection."""
        with self._lock:
            call.num_waiting -= 1

    def gave(self, call: PendingCall) -> None:
        """A request has its answer."""
        with self._lock:
            call.num_waiting -= 1
            call.is_given = True

    def end(self) -> None:
        with self._lock:
            self._is_over = True
            left = [call for calls in self._calls.values() for call in calls if not call.answer.done()]
        for call in left:
            call.answer.set_exception(_over())


def _over() -> RequestError:
    return RequestError("the episode has ended; nothing more is answered in this session", 503)
