"""A run with an environment: what is trained on was sampled, and whatever is killed in mid-episode costs nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from async_rlhf.buffers.queue.recovery import read_batches
from async_rlhf.run.run_dir import RunDir

NUM_STEPS = 6
# Spells a word three times, and is scored for each; in the last turn of its group's episodes it ends who is named for that.
ENVIRONMENT = '''
import os, signal
from pathlib import Path
import psutil
from async_rlhf import Feedback, Score, environment
from async_rlhf.launch.program import role_of

def strike(folder, name):
    """Once for each name, whoever comes first."""
    try:
        os.close(os.open(Path(folder) / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    if name == "worker":
        os._exit(9)
    own = psutil.Process()
    family = [each for parent in own.parents() for each in (parent, *parent.children())]
    for each in family:
        if role_of(each.cmdline()) == name:
            each.send_signal(signal.SIGKILL)
            return
    raise AssertionError(f"no {name} in {[each.cmdline() for each in family]}")

@environment(max_turns=3, timeout_s=60)
def thrice(prompt, answer, seed, folder="", victims=()):
    text, right = (yield prompt), 0
    for turn in range(2):
        right += text == answer
        text = yield Feedback(chr(10) + prompt, 0.1 * (text == answer))
    marks = len(list(Path(folder).glob("group-*"))) if folder else 0
    if folder:
        (Path(folder) / f"group-{seed}").touch()
        if marks > 3 and len(done := [each for each in victims if (Path(folder) / each).exists()]) < len(victims):
            if marks > 4 * (1 + len(done)):
                strike(folder, victims[len(done)])
    yield Score((right + (text == answer)) / 3)
'''


@pytest.fixture
def train(command: Callable[..., Any], small_arguments: Callable[..., list[str]], tmp_path: Path) -> Callable[..., Path]:
    (tmp_path / "thrice.py").write_text(ENVIRONMENT)

    def run(name: str, victims: list[str], **overrides: Any) -> Path:
        (tmp_path / f"marks-{name}").mkdir()
        settings = {
            "name": name,
            "environment": {
                "function": str(tmp_path / "thrice.py:thrice"),
                "options": {"folder": str(tmp_path / f"marks-{name}"), "victims": victims},
            },
            "rewards.functions": [],
            "generation.max_episode_length": 180,
            "max_steps": NUM_STEPS,
            "checkpoint.save_every": 2,
            "queue.keep_rollouts": True,
            "learner.learning_rate": 1e-3,
        }
        code, output = command(*small_arguments(**{**settings, **overrides})).finish()
        assert code == 0, output
        assert all((tmp_path / f"marks-{name}" / victim).exists() for victim in victims), output
        return tmp_path / "runs" / name

    return run


@pytest.mark.rest
def test_kills_in_the_last_turn_change_no_bit_and_what_is_read_is_not_trained_on(train: Callable[..., Path]) -> None:
    whole = train("whole", [], **{"queue.max_staleness": 0})
    killed = train("killed", ["actor", "hub", "learner", "worker"], **{"queue.max_staleness": 0})
    weights, others = (load_file(run / "checkpoints" / "latest" / "model" / "model.safetensors") for run in (whole, killed))
    assert all(weights[name].tobytes() == others[name].tobytes() for name in weights)
    assert json.loads((killed / "checkpoints" / "latest" / "state.json").read_text())["step"] == NUM_STEPS
    records = RunDir(whole).read_metrics()
    assert records[0]["mismatch/abs_log_ratio"] < 1e-5, "the engine sampled what the learner reads, behind observations too"
    assert all(record["episodes/mean_turns"] == 3 and record["staleness/max"] == 0 for record in records)
    for batch in read_batches(whole / "queue"):
        for rollout in (rollout for group in batch.groups for rollout in group.rollouts):
            read = [span for span in rollout.spans if span.version is None]
            assert len(read) == 2 and len(rollout.turn_scores) == 2
            assert rollout.length - rollout.num_tokens == sum(span.num_tokens for span in read) > rollout.num_tokens
