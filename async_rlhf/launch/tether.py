"""The tie between a role and the supervisor that started it: a held pipe, beats, and the lock of the run directory.

owns        in the role: the writing end of a pipe, a thread that beats once a second, a thread that reads standard input
waits for   standard input to close, which happens when the supervisor ends in any way: then this process ends at once
woken by    the clock
on close    nothing: all of it ends with the process

A launcher names the descriptors in the environment; a role that finds none was started by hand and follows no supervisor. No
clock of the role enters the beats: the supervisor counts silence on its own.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

from async_rlhf.launch.run_lock import RunLock

_VARIABLE = "ASYNC_RLHF_TETHER"
_BEAT_S = 1.0
BEAT, PROGRESS, PERCENT = b".", b"+", b"%"


def environment(beats: int, lock: int = -1) -> dict[str, str]:
    """Variables that the launcher adds to a role's environment: the inherited descriptors."""
    return {_VARIABLE: f"{beats} {lock}"}


class Tether:
    """The role's end. Without descriptors (a role that was started by hand) every method does nothing."""

    def __init__(self, beats: int | None = None, lock: int | None = None) -> None:
        self._beats = beats
        self.lock = None if lock is None else RunLock(lock)
        self._by_thread = True
        self._percent = 0

    @classmethod
    def from_environment(cls) -> Tether:
        """The tether that the launcher passed on. Processes that this one starts do not inherit it."""
        beats, lock = (int(text) for text in os.environ.pop(_VARIABLE, "-1 -1").split())
        if beats < 0:
            return cls()
        os.set_blocking(beats, False)
        for descriptor in (beats, lock):
            if descriptor >= 0:
                os.set_inheritable(descriptor, False)
        return cls(beats, lock if lock >= 0 else None)

    @property
    def is_tied(self) -> bool:
        return self._beats is not None

    def follow(self) -> None:
        """Begin to beat, and to end with the supervisor."""
        if self.is_tied:
            threading.Thread(target=self.end_with_supervisor, name="follow-supervisor", daemon=True).start()
            threading.Thread(target=self._beat_on, name="beat", daemon=True).start()

    def beat(self) -> None:
        """Beat now; from the first call on only these calls do, so that a loop that hangs sends no beats."""
        self._by_thread = False
        self._send(BEAT)

    def progress(self, done: int = 0, of: int = 1) -> None:
        """Report progress of this role's work; where the amount is known, `done` of `of` in all."""
        before, self._percent = self._percent, 100 * done // of
        self._send(PROGRESS + PERCENT * (self._percent - before))

    def _send(self, word: bytes) -> None:
        if self._beats is not None:
            with suppress(BlockingIOError, BrokenPipeError):  # the supervisor has enough to read, or is gone
                os.write(self._beats, word)

    def _beat_on(self) -> None:
        while self._by_thread:
            self._send(BEAT)
            time.sleep(_BEAT_S)

    @staticmethod
    def end_with_supervisor() -> None:
        """End at once when standard input closes."""
        while os.read(0, 4096):
            pass
        os._exit(1)
