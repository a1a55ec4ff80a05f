"""How fast is a learner step next to a bare training loop and to TRL's? All on the same ready samples, in turns, on one CPU.

Lengths are long-tailed (log-normal, sigma 1, median 48, cut at 256 tokens; prompts of 60) and always the same.

- alone:  every completion has a prompt of its own. Nothing to share: what our machinery costs beside the bare loop.
- shared: 8 completions of each prompt, which the learner computes once for all of them.

Two models: the shipped tiny one, and one of 39 million random parameters with a vocabulary of 32,768. Each side makes one step
of the same samples when it is called:

- ours: `Controller.step` from groups on: packing, forward, corrections, loss, backward, clipping, optimizer, diagnostics.
- bare: what one writes in thirty lines: every completion with its prompt in a row of its own, rows of similar length together,
        forward, log-probabilities, policy-gradient loss, backward, clipping and the same fused AdamW; its tensors are made
        once, outside the clock.
- trl:  `GRPOTrainer` on samples that it is handed ready (`trl_side`).

A rate is completion tokens a second by the clock: prompts and padding are work, not result. `cpu_ratio` is the same ratio in
processor time: read it where other programs use the machine.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from async_rlhf.buffers.composition import Composition
from async_rlhf.buffers.record import Group, Rollout, Score, Span
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.experiments.throughput.harness import MODEL, Bench, BenchmarkRow, alternate, rates
from async_rlhf.experiments.throughput.trl_side import check_trl, trl_process
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.config import LearnerConfig, LossConfig
from async_rlhf.learner.objective.advantages import group_relative
from async_rlhf.learner.step.controller import make_backend

GOALS = {"bare": 0.9, "trl": 1.3}
NUM_PROMPT_TOKENS = 60
# So small that a hundred steps on the same batch leave the model where it was.
CONFIG = LearnerConfig(learning_rate=1e-9, threads=1)
# Random weights: 39 million parameters, a third of the arithmetic in the output layer.
WIDE = {"vocab_size": 32_768, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6,
        "max_position_embeddings": 512}  # fmt: skip
Model = Literal["tiny", "wide"]
Sharing = Literal["alone", "shared"]
# Prompts of `shared`, 8 completions each, and turns; a step of the wide model takes 50 times as long.
_SIZES: dict[Model, tuple[int, int]] = {"tiny": (8, 6), "wide": (2, 3)}


def learner(bench: Bench) -> Iterator[BenchmarkRow]:
    """Compare a learner step with a bare training loop and with TRL's, in completion tokens a second."""
    check_trl()
    torch.set_num_threads(1)
    sharings: tuple[Sharing, ...] = ("alone", "shared")
    for model, sharing in product(list(_SIZES)[: bench.size(2, 1)], sharings):
        if bench.load in f"{model}, {sharing}":
            with tempfile.TemporaryDirectory(prefix="async-rlhf-bench-") as directory:
                yield from measure(model, sharing, bench, Path(directory))


def measure(model: Model, load: Sharing, bench: Bench, directory: Path) -> Iterator[BenchmarkRow]:
    """All sides in turns; one row for each side beside ours."""
    prompts, turns = _SIZES[model]
    lengths, path, vocabulary = long_tailed(prompts, 8), MODEL, 99
    if model == "wide":
        path, vocabulary = directory / "model", WIDE["vocab_size"]
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(LlamaConfig(**WIDE), trust_remote_code=False).save_pretrained(path)
    groups = make_groups(lengths.reshape(-1, 1) if load == "alone" else lengths, vocabulary)
    with trl_process("learner", trl_spec(path, groups, directory)) as step:
        sides: dict[str, Side] = {"ours": ours(path, groups), "bare": bare(path, groups), "trl": lambda: Seconds(**step())}
        seconds = alternate(sides, bench.num_turns(turns))
    tokens = int(np.sum(lengths))
    for name, goal in GOALS.items():
        wall = {side: [turn.wall for turn in seconds[side]] for side in ("ours", name)}
        cpu = statistics.median(b.cpu / a.cpu for a, b in zip(seconds["ours"], seconds[name], strict=True))
        figures = {"cpu_ratio": cpu, "tokens": tokens}
        yield BenchmarkRow.of(f"{model}, {load}, beside {name}", rates(tokens, wall), "tok/s", at_least=goal, figures=figures)


