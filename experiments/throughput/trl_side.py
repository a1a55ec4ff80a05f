"""TRL's side of the pipeline benchmark: one GRPOTrainer run that writes down when each step ended.

Run by the interpreter of `.venv-trl`, which has torch, transformers, trl and datasets and nothing of ours; started by
`pipeline` with the paths of a specification and of its result. It measures and never judges: what is
left out and what is divided by what is decided in `pipeline`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOTrainer

from async_rlhf.experiments.throughput.judges import similarity, slow_similarity
from async_rlhf.experiments.throughput.trl_config import spare_config


class Recorder(TrainerCallback):  # type: ignore[misc]  # trl's environment is not the checker's
    """Monotonic seconds at which each step ended, and how many tokens were judged in it."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.tokens: list[int] = []
        self.num_tokens = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.monotonic())
        self.tokens.append(self.num_tokens)
        self.num_tokens = 0


def make_reward(slow: bool, recorder: Recorder) -> Callable[..., Any]:
    """The judge in TRL's form: whole lists in, one number each out; an async one is awaited for all at once."""

    def quick_judge(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        recorder.num_tokens += sum(map(len, completion_ids))
        return [similarity(*pair) for pair in zip(completions, answer, strict=True)]

    async def slow_judge(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        recorder.num_tokens += sum(map(len, completion_ids))
        return await asyncio.gather(*[slow_similarity(*pair) for pair in zip(completions, answer, strict=True)])

    return slow_judge if slow else quick_judge


def train(spec: dict[str, Any]) -> Recorder:
    """One run with the same model, prompts, sizes and learning rate as ours; everything TRL can spare is off."""
    torch.set_num_threads(spec["threads"])
    recorder = Recorder()
    rows = [json.loads(line) for line in Path(spec["prompts"]).read_text().splitlines()]
    trainer = GRPOTrainer(
        model=spec["model"],
        reward_funcs=make_reward(spec["slow_reward"], recorder),
        train_dataset=Dataset.from_list(rows),
        callbacks=[recorder],
        args=spare_config(
            spec["output_dir"],
            spec["learning_rate"],
            max_steps=spec["steps"],
            per_device_train_batch_size=spec["batch_size"],
            num_generations=spec["group_size"],
            max_completion_length=spec["max_completion_length"],
            temperature=1.0,
        ),
    )
    trainer.train()
    return recorder


def main(spec_path: str, result_path: str) -> None:
    recorder = train(json.loads(Path(spec_path).read_text()))
    versions = {name: version(name) for name in ("trl", "torch", "transformers")}
    result = {"ends": recorder.ends, "tokens": recorder.tokens, "versions": versions}
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
