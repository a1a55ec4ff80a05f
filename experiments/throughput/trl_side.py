"""TRL's side of the benchmarks: what the interpreter of `.venv-trl` runs, which has torch, transformers, trl and datasets and
nothing of ours but this file and `judges`.

It measures and never judges: what is left out and what is divided by what is decided in `pipeline` and `learner`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from async_rlhf.experiments.throughput.judges import similarity, slow_similarity


def spare_config(output_dir: str, learning_rate: float, **further: Any) -> GRPOConfig:
    """TRL's configuration with nothing that costs time and is not compared; `further` goes to it as it is."""
    return GRPOConfig(
        output_dir=output_dir,
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        beta=0.0,  # no reference model
        model_init_kwargs={"dtype": "float32"},
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,  # on by default; it computes the forward pass twice
        dataloader_pin_memory=False,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
        **further,
    )


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


def run_pipeline(spec_path: str) -> None:
    """One whole run, begun by the first line on standard input; answers with when each step ended and its tokens."""
    sys.stdin.readline()
    recorder = train(json.loads(Path(spec_path).read_text()))
    sys.stdout.write(json.dumps({"ends": recorder.ends, "tokens": recorder.tokens}) + "\n")
    sys.stdout.flush()


class Turns(TrainerCallback):  # type: ignore[misc]  # trl's environment is not the checker's
    """Waits for a line before each step and answers after it."""

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not sys.stdin.readline():
            raise SystemExit(0)
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        took = {"wall": time.perf_counter() - self.wall, "cpu": time.process_time() - self.cpu}
        sys.stdout.write(json.dumps(took) + "\n")
        sys.stdout.flush()


class ReadySamples(GRPOTrainer):  # type: ignore[misc]
    """Is handed what it would have generated and scored."""

    ready: dict[str, torch.Tensor]

    def _generate_and_score_completions(self, inputs: object) -> dict[str, torch.Tensor]:
        return dict(self.ready)


def padded(rows: list[list[int]], left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and mask, int64 [B, L]; prompts are padded on the left as TRL pads them, completions on the right."""
    width = max(map(len, rows))
    filled = [([0] * (width - len(row)), row) for row in rows]
    ids = torch.tensor([[*pad, *row] if left else [*row, *pad] for pad, row in filled])
    mask = torch.tensor([[0] * len(pad) + [1] * len(row) if left else [1] * len(row) + [0] * len(pad) for pad, row in filled])
    return ids, mask


def run_learner(spec_path: str) -> None:
    """`GRPOTrainer`'s own loop on samples that are ready: for every line on standard input it makes one optimizer step and
    answers with its seconds, from the moment the step begins to the end of the update: padding, shuffling and splitting as TRL
    does them, loss, backward, clipping, optimizer, its metrics. Ends when standard input does.
    """
    spec: dict[str, Any] = json.loads(Path(spec_path).read_text())
    torch.set_num_threads(spec["threads"])
    batch_size = len(spec["completion_ids"])
    trainer = ReadySamples(
        model=spec["model"],
        processing_class=AutoTokenizer.from_pretrained(spec["tokenizer"], trust_remote_code=False),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * batch_size),
        callbacks=[Turns()],
        args=spare_config(
            spec["output_dir"],
            spec["learning_rate"],
            max_steps=1_000_000,
            per_device_train_batch_size=spec["micro_batch"],
            gradient_accumulation_steps=batch_size // spec["micro_batch"],
            num_generations=2,  # of no consequence: nothing is generated
            adam_beta2=0.95,
        ),
    )
    prompt_ids, prompt_mask = padded(spec["prompt_ids"], left=True)
    completion_ids, completion_mask = padded(spec["completion_ids"], left=False)
    trainer.ready = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.tensor(spec["advantages"]),
        "num_items_in_batch": completion_mask.sum(),
    }
    trainer.train()


PARTS: dict[str, Callable[[str], None]] = {"pipeline": run_pipeline, "learner": run_learner}

if __name__ == "__main__":
    PARTS[sys.argv[1]](sys.argv[2])
