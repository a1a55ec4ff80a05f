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
from contextlib import AbstractContextManager

from async_rlhf.buffers.clients.control import Control
from async_rlhf.buffers.errors import AsyncRLHFError

_PATIENCE_S = 2.0
_AGAIN_S = 0.5
_GOES_ON = ("running", "paused", "disk full")


class HubNotifier:
    """See the module docstring. control: a connection to the hub with this patience in seconds."""

    def __init__(self, control: Callable[[float], AbstractContextManager[Control]]) -> None:
        self._control = control
        self._news = threading.Condition()
        self._closing = False
        self._unconfirmed: deque[str] = deque()  # actors that have ended; empty text: that the run drains
        self.hub_goes_on = True
        """Whether the hub still gave work when it last confirmed an actor's end."""
        self._last_error = ""
        self._thread = threading.Thread(target=self._run, name="notifier", daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Drain the hub; call it again for a restarted hub."""
        self.gone("")

    def gone(self, actor: str) -> None:
        """The process of this actor has ended. It may be started again once the hub has confirmed it."""
        with self._news:
            self._unconfirmed.append(actor)
            self._news.notify()

    def is_unconfirmed(self, actor: str) -> bool:
        """Whether the hub has not confirmed yet that this actor is gone."""
        with self._news:
            return actor in self._unconfirmed

    def last_error(self) -> str:
        """Why the hub has confirmed nothing, once for each outage."""
        with self._news:
            last_error, self._last_error = self._last_error, ""
            return last_error

    def close(self) -> None:
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join(2 * _PATIENCE_S)

    def _run(self) -> None:
        answers = True
        while True:
            with self._news:
                self._news.wait_for(lambda: self._closing or self._unconfirmed)
                if self._closing:
                    return
                actor = self._unconfirmed[0]
            try:
                self._send(actor)
                answers = True
            except AsyncRLHFError as error:
                with self._news:
                    if answers:
                        self._last_error = str(error)
                    self._news.wait_for(lambda: self._closing, _AGAIN_S)
                answers = False

    def _send(self, actor: str) -> None:
        with self._control(_PATIENCE_S) as hub:
            if actor:
                hub.gone(actor)
                self.hub_goes_on = hub.status().get("state") in _GOES_ON
            else:
                hub.drain()
        with self._news:
            self._unconfirmed.popleft()
