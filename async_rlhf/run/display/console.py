"""The display of a run: a live bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import time
from datetime import timedelta
from itertools import groupby
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from async_rlhf.actors.config import REFERENCE
from async_rlhf.run import display
from async_rlhf.run.display.terminal import Lasting
from async_rlhf.run.run_files import figures, printable

# A log that is read later wants a line now and then, not one a step.
_LINE_EVERY_S = 5.0
_SAMPLE_EVERY_S = 60.0
_SHOWN_CHARACTERS = 60


class StepPace:
    """The expected time of the coming steps, at the pace of the past ones."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def left_s(self, step: int, num_steps: int | None, now: float) -> float | None:
        """Seconds; None for a run without end, while nothing can be said, and when no step is left. now: of any clock that
        does not go back."""
        first, began = self._first = self._first or (step, now)
        if num_steps is None or not first < step < num_steps:
            return None
        return (now - began) / (step - first) * (num_steps - step)


def duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


class Display(display.Progress):
    """Prints to `console`; a context manager, so that the bar is gone whatever happens."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=cast(IO[str], Lasting()), highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._steps: TaskID | None = None
        self._evaluation: TaskID | None = None
        self._last_line, self._last_sample = -_LINE_EVERY_S, -_SAMPLE_EVERY_S
        self._waiting = ""
        self._pace = StepPace()

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            # On a narrow terminal the text takes a second line and is not cut off.
            text = TextColumn("{task.description}", table_column=Column(no_wrap=False, ratio=1))
            columns = (BarColumn(10), TextColumn("{task.fields[done]}"), text, TimeRemainingColumn(compact=True))
            self._bar = Progress(*columns, console=self._console)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def event(self, text: str) -> None:
        self._console.print(printable(text), markup=False)

    def waiting(self, status: dict[str, Any], wanted: int) -> None:
        stage, detail = beginning(status, wanted)
        if self._bar is not None:
            self._show_steps(self._bar, description=f"{stage}{detail and ': '}{detail}")
        elif stage != self._waiting:
            self.event(stage)
        self._waiting = stage

    def evaluating(self, what: str, percent: int | None) -> None:
        """A bar below that of the steps."""
        if (bar := self._bar) is None:
            return
        if self._evaluation is None:
            self._evaluation = bar.add_task(evaluating(what, percent or 0), total=None, done="")
        if percent is not None:  # no percentage exists while its model is loaded
            words, total = evaluating(what, percent), 100 if percent else None
            bar.update(self._evaluation, description=words, completed=percent, total=total)
        else:
            bar.remove_task(self._evaluation)
            self._evaluation = None

    def evaluation(self, record: dict[str, Any]) -> None:
        self.event(held_out(record))

    def step(self, record: dict[str, Any], max_steps: int | None) -> None:
        if self._bar is not None:
            done = f"{record['step']}" if max_steps is None else f"{record['step']}/{max_steps}"
            self._show_steps(self._bar, description=line(record), completed=record["step"], total=max_steps, done=done)
            return
        now, step = time.monotonic(), record["step"]
        left_s = self._pace.left_s(step, max_steps, now)
        if now - self._last_line >= _LINE_EVERY_S or step in (1, max_steps):
            self._last_line = now
            left = "" if left_s is None else f"  left {duration(left_s)}"
            of = "" if max_steps is None else f"/{max_steps}"
            self.event(f"step {step:>5}{of}  {line(record)}{left}")

    def sample(self, record: dict[str, Any]) -> None:
        now = time.monotonic()
        if now - self._last_sample >= _SAMPLE_EVERY_S and (shown := sample_line(record)):
            self._last_sample = now
            self.event(shown)

    def _show_steps(self, bar: Progress, **fields: Any) -> None:
        if self._steps is None:
            self._steps = bar.add_task("", total=None, done="")
        bar.update(self._steps, **fields)


def beginning(status: dict[str, Any], wanted: int) -> tuple[str, str]:
    """A run's activity before its first step, and its progress. status: the hub's. wanted: groups in a batch."""
    if not status:
        return "starting the processes", ""
    if status.get("version") is None:
        return "the learner loads its model", ""
    if not status.get("actors"):
        return "the actors load their model", ""
    if status.get("waits_for_room"):
        return "the disk has too little room", ""
    if status.get("waits_for_prompts"):
        return "the spool has no prompts", ""
    ledger = status.get("ledger", {})
    ready = f"{ledger.get('queued', 0)} of {wanted} groups are ready, {ledger.get('leased', 0)} in work"
    return "the first batch is generated", ready


def line(record: dict[str, Any]) -> str:
    """One step in a line: reward, staleness, speed, who was idle, and the share of scores that failed."""
    failed = f"  failed scores: {ratio:.1%}" if (ratio := record.get("rewards/failed_ratio", 0.0)) else ""
    reward = "   -  " if record["reward"] is None else f"{record['reward']:6.3f}"
    return (
        f"reward {reward}  staleness {record['staleness/mean']:.2f} (max {record['staleness/max']})  "
        f"{record['tokens_per_second']:,.0f} tok/s  "
        f"idle: learner {record['idle/learner']:.0%}, actors {record['idle/actor']:.0%}{failed}"
    )


def evaluating(what: str, percent: int) -> str:
    """The progress of an evaluation, in words."""
    return f"evaluation of {what}: {percent}%" if percent else f"evaluation of {what}: its model is loaded"


def held_out(record: dict[str, Any]) -> str:
    """One evaluation in a line."""
    label = record["label"]
    when = "" if label == "alone" else f" at step {record['step']}" if label == "step" else f" at the {label}"
    if "missing" in record:
        return f"held-out{when}: not evaluated, {record['missing']}"
    if not (numbers := [(name, f"{value:.3f}") for name, value in figures(record).items()]):
        why = "" if record.get("rewards", True) else ": there is no reward (rewards.functions)"
        return f"held-out{when}: none of {record['num_prompts']} prompts could be judged{why}"
    (first, value), *others = numbers
    size, failed = record.get("group_size"), f", {record['failed']} could not be judged" if record["failed"] else ""
    return (
        f"held-out {first}{when}: {value}{''.join(f', {name} {value}' for name, value in others)} "
        f"({f'groups of {size} sampled' if size else 'greedy'}, {record['num_prompts']} prompts{failed})"
        f"{_pass_at(record.get('sampled'))}"
    )


def _pass_at(sampled: dict[str, Any] | None) -> str:
    if sampled is None:
        return ""
    known = [f"pass@{k} {value:.3f}" for k, value in sampled["pass_at"].items() if value is not None]
    failed = f", {sampled['failed']} could not be judged" if sampled["failed"] else ""
    return f"; {', '.join(known)} ({sampled['num_samples']} samples{failed})"


def sample_line(record: dict[str, Any]) -> str:
    """The first completion of a group in `rollouts.jsonl` as a line; empty for another record."""
    try:
        rollout = record["rollouts"][0]
        scores = ", ".join(
            f"{name} {score}" for name, score in rollout["scores"].items() if name != REFERENCE or isinstance(score, str)
        )
        was_read = [version is None for version, *_ in rollout.get("spans", ())]
        turns = sum(not read for read, _ in groupby(was_read))
        of = f" (the text of {turns} turns and of what was read between them)" if any(was_read) else ""
        return f"sample of step {record['step']}: {_short(record['prompt'])} -> {_short(rollout['text'])}{of}  ({scores})"
    except (AttributeError, IndexError, KeyError, TypeError):
        return ""


def _short(text: Any) -> str:
    shown = repr(text)
    return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[: _SHOWN_CHARACTERS // 2]}…{shown[-_SHOWN_CHARACTERS // 2 :]}"
