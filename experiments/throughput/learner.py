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

import pkgutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import numpy as np
import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from async_rlhf.buffers.composition import Composition
from async_rlhf.buffers.record import Group, Rollout, Score, Span
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.experiments.throughput.harness import Bench, MissingError, Row, ThreadsOption, alternate
from async_rlhf.experiments.throughput.trl import MODEL, ROOT, TrlProcess, trl_python
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.config import LearnerConfig, LossConfig
from async_rlhf.learner.objective.advantages import group_relative
from async_rlhf.learner.step.controller import make_backend

GOALS = {"bare": 0.9, "trl": 1.3}
MOST_OVERHEAD = 0.03
NUM_PROMPT_TOKENS = 60
MICRO_BATCH_TOKENS = LearnerConfig().micro_batch_tokens
# So small that a hundred steps on the same batch leave the model where it was.
LEARNING_RATE = 1e-9
# Random weights: 39 million parameters, a third of the arithmetic in the output layer.
WIDE = {
    "vocab_size": 32_768,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
}


class Model(StrEnum):
    """What is trained."""

    TINY = "tiny"
    WIDE = "wide"


class Sharing(StrEnum):
    """Whether completions share prompts."""

    ALONE = "alone"
    SHARED = "shared"


# Prompts of `shared`, 8 completions each; a step of the wide model takes 50 times as long.
_PROMPTS = {Model.TINY: 8, Model.WIDE: 2}
_TURNS = {Model.TINY: 6, Model.WIDE: 3}

Loads = Annotated[list[Sharing] | None, typer.Option("--load", help="Only this load; may be repeated.")]
Models = Annotated[list[Model] | None, typer.Option("--model", help="Only this model; may be repeated.")]
UseTrl = Annotated[bool, typer.Option(help="Measure TRL's training part too (installed into .venv-trl on first use).")]


def learner(
    bench: Bench, model: Models = None, load: Loads = None, threads: ThreadsOption = 1, trl: UseTrl = True
) -> Iterator[Row]:
    """Compare a learner step with a bare training loop and with TRL's, in completion tokens a second."""
    python, missing = None, None
    try:
        python = trl_python(ROOT) if trl else None
    except MissingError as error:
        missing = error
    torch.set_num_threads(threads)
    for each in model or bench.size(list(Model), [Model.TINY]):
        for name in load or list(Sharing):
            with tempfile.TemporaryDirectory(prefix="async-rlhf-bench-") as directory:
                yield from measure(each, name, python, bench.num_turns(_TURNS[each]), threads, Path(directory))
    if missing is not None:
        raise missing


def measure(model: Model, load: Sharing, python: Path | None, turns: int, threads: int, directory: Path) -> Iterator[Row]:
    """All sides in turns; one row for each side beside ours, and one for the share of diagnostics."""
    lengths = long_tailed(_PROMPTS[model], 8)
    path, vocabulary = MODEL, 99
    if model is Model.WIDE:
        path, vocabulary = directory / "model", WIDE["vocab_size"]
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(LlamaConfig(**WIDE), trust_remote_code=False).save_pretrained(path)
    groups = make_groups(lengths.reshape(-1, 1) if load is Sharing.ALONE else lengths, vocabulary)
    with ExitStack() as stack:
        sides: dict[str, Side] = {"ours": ours(path, groups, threads), "bare": bare(path, groups)}
        if python is not None:
            trl = stack.enter_context(TrlProcess(python, "learner", trl_spec(path, groups, threads, directory), directory))
            sides["trl"] = lambda: Seconds(**trl.step())
        seconds = alternate(sides, turns)
    yield from beside(f"{model}, {load}", int(np.sum(lengths)), seconds)
    whole, diagnostics = diagnostics_seconds(path, groups, threads)
    parts = {"diagnostics": [diagnostics], "step": [whole]}
    yield Row.of(f"{model}, {load}: corrections and diagnostics", parts, "CPU s", at_most=MOST_OVERHEAD)


@dataclass(frozen=True)
class Seconds:
    """Of one step: by the clock, and of the processor."""

    wall: float
    cpu: float


Side = Callable[[], Seconds]


def beside(load: str, tokens: int, seconds: Mapping[str, Sequence[Seconds]]) -> Iterator[Row]:
    """A row for each other side; `seconds["ours"][i]` and the others' belong to the same turn."""
    for name in [each for each in seconds if each != "ours"]:
        pair = {"ours": seconds["ours"], name: seconds[name]}
        rate = {side: [tokens / each.wall for each in turns] for side, turns in pair.items()}
        cpu = statistics.median(b.cpu / a.cpu for a, b in zip(*pair.values(), strict=True))
        further = {"cpu_ratio": cpu, "tokens": tokens}
        yield Row.of(f"{load}, beside {name}", rate, "tok/s", at_least=GOALS[name], figures=further)


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
        prompt = random.integers(2, vocabulary, NUM_PROMPT_TOKENS).astype(np.int32)
        groups.append(Group(number, 0, prompt, rollouts, Sampling()))
    return groups


def advantages_of(groups: list[Group]) -> list[list[float | None]]:
    rewards = [[Composition().reward(rollout.scores) for rollout in group.rollouts] for group in groups]
    return [group_relative(own, scale_by_std=True) for own in rewards]


def timed(step: Callable[[], object]) -> Side:
    """Any step of this process, with its seconds."""

    def run() -> Seconds:
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        return Seconds(time.perf_counter() - wall, time.process_time() - cpu)

    return run


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
    functions = (
        "model.logprobs._entropy_",
        "step.controller.objective",
        "step.report.StepSums.add",
        "step.report.StepSums.report",
    )
    with ExitStack() as stack:
        for name in (f"async_rlhf.learner.{each}" for each in functions):
            stack.enter_context(mock.patch(name, counted(pkgutil.resolve_name(name))))
        whole = side().cpu
    return whole, spent


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


def trl_spec(model: Path, groups: list[Group], threads: int, directory: Path) -> dict[str, Any]:
    """What `trl_side.run_learner` reads."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {
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
