"""The runs that are watched: one, or those in a directory. All viewers and scrapes share one reading of them.

A thread looks again every `PERIOD_S` seconds, in full at those runs whose page was opened last; answers are of what was read
last. A run is known by the name of its directory and by nothing else, so a request can name no other file.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.inspect.status import read
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.run_files import figures, stamp
from async_rlhf.watch.reading import RunReading
from async_rlhf.watch.series import is_number

PERIOD_S = 2.0
MAX_RUNS = 200
"""The newest of a directory; the page shows how many more there are."""
_MAX_READINGS = 16
_MAX_TEXT = 4000
_NOTHING: dict[str, Any] = {
    "state": "cannot be read", "step": 0, "max_steps": 0, "alive": False, "last": None, "hub": {}, "config": {},
    "evaluations": [], "ended": None, "restarts": {},
}  # fmt: skip
_OF_EVALUATION = ("label", "step", "time", "mean_reward", "rewards", "solved_by", "missing")


class _Run:
    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.summary: dict[str, Any] = {}
        self._files, self._stamp = Reading(run), tuple[object, ...]()

    def look(self) -> None:
        """Renew the summary; that of a run that stands still is made once."""
        try:
            alive, now = self.run.is_alive(), _stamp(self.run)
            if alive or now != self._stamp:
                config = {"max_staleness": self._files.config().queue.max_staleness}
                self.summary = plain({**_without_paths(self._files), "alive": alive, "config": config})
                self._stamp = now
        except Exception as error:  # noqa: BLE001  whatever stands in the files of one run, the others are shown
            self._stamp = ()
            problem = str(error).replace(f"{self.run.path}/", "")[:_MAX_TEXT] or repr(error)
            self.summary = {**_NOTHING, "problems": [plain(problem)]}


class Runs:
    """Owns what is known of the runs and, from `start` to `close`, the thread. clock: seconds that only rise.

    revision: rises whenever there may be something new. more: older runs that are left out. is_one: a run directory is watched.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """A run may begin there later, the directory too. Raises ConfigError for a path that can never be one."""
        self.path, self._clock = path, clock
        self.more, self.is_one, self.revision = 0, False, 0
        self._runs: dict[str, _Run] = {}
        self._readings: dict[Path, RunReading] = {}
        """What was read of the files of a run, once its page was opened; the one opened last is last."""
        self._read_at = -math.inf
        # The one is held while hubs are queried, which may take seconds; the other only while files are read.
        self._looking, self._lock, self._stop = threading.Lock(), threading.RLock(), threading.Event()
        self._thread = threading.Thread(target=self._keep_reading, name="watch", daemon=True)
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{str(path)!r} is no directory. Name a run directory, or one that holds some: runs")

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
        """What `inspect.status.read` finds of each run, by name, ready for JSON; newest first. Not to be changed."""
        self._be_current()
        return {name: run.summary for name, run in self._runs.items()}

    def touch(self, name: str) -> None:
        """The page of this run is open: it is read on. Raises KeyError for a name that is none."""
        with self._lock:
            self._open(name)

    def state(self, name: str) -> dict[str, Any]:
        """Everything a page shows of one run but its curves and completions. Raises KeyError for a name that is none."""
        with self._lock:
            reading, summary = self._open(name), self._runs[name].summary
            found: dict[str, Any] = plain(
                {
                    "name": name,
                    "summary": summary,
                    "metrics": reading.history.metrics,
                    "is_spread": reading.files.steps.is_spread,
                    "timeline": reading.timeline(),
                    "events": reading.events(summary["evaluations"]),
                    "changed": reading.changed(),
                    "problems": [*(f"cannot be read: {each}" for each in summary["problems"]), *reading.problems],
                    "seen": reading.files.samples.num_lines,
                }
            )
            return found

    def curves(self, name: str, metrics: Iterable[str], step: int = 0, layout: str = "") -> dict[str, Any]:
        """`History.after` of a run, ready for JSON. Raises KeyError for a name that is none."""
        with self._lock:
            return self._open(name).history.after(metrics, step, layout)

    def completions(self, name: str) -> list[dict[str, Any]]:
        """The newest sampled groups. Raises KeyError for a name that is none."""
        with self._lock:
            return [plain(group) for group in self._open(name).completions()]

    def refresh(self) -> None:
        """Look again at every run, and read on those whose page was opened last."""
        with self._looking:
            known = {run.run.path: run for run in self._runs.values()}
            found = {name: known.get(run.path) or _Run(run) for name, run in self._found().items()}
            for run in found.values():
                run.look()
            self._runs, self._read_at = found, self._clock()
        with self._lock:
            there = {run.run.path for run in found.values()}
            self._readings = {path: reading for path, reading in self._readings.items() if path in there}
            for reading in self._readings.values():
                reading.refresh()
            self.revision += 1

    def _keep_reading(self) -> None:
        while True:
            self.refresh()
            if self._stop.wait(PERIOD_S):
                return

    def _be_current(self) -> None:
        """Without a thread, or before it has looked, a request looks."""
        age = self._clock() - self._read_at
        if age == math.inf or (age > PERIOD_S and not self._thread.is_alive()):
            self.refresh()

    def _open(self, name: str) -> RunReading:
        self._be_current()
        run = self._runs[name].run
        if (reading := self._readings.pop(run.path, None)) is None:
            reading = RunReading(run)
            reading.refresh()
            self.revision += 1
        self._readings[run.path] = reading
        for path in list(self._readings)[:-_MAX_READINGS]:
            del self._readings[path]
        return reading

    def _found(self) -> dict[str, RunDir]:
        """By name, newest first."""
        self.is_one = (self.path / "config.toml").exists()
        if self.is_one:
            return {self.path.resolve().name: RunDir(self.path)}
        begun: dict[Path, float] = {}
        with suppress(OSError):  # there may be no directory yet
            for path in self.path.iterdir():
                with suppress(OSError):  # it was removed meanwhile, or is not for this user
                    if path.name.isprintable():
                        begun[path] = (path / "config.toml").lstat().st_mtime
        self.more = max(0, len(begun) - MAX_RUNS)
        return {path.name: RunDir(path) for path in sorted(begun, key=begun.__getitem__, reverse=True)[:MAX_RUNS]}


def plain(value: Any, depth: int = 12) -> Any:
    """Ready for JSON of the strict kind and for UTF-8, whatever a file held: other numbers become null, long texts are cut."""
    if isinstance(value, str):
        return value[: 5 * _MAX_TEXT].encode(errors="replace").decode()
    if value is None or isinstance(value, bool) or is_number(value):
        return value
    if depth and isinstance(value, Mapping):
        return {plain(str(key)[:200]): plain(each, depth - 1) for key, each in value.items()}
    if depth and isinstance(value, list | tuple):
        return [plain(each, depth - 1) for each in value]
    return None


def as_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _without_paths(files: Reading) -> dict[str, Any]:
    """Without where it lies and without its changes, which are events; of evaluations their numbers only."""
    found = {key: value for key, value in read(files).items() if key not in ("run_dir", "changes")}
    evaluations = found["evaluations"]
    numbers = [{k: e[k] for k in _OF_EVALUATION if k in e} | {"accuracy": figures(e).get("accuracy")} for e in evaluations]
    return {
        **found,
        "evaluations": numbers,
        "problems": [problem.replace(f"{files.run.path}/", "") for problem in found["problems"]],
    }


def _stamp(run: RunDir) -> tuple[object, ...]:
    """Changes when a file changes that a summary is of."""
    return tuple(map(stamp, (run.config_file, run.metrics, run.evaluations, run.ledger, run.restarts)))
