"""What a person reads: where a run stands, also when it ends while it is asked, and the lines printed while it goes on."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from rich.console import Console

from async_rlhf.inspect.status import lines, read
from async_rlhf.launch.sockets import hub_address, socket_directory
from async_rlhf.learner.loop.changes import Applied, ChangeLedger, ChangeRequest
from async_rlhf.run.display.console import Display, beginning, held_out, line, sample_line
from async_rlhf.run.display.notebook import NotebookDisplay
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_dir import RunDir


@pytest.fixture
def sockets() -> Iterator[Path]:
    with socket_directory() as directory:
        yield directory


@pytest.fixture
def run(small: Any) -> RunDir:
    return RunDir.create(small())


def test_a_run_that_ends_while_it_is_asked_is_told_of_as_far_as_it_went(run: RunDir, sockets: Path) -> None:
    run.announce(sockets)

    def ends() -> None:
        """A hub that is gone before it answers, and the run with it."""
        with zmq.Context() as context, context.socket(zmq.ROUTER) as hub:
            hub.bind(hub_address(sockets))
            if hub.poll(60_000):
                run.retire()

    ending = threading.Thread(target=ends)
    ending.start()
    found = read(Reading(run))
    ending.join(60)
    assert not run.is_alive() and "the hub does not answer" in found["state"]
    assert lines(run, found)[0].endswith("step 0 of 4")


def test_a_run_whose_hub_has_ended_is_ending_while_its_last_checkpoint_is_evaluated(
    run: RunDir, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_rlhf.inspect.status._PATIENCE_S", 0.05)
    run.announce(sockets)
    run.ledger.write_text('{"state": "drained"}')
    begun = run.lock_file.stat().st_mtime_ns
    os.utime(run.ledger, ns=(begun + 1, begun + 1))
    assert read(Reading(run))["state"] == "ending"
    os.utime(run.ledger, ns=(begun - 1, begun - 1))  # what the hub of an earlier start wrote
    assert "the hub does not answer" in read(Reading(run))["state"]
    run.retire()


def test_of_a_run_that_was_killed_nothing_is_shown_as_if_it_lived(run: RunDir) -> None:
    actor = {"version": 1, "groups": 0, "silent_s": 0.0}
    run.ledger.write_text(json.dumps({"waiting_for": "prompts", "actors": {"actor-0": actor}}))
    assert "actor-0: version 1, 0 groups, last message 0.0 s ago" in lines(run, read(Reading(run)))
    run.retire()
    assert lines(run, read(Reading(run))) == [
        f"{run.path}: stopped, step 0 of 4",
        "ended: it was killed, or the machine went down; --resume goes on",
    ]


def test_broadcasts_that_come_to_nothing_are_counted_and_who_takes_no_part_in_them_is_named(run: RunDir, small: Any) -> None:
    actor = {"version": 1, "groups": 0, "silent_s": 0.0, "no_broadcasts": "the broadcast failed"}
    counts = {"broadcasts": 9, "broadcasts_failed": 3, "broadcasts_refused": 0}
    run.ledger.write_text(json.dumps({"weights": counts, "actors": {"actor-0": actor}}))
    shown = lines(run, read(Reading(run)))
    assert "broadcasts of weights: 3 failed, 0 refused" in shown
    assert "last message 0.0 s ago; broadcasts of weights no longer serve it: the broadcast failed" in shown[1]
    run.retire()
    on_one_device = {"engine.device": "cuda", "learner.device": "cuda", "placement.colocate": True}
    shared = RunDir.create(small(name="shared", **{"weights.transport": "device"}, **on_one_device))
    assert "weights are not broadcast: learner and engines share devices" in "".join(lines(shared, read(Reading(shared))))
    assert not shared.config().broadcasts and small(**{"weights.transport": "device"}).broadcasts
    shared.retire()


def test_what_a_killed_supervisor_left_is_finished_by_what_was_recorded(small: Any) -> None:
    run = RunDir.create(small(max_steps=500, max_seconds=9))
    run.retire()
    steps = [{"step": step, "num_tokens_total": 9 * step, "step_time_total": 4.5 * step} for step in (1, 2)]
    for recorded, head in ((steps[:1], "stopped, step 1 of 500, 4 of 9 seconds"), (steps, "finished, step 2 of 500, 9 of 9")):
        run.metrics.write_text("".join(json.dumps(step) + "\n" for step in recorded))
        assert head in lines(run, read(Reading(run)))[0]
    assert read(Reading(run))["used_up"] == "max_seconds = 9 reached"


def test_restarts_are_counted_over_all_starts_of_a_run_and_shown(run: RunDir) -> None:
    for role in ("actor", "hub", "actor"):
        run.count_restart(role)
    assert "started again: actor 2, hub 1" in lines(run, read(Reading(run)))
    run.restarts.write_text('{"actor": "often"}')
    damaged = read(Reading(run))
    assert damaged["restarts"] == {} and "holds other things than counts" in damaged["problems"][0]
    run.count_restart("hub")
    assert read(Reading(run))["restarts"] == {"hub": 1}


def test_checkpoints_that_could_not_be_written_are_counted(run: RunDir) -> None:
    run.metrics.write_text(json.dumps({"step": 1, "checkpoint/failed": 3}) + "\n")
    assert f"checkpoints that could not be written: 3; see {run.log('learner')}" in lines(run, read(Reading(run)))


def test_of_many_evaluations_and_changes_those_that_count_are_shown(run: RunDir) -> None:
    made = {"label": "step", "accuracy": 0.0, "num_prompts": 8, "failed": 0}
    rewards = [0.1, 0.2, 0.9, 0.3, 0.4, 0.5, 0.6]
    records = [{**made, "step": i, "mean_reward": reward} for i, reward in enumerate(rewards, 1)]
    run.evaluations.write_text("".join(json.dumps(record) + "\n" for record in records))
    told = lines(run, read(Reading(run)))[-6:]
    assert [text.split(":")[0].rsplit(" ", 1)[-1] for text in told[:-1]] == ["1", "3", "5", "6", "7"]
    assert told[1].endswith("(best)") and told[-1] == "2 more evaluations"
    reading = Reading(run)

    def change(numbers: range) -> list[str]:
        made = [(ChangeRequest(number=n, values={"guard.max_kl": (None, 1.0)}), Applied(number=n, step=n)) for n in numbers]
        ChangeLedger(run.path).append(lambda history: [line for pair in made for line in pair])
        return [text for text in lines(run, read(reading)) if text.startswith("changed")]

    assert change(range(1, 11)) == [f"changed: guard.max_kl null -> 1.0, from step {step} on" for step in range(1, 11)]
    told = change(range(11, 14))
    assert told[0] == f"changed 3 times before that: {run.path / 'changes.jsonl'}"
    assert told[1:] == [f"changed: guard.max_kl null -> 1.0, from step {step} on" for step in range(4, 14)]


RECORD = dict.fromkeys(("reward", "staleness/mean", "staleness/max", "tokens_per_second", "idle/learner", "idle/actor"), 0)
ROLLOUTS = [{"text": "leets", "scores": {"exact": 1.0, "judge": "timed out", "reference": None}}]
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
    monkeypatch.setattr("async_rlhf.run.display.console.time", SimpleNamespace(monotonic=lambda: next(clock)))
    for step in (1, 11, 100):
        display.step({**RECORD, "step": step}, 100)
    assert "left" not in lines()[0] and lines()[1].endswith("left 0:02:58") and "left" not in lines()[2]


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


def test_an_evaluation_without_rewards_says_why_nothing_could_be_judged() -> None:
    record = {"label": "start", "step": 0, "num_prompts": 3, "failed": 3, "rewards": {}}
    assert held_out(record) == (
        "held-out at the start: none of 3 prompts could be judged: there is no reward (rewards.functions)"
    )


def test_a_sample_is_shown_now_and_then_and_what_is_none_never(printed: Any, tmp_path: Path) -> None:
    display, lines = printed
    for record in ({}, {"rollouts": []}, {**SAMPLE, "rollouts": [7]}, SAMPLE, {**SAMPLE, "step": 4}):
        display.sample(record)
    assert lines() == ["sample of step 3: 'Spell steel' -> 'leets'  (exact 1.0, judge timed out)"]
    assert len(sample_line({**SAMPLE, "prompt": "x" * 10_000})) < 200
    episode = {**SAMPLE, "rollouts": [{**ROLLOUTS[0], "spans": [[3, 2], [4, 1], [None, 2], [4, 1]]}]}
    assert "-> 'leets' (the text of 2 turns and of what was read between them)  (exact" in sample_line(episode)


def test_a_notebook_shows_what_is_said_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions and reasons come from models and from users' code."""
    drawn: list[str] = []
    display = SimpleNamespace(display=lambda page, display_id: SimpleNamespace(update=drawn.append), HTML=str)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    with NotebookDisplay() as notebook:
        notebook.event("<script>alert(1)</script> & more")
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in drawn[-1] and "<script" not in drawn[-1]
