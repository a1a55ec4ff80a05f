"""`async-rlhf set`: what it takes and refuses, and a real run that is changed, loses its learner, and ends with the bits of one
that lost nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.inspect import status
from async_rlhf.learner.loop.changes import Applied, ChangeLedger, ChangeRequest
from async_rlhf.preparation import prepare
from async_rlhf.run.live import ask, check_resumed, effective, inherit, present, undo
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_dir import RunDir, RunEnd
from async_rlhf.run.run_files import read_lines
from tests.async_rlhf.test_synchronous import measured
from tests.conftest import Train, output_of, steps, wait_for

RATE = "learner.learning_rate"


@pytest.fixture
def run(small: Any) -> Iterator[RunDir]:
    """One that stands still."""
    found = RunDir.create(small(**{"queue.max_staleness": 2, RATE: 1e-3}), ([], []))
    yield found
    found.retire()


def apply(run: RunDir, step: int) -> None:
    ChangeLedger(run.path).append(lambda history: history.apply(step))


def test_a_change_is_laid_upon_the_configuration_and_all_changes_before(run: RunDir) -> None:
    first = ask(run, {RATE: 5e-4, "checkpoint": {"keep_every": 10}})
    assert first is not None and first.values == {RATE: (1e-3, 5e-4), "checkpoint.keep_every": (None, 10)}
    second = ask(run, {RATE: 1e-4, "checkpoint.keep_every": 10})
    assert second is not None and second.number == 2 and second.values == {RATE: (5e-4, 1e-4)}
    assert ask(run, {RATE: 1e-4}) is None, "nothing changes"
    third = ask(run, {"rewards.weights.reasoning_gym": 2.0, "checkpoint.keep_every": "none"})
    assert third is not None and third.values["rewards.weights.reasoning_gym"] == (1.0, 2.0)
    config = effective(run)
    assert (config.learner.learning_rate, config.checkpoint.keep_every) == (1e-4, None)
    assert run.config().learner.learning_rate == 1e-3 and present(run)["rewards.weights.reasoning_gym"] == 2.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learner.batch_size": 32}, r"learner\.batch_size may not change in a run that has begun; choose one of: checkpoint"),
        ({"learner.learning_rat": 1.0}, r"unknown key 'learner\.learning_rat'; did you mean 'learner\.learning_rate'"),
        ({RATE: -1.0}, r"learner\.learning_rate = -1\.0"),
        ({RATE: 1e-5, "guard.target": 3}, r"guard\.target = 3 is not between 0.* queue\.max_staleness = 2.*nearest: 2"),
        ({"rewards.weights.reasoning": 1.5}, r"'reasoning', which is no reward of this run; did you mean 'reasoning_gym'"),
    ],
)
def test_what_may_not_be_is_refused_by_name_and_nothing_is_written(run: RunDir, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ask(run, values)
    assert ChangeLedger(run.path).read().changes == ()


def test_weights_by_which_actors_choose_groups_may_not_change(small: Any) -> None:
    run = RunDir.create(small(**{"advantage.constant_groups": "refill"}), ([], []))
    with pytest.raises(ConfigError, match=r"rewards\.weights\.exact may not change with advantage\.constant_groups = 'refill'"):
        ask(run, {"rewards.weights.exact": 2.0})
    run.retire()


def test_a_weight_has_no_effect_where_a_teacher_is_learned_from(small: Any) -> None:
    run = RunDir.create(small(**{"loss.kind": "reverse_kl", "scoring.reference.path": "tiny-speller"}), ([], []))
    with pytest.raises(
        ConfigError, match=r"rewards\.weights\.exact has no effect: loss.kind = 'reverse_kl' learns from a teacher"
    ):
        ask(run, {"rewards.weights.exact": 2.0})
    run.retire()


def test_a_run_that_has_ended_for_good_is_not_changed(run: RunDir) -> None:
    run.record_end(RunEnd(code=0, reason="all steps done", finished=True))
    run.retire()
    with pytest.raises(ConfigError, match=r"has ended for good \(all steps done\)"):
        ask(run, {RATE: 1e-4})


def test_a_run_that_goes_back_forgets_later_changes_and_takes_what_waits_at_once(run: RunDir) -> None:
    undo(run, 20)  # where nothing was ever changed, too, it is recorded
    (undone,) = read_lines(run.path / "changes.jsonl")
    assert (undone["kind"], undone["step"]) == ("undone", 20) and Reading(run).changed() == []
    for value, step in ((5e-4, 4), (1e-4, 9)):
        ask(run, {RATE: value})
        apply(run, step)
    ask(run, {"checkpoint.keep_last": 3})
    run.metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 13)))
    undo(run, 6)
    history = ChangeLedger(run.path).read()
    assert history.in_force(6) == {RATE: 5e-4} and history.in_force(7) == {RATE: 5e-4, "checkpoint.keep_last": 3}
    assert steps(run.path) == 6 and Reading(run).changed() == [4, 7]


def test_a_key_that_was_changed_live_is_not_changed_by_resuming(run: RunDir, small: Any) -> None:
    same = run.config()
    ask(run, {"checkpoint.keep_last": 3})
    check_resumed(run, same)
    other = same.model_copy(update={"checkpoint": same.checkpoint.model_copy(update={"keep_last": 5})})
    with pytest.raises(ConfigError, match=r"keep_last = 5: it was changed while the run went on .* checkpoint\.keep_last=5"):
        check_resumed(run, other)


def test_what_is_learned_again_is_changed_where_the_run_was_but_for_values_of_its_own(run: RunDir, small: Any) -> None:
    ask(run, {RATE: 5e-4, "checkpoint.keep_last": 3})
    apply(run, 4)
    own = small(**{"queue.max_staleness": 2, RATE: 2e-3, "name": "again"})
    again = RunDir.create(own, ([], []))
    inherit(again, run, own)
    assert ChangeLedger(again.path).read().in_force(4) == {"checkpoint.keep_last": 3}
    again.retire()


def test_the_command_shows_changes_and_refuses_with_the_code_of_a_wrong_setting(run: RunDir) -> None:
    assert output_of(0, "set", run.path, f"{RATE}=5e-4").endswith(f"{RATE} 0.001 -> 0.0005, waits for the next step\n")
    output = output_of(0, "set", run.path)
    assert f"{RATE} = 0.0005" in output and "guard.target = none" in output
    assert "max_steps may not change in a run that has begun" in output_of(3, "set", run.path, "max_steps=5")
    found = status.read(Reading(run))
    assert f"changed: {RATE} 0.001 -> 0.0005, waits for the next step" in status.lines(run, found)


NUM_STEPS = 80
SETTINGS = {"max_steps": NUM_STEPS, "checkpoint.save_every": 4, "queue.max_staleness": 0, RATE: 1e-3}


def bits(run: Path) -> list[bytes]:
    last = run / "checkpoints" / "latest"
    assert json.loads((last / "state.json").read_text())["step"] == NUM_STEPS
    return [(last / name).read_bytes() for name in ("model/model.safetensors", "optimizer-00001.safetensors")]


@pytest.mark.rest
def test_a_run_that_is_changed_and_loses_its_learner_ends_with_the_bits_of_another(training: Train, small: Any) -> None:
    hook = {"hooks.command": ["/bin/sh", "-c", 'cat > "$ASYNC_RLHF_RUN_DIR/told-$ASYNC_RLHF_EVENT"']}
    started = training(**SETTINGS, **hook)
    started.reach(1)
    run = started.run.path
    ask(started.run, {RATE: 2e-2, "rewards.weights.reasoning_gym": 0.5})
    reading = Reading(started.run)
    wait_for(lambda: any(steps(run) > step for step in reading.changed()), "a step with the change")
    started.end("learner")
    started.ends_with(0)
    (step,) = reading.changed()
    assert 2 <= step < NUM_STEPS
    rates = [record["learning_rate"] for record in started.run.read_metrics()]
    assert rates == [1e-3] * (step - 1) + [2e-2] * (NUM_STEPS - step + 1)
    assert json.loads((run / "told-finished").read_text())["event"] == "finished"
    assert [record["event"] for record in read_lines(run / "events.jsonl")] == ["finished"]
    assert [line["kind"] for line in read_lines(run / "changes.jsonl")][:2] == ["asked", "applied"]

    (change,) = ChangeLedger(run).read().changes
    supervisor, whole = prepare(small(**SETTINGS, name="whole"))  # it is changed by its ledger from the beginning
    lines = [ChangeRequest(number=1, values=dict(change.values)), Applied(number=1, step=step)]
    ChangeLedger(whole.path).append(lambda history: lines)
    assert supervisor.run()
    assert bits(whole.path) == bits(run) and measured(whole.path) == measured(run)
