"""How fast is a learner step next to a bare training loop? Both in one process, in turns, on one CPU.

The data is ready: 128 completions of prompts of 60 tokens, for the shipped tiny model.

- alone: 128 prompts with a completion of 8 tokens each. Nothing to share and nothing to pad: bare overhead.
- equal: 16 prompts with 8 completions of 8 tokens each. The learner computes a prompt once for all its completions.
- mixed: 16 prompts with 8 completions of 8 to 64 tokens each, which the bare loop pads to the longest of its batch.

The learner's side is `TorchBackend.step` from groups on: advantages, packing, forward, loss, backward, clipping,
optimizer, and all diagnostics that go into the metrics. The bare loop is what one writes in thirty lines: every completion
with its prompt in a row of its own, a plain forward pass, log-probabilities, policy-gradient loss, backward, clipping and
the same fused AdamW, and no diagnostics; its tensors are made once, outside the clock. Completion tokens per second are
counted for both: prompts and padding are work, not result. Run as `python -m experiments.throughput.learner [--json]`.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from buffers.composition import Composition
from buffers.record import Group, Rollout, Score, Span
from learner.advantages import group_relative
from learner.batch import make_rows
from learner.config import LearnerConfig, LossConfig
from learner.torch_backend import TorchBackend

MODEL = Path(__file__).resolve().parents[2] / "configs" / "models" / "tiny-speller"
NUM_PROMPT_TOKENS = 60
# So small that a hundred steps on the same batch leave the model where it was.
LEARNING_RATE = 1e-9


@dataclass(frozen=True)
class Result:
    """Completion tokens per second (medians over the turns), and the median over the turns of their ratio."""

    load: str
    completion_tokens: int
    bare_tokens_per_s: float
    learner_tokens_per_s: float
    ratio: float


def make_groups(lengths: np.ndarray) -> list[Group]:
    """One batch of groups; `lengths` [prompts, completions] in tokens."""
    random = np.random.default_rng(0)
    groups = []
    for number, row in enumerate(lengths.tolist()):
        rollouts = tuple(
            Rollout(
                completion_ids=random.integers(2, 99, length).astype(np.int32),
                logprobs=random.uniform(-5.0, -4.0, length).astype(np.float32),
                spans=(Span(0, length),),
                finish_reason="stop",
                scores={"judge": Score(float(random.random()))},
            )
            for length in row
        )
        groups.append(Group(number, 0, random.integers(2, 99, NUM_PROMPT_TOKENS).astype(np.int32), rollouts, 1.0))
    return groups


def advantages_of(groups: list[Group]) -> list[list[float | None]]:
    return [group_relative([Composition().reward(r.scores) for r in group.rollouts], scale_by_std=True) for group in groups]


def learner_step(groups: list[Group], micro_batch_tokens: int) -> Callable[[], None]:
    config = LearnerConfig(learning_rate=LEARNING_RATE, micro_batch_tokens=micro_batch_tokens, threads=torch.get_num_threads())
    backend = TorchBackend(MODEL, config, LossConfig())

    def run() -> None:
        backend.step([make_rows(groups, advantages_of(groups), config.row_tokens)], 0)

    return run


@dataclass(frozen=True)
class BareBatch:
    """Right-padded tensors: ids, attention [B, L] int64; loss-bearing [B, L - 1] float32; advantage [B, 1] float32."""

    ids: Tensor
    attention: Tensor
    bears_loss: Tensor
    advantage: Tensor


def bare_batches(groups: list[Group], size: int) -> list[BareBatch]:
    whole = [
        (np.concatenate([group.prompt_ids, rollout.completion_ids]), advantage)
        for group, values in zip(groups, advantages_of(groups), strict=True)
        for rollout, advantage in zip(group.rollouts, values, strict=True)
    ]
    batches = []
    for start in range(0, len(whole), size):
        part = whole[start : start + size]
        lengths = torch.tensor([len(ids) for ids, _ in part])[:, None]
        width = int(lengths.max())
        ids = torch.tensor([[*ids.tolist(), *[0] * (width - len(ids))] for ids, _ in part])
        place = torch.arange(width)
        bears_loss = ((place >= NUM_PROMPT_TOKENS) & (place < lengths)).float()[:, 1:]
        advantage = torch.tensor([[advantage or 0.0] for _, advantage in part])
        batches.append(BareBatch(ids, (place < lengths).long(), bears_loss, advantage))
    return batches


def bare_step(groups: list[Group], size: int) -> Callable[[], None]:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(MODEL, local_files_only=True).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    batches = bare_batches(groups, size)
    num_tokens = sum(group.num_tokens for group in groups)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        for batch in batches:
            logits = model(input_ids=batch.ids, attention_mask=batch.attention, use_cache=False).logits[:, :-1]
            logps = torch.log_softmax(logits, -1).gather(-1, batch.ids[:, 1:, None])[..., 0]
            loss = -(logps * batch.advantage * batch.bears_loss).sum() / num_tokens
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return run


def measure(load: str, lengths: np.ndarray, turns: int, micro_batch_tokens: int, bare_batch: int) -> Result:
    """Runs both in turns, so that a slow moment of the machine falls on both; the first turn warms up."""
    groups = make_groups(lengths)
    runs = {"bare": bare_step(groups, bare_batch), "learner": learner_step(groups, micro_batch_tokens)}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - started)
    useful = int(lengths.sum())
    ratios = [bare / learner for bare, learner in zip(seconds["bare"], seconds["learner"], strict=True)]
    return Result(
        load=load,
        completion_tokens=useful,
        bare_tokens_per_s=round(useful / statistics.median(seconds["bare"]), 1),
        learner_tokens_per_s=round(useful / statistics.median(seconds["learner"]), 1),
        ratio=round(statistics.median(ratios), 3),
    )


def main(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per load instead of a table.")] = False,
    turns: Annotated[int, typer.Option(min=1, help="Timed turns of each after one to warm up.")] = 9,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads, the same for both.")] = 1,
    micro_batch_tokens: Annotated[int, typer.Option(min=1, help="Of the learner; its default is 8192.")] = 8192,
    bare_batch: Annotated[int, typer.Option(min=1, help="Completions in one forward pass of the bare loop.")] = 32,
) -> None:
    """Compare a learner step with a bare training loop on the same tokens."""
    torch.set_num_threads(threads)
    loads = {
        "alone": np.full((128, 1), 8),
        "equal": np.full((16, 8), 8),
        "mixed": np.random.default_rng(0).integers(8, 65, (16, 8)),
    }
    if not as_json:
        typer.echo(f"{'load':<8}{'completion tokens':>18}{'bare tok/s':>12}{'learner tok/s':>15}{'ratio':>8}")
    for load, lengths in loads.items():
        result = measure(load, lengths, turns, micro_batch_tokens, bare_batch)
        if as_json:
            settings = {"threads": threads, "micro_batch_tokens": micro_batch_tokens, "bare_batch": bare_batch}
            typer.echo(json.dumps(asdict(result) | settings))
        else:
            typer.echo(
                f"{result.load:<8}{result.completion_tokens:>18}{result.bare_tokens_per_s:>12.0f}"
                f"{result.learner_tokens_per_s:>15.0f}{result.ratio:>8.2f}"
            )


if __name__ == "__main__":
    typer.run(main)
