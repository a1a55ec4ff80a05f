"""With max_staleness = 0 the asynchronous system is the synchronous loop, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from async_rlhf.actors.engine import Completion
from async_rlhf.actors.loop.work import Work
from async_rlhf.actors.rewards.builtins.gym import reasoning_gym
from async_rlhf.actors.torch_engine.loading import load_engine
from async_rlhf.api import train
from async_rlhf.buffers.composition import Composition
from async_rlhf.buffers.record import Group, Rollout, Score
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.objective.advantages import group_relative
from async_rlhf.learner.step.controller import make_backend
from async_rlhf.run.checks.preflight import preflight
from async_rlhf.run.config import Config
from async_rlhf.run.processes.roles import make_work

STEPS = 20


def synchronous_loop(config: Config) -> dict[str, np.ndarray]:
    """Generate, score, step, load the weights: nothing overlaps, nothing is queued, one process."""
    torch.set_num_threads(1)
    rows, _ = preflight(config).rows
    tokenizer = AutoTokenizer.from_pretrained(config.model, local_files_only=True)
    work = make_work(config, rows, tokenizer)
    engine = load_engine(config.model, config.engine)
    backend = make_backend(Path(config.model), config.learner, config.loss)
    for step in range(config.max_steps):
        engine.load_weights(step, backend.tensors())
        numbers = range(step * config.groups_per_batch, (step + 1) * config.groups_per_batch)
        groups = generate(engine, work, numbers)
        rewards = [[Composition().reward(rollout.scores) for rollout in group.rollouts] for group in groups]
        advantages = [group_relative(values, scale_by_std=True) for values in rewards]
        backend.step([make_rows(groups, advantages, config.learner.row_tokens)], step)
    return {name: np.frombuffer(tensor.data, np.float32).reshape(tensor.shape) for name, tensor in backend.tensors().items()}


def generate(engine: Any, work: Work, numbers: Sequence[int]) -> list[Group]:
    work_of = {number: work.requests(number, 0) for number in numbers}
    engine.submit([request for _, _, requests in work_of.values() for request in requests])
    done: dict[tuple[int, int], Completion] = {}
    while engine.num_unfinished:
        done.update({(c.key.group, c.key.member): c for c in engine.step()})
    groups = []
    for number, (row, prompt, requests) in work_of.items():
        rollouts = []
        for request in requests:
            completion = done[number, request.key.member]
            text = work.decode(completion.token_ids.tolist())
            score = Score(float(reasoning_gym(completion=text, entry=row.columns["entry"])))
            rollouts.append(
                Rollout(
                    completion.token_ids,
                    completion.logprobs,
                    completion.spans,
                    completion.finish_reason,
                    {"reasoning_gym": score},
                    text,
                )
            )
        ids = np.array(requests[0].prompt_ids, np.int32)
        groups.append(Group(number, 0, ids, tuple(rollouts), work.generation.sampling, prompt=prompt))
    return groups


def test_bound_zero_is_the_synchronous_loop_bit_for_bit(small: Any) -> None:
    config = small(**{"max_steps": STEPS, "queue.max_staleness": 0})
    result = train(config, quiet=True)
    assert result.checkpoint is not None
    trained = load_file(result.checkpoint / "model.safetensors")
    expected = synchronous_loop(config)
    assert set(expected) <= set(trained)
    for name, tensor in expected.items():
        assert np.array_equal(trained[name], tensor), f"{name} differs"
    assert all(record["staleness/max"] == 0 for record in result.metrics)
    start = load_file(Path(config.model) / "model.safetensors")
    assert any(not np.array_equal(start[name], trained[name]) for name in trained)  # it did learn something
