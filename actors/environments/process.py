"""The actor's end of one process that runs episodes (`worker`): its pipe, whether it still turns, how it ended."""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from multiprocessing.connection import Pipe

from async_rlhf.actors.environments.loading import EnvironmentSpec
from async_rlhf.actors.environments.messages import Message, pack, unpack
from async_rlhf.actors.environments.worker import GRACE_S, Limits, serve
from async_rlhf.actors.scoring.event_loop_worker import LoopWatchdog
from async_rlhf.actors.scoring.executor import START_LIMIT_S
from async_rlhf.actors.scoring.processes import END_S, WorkerContext, ended, is_over

logger = logging.getLogger(__name__)

# How often to look at a process that has episodes.
LOOK_S = 0.25
# Beside an observation, what a message holds; tracebacks and failures are cut off far below it.
_OVERHEAD_BYTES = 1 << 20


class EpisodeProcess:
    """One process and its connection. Whatever it started is killed with it (`async_rlhf.actors.scoring.guard`).

    is_ready: its environment is imported. failure: why that cannot be, "" where no reason came. ready_by: monotonic seconds.
    """

    def __init__(self, spec: EnvironmentSpec, limits: Limits) -> None:
        """Raises OSError where no process can be started."""
        self._spec, self._limits = spec, limits
        self.connection, theirs = Pipe()
        # A step that holds the interpreter lock keeps the process from reading; a send has a deadline.
        with socket.socket(fileno=os.dup(self.connection.fileno())) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(GRACE_S), 0))
        self._watchdog, self._pulse = LoopWatchdog(), LoopWatchdog()
        arguments = (theirs, spec, limits, self._watchdog, self._pulse)
        self.process = WorkerContext().Process(target=serve, args=arguments, name="episodes")
        try:
            self.process.start()
        except BaseException:  # an interrupt too: the pipe must not outlive a start that was given up
            self.connection.close()
            raise
        finally:
            theirs.close()
        self.is_ready, self.failure = False, ""
        self.ready_by = time.monotonic() + START_LIMIT_S
        self._seen, self._looked, self._silent_s = 0.0, time.monotonic(), 0.0

    def send(self, message: Message) -> None:
        """Raises WireError for a column that cannot travel, BlockingIOError when the process takes nothing, OSError when it has
        ended."""
        self.connection.send_bytes(pack(message))

    def receive(self) -> Message:
        """Raises EOFError and OSError at its end, WireError for what is no message."""
        return unpack(self.connection.recv_bytes(2 * self._limits.max_observation_bytes + _OVERHEAD_BYTES))

    def blocked(self) -> tuple[str, int | None] | None:
        """Once its loop has not turned for longer than a step may take: why, and the episode whose step blocks it if known.

        Only time in which this process could look itself counts as silence.
        """
        now, turn = time.monotonic(), self._pulse.look()
        beat = 0.0 if turn is None else turn.since
        self._silent_s = self._silent_s + min(now - self._looked, 2 * LOOK_S) if beat == self._seen else 0.0
        self._seen, self._looked = beat, now
        if self._silent_s <= self._spec.timeout_s + GRACE_S:
            return None
        if (cause := self.running()) is not None:
            return (
                f"timed out: it blocked the event loop for more than {self._spec.timeout_s:g} s (timeout_s); "
                "a step that does not await belongs in a plain 'def'",
                cause,
            )
        return f"its process did not answer for more than {self._spec.timeout_s:g} s (timeout_s)", None

    def running(self) -> int | None:
        """The episode whose asynchronous step is on the loop right now, or was when the process died."""
        turn = self._watchdog.look()
        return None if turn is None else turn.call_id

    def ended(self) -> str:
        """Why the process ended, which it has, or is about to."""
        is_over(self.process, END_S)
        return self.failure or ended(self.process.exitcode, self._limits.worker_memory_mb, "environment.worker_memory_mb")

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> None:
        """Kill it, and all it started."""
        self.process.kill()
        if not is_over(self.process, END_S):
            logger.warning("process %s of episodes was killed and still runs after %g s", self.process.pid, END_S)
        self.connection.close()
