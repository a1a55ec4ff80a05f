"""A run whose environment is an agent: its calls are sampled, scored and trained as chains of one rollout."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from async_rlhf.buffers.queue.recovery import read_batches
from async_rlhf.inspect.rollouts import records as inspected
from async_rlhf.inspect.trials import _of_run
from async_rlhf.run.display.console import group_lines
from async_rlhf.run.run_dir import RunDir
from tests import oracles

pytestmark = pytest.mark.rest

MODEL = Path(__file__).resolve().parents[2] / "configs" / "models" / "tiny-speller"
TEMPLATE = """{%- for m in messages %}{{ m.role[0] }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}a: {% endif %}"""
AGENT = """
import random
from async_rlhf import Score, environment
from async_rlhf.actors.environments import Call

def user(text): return [{"role": "user", "content": text}]

@environment(calls=True)
def caller(prompt, answer, seed):
    own = "".join(random.SystemRandom().choices("abcdefgh", k=8))  # another for each member
    first = yield Call(0, user(prompt if seed % 2 else own))
    yield Call(1, user("note"), trained=False)
    other = yield Call(2, user("sub"), max_tokens=5)
    last = yield Call(0, user(other.text))
    yield Call(2, user("no more"), trained=False)
    yield Score(0.01 * len(set(first.text + last.text)) + (other.text == answer))
"""


def test_an_agent_is_sampled_scored_and_trained_on(
    command: Callable[..., Any], small_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    model = shutil.copytree(MODEL, tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "agent.py").write_text(AGENT)
    settings = {
        "name": "calls",
        "model": str(model),
        "environment": {"function": str(tmp_path / "agent.py:caller")},
        "rewards.functions": ["length"],
        "rewards.options.length": {"target": 20, "tolerance": 20},
        "generation.max_completion_length": 12,
        "generation.max_episode_length": 120,
        "queue.max_staleness": 1,
        "queue.keep_rollouts": True,
        "learner.learning_rate": 1e-3,
        "advantage.kind": "reinforce_pp",
        "advantage.gamma": 0.9,
        "loss.kl_coef": 0.01,
        "scoring.stages.reference": {"placement": "actor", "stream_tokens": 4},
    }
    code, output = command(*small_arguments(**settings)).finish()
    assert code == 0, output
    run = RunDir(tmp_path / "runs" / "calls")
    records = run.read_metrics()
    assert len(records) == 4 and all(record["staleness/max"] <= 1 for record in records)
    assert all(record["episodes/mean_turns"] == 3 and record["episodes/mean_restarts"] == 1 for record in records)
    assert all(record["rewards/caller/failed_ratio"] == record["rewards/length/failed_ratio"] == 0 for record in records)
    assert records[0]["mismatch/abs_log_ratio"] < 1e-5 and records[-1]["grad_norm"] > 0
    initial = AutoModelForCausalLM.from_pretrained(model).eval()
    groups = [group for batch in read_batches(run.path / "queue") for group in batch.groups]
    begins_read = set()
    for group in groups:
        for rollout in group.rollouts:
            begins_read.add(rollout.spans[0].version is None)
            with torch.no_grad():
                plain = oracles.rollout_logprobs(initial, group, rollout).numpy()
            assert rollout.reference is not None
            np.testing.assert_allclose(rollout.reference, plain, atol=1e-4)
            first = rollout.versions == 0
            np.testing.assert_allclose(rollout.logprobs[first], plain[first], atol=1e-4)
            assert "note" not in rollout.text and "no more" not in rollout.text and rollout.text.count("sub") == 1
    assert begins_read == {True, False}, "first prompts differ in some groups, and in others not"
    exported = list(inspected(run))
    assert all(" anew " in group_lines(record) for record in exported)
    tried = _of_run(run.path)[0]
    assert [sum(sampled) for sampled in tried["sampled"]] == [rollout.num_tokens for rollout in groups[0].rollouts]
