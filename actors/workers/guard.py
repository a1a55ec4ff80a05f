"""The guard of a worker: the process between it and the actor. A program of its own, run by `processes`; Linux only.

owns        the worker, and whatever that starts: what loses its parent becomes the guard's child, also after `setsid` and a
            double fork
waits for   the worker's end, the pipe that the actor closes (or its death does), the output of the worker and its programs
woken by    these
on close    every process below it is killed; then it ends as the worker ended

Output goes on to the actor's, so much in each minute; the rest is dropped and counted. A worker never waits for a reader.
It imports nothing but the standard library and no user code: it must be small, and outlive them all.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterable

# Of one worker, for standard output and standard error together.
OUTPUT_BYTES, OUTPUT_WINDOW_S = 64 << 10, 60.0
# A process that the kernel does not let go (on a dead network disk) must not keep the actor waiting.
_LAST_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
# A pipe that is ready takes so much without blocking (PIPE_BUF).
_BLOCK = 4096


class Output:
    """Passes on what comes from the worker, as far as it is allowed. targets: descriptor to read -> descriptor to write."""

    def __init__(self, targets: dict[int, int]) -> None:
        self._targets = targets
        self._began, self._left, self._dropped = time.monotonic(), OUTPUT_BYTES, 0

    @property
    def next_report_s(self) -> float | None:
        """Seconds until the next `report`; None while nothing was dropped."""
        return max(0.0, self._began + OUTPUT_WINDOW_S - time.monotonic()) if self._dropped else None

    def pass_on(self, source: int) -> bool:
        """Passes on the data that can be read now; False at the end of the source."""
        self.report()
        data = os.read(source, _BLOCK)
        kept = data[: self._left]
        if kept and not _write(self._targets[source], kept):
            kept = b""
        self._left -= len(kept)
        if len(kept) < len(data):
            if not self._dropped:
                self._note(
                    f"the rest of this minute's output is dropped: more than {OUTPUT_BYTES} bytes, or than the log takes"
                )
            self._dropped += len(data) - len(kept)
        return bool(data)

    def report(self, *, ends: bool = False) -> None:
        """Begin a new minute when the last is over, and report what was dropped in it."""
        if not ends and time.monotonic() < self._began + OUTPUT_WINDOW_S:
            return
        if self._dropped:
            self._note(f"{self._dropped} bytes of its output were dropped")
        self._began, self._left, self._dropped = time.monotonic(), OUTPUT_BYTES, 0

    def _note(self, text: str) -> None:
        _write(2, f"\nworker {os.getpid()}: {text}\n".encode())


def main(life: int, started: int, command: list[str]) -> None:
    """Run the worker's command and end as it does.

    life: its other end closes when all here must end. started: gets the worker's process id, and is closed at the end.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    os.setsid()
    os.set_inheritable(started, False)
    pipes = {target: os.pipe() for target in (1, 2)}
    ended, wake = os.pipe()
    for end in (ended, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    worker = os.fork()
    if not worker:
        for target, (_, write) in pipes.items():
            os.dup2(write, target)
        os.execv(command[0], command)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the actor decides when this ends
    os.write(started, b"%d\n" % worker)
    sources = {read: target for target, (read, _) in pipes.items()}
    _close_all_but({0, 1, 2, life, started, ended, wake, *sources})
    output = Output(sources)
    _watch(worker, life, ended, sources, output)
    _kill_below(worker)
    for source in sources:
        os.set_blocking(source, False)
        with contextlib.suppress(BlockingIOError):
            while output.pass_on(source):
                pass
    output.report(ends=True)
    _end_like(worker)


def _watch(worker: int, life: int, ended: int, sources: Iterable[int], output: Output) -> None:
    """Until the worker has ended, or is to end. ended: can be read when a child has."""
    poll = select.poll()
    poll.register(life, 0)  # its hanging up alone: what it carries is for the worker
    for descriptor in (ended, *sources):
        poll.register(descriptor, select.POLLIN)
    while True:
        wait_s = output.next_report_s
        ready = [descriptor for descriptor, _ in poll.poll(None if wait_s is None else 1000 * wait_s + 1)]
        if ended in ready:
            os.read(ended, _BLOCK)
        if life in ready or (ended in ready and _reap(worker)):
            return
        output.report()
        for source in (descriptor for descriptor in ready if descriptor in sources):
            if not output.pass_on(source):
                poll.unregister(source)  # the worker closed its own


def _reap(worker: int) -> bool:
    """Whether the worker has ended. It is not reaped itself: its number must not go to another process before the end."""
    with contextlib.suppress(ChildProcessError):
        while one := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if one.si_pid == worker:
                return True
            os.waitpid(one.si_pid, 0)
    return False


def _kill_below(worker: int) -> None:
    """Kill what is left, until nothing is."""
    until = time.monotonic() + _LAST_S
    while (left := _alive_below(os.getpid())) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _reap(worker)
        time.sleep(0.005)


def _alive_below(top: int) -> set[int]:
    """The processes below this one that still run."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        # One that has just ended cannot be read.
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
            state, parent = stat.read().rpartition(b")")[2].split()[:2]
            if state not in b"ZX":
                children.setdefault(int(parent), []).append(int(name))
    found: set[int] = set()
    front = [top]
    while front:
        below = children.get(front.pop(), [])
        found.update(below)
        front += below
    return found


def _end_like(worker: int) -> None:
    status = os.waitid(os.P_PID, worker, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if status is None:  # killed, and the kernel holds on to it
        os._exit(1)
    if status.si_code == os.CLD_EXITED:
        os._exit(status.si_status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(status.si_status, signal.SIG_DFL)
    os.kill(os.getpid(), status.si_status)


def _close_all_but(kept: set[int]) -> None:
    """Closes all descriptors but the worker's own, so that an end that it closes is closed."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _write(target: int, data: bytes) -> bool:
    """Whether it was taken; a reader that is slow or gone does not hold the worker up."""
    poll = select.poll()
    poll.register(target, select.POLLOUT)
    if not any(event & select.POLLOUT for _, event in poll.poll(0)):
        return False
    with contextlib.suppress(OSError):
        return os.write(target, data) == len(data)
    return False


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
