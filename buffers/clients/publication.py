"""A weight set on its way to the hub, while the learner makes its next step.

owns        one thread, until the hub has verified the set or refused it
waits for   the hub's answers, each with a deadline; who calls `wait` waits for the thread
woken by    the hub's answers
on close    nothing: a set that did not come whole is not announced
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

Work = Callable[[], None]


class Publication:
    """Runs `work`, which publishes, in a thread. `blocked_s`: how long others waited for it."""

    def __init__(self, work: Work) -> None:
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self.blocked_s = 0.0
        self._start(lambda: self._run(work))

    def check(self) -> None:
        """Raise what the publication failed with, if it has; it may still be under way."""
        if self._failure is not None:
            raise self._failure

    def wait(self) -> None:
        """Return when the hub has verified the whole. Raises RefusedError when it did not take it, DeadlineError when it did
        not answer."""
        self._await(self._ended)
        self.check()

    def _run(self, work: Work) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (handed to the thread that waits)
            self._failure = error
        finally:
            self._ended.set()

    def _start(self, run: Callable[[], None]) -> None:
        threading.Thread(target=run, name="publication", daemon=True).start()

    def _await(self, event: threading.Event) -> None:
        began = time.monotonic()
        event.wait()
        self.blocked_s += time.monotonic() - began
