"""One watched run: its state and, once its page was opened, the data of the page. Plain values, ready for JSON.

Bounded in memory and in time: only what was added to its files is read. What cannot be read is named beside the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from async_rlhf.buffers.errors import DamagedError
from async_rlhf.inspect.status import read
from async_rlhf.run.reading import MOST_EVENTS, Reading
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.run_files import figures, is_number, stamp
from async_rlhf.watch.completions import decode_of, shown
from async_rlhf.watch.events import MOST_STEPS, events, timeline
from async_rlhf.watch.series import MAX_STEP, MetricHistory, ages, numbers

_MAX_TEXT = 4000
_NOTHING: dict[str, Any] = {
    "state": "cannot be read", "step": 0, "max_steps": 0, "alive": False, "last": None, "hub": {}, "config": {},
    "evaluations": [], "ended": None, "restarts": {},
}  # fmt: skip
_OF_EVALUATION = ("label", "step", "time", "mean_reward", "rewards", "solved_by", "missing")


class WatchedRun:
    """summary: the result of `inspect.status.read`, renewed by `look`; read-only. `refresh` renews everything else.

    The one may be called while the other is: it asks the hub, which may take seconds.
    """

    def __init__(self, run: RunDir) -> None:
        self.run, self.summary = run, dict[str, Any]()
        self._stamp: tuple[object, ...] = ()
        self.forget()

    def forget(self) -> None:
        """Forget everything that was read for the page."""
        self.files, self.problems, self.history = Reading(self.run, brief=True), list[str](), MetricHistory()
        self._steps: deque[dict[str, Any]] = deque(maxlen=MOST_STEPS + 1)
        self._refused: deque[dict[str, Any]] = deque(maxlen=MOST_EVENTS)

    def look(self) -> None:
        """Renew the state; once for a run whose files no longer change."""
        try:
            files, run = self.files, self.run
            paths = (run.config_file, run.metrics, run.evaluations, run.ledger, run.restarts)
            alive, now = run.is_alive(), tuple(map(stamp, paths))
            if alive or now != self._stamp:
                config = {"max_staleness": files.config().queue.max_staleness}
                self.summary = plain({**_without_paths(files), "alive": alive, "config": config})
                self._stamp = now
        except Exception as error:  # noqa: BLE001  whatever stands in the files of one run, the others are shown
            self._stamp = ()
            problem = str(error).replace(f"{self.run.path}/", "")[:_MAX_TEXT] or repr(error)
            self.summary = {**_NOTHING, "problems": [plain(problem)]}

    def refresh(self) -> None:
        """Read the new lines of all files."""
        self.problems = self.files.refresh(self._take)

    def state(self) -> dict[str, Any]:
        """Everything that its page shows but curves and completions."""
        return {
            "summary": self.summary,
            "metrics": self.history.metrics,
            "is_spread": self.files.steps.is_spread,
            "timeline": self.timeline(),
            "events": self.events(self.summary["evaluations"]),
            "changed": self.changed(),
            "problems": [*(f"cannot be read: {each}" for each in self.summary["problems"]), *self.problems],
            "seen": self.files.samples.num_lines,
        }

    def timeline(self) -> dict[str, Any]:
        """The time line of the newest steps, in the supervisor's time."""
        spans = {actor: tail.lines for actor, tail in self.files.spans().items()}
        return timeline(list(self._steps), spans, self.files.samples.lines)

    def completions(self) -> list[dict[str, Any]]:
        """The newest sampled groups, newest first."""
        decode = decode_of(self.run)
        found = [shown(sample, decode, self.run.images) for sample in reversed(self.files.samples.lines)]
        return [plain(group) for group in found if group is not None]

    def events(self, evaluations: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The run's events, newest first."""
        files = self.files
        return events(files.changes.lines, files.events.lines, evaluations, files.quarantined.lines, self._refused)

    def changed(self) -> list[int]:
        """The steps from which on something was changed; none where that cannot be read, which the summary says."""
        with suppress(DamagedError, OSError):
            return self.files.changed()
        return []

    def _take(self, record: dict[str, Any]) -> None:
        if not 0 <= (step := record["step"]) <= MAX_STEP:
            return
        self.history.add(step, {k: v for k, v in numbers(record).items() if k not in ("step", "time")}, ages(record))
        while self._steps and self._steps[-1]["step"] >= step:
            self._steps.pop()
        self._steps.append(record)
        if record.get("applied") is False:
            self._refused.append({"step": step, "time": record.get("time")})


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


def _without_paths(files: Reading) -> dict[str, Any]:
    """The state without paths, without changes, which are events, and with only the numbers of evaluations."""
    state = {key: value for key, value in read(files).items() if key not in ("run_dir", "changes")}
    evaluations = state["evaluations"]
    numbers = [{k: e[k] for k in _OF_EVALUATION if k in e} | {"accuracy": figures(e).get("accuracy")} for e in evaluations]
    problems = [problem.replace(f"{files.run.path}/", "") for problem in state["problems"]]
    return {**state, "evaluations": numbers, "problems": problems}
