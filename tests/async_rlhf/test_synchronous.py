"""With max_staleness = 0 the asynchronous system is the synchronous loop, bit for bit; and a run whose processes are killed
ends with the bits of an uninterrupted one, where that is promised."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from async_rlhf import api
from async_rlhf.actors.engine import completed
from async_rlhf.actors.loop.context import RunContext
from async_rlhf.actors.rewards.builtins.gym import reasoning_gym
from async_rlhf.actors.torch_engine.loading import load_engine
from async_rlhf.buffers.composition import Composition
from async_rlhf.buffers.queue.recovery import read_batches
from async_rlhf.buffers.record import Group, Rollout, Score
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.objective.advantages import group_relative
from async_rlhf.learner.step.controller import make_backend
from async_rlhf.run.checks.preflight import preflight
from async_rlhf.run.config import Config
from async_rlhf.run.processes.roles import run_context
from async_rlhf.run.run_dir import RunDir
from tests.conftest import Train

STEPS = 20


def synchronous_loop(config: Config) -> dict[str, np.ndarray]:
    """Generate, score, step, load the weights: nothing overlaps, nothing is queued, one process."""
    torch.set_num_threads(1)
    rows, _ = preflight(config).rows
    tokenizer = AutoTokenizer.from_pretrained(config.model, local_files_only=True)
    context = run_context(config, rows, tokenizer)
    engine = load_engine(config.model, config.engine)
    backend = make_backend(Path(config.model), config.learner, config.loss)
    for step in range(config.max_steps):
        engine.load_weights(step, backend.tensors())
        numbers = range(step * config.groups_per_batch, (step + 1) * config.groups_per_batch)
        groups = generate(engine, context, numbers)
        rewards = [[Composition().reward(rollout.scores) for rollout in group.rollouts] for group in groups]
        advantages = [group_relative(values, scale_by_std=True) for values in rewards]
        backend.step([make_rows(groups, advantages)], step)
    return {name: np.frombuffer(tensor.data, np.float32).reshape(tensor.shape) for name, tensor in backend.tensors().items()}


def generate(engine: Any, context: RunContext, numbers: Sequence[int]) -> list[Group]:
    work_of = {number: context.requests(number, 0) for number in numbers}
    done = completed(engine, [request for _, _, requests in work_of.values() for request in requests])
    groups = []
    for number, (row, prompt, requests) in work_of.items():
        rollouts = []
        for request in requests:
            completion = done[request.key]
            text = context.decode(completion.token_ids.tolist())
            score = Score(float(reasoning_gym(completion=text, entry=row.columns["entry"])))
            rollouts.append(
                Rollout(
                    completion.token_ids, completion.logprobs, completion.spans, completion.finish_reason,
                    {"reasoning_gym": score},
                    text,
                )
            )  # fmt: skip
        ids = np.array(requests[0].prompt_ids, np.int32)
        groups.append(Group(number, 0, ids, tuple(rollouts), context.generation.sampling, prompt=prompt))
    return groups


def test_bound_zero_is_the_synchronous_loop_bit_for_bit(small: Any) -> None:
    config = small(**{"max_steps": STEPS, "queue.max_staleness": 0})
    result = api.train(config, quiet=True)
    assert result.checkpoint is not None
    trained = load_file(result.checkpoint / "model.safetensors")
    expected = synchronous_loop(config)
    assert set(expected) <= set(trained)
    for name, tensor in expected.items():
        assert np.array_equal(trained[name], tensor), f"{name} differs"
    assert all(record["staleness/max"] == 0 for record in result.metrics)
    start = load_file(Path(config.model) / "model.safetensors")
    assert any(not np.array_equal(start[name], trained[name]) for name in trained)  # it did learn something


CHANNELS: dict[str, dict[str, Any]] = {
    "torch": {},
    "ZeRO-3": {"learner.backend": "deepspeed", "learner.ranks": 2, "learner.zero_stage": 3},
}


@pytest.mark.parametrize(
    "parts", [each if each == "torch" else pytest.param(each, marks=pytest.mark.rest) for each in CHANNELS]
)
def test_twenty_steps_end_with_the_same_bits_whichever_channel_the_weights_take(parts: str, small: Any, tmp_path: Path) -> None:
    ended = []
    for transport in ("chunks", "device"):
        settings = {"name": transport, "max_steps": STEPS, "queue.max_staleness": 0, "weights.transport": transport}
        result = api.train(small(**settings, **CHANNELS[parts]), quiet=True)
        assert result.checkpoint is not None
        ended.append((result.checkpoint / "model.safetensors").read_bytes())
    assert ended[0] == ended[1]
    assert_broadcast(RunDir(tmp_path / "runs" / "device"))


def assert_broadcast(run: RunDir) -> None:
    """Each version but the first, which is there before the engine."""
    weights = run.read_ledger()["weights"]
    assert weights["broadcasts"] >= STEPS - 1 and weights["broadcasts_failed"] == weights["broadcasts_refused"] == 0, weights


@pytest.mark.rest
def test_vllm_samples_from_the_versions_that_are_broadcast(small: Any, tmp_path: Path) -> None:
    """By its probe: its bits depend on what it computes together, and so on time."""
    pytest.importorskip("vllm")
    settings = {"max_steps": STEPS, "queue.max_staleness": 0, "weights.transport": "device", "engine.kind": "vllm"}
    metrics = api.train(small(name="device", **settings), quiet=True).metrics
    assert len(metrics) == STEPS and all(record["canary/drift"] < 1e-4 for record in metrics)
    assert all(record["mismatch/abs_log_ratio"] < 1e-4 for record in metrics), "what it sampled is what the learner finds"
    assert_broadcast(RunDir(tmp_path / "runs" / "device"))


NUM_STEPS = 24
# Metrics that tell of time, of how many actors there are, of what a hub that was away had not been told yet, or of steps made
# again.
OF_TIME = ("time", "step_time", "samples_per_second", "tokens_per_second", "broadcast/", "checkpoint/", "idle/", "stages/")
OF_OTHERS = ("actors", "canary/", "queue/depth", "version", "staleness/nominal")


def trained(run: Path) -> list[bytes]:
    """Weights, optimizer and counters of the last checkpoint, as they lie on disk."""
    last = run / "checkpoints" / "latest"
    assert json.loads((last / "state.json").read_text())["step"] == NUM_STEPS
    return [(last / name).read_bytes() for name in ("model/model.safetensors", "optimizer-00001.safetensors", "state.json")]


def measured(run: Path) -> list[dict[str, Any]]:
    """What was measured in each step, without time."""
    return [
        {key: value for key, value in record.items() if not key.startswith((*OF_TIME, *OF_OTHERS))}
        for record in RunDir(run).read_metrics()
    ]


@pytest.fixture
def train(training: Train) -> Callable[..., tuple[list[bytes], list[dict[str, Any]]]]:
    """`train("name", [(step, role), ...], **overrides)`: `trained` and `measured` of a run in which those were killed."""

    def run(name: str, kills: list[tuple[int, str]], **overrides: Any) -> tuple[list[bytes], list[dict[str, Any]]]:
        settings = {"name": name, "max_steps": NUM_STEPS, "checkpoint.save_every": 3, "learner.learning_rate": 1e-3}
        started = training(**settings, **overrides)
        for step, role in kills:
            started.reach(step)
            started.end(role)
        output = started.ends_with(0)
        assert output.count("signal 9") == output.count("starting it again") == len(kills), output
        return trained(started.run.path), measured(started.run.path)

    return run


def drawn_kills(seed: int, *more: str) -> list[tuple[int, str]]:
    """Every role once, in a drawn order, after drawn steps."""
    draw, roles = random.Random(seed), ["actor", "hub", "learner", *more]
    steps = sorted(draw.sample(range(1, 9), len(roles)))
    return list(zip(steps, draw.sample(roles, len(roles)), strict=True))


@pytest.mark.rest
def test_with_staleness_0_kills_change_no_bit_of_what_two_ranks_learn(train: Callable[..., Any]) -> None:
    """A rank that is killed takes the other with it; both go on from the checkpoint."""
    settings = {"queue.max_staleness": 0, "learner.ranks": 2}
    weights, metrics = train("whole", [], **settings)
    assert train("killed", drawn_kills(0, "learner_rank"), **settings) == (weights, metrics)


# Its process, too, ends once in mid-episode, where a file is to mark that.
ENVIRONMENT = """
import os
from async_rlhf import Feedback, Score, environment

