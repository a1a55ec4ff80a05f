"""What a person reads while a run goes on, in a log: lines that were printed, of records as the roles write them."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from async_rlhf.run.display.console import Display, beginning, line, sample_line
from async_rlhf.run.display.notebook import NotebookDisplay

RECORD = dict.fromkeys(("reward", "staleness/mean", "staleness/max", "tokens_per_second", "idle/learner", "idle/actor"), 0)
ROLLOUTS = [{"text": "leets", "scores": {"exact": 1.0, "judge": "timed out"}}]
SAMPLE = {"step": 3, "prompt": "Spell steel", "rollouts": ROLLOUTS}


@pytest.fixture
def printed() -> tuple[Display, Callable[[], list[str]]]:
    file = io.StringIO()
    return Display(Console(file=file, soft_wrap=True)), lambda: file.getvalue().splitlines()


def test_before_the_first_step_each_thing_that_is_waited_for_is_printed_once(printed: Any) -> None:
    display, lines = printed
    loading = {"version": None, "actors": {}}
    generating = {"version": 0, "actors": {"actor-0": {}}, "ledger": {"queued": 3, "leased": 13}}
    for status in ({}, {}, loading, loading, {**loading, "version": 0}, generating, generating):
        display.waiting(status, 16)
    assert lines() == [
        "starting the processes",
        "the learner loads its model",
        "the actors load their model",
        "the first batch is generated",
    ]
    assert beginning(generating, 16)[1] == "3 of 16 groups are ready, 13 in work"


def test_a_step_says_how_long_the_rest_will_take_and_when_scores_failed(printed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "failed" not in line(RECORD) and "failed" not in line({**RECORD, "rewards/failed_ratio": 0.0})
    assert line({**RECORD, "rewards/failed_ratio": 0.25}).endswith("failed scores: 25.0%")
    display, lines = printed
    clock = iter([0.0, 20.0, 40.0])
    monkeypatch.setattr("async_rlhf.run.display.console.time.monotonic", lambda: next(clock))
    for step in (1, 11, 100):
        display.step({**RECORD, "step": step}, 100)
    assert "left" not in lines()[0] and lines()[1].endswith("left 0:02:58") and "left" not in lines()[2]


def test_an_evaluation_says_how_far_it_is_where_it_takes_longer_than_a_moment(
    printed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    display, lines = printed
    times = [0.0, 9.0, 10.0, 13.9, 14.0, 20.0, 21.0, 100.0, 104.0]
    percents = [0, 0, 3, 9, 10, 10, None, 0, 99]  # it loads its model for 9 s; the next one is quick
    clock = iter(times)
    monkeypatch.setattr("async_rlhf.run.display.console.time.monotonic", lambda: next(clock))
    for percent in percents:
        display.evaluating("step 20", percent)
    assert lines() == ["evaluation of step 20: 10%"]


def test_on_a_terminal_an_evaluation_has_a_bar_below_the_steps_until_it_ends() -> None:
    file = io.StringIO()
    with Display(Console(file=file, force_terminal=True, width=120)) as display:
        display.step({**RECORD, "step": 5}, 100)
        display.evaluating("the start", 40)
        display.evaluating("the start", None)
        between = len(file.getvalue())
        display.step({**RECORD, "step": 6}, 100)
    drawn = file.getvalue()
    assert "5/100" in drawn[:between] and "evaluation of the start: 40%" in drawn[:between]
    assert "6/100" in drawn[between:] and "evaluation" not in drawn[between:]


def test_a_sample_is_shown_now_and_then_and_what_is_none_never(printed: Any, tmp_path: Path) -> None:
    display, lines = printed
    for record in ({}, {"rollouts": []}, {**SAMPLE, "rollouts": [7]}, SAMPLE, {**SAMPLE, "step": 4}):
        display.sample(record)
    assert lines() == ["sample of step 3: 'Spell steel' -> 'leets'  (exact 1.0, judge timed out)"]
    assert len(sample_line({**SAMPLE, "prompt": "x" * 10_000})) < 200


def test_a_notebook_shows_what_is_said_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions and reasons come from models and from users' code."""
    drawn: list[str] = []
    display = SimpleNamespace(display=lambda page, display_id: SimpleNamespace(update=drawn.append), HTML=str)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    with NotebookDisplay() as notebook:
        notebook.event("<script>alert(1)</script> & more")
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in drawn[-1] and "<script" not in drawn[-1]
