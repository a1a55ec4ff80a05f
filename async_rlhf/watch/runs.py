"""The watched runs: one, or those in a directory. All viewers and scrapes share one reading of them.

A thread looks again every `PERIOD_S` seconds, in full at those runs whose page was opened last; answers are of what was read
last. A run is known by the name of its directory and by nothing else, so a request can name no other file.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.run.run_dir import RunDir
from async_rlhf.watch.run import WatchedRun, plain

PERIOD_S = 2.0
MAX_RUNS = 200
"""The most runs of a directory, the newest; the page shows how many more exist."""
_MAX_OPEN = 16


class Runs:
    """Owns the readings of the runs and, from `start` to `close`, the thread. clock: monotonic, in seconds.

    revision: rises whenever there may be something new. more: older runs that are left out. is_one: a run directory is watched.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """A run may begin there later, the directory too. Raises ConfigError for a path that can never be one."""
        self.path, self._clock = path, clock
        self.more, self.is_one, self.revision = 0, False, 0
        self._runs: dict[str, WatchedRun] = {}
        self._open: list[WatchedRun] = []
        """Runs whose page was opened, the newest one last."""
        self._read_at = -math.inf
        # The one is held while hubs are queried, which may take seconds; the other only while files are read.
        self._looking, self._lock, self._stop = threading.Lock(), threading.RLock(), threading.Event()
        self._thread = threading.Thread(target=self._keep_reading, name="watch", daemon=True)
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{str(path)!r} is not a directory. Name a run directory, or a directory of runs: runs")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def names(self) -> list[str]:
        self._be_current()
        return list(self._runs)

    def summaries(self) -> dict[str, dict[str, Any]]:
        """The result of `inspect.status.read` for each run, by name, ready for JSON; newest first. Read-only."""
        self._be_current()
        return {name: run.summary for name, run in self._runs.items()}

    def touch(self, name: str) -> None:
        """The page of this run is open: keep reading it. Raises KeyError for an unknown name."""
        with self._lock:
            self._opened(name)

    def state(self, name: str) -> dict[str, Any]:
        """Everything a page shows of one run but its curves and completions. Raises KeyError for an unknown name."""
        with self._lock:
            found: dict[str, Any] = plain({"name": name, **self._opened(name).state()})
            return found

    def curves(self, name: str, metrics: Iterable[str], step: int = 0, layout: str = "") -> dict[str, Any]:
        """`MetricHistory.after` of a run, ready for JSON. Raises KeyError for an unknown name."""
        with self._lock:
            return self._opened(name).history.after(metrics, step, layout)

    def completions(self, name: str) -> list[dict[str, Any]]:
        """The newest sampled groups. Raises KeyError for an unknown name."""
        with self._lock:
            return self._opened(name).completions()

    def refresh(self) -> None:
        """Look again at every run, and read on those whose page was opened last."""
        with self._looking:
            known = {run.run.path: run for run in self._runs.values()}
            watched = {name: known.get(run.path) or WatchedRun(run) for name, run in self._found().items()}
            for run in watched.values():
                run.look()
            self._runs, self._read_at = watched, self._clock()
        with self._lock:
            self._open = [run for run in self._open if run in watched.values()]
            for run in self._open:
                run.refresh()
            self.revision += 1

    def _keep_reading(self) -> None:
        while True:
            self.refresh()
            if self._stop.wait(PERIOD_S):
                return

    def _be_current(self) -> None:
        """Look within a request when there is no thread, or it has not looked yet."""
        age = self._clock() - self._read_at
        if age == math.inf or (age > PERIOD_S and not self._thread.is_alive()):
            self.refresh()

    def _opened(self, name: str) -> WatchedRun:
        self._be_current()
        run = self._runs[name]
        if run in self._open:
            self._open.remove(run)
        else:
            run.refresh()
            self.revision += 1
        self._open.append(run)
        if len(self._open) > _MAX_OPEN:
            self._open.pop(0).forget()
        return run

    def _found(self) -> dict[str, RunDir]:
        """Run directories by name, newest first."""
        self.is_one = (self.path / "config.toml").exists()
        if self.is_one:
            return {self.path.resolve().name: RunDir(self.path)}
        begun: dict[Path, float] = {}
        with suppress(OSError):  # the directory may not exist yet
            for path in self.path.iterdir():
                with suppress(OSError):  # it was just removed, or is not for this user
                    if path.name.isprintable():
                        begun[path] = (path / "config.toml").lstat().st_mtime
        self.more = max(0, len(begun) - MAX_RUNS)
        return {path.name: RunDir(path) for path in sorted(begun, key=begun.__getitem__, reverse=True)[:MAX_RUNS]}


def as_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
