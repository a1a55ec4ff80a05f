"""Where a run stands, when it ends while it is asked."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from rich.console import Console

from async_rlhf.inspect.status import lines, read, watch
from async_rlhf.launch.sockets import hub_address, socket_directory
from async_rlhf.learner.loop.changes import Applied, Asked, Ledger
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
    found = read(run)
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
    assert read(run)["state"] == "ending"
    os.utime(run.ledger, ns=(begun - 1, begun - 1))  # what the hub of an earlier start wrote
    assert "the hub does not answer" in read(run)["state"]
    run.retire()


def test_of_a_run_that_was_killed_nothing_is_shown_as_if_it_lived(run: RunDir) -> None:
    actor = {"version": 1, "groups": 0, "silent_s": 0.0}
    run.ledger.write_text(json.dumps({"waiting_for": "prompts", "actors": {"actor-0": actor}}))
    assert "actor-0: version 1, 0 groups, last message 0.0 s ago" in lines(run, read(run))
    run.retire()
    assert lines(run, read(run)) == [
        f"{run.path}: stopped, step 0 of 4",
        "ended: it was killed, or the machine went down; --resume goes on",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_is_watched_until_it_ends(run: RunDir, terminal: bool) -> None:
    shown = io.StringIO()
    looks = iter([lambda: None, lambda: run.metrics.write_text('{"step": 1}\n'), run.retire])
    watch(run, Console(file=shown, force_terminal=terminal, width=200), sleep=lambda seconds: next(looks)())
    heads = [text.rsplit(": ")[-1] for text in shown.getvalue().splitlines() if "step " in text and " of 4" in text]
    assert "stopped, step 1 of 4" in heads[-1] and not run.is_alive()
    assert terminal or heads == ["starting, step 0 of 4", "starting, step 1 of 4", "stopped, step 1 of 4"]


def test_restarts_are_counted_over_all_starts_of_a_run_and_shown(run: RunDir) -> None:
    for role in ("actor", "hub", "actor"):
        run.count_restart(role)
    assert "started again: actor 2, hub 1" in lines(run, read(run))
    run.restarts.write_text('{"actor": "often"}')
    damaged = read(run)
    assert damaged["restarts"] == {} and "holds other things than counts" in damaged["problems"][0]
    run.count_restart("hub")
    assert read(run)["restarts"] == {"hub": 1}


def test_of_many_evaluations_and_changes_those_that_count_are_shown(run: RunDir) -> None:
    made = {"label": "step", "accuracy": 0.0, "num_prompts": 8, "failed": 0}
    rewards = [0.1, 0.2, 0.9, 0.3, 0.4, 0.5, 0.6]
    records = [{**made, "step": i, "mean_reward": reward} for i, reward in enumerate(rewards, 1)]
    run.evaluations.write_text("".join(json.dumps(record) + "\n" for record in records))
    told = lines(run, read(run))[-6:]
    assert [text.split(":")[0].rsplit(" ", 1)[-1] for text in told[:-1]] == ["1", "3", "5", "6", "7"]
    assert told[1].endswith("(best)") and told[-1] == "2 more evaluations"
    ledger = Ledger(run.path)

    def change(numbers: range) -> list[str]:
        made = [(Asked(number=n, values={"guard.max_kl": (None, 1.0)}), Applied(number=n, step=n)) for n in numbers]
        Ledger(run.path).append(lambda history: [line for pair in made for line in pair])
        return [text for text in lines(run, read(run, ledger)) if text.startswith("changed")]

    assert change(range(1, 11)) == [f"changed: guard.max_kl null -> 1.0, from step {step} on" for step in range(1, 11)]
    told = change(range(11, 14))
    assert told[0] == f"changed 3 times before that: {run.path / 'changes.jsonl'}"
    assert told[1:] == [f"changed: guard.max_kl null -> 1.0, from step {step} on" for step in range(4, 14)]
