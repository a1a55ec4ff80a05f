"""Evaluations beside a run, as its supervisor sees them: which is due, one process at a time, what becomes of it.

    owns        at most one process, and the link `checkpoints/best`
    waits for   nothing but in `finish`; a process that is silent for `watchdog_s`, or scores nothing for `stall_timeout_s`, is
                killed
    woken by    the supervisor's poll
    on close    the process is killed; what it was about has no line then, and is due again when the run is continued

Weights are pinned by their checkpoint, which is kept until the evaluation has a line (`learner.checkpoint.evaluated`). No
evaluation is absent in silence: a process that was killed is started again, twice; one that fails, and one that was skipped
because another took longer than the steps between them, get a line with the reason. The run goes on whatever happens here.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from async_rlhf.buffers.errors import DamagedError
from async_rlhf.launch.placement import Placement
from async_rlhf.launch.program import Launcher, Node
from async_rlhf.launch.tether import PERCENT
from async_rlhf.learner.checkpoint.evaluated import is_evaluation, link_best
from async_rlhf.learner.checkpoint.store import complete, step_of
from async_rlhf.run.config import Config
from async_rlhf.run.display import Progress
from async_rlhf.run.processes.evaluation import record_evaluation
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.run_files import Tail
from async_rlhf.run.supervision.child import Child, Every
from async_rlhf.run.supervision.hooks import Events
from async_rlhf.run.watching import EvaluationConfig

_LOOK_S = 0.1
_PLAN_EVERY_S = 1.0
_MAX_KILLED = 3


@dataclass(frozen=True)
class Due:
    """An evaluation to be made."""

    label: str
    """`start`, `step`, or `end`."""
    step: int
    """The weights after this step are evaluated."""

    def __str__(self) -> str:
        return f"step {self.step}" if self.label == "step" else f"the {self.label}"


Missing = Sequence[tuple[Due, str]]
"""Evaluations that will never be made, with the reasons."""


def plan(
    config: EvaluationConfig,
    records: Iterable[dict[str, Any]],
    checkpoints: Sequence[int],
    last_step: int | None,
    *,
    finished: bool = False,
    given_up: Set[Due] = frozenset(),
) -> tuple[Due | None, Missing]:
    """The next evaluation, and those that are missing for good. records: the lines of `evaluations.jsonl`. checkpoints: steps
    of those that are whole, ascending. last_step: `max_steps`, None where it is not known. finished: no step follows.
    given_up: evaluations that have failed in this life of the supervisor.

    The initial model comes first, then the newest checkpoint that is due, then the end, unless that step was evaluated. What is
    due and older is skipped.
    """
    records = [record for record in records if is_evaluation(record)]
    done = given_up | {Due(str(record.get("label")), record["step"]) for record in records if "missing" not in record}
    newest, start = (checkpoints[-1] if checkpoints else 0), Due("start", 0)
    end = Due("end", newest) if config.at_end and newest and Due("step", newest) not in done else None
    known = {record["step"] for record in records} | {due.step for due in given_up}
    of_end = {newest} if finished and end else {last_step} if config.at_end else set[int | None]()
    steps = range(config.every, newest + 1, config.every) if config.every else ()
    waiting = [Due("step", step) for step in steps if step not in known | of_end]
    there = [due for due in waiting if due.step in checkpoints]
    skipped, lost = "skipped: evaluations take longer than the steps between them", "there is no checkpoint of this step"
    missing = [(due, skipped if due in there else lost) for due in waiting if due not in there[-1:]]
    if config.at_start and start not in done:
        return start, missing
    if there:
        return there[-1], missing
    return end if finished and end not in done else None, missing


class Evaluator:
    """See the module docstring. placement: where an evaluation runs; one that waits begins when no step follows and the run's
    processes have ended."""

    def __init__(
        self,
        config: Config,
        run: RunDir,
        launcher: Launcher,
        placement: Placement,
        progress: Progress,
        events: Events,
        now: Callable[[], float],
    ) -> None:
        self._config, self._run, self._launcher, self._now = config, run, launcher, now
        self._placement, self._progress, self._events = placement, progress, events
        self._running: tuple[Due, Child] | None = None
        self._percent = 0
        self._is_time = Every(_PLAN_EVERY_S, now)
        self._killed: Counter[Due] = Counter()
        self._given_up: set[Due] = set()
        self._lines, self._known = Tail(run.evaluations), list[dict[str, Any]]()
        self._has_links = True
        self.plateau = ""
        """Why no further step is wanted; empty while one is."""

    def look(self, *, finished: bool = False) -> bool:
        """Begin the due evaluation and look after it; returns whether one is under way. Never waits."""
        if self._running is not None:
            self._look_after(*self._running)
        if self._running is None and (finished or (not self._placement.evaluation_waits and self._is_time())):
            self._begin(finished=finished)
        return self._running is not None

    def finish(self, stop: Callable[[], bool]) -> None:
        """Evaluate all that is due when no step follows, until `stop` is true."""
        while not stop() and self.look(finished=True):
            time.sleep(_LOOK_S)
        self.close()

    def close(self) -> None:
        if self._running is not None:
            self._running[1].kill()
            self._running = None

    def judge(self) -> None:
        """Set `checkpoints/best` and `plateau` from the lines."""
        records = self._records()
        self.plateau = self._config.evaluation.plateau(records)
        try:
            link_best(self._run.path / "checkpoints", records)
        except OSError as error:
            if self._has_links:
                self._progress.event(
                    f"checkpoints/best is no link here ({error.strerror}); async-rlhf finds what it names without"
                )
            self._has_links = False

    def _begin(self, *, finished: bool) -> None:
        checkpoints = [step_of(path) for path in complete(self._run.path / "checkpoints")]
        due, missing = plan(
            self._config.evaluation,
            self._records(),
            checkpoints,
            self._config.max_steps,
            finished=finished,
            given_up=self._given_up,
        )
        for lost, reason in missing:
            self._miss(lost, reason)
        if due is None:
            return
        checkpoint = self._run.path / "checkpoints" / f"step_{due.step:06d}"
        model = self._config.model if due.label == "start" else str(checkpoint / "model")
        node = Node("evaluation", "evaluation", (model, due.label, str(due.step)), self._run.log("evaluation"))
        child = Child(self._placement.placed(node))
        try:
            child.started(self._launcher.start(self._run.path, child.node), self._now())
        except OSError as error:
            self._miss(due, f"it cannot be started: {error}")
            return
        self._running, self._percent = (due, child), 0
        self._progress.evaluating(str(due), 0)

    def _look_after(self, due: Due, child: Child) -> None:
        now = self._now()
        if (end := child.end()) is not None:
            self._running = None
            self._ended(due, *end)
            return
        if beats := child.beats(now):
            self._percent += beats.count(PERCENT)
            self._progress.evaluating(str(due), self._percent)
        if child.silent_s(now) > self._config.watchdog_s or child.idle_s(now) > self._config.stall_timeout_s:
            child.kill()

    def _ended(self, due: Due, code: int, reason: str) -> None:
        self._progress.evaluating(str(due), None)
        records = reversed(self._records())
        record = next((each for each in records if (each.get("label"), each.get("step")) == (due.label, due.step)), None)
        if code == 0 and record is not None and "missing" not in record:
            self.judge()
            self._progress.evaluation(record)
            self._events.evaluation(record)
            return
        self._killed[due] += code < 0
        if code < 0 and self._killed[due] < _MAX_KILLED:
            self._progress.event(f"the evaluation of {due} ended by signal {-code}; it is made again")
            return
        self._miss(due, f"it failed with code {code}: {reason or 'see logs/evaluation.log'}")

    def _miss(self, due: Due, reason: str) -> None:
        """Record a missing evaluation, which is not tried again in this life of the supervisor."""
        self._given_up.add(due)
        record_evaluation(self._run, {"label": due.label, "step": due.step, "time": time.time(), "missing": reason[:1000]})
        self._progress.event(f"no evaluation of {due}: {reason}")

    def _records(self) -> list[dict[str, Any]]:
        """All lines, without the answers that they quote: each is read once, for a run of weeks has many."""
        try:
            for line in self._lines.rest():
                line.pop("samples", None)
                self._known.append(line)
        except DamagedError as error:
            self._progress.event(str(error))
        return self._known
