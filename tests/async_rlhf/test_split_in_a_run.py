"""A run whose chat template rewrites what was said: its episodes are trained as rows that begin anew."""

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
# Of turns before the user's last message what stands before the first "e" is left out, as reasoning is elsewhere.
TEMPLATE = """{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{ m.role[0] }}:{{ ' ' }}
{{- m.content.split('e', 1)[-1] if m.role == 'assistant' and loop.index0 < ns.last else m.content }}
{% endfor %}{% if add_generation_prompt %}a:{{ ' ' }}{% endif %}"""
ENVIRONMENT = """
from async_rlhf import Score, environment

@environment(max_turns=3)
def thrice(prompt, answer):
    yield prompt
    yield "again"
    text = yield "and again"
    yield Score(float(text == answer) + 0.01 * len(set(text)))
"""


def test_episodes_of_several_rows_are_sampled_scored_and_trained_on(
    command: Callable[..., Any], small_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    model = shutil.copytree(MODEL, tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "thrice.py").write_text(ENVIRONMENT)
    settings = {
        "name": "split",
        "model": str(model),
        "data.chat": True,
        "environment": {"function": str(tmp_path / "thrice.py:thrice"), "render": "split"},
        "rewards.functions": [],
        "generation.max_completion_length": 12,
        "generation.max_episode_length": 300,
        "queue.max_staleness": 1,
        "queue.keep_rollouts": True,
        "learner.learning_rate": 1e-3,
        "loss.kl_coef": 0.01,
        "scoring.stages.reference": {"placement": "actor", "stream_tokens": 4},
    }
    code, output = command(*small_arguments(**settings)).finish()
    assert code == 0, output
    run = RunDir(tmp_path / "runs" / "split")
    records = run.read_metrics()
    assert len(records) == 4 and all(record["staleness/max"] <= 1 for record in records)
    assert all(record["episodes/mean_turns"] == 3 and record["episodes/mean_restarts"] > 0 for record in records)
    assert records[0]["mismatch/abs_log_ratio"] < 1e-5 and records[-1]["grad_norm"] > 0
    initial = AutoModelForCausalLM.from_pretrained(model).eval()
    groups = [group for batch in read_batches(run.path / "queue") for group in batch.groups]
    numbers = set()
    for group in groups:
        for rollout in group.rollouts:
            numbers.add(len(rollout.restarts))
            with torch.no_grad():
                plain = oracles.rollout_logprobs(initial, group, rollout).numpy()
            assert rollout.reference is not None
            np.testing.assert_allclose(rollout.reference, plain, atol=1e-4)
            first = rollout.versions == 0
            np.testing.assert_allclose(rollout.logprobs[first], plain[first], atol=1e-4)
            assert rollout.text.count("again") == 2, "what is said again with the conversation is not shown again"
    assert len(numbers) > 1 and numbers <= {0, 1, 2}, "a row begins anew where the text is another, and nowhere else"
    exported = list(inspected(run))
    assert [rollout["restarts"] for record in exported for rollout in record["rollouts"]] == [
        rollout.restarts for group in groups for rollout in group.rollouts
    ]
    assert all(" anew " in group_lines(record) for record in exported if any(each["restarts"] for each in record["rollouts"]))
    tried = _of_run(run.path)[0]
    of_first = [sum(sampled) for sampled in tried["sampled"]]
    assert of_first == [rollout.num_tokens for rollout in groups[0].rollouts], "what is tried again counts what was written"