@environment(max_turns=3, timeout_s=60)
def thrice(prompt, answer, mark=""):
    text, right = (yield prompt), 0
    for turn in range(2):
        right += text == answer
        text = yield Feedback(chr(10) + prompt, 0.1 * (text == answer))
    if mark:
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pass
        else:
            os._exit(9)
    yield Score((right + (text == answer)) / 3)
"""


@pytest.mark.rest
def test_with_an_environment_kills_change_no_bit_and_what_is_read_is_not_trained_on(train: Any, tmp_path: Path) -> None:
    (tmp_path / "thrice.py").write_text(ENVIRONMENT)
    settings: dict[str, Any] = {"environment": str(tmp_path / "thrice.py:thrice"), "rewards.functions": []}
    settings |= {"generation.max_episode_length": 180, "queue.keep_rollouts": True, "queue.max_staleness": 0}
    weights, metrics = train("whole", [], **settings)
    mark = tmp_path / "mark"
    assert train("killed", drawn_kills(1), **settings, **{"environment.options": {"mark": str(mark)}}) == (weights, metrics)
    assert mark.exists()
    assert metrics[0]["mismatch/abs_log_ratio"] < 1e-5, "the engine sampled what the learner reads, behind observations too"
    assert all(record["episodes/mean_turns"] == 3 and record["staleness/max"] == 0 for record in metrics)
    for batch in read_batches(tmp_path / "runs" / "whole" / "queue"):
        for rollout in (rollout for group in batch.groups for rollout in group.rollouts):
            read = [span for span in rollout.spans if span.version is None]
            assert len(read) == 2 and len(rollout.turn_scores) == 2
            assert rollout.length - rollout.num_tokens == sum(span.num_tokens for span in read) > rollout.num_tokens


def test_in_exact_mode_neither_kills_nor_the_number_of_actors_change_a_bit(train: Callable[..., Any]) -> None:
    settings = {"queue.max_staleness": 2, "queue.exact": True}
    weights, metrics = train("one", [], **settings)
    assert max(record["staleness/max"] for record in metrics) == 2
    assert train("killed", drawn_kills(3), **settings, **{"actors.count": 3}) == (weights, metrics)


@pytest.mark.rest
def test_with_broadcasts_kills_change_no_bit_of_what_is_learned_without_any(train: Callable[..., Any]) -> None:
    settings = {"queue.max_staleness": 2, "queue.exact": True, "actors.count": 2}
    whole = train("whole", [], **settings)
    assert train("killed", drawn_kills(4), **settings, **{"weights.transport": "device"}) == whole
