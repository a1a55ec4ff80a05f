"""Runs whose episodes are of several rows: a chat template rewrites what was said, or an agent has several conversations."""

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
from async_rlhf.buffers.record import Group
from async_rlhf.inspect.rollouts import records as inspected
from async_rlhf.inspect.trials import _of_run
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_dir import RunDir
from async_rlhf.watch.completions import group_lines
from tests import oracles
from tests.conftest import SPELLER, Train

pytestmark = pytest.mark.rest

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
Trained = Callable[..., tuple[RunDir, list[dict[str, Any]], list[Group]]]


@pytest.fixture
def trained(training: Train, tmp_path: Path) -> Trained:
    """A run of an environment, whose log-probabilities, also under the reference, are those of plain passes; its metrics, and
    what was trained on."""

    def train(source: str, name: str, template: str, **more: Any) -> tuple[RunDir, list[dict[str, Any]], list[Group]]:
        model = shutil.copytree(SPELLER, tmp_path / "model")
        (model / "chat_template.jinja").write_text(template)
        (tmp_path / "played.py").write_text(source)
        settings = {
            "name": "played",
            "model": str(model),
            "environment.function": str(tmp_path / f"played.py:{name}"),
            "rewards.functions": [], "generation.max_completion_length": 12, "generation.max_episode_length": 300,
            "queue.max_staleness": 1, "queue.keep_rollouts": True, "learner.learning_rate": 1e-3, "loss.kl_coef": 0.01,
            "scoring.stages.reference": {"placement": "actor", "stream_tokens": 4},
        }  # fmt: skip
        started = training(**settings | more)
        started.ends_with(0)
        run = started.run
        records = run.read_metrics()
        assert len(records) == 4 and all(record["staleness/max"] <= 1 for record in records)
        assert all(record["episodes/mean_turns"] == 3 for record in records)
        assert records[0]["mismatch/abs_log_ratio"] < 1e-5 and records[-1]["grad_norm"] > 0
        initial = AutoModelForCausalLM.from_pretrained(model).eval()
        groups = [group for batch in read_batches(run.path / "queue") for group in batch.groups]
        for group in groups:
            for rollout in group.rollouts:
                with torch.no_grad():
                    plain = oracles.rollout_logprobs(initial, group, rollout).numpy()
                assert rollout.reference is not None
                np.testing.assert_allclose(rollout.reference, plain, atol=1e-4)
                first = rollout.versions == 0
                np.testing.assert_allclose(rollout.logprobs[first], plain[first], atol=1e-4)
        tried = [sum(sampled) for sampled in _of_run(run.path)[0]["sampled"]]
        assert tried == [rollout.num_tokens for rollout in groups[0].rollouts], "what is tried again counts what was written"
        return run, records, groups

    return train


def test_episodes_of_several_rows_are_sampled_scored_and_trained_on(trained: Trained) -> None:
    run, records, groups = trained(ENVIRONMENT, "thrice", TEMPLATE, **{"data.chat": True, "environment.render": "split"})
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    numbers = {len(rollout.restarts) for rollout in rollouts}
    assert all(record["episodes/mean_restarts"] > 0 for record in records)
    assert all(rollout.text.count("again") == 2 for rollout in rollouts), "what is said again is not shown again"
    assert len(numbers) > 1 and numbers <= {0, 1, 2}, "a row begins anew where the text is another, and nowhere else"
    exported = list(inspected(Reading(run)))
    assert [each["restarts"] for record in exported for each in record["rollouts"]] == [each.restarts for each in rollouts]
    assert all(" anew " in group_lines(record) for record in exported if any(each["restarts"] for each in record["rollouts"]))


def test_an_agent_is_sampled_scored_and_trained_on(trained: Trained) -> None:
    """Its first prompts are the same in some groups, and in others not."""
    template = TEMPLATE.replace("m.content.split('e', 1)[-1] if m.role == 'assistant' and loop.index0 < ns.last else ", "")
    kind = {"advantage.kind": "reinforce_pp", "advantage.gamma": 0.9}
    _, records, groups = trained(AGENT, "caller", template, **kind)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert all(record["episodes/mean_restarts"] == 1 and record["rewards/caller/failed_ratio"] == 0 for record in records)
    assert {rollout.spans[0].version is None for rollout in rollouts} == {True, False}
    assert all("no" not in rollout.text.split() and rollout.text.count("sub") == 1 for rollout in rollouts)
