"""The sides of the learner benchmark: each is given the same samples and makes one step of them when it is called.

ours:  `Controller.step` from groups on: packing, forward, corrections, loss, backward, clipping, optimizer, diagnostics.
off:   the same backend and packing with a plain policy-gradient loss: no correction, no diagnostics, no entropy.
bare:  what one writes in thirty lines: every completion with its prompt in a row of its own, rows of similar length together,
       forward, log-probabilities, policy-gradient loss, backward, clipping and the same fused AdamW; its tensors are made
       once, outside the clock.
TRL:   `GRPOTrainer` on samples that it is handed ready (see `trl_training`).
"""

from __future__ import annotations

import pkgutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from async_rlhf.buffers.composition import Composition
from async_rlhf.buffers.record import Group, Rollout, Score, Span
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.experiments.throughput.sides import MODEL
from async_rlhf.experiments.throughput.trl_process import TrlProcess
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.config import LearnerConfig, LossConfig
from async_rlhf.learner.objective.advantages import group_relative
from async_rlhf.learner.step.controller import make_backend

# Random weights: 39 million parameters, a third of the arithmetic in the output layer.
WIDE = {
    "vocab_size": 32_768,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
}
NUM_PROMPT_TOKENS = 60
MICRO_BATCH_TOKENS = LearnerConfig().micro_batch_tokens
# So small that a hundred steps on the same batch leave the model where it was.
LEARNING_RATE = 1e-9


@dataclass(frozen=True)
class Seconds:
    """Of one step: by the clock, and of the processor."""

    wall: float
    cpu: float


Side = Callable[[], Seconds]


def timed(step: Callable[[], object]) -> Side:
    """Any step of this process, with its seconds."""

    def run() -> Seconds:
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        return Seconds(time.perf_counter() - wall, time.process_time() - cpu)

    return run


