"""What a person sees while a run goes on: a live bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from async_rlhf.run import daemon
from async_rlhf.run.run_files import printable

# A log that is read later wants a line now and then, not one a step.
_LINE_EVERY_S = 5.0


class Display(daemon.Progress):
    """Prints to `console`; a context manager, so that the bar is gone whatever happens."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._last_line = -_LINE_EVERY_S

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("waiting for the first batch", total=None)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def event(self, text: str) -> None:
        self._console.print(printable(text), markup=False)

    def evaluation(self, record: dict[str, Any]) -> None:
        self.event(held_out(record))

    def step(self, record: dict[str, Any], max_steps: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=line(record), completed=record["step"], total=max_steps)
            return
        now = time.monotonic()
        if now - self._last_line >= _LINE_EVERY_S or record["step"] in (1, max_steps):
            self._last_line = now
            self.event(f"step {record['step']:>5}/{max_steps}  {line(record)}")


def line(record: dict[str, Any]) -> str:
    """One step in a line: reward, staleness, speed, who was idle, and the share of scores that failed."""
    failed = f"  failed scores: {ratio:.1%}" if (ratio := record.get("rewards/failed_ratio", 0.0)) else ""
    reward = "   -  " if record["reward"] is None else f"{record['reward']:6.3f}"
    return (
        f"reward {reward}  staleness {record['staleness/mean']:.2f} (max {record['staleness/max']})  "
        f"{record['tokens_per_second']:,.0f} tok/s  "
        f"idle: learner {record['idle/learner']:.0%}, actors {record['idle/actor']:.0%}{failed}"
    )


def held_out(record: dict[str, Any]) -> str:
    """One evaluation in a line."""
    if record["mean_reward"] is None:
        return f"held-out at the {record['label']}: none of {record['num_prompts']} prompts could be judged"
    failed = f", {record['failed']} could not be judged" if record["failed"] else ""
    return (
        f"held-out accuracy at the {record['label']}: {record['accuracy']:.3f}, reward {record['mean_reward']:.3f} "
        f"(greedy, {record['num_prompts']} prompts{failed})"
    )


def group_lines(record: dict[str, Any]) -> str:
    """One group as a person reads it."""
    lines = [f"step {record['step']}  group {record['group']} (attempt {record['attempt']}, {record['actor']})"]
    lines += [f"  prompt: {record['prompt']!r}"]
    for rollout in record["rollouts"]:
        scores = ", ".join(
            f"{name} failed: {score['failure']}" if score["failure"] else f"{name} {score['value']}"
            for name, score in rollout["scores"].items()
        )
        versions = " ".join(f"v{version}x{count}" for version, count in rollout["spans"])
        lines.append(f"  {scores:<28} {versions:<14} {rollout['finish_reason']:<7} {rollout['text']!r}")
    return "\n".join(lines)
