"""The learner's other ranks: processes that rank 0 starts, watches, and takes with it.

    owns        the processes of ranks 1 to n - 1, the folder they meet in, a thread that looks at them every 0.2 s
    waits for   `close`: their end, for `_CLOSE_S`
    woken by    the thread: when a rank ends unexpectedly, the learner ends too and names it
    on close    no rank is left; they also end when this process does, since it holds their standard input open

A learner that lost a rank is not mended: the supervisor starts it again, with all ranks, from its last checkpoint.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from async_rlhf.launch.exit_codes import FAILED, FATAL
from async_rlhf.launch.program import Launcher, Process, rank_node

_LOOK_S = 0.2
_CLOSE_S = 15.0
# How long the learner's own thread may take to find out by itself, and to say more about it.
_GRACE_S = 5.0


def _end(code: int, text: str) -> None:
    sys.stderr.write(f"fatal: {text}\n")
    sys.stderr.flush()
    os._exit(code)


class RankProcesses:
    """Starts them at once. `end(code, text)` ends this process; only tests give another."""

    def __init__(
        self,
        launcher: Launcher,
        run_dir: Path,
        size: int,
        log: Callable[[str], Path],
        end: Callable[[int, str], None] = _end,
    ) -> None:
        self._meeting = tempfile.TemporaryDirectory(prefix="ranks-")
        self.directory = Path(self._meeting.name)
        self._end, self._closing = end, threading.Event()
        self._processes: dict[int, Process] = {}
        for rank in range(1, size):
            node = rank_node(rank, self.directory, log(f"learner-rank-{rank}"))
            self._processes[rank] = launcher.start(run_dir, node)
        threading.Thread(target=self._watch, name="watch-ranks", daemon=True).start()

    def ended(self) -> str | None:
        """Which rank has ended, and how; None when all run."""
        for rank, process in self._processes.items():
            if (code := process.poll()) is not None:
                if code < 0:
                    return f"rank {rank} ended by signal {-code}"
                return f"rank {rank} ended with code {code} ({process.last_words()})"
        return None

    def close(self, *, orderly: bool) -> None:
        """orderly: the ranks have the command to end, and get time for it; whatever still runs then is killed."""
        self._closing.set()
        deadline = time.monotonic() + (_CLOSE_S if orderly else 0.0)
        for process in self._processes.values():
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            process.kill()
        self._meeting.cleanup()

    def _watch(self) -> None:
        while not self._closing.wait(_LOOK_S):
            codes = {rank: code for rank, process in self._processes.items() if (code := process.poll()) is not None}
            if codes:
                text = self.ended() or ""
                code = next((code for code in codes.values() if code in FATAL), FAILED)  # starting again would not help
                if not self._closing.wait(_GRACE_S):
                    self._end(code, f"the learner's {text}; see its log")
                return
