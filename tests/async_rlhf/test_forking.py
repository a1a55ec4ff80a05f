"""A run that begins with the model of another one's checkpoint: which, when it is refused, and where it says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from async_rlhf.buffers.errors import ConfigError, DamagedError
from async_rlhf.launch.run_lock import RunLock
from async_rlhf.run.live import ask, forked
from async_rlhf.run.loading import differences
from async_rlhf.run.run_dir import RunDir
from async_rlhf.serve.queue_dir import QueueDir
from tests.conftest import output_of
from tests.formats.sample import copied


@pytest.fixture
def source(tmp_path: Path) -> RunDir:
    """A run with checkpoints of steps 2 and 3, of which neither was evaluated."""
    run = copied(tmp_path, 1)
    shutil.copytree(run.path / "checkpoints" / "step_000002", run.path / "checkpoints" / "step_000003")
    return run


def evaluated(run: RunDir, **rewards: float) -> None:
    lines = [{"label": "step", "step": int(step[1:]), "mean_reward": reward} for step, reward in rewards.items()]
    run.evaluations.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_new_run_has_the_old_ones_configuration_but_for_its_model_its_name_and_what_is_overridden(source: RunDir) -> None:
    config = forked(source, "new", {"learner.learning_rate": 1e-5})
    changed = {line.split(":")[0] for line in differences(source.config(), config)}
    assert changed == {"name", "model", "learner.learning_rate"} and config.run_dir == source.path.parent / "new"
    source.forget_end()  # no change is taken by a run that has ended for good
    assert ask(source, {"guard.max_kl": 2.0, "checkpoint.save_every": 7}) is not None
    config = forked(source, "new", {"checkpoint.save_every": 9})
    assert (config.guard.max_kl, config.checkpoint.save_every) == (2.0, 9), "what was changed while the old run went on holds"
    evaluated(source, s1=0.9, s2=0.6, s3=0.5)
    for chosen, step in (({}, 3), ({"best": True}, 2), ({"from_step": 2}, 2)):
        model = forked(source, "new", {}, **chosen).model  # type: ignore[arg-type]
        assert model == str(source.path / "checkpoints" / f"step_{step:06d}" / "model")


def test_its_manifest_names_the_run_and_the_step_that_it_came_from(source: RunDir) -> None:
    run = RunDir.create(forked(source, "new", {}, from_step=2))
    run.retire()
    assert json.loads((run.path / "manifest.json").read_text())["origin"] == {"run": str(source.path), "step": 2}
    other = RunDir.create(source.config().model_copy(update={"name": "other", "model": str(source.path.parent)}))
    other.retire()
    assert json.loads((other.path / "manifest.json").read_text())["origin"] is None


def test_what_cannot_be_forked_is_refused_with_what_can(source: RunDir) -> None:
    for chosen, words in (
        ({"best": True}, r"no checkpoint of run .* was evaluated .* with --from-step: 2, 3"),
        ({"from_step": 7}, "--from-step 7: run .* has no checkpoint of it, but those of 2, 3"),
        ({"best": True, "from_step": 2}, "--best and --from-step 2 name two checkpoints"),
    ):
        with pytest.raises(ConfigError, match=words):
            forked(source, "new", {}, **chosen)  # type: ignore[arg-type]
    lock = RunLock.take(source.lock_file)
    with pytest.raises(ConfigError, match=r"is running and replaces its checkpoints; wait, or stop it: async-rlhf stop"):
        forked(source, "new", {})
    lock.release()
    weights = source.path / "checkpoints" / "step_000003" / "model" / "model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    with pytest.raises(DamagedError, match=r"model/model.safetensors has other bytes than were written"):
        forked(source, "new", {})
    shutil.rmtree(source.path / "checkpoints")
    with pytest.raises(ConfigError, match="has no checkpoint to go on from"):
        forked(source, "new", {})


def test_the_command_refuses_a_name_that_is_taken_and_queues_where_it_is_told_to(source: RunDir, tmp_path: Path) -> None:
    assert "run-1' exists" in output_of(3, "fork", source.path, "--name", "run-1")
    output = output_of(0, "fork", source.path, "--name", "new", "--to", tmp_path / "serve", "--set", "max_steps=1")
    assert f"run 1 of {tmp_path / 'serve'}: new; it waits for: " in output
    queue = QueueDir.existing(tmp_path / "serve")
    written = (queue.folder(queue.find("new")) / "config.toml").read_text()
    assert f'model = "{source.path}/checkpoints/step_000003/model"' in written and "max_steps = 1\n" in written
    assert not (tmp_path / "new").exists()