class Seconds(NamedTuple):
    """Seconds of one step: by the clock, and of the processor."""

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


def long_tailed(prompts: int, completions: int) -> np.ndarray:
    """int [prompts, completions]: log-normal lengths in tokens (median 48, sigma 1), cut at 256; always the same."""
    lengths = np.random.default_rng(0).lognormal(np.log(48), 1.0, (prompts, completions))
    return np.clip(np.round(lengths), 1, 256).astype(int)


def make_groups(lengths: np.ndarray, vocabulary: int, prompt_tokens: int = NUM_PROMPT_TOKENS) -> list[Group]:
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
        prompt = random.integers(2, vocabulary, prompt_tokens).astype(np.int32)
        groups.append(Group(number, 0, prompt, rollouts, Sampling()))
    return groups


def advantages_of(groups: list[Group]) -> list[list[float | None]]:
    rewards = [[Composition().reward(rollout.scores) for rollout in group.rollouts] for group in groups]
    return [group_relative(own, scale_by_std=True) for own in rewards]


def ours(model: Path, groups: list[Group]) -> Side:
    backend = make_backend(model, CONFIG, LossConfig())
    return timed(lambda: backend.step([make_rows(groups, advantages_of(groups))], 0))


def bare_batches(groups: list[Group]) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """ids, attention int64 [B, L]; loss-bearing float32 [B, L - 1]; advantages float32 [B, 1]. Completions sorted by length, as
    many together as the learner's budget of padded tokens allows."""
    whole = [
        (torch.from_numpy(np.concatenate([group.prompt_ids, rollout.completion_ids])).long(), advantage or 0.0)
        for group, values in zip(groups, advantages_of(groups), strict=True)
        for rollout, advantage in zip(group.rollouts, values, strict=True)
    ]
    parts: list[list[tuple[Tensor, float]]] = []
    for row in sorted(whole, key=lambda row: -len(row[0])):
        if not parts or (len(parts[-1]) + 1) * len(parts[-1][0][0]) > CONFIG.micro_batch_tokens:
            parts.append([])
        parts[-1].append(row)
    batches = []
    for part in parts:
        ids = pad_sequence([text for text, _ in part], batch_first=True)
        attention = pad_sequence([torch.ones_like(text) for text, _ in part], batch_first=True)
        bears_loss = attention[:, 1:].float()
        bears_loss[:, : NUM_PROMPT_TOKENS - 1] = 0
        batches.append((ids, attention, bears_loss, torch.tensor([[advantage] for _, advantage in part])))
    return batches


def bare(model_dir: Path, groups: list[Group]) -> Side:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        model_dir, local_files_only=True, trust_remote_code=False
    ).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=CONFIG.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    batches, num_tokens = bare_batches(groups), sum(group.num_tokens for group in groups)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for ids, attention, bears_loss, advantage in batches:
            logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1]
            logps = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
            loss = -(logps * advantage * bears_loss).sum() / num_tokens
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return timed(step)


def trl_spec(model: Path, groups: list[Group], directory: Path) -> dict[str, Any]:
    """The settings and samples of TRL's side."""
    return {
        "model": str(model),
        "tokenizer": str(MODEL),
        "output_dir": str(directory),
        "prompt_ids": [group.prompt_ids.tolist() for group in groups for _ in group.rollouts],
        "completion_ids": [rollout.completion_ids.tolist() for group in groups for rollout in group.rollouts],
        "advantages": [each or 0.0 for values in advantages_of(groups) for each in values],
        "micro_batch": 8,
        "learning_rate": CONFIG.learning_rate,
        "threads": 1,
    }
