"""Calls the hooks of a run that the daemon has given up: one that was killed, or could not begin, cannot call them itself.

owns        a `Hooks` for each run that was given up
waits for   nothing while the daemon goes on; where it ends, for hooks that are under way, `hooks.timeout_s` at most
woken by    the daemon's look at its runs
on close    hooks that have begun end within their time-out; the others are dropped
"""

from __future__ import annotations

import time

from async_rlhf.buffers.errors import AsyncRLHFError
from async_rlhf.run.config import load
from async_rlhf.run.supervision.hooks import Hooks
from async_rlhf.serve.queue_dir import QueueDir
from async_rlhf.serve.turns import Entry


class Notices:
    """See the module docstring."""

    def __init__(self, queue: QueueDir) -> None:
        self._queue = queue
        self._hooks: list[Hooks] = []

    def failed(self, entry: Entry) -> str:
        """Begin to call them, unless the run itself has recorded its end. Returns at once, with what is in the way."""
        folder, run = self._queue.folder(entry), self._queue.run(entry)
        try:
            if self._queue.ended(entry) is not None:
                return ""
            config = load(folder / "config.toml")
        except (AsyncRLHFError, OSError) as error:
            return f"{entry.name} has failed, and its hooks cannot run: {error}"
        hooks = Hooks(config.hooks, run.path, folder / "hooks.log")
        text = f"the run could not go on by itself: {entry.reason}"
        hooks.deliver({"time": time.time(), "event": "failed", "run_dir": str(run.path), "text": text})
        self._hooks.append(hooks)
        return ""

    def failures(self) -> list[str]:
        """What failed since the last call."""
        return [failure for hooks in self._hooks for failure in hooks.failures()]

    def close(self) -> None:
        for hooks in self._hooks:
            hooks.close()