def make_wide(directory: Path) -> Path:
    """A model directory of `WIDE`."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**WIDE), trust_remote_code=False).save_pretrained(directory)
    return directory


def long_tailed(prompts: int, completions: int) -> np.ndarray:
    """int [prompts, completions]: log-normal lengths in tokens (median 48, sigma 1), cut at 256; always the same."""
    lengths = np.random.default_rng(0).lognormal(np.log(48), 1.0, (prompts, completions))
    return np.clip(np.round(lengths), 1, 256).astype(int)


def make_groups(lengths: np.ndarray, vocabulary: int) -> list[Group]:
    """One batch of groups; `lengths` [prompts, completions] in tokens."""
    random = np.random.default_rng(0)
    groups = []
    for number, row in enumerate(lengths.tolist()):
        rollouts = tuple(
            Rollout(
                completion_ids=random.integers(2, vocabulary, length).astype(np.int32),
                logprobs=(random.uniform(-0.5, 0.5, length) - np.log(vocabulary)).astype(np.float32),
                spans=(Span(0, length),),
                finish_reason="stop",
                scores={"judge": Score(float(random.random()))},
            )
            for length in row
        )
        groups.append(
            Group(number, 0, random.integers(2, vocabulary, NUM_PROMPT_TOKENS).astype(np.int32), rollouts, Sampling())
        )
    return groups


def advantages_of(groups: list[Group]) -> list[list[float | None]]:
    rewards = [[Composition().reward(rollout.scores) for rollout in group.rollouts] for group in groups]
    return [group_relative(own, scale_by_std=True, std="sample") for own in rewards]


def ours(model: Path, groups: list[Group], threads: int) -> Side:
    config = LearnerConfig(learning_rate=LEARNING_RATE, threads=threads)
    backend = make_backend(model, config, LossConfig())
    return timed(lambda: backend.step([make_rows(groups, advantages_of(groups), config.row_tokens)], 0))


def diagnostics_seconds(model: Path, groups: list[Group], threads: int) -> tuple[float, float]:
    """Processor seconds of one step, and of its corrections, token losses, entropy and diagnostics.

    Timed where they are called, which other work on the machine disturbs less than a difference of two steps.
    """
    spent = 0.0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent += time.thread_time() - began

        return run

    side = ours(model, groups, threads)
    side()
    with ExitStack() as stack:
        for name in (
            "model.logprobs._entropy_",
            "step.controller.objective",
            "step.report.StepSums.add",
            "step.report.StepSums.report",
        ):
            found = pkgutil.resolve_name(f"async_rlhf.learner.{name}")
            stack.enter_context(mock.patch(f"async_rlhf.learner.{name}", counted(found)))
        whole = side().cpu
    return whole, spent


def off(model: Path, groups: list[Group], threads: int) -> Side:
    config = LearnerConfig(learning_rate=LEARNING_RATE, threads=threads)
    backend = make_backend(model, config, LossConfig())

    def step() -> None:
        (update,) = backend.partition([make_rows(groups, advantages_of(groups), config.row_tokens)])[0]
        machine = backend.machine
        machine.begin()
        for batch in update.batches:
            logp_N, _, _ = machine.predict(batch)
            loss = -(logp_N * batch.advantage_N).sum() / update.counts.num_tokens
            machine.backward(loss, last=batch is update.batches[-1])
        machine.apply(0, finite=True)

    def without_entropy() -> None:
        with mock.patch("async_rlhf.learner.model.logprobs._entropy_", lambda y_CV, *_: y_CV.new_zeros(len(y_CV))):
            step()

    return timed(without_entropy)


@dataclass(frozen=True)
class BareBatch:
    """Right-padded tensors: ids, attention [B, L] int64; loss-bearing [B, L - 1] float32; advantage [B, 1] float32."""

    ids: Tensor
    attention: Tensor
    bears_loss: Tensor
    advantage: Tensor


def bare_batches(groups: list[Group]) -> list[BareBatch]:
    """Completions sorted by length, as many together as the learner's budget of padded tokens allows."""
    whole = [
        (np.concatenate([group.prompt_ids, rollout.completion_ids]), advantage)
        for group, values in zip(groups, advantages_of(groups), strict=True)
        for rollout, advantage in zip(group.rollouts, values, strict=True)
    ]
    parts: list[list[tuple[np.ndarray, float | None]]] = []
    for ids, advantage in sorted(whole, key=lambda each: -len(each[0])):
        if not parts or (len(parts[-1]) + 1) * len(parts[-1][0][0]) > MICRO_BATCH_TOKENS:
            parts.append([])
        parts[-1].append((ids, advantage))
    batches = []
    for part in parts:
        lengths = torch.tensor([len(ids) for ids, _ in part])[:, None]
        width = int(lengths.max())
        padded = torch.tensor([[*ids.tolist(), *[0] * (width - len(ids))] for ids, _ in part])
        place = torch.arange(width)
        bears_loss = ((place >= NUM_PROMPT_TOKENS) & (place < lengths)).float()[:, 1:]
        worth = torch.tensor([[advantage or 0.0] for _, advantage in part])
        batches.append(BareBatch(padded, (place < lengths).long(), bears_loss, worth))
    return batches


def bare(model_dir: Path, groups: list[Group]) -> Side:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        model_dir, local_files_only=True, trust_remote_code=False
    ).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    batches = bare_batches(groups)
    num_tokens = sum(group.num_tokens for group in groups)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for batch in batches:
            logits = model(input_ids=batch.ids, attention_mask=batch.attention, use_cache=False).logits[:, :-1]
            logps = torch.log_softmax(logits, -1).gather(-1, batch.ids[:, 1:, None])[..., 0]
            loss = -(logps * batch.advantage * batch.bears_loss).sum() / num_tokens
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return timed(step)


class Trl(TrlProcess):
    """TRL's training part in a process of its own."""

    def __init__(self, python: Path, model: Path, groups: list[Group], threads: int, directory: Path) -> None:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        spec = {
            "model": str(model),
            "tokenizer": str(MODEL),
            "output_dir": str(directory),
            "prompt_ids": [group.prompt_ids.tolist() for group in groups for _ in group.rollouts],
            "completion_ids": [rollout.completion_ids.tolist() for rollout in rollouts],
            "advantages": [each or 0.0 for values in advantages_of(groups) for each in values],
            "micro_batch": 8,
            "learning_rate": LEARNING_RATE,
            "threads": threads,
        }
        super().__init__(python, "learner", spec, directory)

    def __call__(self) -> Seconds:
        return Seconds(**self.step())
