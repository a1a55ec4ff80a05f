"""TRL's side of the benchmarks, in a process of its own: `pipeline` is a whole run of its GRPOTrainer, `learner` its training
part on samples that are ready, `asynchronous` a whole run of its AsyncGRPOTrainer (`trl_async`).

It measures and never judges: what is left out and what is divided by what is decided in `pipeline` and `learner`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from async_rlhf.experiments.throughput.harness import MissingError, talking
from async_rlhf.experiments.throughput.judges import similarity, slow_similarity

_STEP_LIMIT_S = 600.0


def check_trl() -> None:
    """Raises MissingError."""
    if importlib.util.find_spec("trl") is None:
        raise MissingError("TRL is not installed: pip install 'async-rlhf[dev]'")


@contextmanager
def trl_process(part: str, spec: Mapping[str, Any]) -> Iterator[Callable[[], dict[str, Any]]]:
    """A function that has PART make its next step and returns what it reports of it. spec: what that part reads, with its
    `threads`.

    The function raises EOFError when TRL has failed, whose reason it has printed, and TimeoutError after ten minutes.
    """
    # no network, and as many threads as ours has
    variables = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(spec["threads"])}
    with mock.patch.dict(os.environ, variables), talking(_serve, part, dict(spec), daemon=part != "asynchronous") as trl:

        def step() -> dict[str, Any]:
            trl.send("step")
            if not trl.poll(_STEP_LIMIT_S):
                raise TimeoutError(f"TRL made no step within {_STEP_LIMIT_S:.0f} s")
            reported: dict[str, Any] = trl.recv()
            return reported

        yield step


def _serve(part: str, spec: dict[str, Any], connection: Connection) -> None:
    import torch

    from async_rlhf.experiments.throughput import trl_async

    os.dup2(2, 1)  # what libraries print is no row
    torch.set_num_threads(spec["threads"])
    {"pipeline": _run_pipeline, "learner": _run_learner, "asynchronous": trl_async.run}[part](spec, connection)


def spare(spec: dict[str, Any]) -> dict[str, Any]:
    """Arguments of each of TRL's configurations: nothing that costs time and is not compared."""
    return {
        "output_dir": spec["output_dir"],
        "learning_rate": spec["learning_rate"],
        "lr_scheduler_type": "constant",
        "model_init_kwargs": {"dtype": "float32"},
        "bf16": False,
        "use_cpu": spec.get("device", "cpu") == "cpu",
        "gradient_checkpointing": False,  # on by default; it computes the forward pass twice
        "dataloader_pin_memory": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
    }


def _spare_config(spec: dict[str, Any], **further: Any) -> Any:
    """`GRPOConfig` without a reference model and logs; `further` goes to it as it is."""
    from trl import GRPOConfig

    return GRPOConfig(**spare(spec), beta=0.0, logging_strategy="no", **further)


def _run_pipeline(spec: dict[str, Any], connection: Connection) -> None:
    """One whole run: monotonic seconds at which each step ended (`ends`), and how many tokens were judged in it (`tokens`)."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    ends, tokens, judged = list[float](), list[int](), 0

    class Recorder(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            nonlocal judged
            ends.append(time.monotonic())
            tokens.append(judged)
            judged = 0

    # The judge in TRL's form: whole lists in, one number each out; an async one is awaited for all at once.
    def quick(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        nonlocal judged
        judged += sum(map(len, completion_ids))
        return [similarity(*pair) for pair in zip(completions, answer, strict=True)]

    async def slow(completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        nonlocal judged
        judged += sum(map(len, completion_ids))
        return await asyncio.gather(*[slow_similarity(*pair) for pair in zip(completions, answer, strict=True)])

    connection.recv()
    GRPOTrainer(
        model=spec["model"],
        reward_funcs=slow if spec["slow_reward"] else quick,
        train_dataset=Dataset.from_list([json.loads(line) for line in Path(spec["prompts"]).read_text().splitlines()]),
        callbacks=[Recorder()],
        args=_spare_config(
            spec,
            max_steps=spec["steps"],
            per_device_train_batch_size=spec["batch_size"],
            num_generations=spec["group_size"],
            max_completion_length=spec["max_completion_length"],
            temperature=1.0,
        ),
    ).train()
    connection.send({"ends": ends, "tokens": tokens})


def _run_learner(spec: dict[str, Any], connection: Connection) -> None:
    """`GRPOTrainer`'s own loop on samples that are ready: for every message it makes one optimizer step and answers with its
    seconds, from the moment the step begins to the end of the update: padding, shuffling and splitting as TRL does them, loss,
    backward, clipping, optimizer, its metrics. Ends with the process that asks.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    class TrlTurns(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            connection.recv()
            self.wall, self.cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            connection.send({"wall": time.perf_counter() - self.wall, "cpu": time.process_time() - self.cpu})

    def padded(rows: list[list[int]], left: bool) -> tuple[Any, Any]:
        """ids and mask, int64 [B, L]; prompts are padded on the left as TRL pads them, completions on the right."""
        pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left" if left else "right")
        return pad([torch.tensor(row) for row in rows]), pad([torch.ones(len(row), dtype=torch.long) for row in rows])

    prompt_ids, prompt_mask = padded(spec["prompt_ids"], left=True)
    completion_ids, completion_mask = padded(spec["completion_ids"], left=False)
    ready = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.tensor(spec["advantages"]),
        "num_items_in_batch": completion_mask.sum(),
    }

    class ReadySamples(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: object) -> dict[str, torch.Tensor]:
            return dict(ready)

    batch_size = len(spec["completion_ids"])
    ReadySamples(
        model=spec["model"],
        processing_class=AutoTokenizer.from_pretrained(spec["tokenizer"], local_files_only=True, trust_remote_code=False),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * batch_size),
        callbacks=[TrlTurns()],
        args=_spare_config(
            spec,
            max_steps=1_000_000,
            per_device_train_batch_size=spec["micro_batch"],
            gradient_accumulation_steps=batch_size // spec["micro_batch"],
            num_generations=2,  # of no consequence: nothing is generated
            adam_beta2=0.95,
        ),
    ).train()
