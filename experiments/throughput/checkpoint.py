"""How long does a checkpoint hold up training? A model of about 100 million parameters, saved while steps go on.

Two things hold it up: the pause until training goes on, and what all steps made while the checkpoint is being written take
longer than steps without (the copy that an update waits for, and what writing takes from the machine). Both are given as
shares of the time the checkpoint takes; steps without one are timed before each.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig

from async_rlhf.buffers.record import Group, Rollout, Span
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.experiments.throughput.harness import Bench, Row
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.checkpoint.store import Checkpoints
from async_rlhf.learner.checkpoint.writer import CheckpointWriter
from async_rlhf.learner.config import LearnerConfig, LossConfig
from async_rlhf.learner.step.controller import Controller, make_backend

_WIDE = {"vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "num_attention_heads": 12}


def checkpoint(
    bench: Bench,
    steps: Annotated[int, typer.Option(min=2, help="Steps timed without a checkpoint, before each.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each of 4 completions.")] = 64,
) -> Iterator[Row]:
    """Time checkpoints in the background, each a turn, after one to warm up. The first row's goal is 5 % of the writing."""
    torch.set_num_threads(1)
    shape = bench.size(_WIDE, {**_WIDE, "hidden_size": 96, "intermediate_size": 288, "num_hidden_layers": 2})
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        AutoModelForCausalLM.from_config(LlamaConfig(**shape), trust_remote_code=False).save_pretrained(directory / "model")
        backend = make_backend(directory / "model", LearnerConfig(learning_rate=1e-9), LossConfig())
        step = make_step(backend, tokens)
        saver = CheckpointWriter(Checkpoints(directory / "checkpoints", keep_last=1), background=True)
        step()
        measured = [measure(backend, saver, step, number, steps) for number in range(bench.num_turns(3) + 1)][1:]
    parameters = sum(p.numel() for p in backend.machine.policy.parameters())
    writing = [each.save_s for each in measured]
    pause = {"pause": [each.pause_s for each in measured], "writing": writing}
    yield Row.of("until training goes on", pause, "s", at_most=0.05, figures={"parameters": parameters})
    beside = statistics.median(each.steps_beside for each in measured)
    step_s = statistics.median(each.step_s for each in measured)
    slower = {"steps beside": [each.slowdown_s for each in measured], "writing": writing}
    yield Row.of("steps beside it, longer by", slower, "s", figures={"steps": beside, "step_s": step_s})


@dataclass(frozen=True)
class Measured:
    """One checkpoint. step_s: of a step without. slowdown_s: what `steps_beside` steps beside it took longer, together."""

    step_s: float
    pause_s: float
    save_s: float
    steps_beside: int
    slowdown_s: float


def make_step(backend: Controller, tokens: int) -> Callable[[], float]:
    """A learner step on one group of four completions; gives its seconds."""
    random = np.random.default_rng(0)
    ids = random.integers(_WIDE["vocab_size"], size=(5, tokens)).astype(np.int32)
    logprobs = np.full(tokens, -9.0, np.float32)
    group = Group(0, 0, ids[0], tuple(Rollout(each, logprobs, (Span(0, tokens),), "stop") for each in ids[1:]), Sampling())
    rows = make_rows([group], [[1.0, -1.0, 0.5, -0.5]], 4096)

    def step() -> float:
        began = time.perf_counter()
        backend.step([rows], 0)
        return time.perf_counter() - began

    return step


def measure(backend: Controller, saver: CheckpointWriter, step: Callable[[], float], number: int, steps: int) -> Measured:
    """Steps without a checkpoint, then steps until one is durable."""
    usual = statistics.median(step() for _ in range(steps))
    began = time.perf_counter()
    saver.begin(number, backend.snapshot(), {})
    pause = time.perf_counter() - began
    beside = [step()]
    while saver.durable != number and not saver.failed:
        beside.append(step())
    saver.wait()
    return Measured(usual, pause, saver.seconds, len(beside), sum(beside) - usual * len(beside))
