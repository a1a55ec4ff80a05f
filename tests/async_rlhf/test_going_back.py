"""A run whose newest checkpoint is damaged goes on from one before it, by the command that it advises; and one that has ended
by its budget goes on with more of it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.api import train
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.inspect.chaos import problems
from async_rlhf.inspect.status import lines, read
from async_rlhf.preparation import prepare
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.run_files import read_lines
from tests.conftest import Command, Start, assert_no_orphans, assert_whole, output_of, steps, train_arguments, wait_for


def saved(run: Path) -> list[int]:
    return [int(path.name[5:]) for path in sorted((run / "checkpoints").glob("step_*"))]


def damage(run: Path, step: int, *, as_long: bool) -> None:
    path = run / "checkpoints" / f"step_{step:06d}" / "optimizer-00001.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if as_long else data[:-1])


SETTINGS = {"max_steps": 100_000, "checkpoint.save_every": 2, "queue.max_staleness": 1}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was killed when it had steps behind its newest checkpoint; not to be changed."""
    folder = tmp_path_factory.mktemp("killed")
    started = Command(train_arguments(folder, **SETTINGS), folder)
    try:
        kill_behind_a_checkpoint(started, folder / "quick")
    finally:
        started.close()
    return folder / "quick"


def _is_stopped(thread: Path) -> bool:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"


def kill_behind_a_checkpoint(started: Command, run: Path) -> None:
    wait_for(lambda: max(saved(run), default=0) >= 6, "the checkpoint of step 6")
    learner, family = started.child("learner"), started.family()

    def caught() -> bool:
        learner.suspend()
        # A thread that waits for the disk ends its call first: it may be the rename that makes a checkpoint.
        wait_for(lambda: all(_is_stopped(thread) for thread in Path(f"/proc/{learner.pid}/task").iterdir()), "its threads")
        if steps(run) > saved(run)[-1]:
            return True
        learner.resume()
        return False

    wait_for(caught, "a learner with a step behind its newest checkpoint")
    started.process.kill()
    learner.kill()
    assert_no_orphans(family)


@pytest.fixture
def run(killed: Path, tmp_path: Path) -> Path:
    """This test's copy of it."""
    return Path(shutil.copytree(killed, tmp_path / "runs" / "quick", symlinks=True))


@pytest.fixture
def stopped(run: Path, small_arguments: Callable[..., list[str]]) -> list[str]:
    """Arguments that go on for some steps with such a run."""
    return small_arguments(**{**SETTINGS, "max_steps": steps(run) + 8})


@pytest.mark.rest
def test_the_command_that_is_advised_goes_on_and_the_run_is_whole(command: Start, stopped: list[str], run: Path) -> None:
    older, newest = saved(run)[-2:]
    before = RunDir(run).metrics.read_bytes()
    damage(run, newest, as_long=False)
    output = command(*stopped, "--resume").ends_with(8, f"step_{newest:06d} is torn: optimizer-00001.safetensors has")
    assert RunDir(run).metrics.read_bytes() == before, "nothing is cut off"
    advised = re.search(r"async-rlhf (train .* --resume --from-step (\d+))", output.replace("\n", " "))
    assert advised is not None and int(advised[2]) == older, output

    command(*shlex.split(advised[1])).ends_with(0)
    assert_whole(run, RunDir(run).config().max_steps)
    assert not list((run / "checkpoints").glob(".*")), "what was set aside is gone"
    assert [(line["kind"], line["step"]) for line in read_lines(run / "changes.jsonl")] == [("undone", older)]


def test_a_run_that_has_gone_further_than_it_is_to_go_is_refused_and_left_as_it_is(stopped: list[str], run: Path) -> None:
    done, before = steps(run), (run / "config.toml").read_bytes()
    output = output_of(3, *stopped, "--set", "max_steps=2", "--resume")
    assert f"has done {done} steps. Lowest: {done}, or go back with --from-step" in output
    output = output_of(3, *stopped, "--set", "max_steps=999", "--resume", "--from-step", done + 100)
    assert f"--from-step {done + 100}: there is no checkpoint of that step. This run can" in output
    assert (run / "config.toml").read_bytes() == before


