"""The daemon of a machine: starts the runs of a queue one after the other, and sees how they end.

owns        the lock of the queue's directory; the processes that it started, each in a session and with a log of its own
waits for   nothing: looks at its runs once a second
woken by    signals: the first drains what runs, which goes on when a daemon is back; the second forces it to end
on close    runs have ended, by their own account; a daemon that is killed, or forced while its disk is full, leaves them alive

who dies    what happens
run         it is started again with --resume, unless an error of its own ended it (`turns`)
daemon      its runs go on; the next daemon sees them by their locks, and starts those that are gone with --resume
machine     the same: nothing that holds a lock is left, so all that ran is started again

A run that was killed, or could not begin, and is given up cannot call its hooks itself: the daemon does, without waiting for
them while it goes on; where it ends, for `hooks.timeout_s` at most.

A run is `python -m async_rlhf train CONFIG`, as by hand. Its process inherits the lock of its entry, and keeps it until it has
ended: so none is started twice, from its first moment on, when it does not hold the lock of its run directory yet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import FrameType
from typing import IO

from async_rlhf.buffers.errors import AsyncRLHFError, DamagedError, FormatError
from async_rlhf.buffers.interpreter import python
from async_rlhf.launch.exit_codes import ending
from async_rlhf.launch.forked import Child
from async_rlhf.launch.local import begin, last_error, warm
from async_rlhf.launch.run_lock import RunLock
from async_rlhf.run.display.terminal import on_signals
from async_rlhf.run.loading import load
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.run_files import printable
from async_rlhf.run.supervision.hooks import Hooks
from async_rlhf.serve.queue_dir import QueueDir
from async_rlhf.serve.turns import QueueEntry, RecordedEnd, SeenRun, plan

_LOOK_S = 1.0
_FATAL = ("error: ",)  # the command line's beginning of a reason


class _CannotBegin(AsyncRLHFError):
    """No process could be made for a run."""


class Daemon:
    """See the module docstring. at_once: runs at a time. say: is given a line for each thing that happens."""

    def __init__(self, queue: QueueDir, *, at_once: int = 1, say: Callable[[str], object]) -> None:
        self._queue, self._at_once, self._say = queue, at_once, say
        self._hooks: list[Hooks] = []
        self._children: dict[int, Child] = {}
        self._signals = 0
        self._last_error = ""

    def run(self) -> None:
        """Run until a signal. Raises ConfigError when another daemon has the queue, or takes it in the meantime; the runs are
        then the other's."""
        with on_signals(self._count):
            lock = self._queue.take()
            try:
                self._say(f"serving {self._queue.path}; Ctrl-C drains what runs")
                while self.look():
                    self._queue.check_mine(lock)
                    warm()  # the next run begins the sooner
                    time.sleep(_LOOK_S)
            finally:
                lock.release()
                self.close()

    def close(self) -> None:
        """Hooks that have begun end within their time-out; the others are dropped."""
        for hooks in self._hooks:
            hooks.close()

    def _count(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1

    def look(self) -> bool:
        """Look at every run once, and carry out the plan; False when a closing daemon has nothing left to do."""
        try:
            with self._queue.alone():
                active = self._turn()
        except (OSError, AsyncRLHFError) as error:  # a full disk, an operator's command that hangs: tried again
            if str(error) != self._last_error:
                self._last_error = str(error)
                self._say(f"cannot go on, and tries again: {error}")
            return self._signals < 2
        self._last_error = ""
        return active or not self._signals

    def _turn(self) -> bool:
        """Raises OSError when the plan cannot be written; it is not carried out then."""
        before = self._queue.entries()
        seen = {entry.number: self._seen(entry) for entry in before if entry.is_active}
        made = plan(before, seen, at_once=self._at_once, closing=self._signals > 0)
        for old, entry in zip(before, made.entries, strict=True):
            if entry.number in made.start:
                entry = self._started(entry)
            elif entry != old:
                self._queue.keep(entry)
                if not entry.is_active:
                    self._children.pop(entry.number, None)
            if entry.state != old.state or entry.number in made.start:
                self._say(f"{entry.name}: {entry.state}" + (f" ({entry.reason})" if entry.reason else ""))
            if entry.state == "failed" != old.state:
                self._call_hooks(entry)
        for hooks in list(self._hooks):
            if hooks.is_idle:  # each has a thread, and a daemon goes on for weeks
                hooks.close()
                self._hooks.remove(hooks)
            for failure in hooks.failures():
                self._say(failure)
        for entry in made.entries:
            if entry.number in made.drain or (self._signals > 1 and entry.is_active):
                self._queue.send_drain(entry)
        return any(entry.is_active for entry in made.entries)

    def _seen(self, entry: QueueEntry) -> SeenRun:
        child = self._children.get(entry.number)
        code = None if child is None else child.poll()
        try:
            if (child is not None and code is None) or self._queue.is_alive(entry):
                return SeenRun(alive=True)
        except DamagedError as error:  # it ends this run alone
            return SeenRun(alive=False, ended=RecordedEnd(failed=str(error)))
        ended = self._queue.ended(entry)
        if ended is None and code is not None and code > 0:  # it was refused before it had begun
            ended = RecordedEnd(failed=printable(last_error(self._queue.folder(entry) / "log", _FATAL)) or ending(code, ""))
        return SeenRun(alive=False, ended=ended, steps=self._queue.steps(entry))

    def _call_hooks(self, entry: QueueEntry) -> None:
        """Call the hooks of a run that has failed, unless it has recorded its end itself."""
        folder, run = self._queue.folder(entry), self._queue.run(entry)
        try:
            if self._queue.ended(entry) is not None:
                return
            config = load(folder / "config.toml")
        except (AsyncRLHFError, OSError) as error:
            self._say(f"{entry.name} has failed, and its hooks cannot run: {error}")
            return
        hooks = Hooks(config.hooks, run.path, folder / "hooks.log")
        text = f"the run could not go on by itself: {entry.reason}"
        hooks.deliver({"time": time.time(), "event": "failed", "run_dir": str(run.path), "text": text})
        self._hooks.append(hooks)

    def _started(self, entry: QueueEntry) -> QueueEntry:
        """Start a run, recorded as running before it runs: after a kill in between it is started again."""
        run, folder = self._queue.run(entry), self._queue.folder(entry)
        command = python("-m", "async_rlhf", "train", str(folder / "config.toml"))
        command += ["--set", f"output_dir={self._queue.runs}"]  # wherever the queue has been moved to
        try:
            self._queue.check_name(entry)
            with ExitStack() as stack:
                lock = RunLock.take(folder / "lock")
                stack.callback(lock.release)  # the process that was started holds it
                if run.exists:
                    RunDir.existing(run.path).forget_end()
                    command.append("--resume")
                log = stack.enter_context((folder / "log").open("ab"))
                self._queue.keep(replace(entry, steps=self._queue.steps(entry)))
                self._children[entry.number] = _begun(command, entry.cwd or str(self._queue.path), log, lock)
        except (FormatError, DamagedError, _CannotBegin) as error:
            entry = replace(entry, state="failed", reason=str(error))
            self._queue.keep(entry)
        return entry


def _begun(command: Sequence[str], cwd: str, log: IO[bytes], lock: RunLock) -> Child:
    variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
    try:
        with open(os.devnull, "rb") as nothing:
            return begin(command, variables, (nothing.fileno(), log.fileno(), log.fileno(), lock.descriptor), cwd)
    except OSError as error:  # its folder no longer exists, or memory is short
        raise _CannotBegin(f"it cannot be started in {cwd}: {error}") from error
