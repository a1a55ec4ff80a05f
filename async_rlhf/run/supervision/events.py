"""What happens in a run that may need a person, or is worth showing one: recognised in what the supervisor reports.

    stalled           no step for too long, and the run has ended     diverged   it refused to train, or went beyond a limit
    failed            it has ended otherwise, by an error             finished   nothing is left to train on
    guard             the target staleness has moved                  best       `checkpoints/best` leads to another checkpoint
    failing_rewards   the share of failed scores nears its limit      disk_low   little room is left on the disk

Each is a line of `events.jsonl` in the run directory, which begins anew when it has grown, and goes to the hooks. A display is
shown the same as without. Nothing here ends or holds up a run: a line that finds no room is lost.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

from async_rlhf.buffers.lines import LineFile
from async_rlhf.launch.exit_codes import INTERRUPTED, REFUSED_TO_TRAIN, STALLED
from async_rlhf.learner.checkpoint.store import step_of
from async_rlhf.run.config import Config
from async_rlhf.run.display.progress import Progress
from async_rlhf.run.run_dir import End, RunDir
from async_rlhf.run.supervision.hooks import Hooks
from async_rlhf.run.watching import EventKind

# Of the limit to failed scores: from where an event is raised, and below which another may be.
_NEAR, _FAR = 0.8, 0.5


class Events(Progress):
    """Passes every report on to `shown`, and raises the events that it finds in them."""

    def __init__(self, config: Config, run: RunDir, shown: Progress) -> None:
        self._config, self._run, self._shown = config, run, shown
        self._hooks = Hooks(config.hooks, run.path, run.log("hooks"))
        self._file = LineFile(run.events, config.max_log_bytes)
        with suppress(OSError):
            self._file.cut()
        self._best = self._best_step()
        self._target: int | None = None
        self._failing = False

    def tell(self, kind: EventKind, text: str, **details: Any) -> None:
        """Something has happened. text: a sentence for a person. details: JSON values for a program."""
        event = {"time": time.time(), "event": kind, "run_dir": str(self._run.path), "text": text, **details}
        with suppress(OSError):
            self._file.write(json.dumps(event))
        self._hooks.deliver(event)

    def ended(self, end: End) -> None:
        """The run has ended. One that an operator stopped is no event."""
        if end.finished:
            self.tell("finished", f"the run has finished: {end.reason}")
        elif end.code not in (0, INTERRUPTED):
            kinds: dict[int, EventKind] = {STALLED: "stalled", REFUSED_TO_TRAIN: "diverged"}
            self.tell(kinds.get(end.code, "failed"), end.reason, code=end.code)

    def disk_low(self, text: str) -> None:
        """There is little room, in these words."""
        self._shown.event(text)
        self.tell("disk_low", text)

    def close(self, *, at_once: bool) -> None:
        """Waits for the hooks, `hooks.timeout_s` at most. at_once: not at all."""
        self._hooks.close(at_once=at_once)
        self.look()
        self._file.close()

    def look(self) -> None:
        """Show what has become of the hooks."""
        for last_error in self._hooks.failures():
            self._shown.event(last_error)

    # -- what the supervisor reports ---------------------------------------------------------------------------------

    def step(self, record: dict[str, Any], max_steps: int | None) -> None:
        self._shown.step(record, max_steps)
        self._watch_target(record["step"], record.get("staleness/target"))
        self._watch_scores(record["step"], record.get("rewards/failed_ratio"))

    def evaluation(self, record: dict[str, Any]) -> None:
        self._shown.evaluation(record)
        before, self._best = self._best, self._best_step()
        if self._best is not None and self._best != before:
            reward = record.get("mean_reward")
            checkpoint = str(self._run.path / "checkpoints" / f"step_{self._best:06d}")
            text = f"the best checkpoint is that of step {self._best}, with a held-out reward of {reward}"
            self.tell("best", text, step=self._best, mean_reward=reward, checkpoint=checkpoint)

    def event(self, text: str) -> None:
        self._shown.event(text)

    def waiting(self, status: dict[str, Any], wanted: int) -> None:
        self._shown.waiting(status, wanted)

    def sample(self, record: dict[str, Any]) -> None:
        self._shown.sample(record)

    def evaluating(self, what: str, percent: int | None) -> None:
        self._shown.evaluating(what, percent)

    def _watch_target(self, step: int, target: Any) -> None:
        before, self._target = self._target, target
        if None not in (before, target) and before != target:
            text = f"from step {step + 1} on the run aims at staleness {target} instead of {before}"
            self.tell("guard", text, step=step, target=target, before=before)

    def _watch_scores(self, step: int, ratio: Any) -> None:
        limit = self._config.rewards.max_failed_ratio
        if not isinstance(ratio, int | float) or not limit:
            return
        if ratio >= _NEAR * limit and not self._failing:
            text = f"{ratio:.0%} of the scores of step {step} failed; above {limit:.0%} (rewards.max_failed_ratio) the run ends"
            self.tell("failing_rewards", text, step=step, failed_ratio=ratio, limit=limit)
        self._failing = ratio >= (_FAR if self._failing else _NEAR) * limit

    def _best_step(self) -> int | None:
        with suppress(OSError, ValueError):
            return step_of((self._run.path / "checkpoints" / "best").readlink())
        return None