def test_damage_that_only_the_digests_tell_is_found_by_the_learner_and_nothing_is_cut_off(
    command: Start, stopped: list[str], run: Path
) -> None:
    older, newest = saved(run)[-2:]
    before = RunDir(run).metrics.read_bytes()
    damage(run, newest, as_long=True)
    code, output = command(*stopped, "--resume").finish()
    assert code != 0 and "has other bytes than were written" in output and f"--resume --from-step {older}" in output, output
    assert RunDir(run).metrics.read_bytes() == before

    output = output_of(8, *stopped, "--resume", "--from-step", newest)
    others = ", ".join(map(str, saved(run)[:-1]))  # more than one where it was killed before the oldest was removed
    assert f"step_{newest:06d} is torn" in output and re.search(f"can go on from steps? {others}", output)
    output = output_of(3, *stopped, "--resume", "--from-step", newest + 1)
    assert f"--from-step {newest + 1}: there is no checkpoint of that step" in output
    assert "give --resume too" in output_of(3, *stopped, "--from-step", older)
    assert saved(run)[-2:] == [older, newest], "and what is refused sets nothing aside"
    state = json.loads((run / "checkpoints" / "latest" / "state.json").read_text())
    assert state["step"] == newest


def test_a_group_of_a_step_that_will_be_done_again_is_taken_back_and_the_other_steps_keep_their_groups(
    command: Start, stopped: list[str], run: Path
) -> None:
    before = {record["step"]: record["groups"] for record in RunDir(run).read_metrics()}
    again = saved(run)[-1] + 1
    bad, done = before[again][1], before[1][0]
    for number in (done, 1 << 40):
        assert re.search(r"trained: group|unknown: group", output_of(1, "rollouts", "quarantine", run, "--group", number))
    output = output_of(0, "rollouts", "quarantine", run, "--group", bad, "--reason", "a wrong answer key")
    assert f"group {bad} is quarantined" in output
    assert "a wrong answer key" in (run / "quarantine.jsonl").read_text()

    command(*stopped, "--resume").ends_with(0)
    after = {record["step"]: record["groups"] for record in RunDir(run).read_metrics()}
    assert after[again] == [number for number in before[again] if number != bad]
    num_groups = RunDir(run).config().max_steps * 4
    assert sorted(number for groups in after.values() for number in groups) == sorted({*range(num_groups)} - {bad})
    ledger = RunDir(run).read_ledger()["ledger"]
    assert ledger["closes"] and ledger["quarantined"] == 1 and ledger["committed"] == num_groups - 1


LIMITED = {"max_steps": 500, "queue.max_staleness": 2, "evaluation.at_end": True, "queue.keep_rollouts": True}


@pytest.mark.rest
def test_a_run_ends_by_its_tokens_and_goes_on_with_more_of_them(small: Callable[..., Any], tmp_path: Path) -> None:
    config = small(**LIMITED, max_trained_tokens=150)
    result = train(config, quiet=True)
    run, used = RunDir(result.run_dir), [record["num_tokens_total"] for record in result.metrics]
    assert result.finished and used[-2] < 150 <= used[-1]
    assert (result.checkpoint or Path()).resolve().parent.name == f"step_{len(used):06d}"
    assert [(record["label"], record["step"]) for record in result.evaluations] == [("end", len(used))]
    assert problems(run, config) == [], "every step once, and the ledger closes"
    ledger = run.read_ledger()["ledger"]
    assert ledger["leased"] == ledger["in_flight"] == ledger["quarantined"] == 0 and ledger["tokens_trained"] == used[-1]
    assert [run.read_ledger()["state"], run.end() and run.end().reason] == ["finished", "max_trained_tokens = 150 reached"]
    told = lines(run, read(Reading(run)))
    assert told[0].endswith(f"finished, step {len(used)} of 500, {used[-1]} of 150 tokens")
    assert told[1] == "ended: max_trained_tokens = 150 reached"

    assert train(config, resume=True, quiet=True).metrics == result.metrics, "nothing is left"
    larger = small(**LIMITED | {"evaluation.at_end": False}, max_trained_tokens=used[-1] + 1)
    more = train(larger, resume=True, quiet=True)
    assert more.finished and more.metrics[:-1] == result.metrics and problems(run, larger) == []
    with pytest.raises(ConfigError, match=rf"max_trained_tokens = 150 reached before step {len(used) + 1}, .*--from-step"):
        prepare(config, resume=True)

    output_of(0, "rollouts", "replay", run.path, "--name", "again")
    assert (tmp_path / "runs/again/checkpoints/latest/model/model.safetensors").read_bytes() == (
        run.latest / "model/model.safetensors"
    ).read_bytes()
