"""Reports to the hub until it has confirmed it: that it is to drain, and which actors' processes have ended.

owns        a thread, and a short-lived connection for each message
waits for   the hub's answer, `_PATIENCE_S`; then the message is sent again, also to a hub that was started again meanwhile
woken by    `drain`, `gone`
on close    the thread ends with its message; what is not confirmed then is dropped
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

from async_rlhf.buffers.clients.control import Control
from async_rlhf.buffers.errors import AsyncRLHFError

_PATIENCE_S = 2.0
_AGAIN_S = 0.5
_GOES_ON = ("running", "paused", "disk full")


class HubNotifier:
    """See the module docstring. control: a connection to the hub with this patience in seconds."""

    def __init__(self, control: Callable[[float], AbstractContextManager[Control]]) -> None:
        self._control, self._closing = control, threading.Event()
        self._thread = ThreadPoolExecutor(1, "notifier")
        self._sent: dict[str, Future[None]] = {}  # by actor that has ended; empty text: that the run drains
        self._answers, self._errors = True, deque[str]()
        self.hub_goes_on = True
        """Whether the hub still gave work when it last confirmed an actor's end."""

    def drain(self) -> None:
        """To be called again for a hub that was started again, which begins without it."""
        self.gone("")

    def gone(self, actor: str) -> None:
        """The process of this actor has ended. It may be started again once the hub has confirmed it."""
        self._sent[actor] = self._thread.submit(self._send, actor)

    def is_unconfirmed(self, actor: str) -> bool:
        """Whether the hub has not confirmed yet that this actor is gone."""
        return actor in self._sent and not self._sent[actor].done()

    def last_error(self) -> str:
        """Why the hub has confirmed nothing, once for each outage."""
        return self._errors.popleft() if self._errors else ""

    def close(self) -> None:
        self._closing.set()
        self._thread.shutdown(cancel_futures=True)

    def _send(self, actor: str) -> None:
        while not self._closing.is_set():
            try:
                with self._control(_PATIENCE_S) as hub:
                    if actor:
                        hub.gone(actor)
                        self.hub_goes_on = hub.status().get("state") in _GOES_ON
                    else:
                        hub.drain()
                self._answers = True
                return
            except AsyncRLHFError as error:
                if self._answers:
                    self._errors.append(str(error))
                self._answers = False
                self._closing.wait(_AGAIN_S)
