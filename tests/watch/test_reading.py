"""A run is read once, then only what was added; what is damaged is named and the rest is shown."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from made_runs import BEGAN, HOSTILE, broken_run, group, made_run, records, write_lines

from async_rlhf.run import run_files
from async_rlhf.run.run_dir import RunDir
from async_rlhf.watch.completions import decoder, pieces
from async_rlhf.watch.events import changed_from, events
from async_rlhf.watch.reading import RunReading
from async_rlhf.watch.timeline import Span, stacked, timeline

TOKENIZER = Path(__file__).resolve().parents[2] / "configs" / "models" / "tiny-speller" / "tokenizer.json"


def read(run: Path) -> RunReading:
    made = RunReading(RunDir.existing(run))
    made.refresh()
    return made


def steps(reading: RunReading) -> list[float]:
    return reading.history.after(["reward"])["curves"]["reward"]["step"]


def test_what_was_added_is_read_and_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path / "run", 5)
    reading = read(run)
    write_lines(run / "metrics.jsonl", records(9, begin=6))
    write_lines(run / "rollouts.jsonl", [group(9)])
    parsed: list[str] = []
    whole = json.loads
    monkeypatch.setattr(json, "loads", lambda text: (parsed.append(text), whole(text))[1])
    seen = reading.seen
    reading.refresh()
    assert len(parsed) == 5
    assert steps(reading) == list(range(1, 10)) and reading.seen > seen
    assert reading.completions()[0]["step"] == 9 and reading.problems == []


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 3)
    line = json.dumps(group(4))
    for part in (line[:40], line[40:] + "\n"):
        with (run / "rollouts.jsonl").open("a") as file:
            file.write(part)
        if part == line[:40]:
            reading = read(run)
    reading.refresh()
    assert [found["step"] for found in reading.completions()][:2] == [4, 3] and reading.problems == []


def test_the_metrics_of_a_long_run_are_read_at_even_distances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path / "run", 3000)
    monkeypatch.setattr(run_files, "_WHOLE_BYTES", 1 << 20)
    monkeypatch.setattr(run_files, "_PLACES", 50)
    monkeypatch.setattr(run_files, "_WINDOW", 4 << 10)
    reading = read(run)
    found = steps(reading)
    assert reading.is_spread and found[0] <= reading.history.width and reading.history.last_step == 3000
    assert max(b - a for a, b in pairwise(found)) <= 3000 / 50 + reading.history.width
    write_lines(run / "metrics.jsonl", records(3001, begin=3001))
    reading.refresh()
    assert reading.history.last_step == 3001


def test_of_a_damaged_run_what_can_be_read_is_shown_and_of_an_empty_one_nothing(tmp_path: Path) -> None:
    empty = read(made_run(tmp_path / "empty", 0))
    assert empty.history.metrics == [] and empty.timeline()["lanes"] == [] and empty.problems == []
    assert empty.completions() == [] and empty.events([]) == []
    reading = read(broken_run(tmp_path / "run"))
    assert steps(reading) == [step for step in range(1, 31) if step not in (11, 12)]
    assert reading.problems == [
        "metrics.jsonl: damaged lines that are left out: 1",
        "rollouts.jsonl: damaged lines that are left out: 1",
    ]
    assert reading.completions()[0]["prompt"] == HOSTILE
    assert [event["text"] for event in reading.events([])] == [f"a {HOSTILE}"]


def test_changes_evaluations_and_refused_steps_stand_in_one_list(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 10)
    write_lines(run / "metrics.jsonl", [{"step": 11, "time": BEGAN + 11, "applied": False, "loss": None}])
    write_lines(run / "events.jsonl", [{"time": BEGAN + 12, "event": "stalled", "run_dir": "x", "text": "no step for 900 s"}])
    about = [
        {"step": 8, "time": BEGAN + 8, "mean_reward": 0.5, "accuracy": 0.25},
        {"step": 7, "time": BEGAN + 7, "mean_reward": 1.5, "accuracy": 1.0, "rewards": {"exact": 0.0, "brief": 1.5}},
        {"step": 9, "time": BEGAN + 9, "missing": "killed"},
    ]
    assert [(event["step"], event["kind"], event["text"]) for event in read(run).events(about)] == [
        (None, "stalled", "no step for 900 s"),
        (11, "no update", "loss or gradient not finite, or nothing to learn from"),
        (9, "evaluation", "killed"),
        (8, "evaluation", "accuracy 0.25, reward 0.5"),
        (7, "evaluation", "reward 1.5, rewards/exact 0, rewards/brief 1.5"),
        (5, "change applied", "learner.learning_rate 0.0002 → 0.0001"),
        (None, "change asked", "learner.learning_rate 0.0002 → 0.0001"),
    ]


def test_a_run_that_goes_back_says_so_and_is_changed_no_more_where_it_was_behind_that_step(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 10)
    write_lines(run / "changes.jsonl", [{"kind": "applied", "number": 2, "step": 8, "time": BEGAN + 8}])
    assert read(run).changed() == [5, 8]
    write_lines(run / "changes.jsonl", [{"kind": "undone", "step": 6, "time": BEGAN + 9}])
    assert read(run).changed() == [5]
    (newest, *_) = read(run).events(())
    assert (newest["kind"], newest["step"]) == ("went back", 6) and "goes on from this step" in newest["text"]


def test_what_is_no_line_of_a_file_of_events_spoils_no_other() -> None:
    wild = [{"kind": ["x"], "step": "1", "time": None, "values": {"a": [1]}}, {"values": 5}, {}]
    found = events(wild, wild, wild, wild, wild)
    assert changed_from([*wild, {"kind": "applied", "step": True}, {"kind": "undone", "step": [1]}]) == []
    assert len(found) == 15 and all(event["step"] is None and isinstance(event["text"], str) for event in found)


def test_the_text_of_a_completion_is_divided_where_the_version_changed_or_stays_whole() -> None:
    decode = decoder(TOKENIZER, 0.0)
    assert pieces("leets", [24, 17, 17, 32, 31, 1], [[7, 3], [8, 3]], decode) == [(7, "lee"), (8, "ts")]
    assert pieces("other", [24, 17, 17], [[7, 1], [8, 2]], decode) == [(8, "other")]
    assert pieces("leets", [24, 17, 10**9], [[7, 1], [8, 2]], decode) == [(8, "leets")]
    assert pieces("leets", [24, 17, 17], [[7, 1], [8, 2]], None) == [(8, "leets")]
    assert decoder(TOKENIZER.with_name("config.json"), 0.0) is None


def test_the_time_line_has_what_each_process_did(tmp_path: Path) -> None:
    found = read(made_run(tmp_path / "run", 40)).timeline()
    kinds = {lane["name"]: {span.kind for span in lane["spans"]} for lane in found["lanes"]}
    assert kinds == {"learner": {"wait", "train"}, "actor-0": {"adopt", "idle"}, "actor-0 groups": {"generate", "score"}}
    assert found["ended"] == BEGAN + 40
    assert all(span.ended > found["began"] for lane in found["lanes"] for span in lane["spans"])


def test_groups_at_the_same_time_stand_below_one_another() -> None:
    groups = [[Span("generate", str(i), began, began + 2.0)] for i, began in enumerate((0.0, 1.0, 2.0, 2.5))]
    assert [[span.label for span in row] for row in stacked(groups)] == [["0", "2"], ["1"], ["3"]]
    assert len(stacked(groups, rows=1)) == 1
    assert timeline([], {}, [])["lanes"] == []
