"""How many bytes of training state does a rank hold under ZeRO? Counted on real ranks, beside the formulas of the paper.

With P parameters and n ranks in mixed precision (2-byte weights and gradients; 4-byte master weights and both moments):
16 P unshared; 4 P + 12 P / n at stage 1, 2 P + 14 P / n at stage 2, 16 P / n at stage 3 (Rajbhandari et al. 2020, arXiv
1910.02054, figure 1). Counted are the storages that a rank holds between the backward pass and the update, when gradients are
there; buffers of a fixed size are made small.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import multiprocessing
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig

from async_rlhf.experiments.throughput.harness import Bench, MissingError, Row
from async_rlhf.launch.network import LOOPBACK, free_port

_LIMIT_S = 300.0
# Bytes per parameter that every rank holds, and those that are shared out.
FORMULAS = {1: (4, 12), 2: (2, 14), 3: (0, 16)}
# A transformer of so many parameters that everything else is little beside them.
_SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
}


def zero_memory(
    bench: Bench,
    ranks: Annotated[int, typer.Option(min=1)] = 2,
    stages: Annotated[list[int] | None, typer.Option("--stage", help="Only this stage; may be repeated.")] = None,
) -> Iterator[Row]:
    """Count bytes per parameter on a rank at every ZeRO stage, beside the formula."""
    if importlib.util.find_spec("deepspeed") is None:
        raise MissingError("deepspeed is not installed (the extra `deepspeed`)")
    shape = bench.size(_SHAPE, {**_SHAPE, "num_hidden_layers": 4})
    for stage in stages or bench.size([1, 2, 3], [2]):
        whole, shared = FORMULAS[stage]
        with tempfile.TemporaryDirectory() as directory:
            model = AutoModelForCausalLM.from_config(LlamaConfig(**shape), trust_remote_code=False)
            model.save_pretrained(Path(directory) / "model")
            with ProcessPoolExecutor(ranks, multiprocessing.get_context("spawn")) as pool:
                meeting = f"{LOOPBACK}:{free_port(LOOPBACK)}"
                running = [pool.submit(measure, rank, ranks, stage, Path(directory), meeting) for rank in range(ranks)]
                held = max(each.result(_LIMIT_S) for each in running)
        sides = {"held": [held], "formula": [whole + shared / ranks]}
        yield Row.of(f"ZeRO-{stage}, {ranks} ranks, bfloat16", sides, "bytes per parameter", counted=True)


def held_bytes() -> int:
    """Bytes of all tensor storages of this process, each counted once."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor):
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def measure(rank: int, size: int, stage: Any, directory: Path, meeting: str) -> float:
    """Bytes per parameter that one rank holds in a step, stopped before the update."""
    from async_rlhf.learner.batch.micro_batch import padding_batch
    from async_rlhf.learner.config import LearnerConfig
    from async_rlhf.learner.parallel.ranks import Ranks
    from async_rlhf.learner.step.torch_machine import make_machine

    ranks = Ranks.join(rank, size, meeting, timeout_s=300.0, idle_timeout_s=300.0)
    before = held_bytes()
    buffers = directory / f"buffers-{rank}.json"  # of a fixed size, and so nothing beside a large model
    buffers.write_text(json.dumps({"zero_optimization": {"reduce_bucket_size": 300_000}}))
    config = LearnerConfig(backend="deepspeed", zero_stage=stage, ranks=size, dtype="bfloat16", deepspeed_config=str(buffers))
    machine = make_machine(directory / "model", config, ranks)
    for step in range(2):  # the first update makes the moments
        machine.begin()
        logp_N, entropy_N, _ = machine.predict(padding_batch())
        machine.backward(logp_N.sum() + entropy_N.sum(), last=True)
        if step == 0:
            machine.apply(0, finite=True)
    held = held_bytes() - before
    parameters = sum(int(getattr(p, "ds_numel", p.numel())) for p in machine.policy.parameters())
    return held / parameters
