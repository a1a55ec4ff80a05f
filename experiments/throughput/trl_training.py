"""TRL's side of the learner benchmark: `GRPOTrainer`'s own loop on samples that are ready; generation is left out.

Run by the interpreter of `.venv-trl`, started by `learner_sides.Trl` with the path of a specification.
For every line on standard input it makes one optimizer step and answers with its seconds, from the moment the step begins
to the end of the update: padding, shuffling and splitting as TRL does them, loss, backward, clipping, optimizer, its
metrics. Ends when standard input does.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOTrainer

from async_rlhf.experiments.throughput.trl_config import spare_config


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


def main(spec_path: str) -> None:
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


if __name__ == "__main__":
    main(sys.argv[1])
