"""How many bytes of training state does a rank hold under ZeRO? Counted on real ranks, beside the formulas of the paper.

With P parameters and n ranks in mixed precision (2-byte weights and gradients; 4-byte master weights and both moments):
16 P unshared; 4 P + 12 P / n at stage 1, 2 P + 14 P / n at stage 2, 16 P / n at stage 3 (Rajbhandari et al. 2020, arXiv
1910.02054, figure 1). Counted are the storages that a rank holds between the backward pass and the update, when gradients are
there; buffers of a fixed size are made small. Run as `python -m async_rlhf.experiments.throughput.zero_memory [--ranks 2]`.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig

ROOT = Path(__file__).resolve().parents[2]
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


def held_bytes() -> int:
    """Bytes of all tensor storages of this process, each counted once."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor):
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def measure(rank: int, size: int, stage: Any, directory: Path) -> dict[str, Any]:
    """One rank's part of a step, stopped before the update."""
    from async_rlhf.learner.batch.partition import padding_batch
    from async_rlhf.learner.config import LearnerConfig
    from async_rlhf.learner.parallel.ranks import Ranks
    from async_rlhf.learner.step.machine import MachineSettings, make_machine

    ranks = Ranks.join(rank, size, directory, timeout_s=300.0, idle_timeout_s=300.0)
    before = held_bytes()
    buffers = directory / f"buffers-{rank}.json"  # of a fixed size, and so nothing beside a large model
    buffers.write_text(json.dumps({"zero_optimization": {"reduce_bucket_size": 300_000}}))
    config = LearnerConfig(backend="deepspeed", zero_stage=stage, ranks=size, dtype="bfloat16", deepspeed_config=str(buffers))
    machine = make_machine(MachineSettings(directory / "model", config), ranks)
    for step in range(2):  # the first update makes the moments
        machine.begin()
        logp_N, entropy_N, _ = machine.predict(padding_batch())
        machine.backward(logp_N.sum() + entropy_N.sum(), last=True)
        if step == 0:
            machine.apply(0, finite=True)
    held = held_bytes() - before
    parameters = sum(int(getattr(p, "ds_numel", p.numel())) for p in machine.policy.parameters())
    return {"stage": stage, "rank": rank, "parameters": parameters, "bytes": held}


def main(
    ranks: Annotated[int, typer.Option(min=1)] = 2,
    stages: Annotated[list[int], typer.Option("--stage", help="Only this stage; may be repeated.")] = [1, 2, 3],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json")] = False,
    only: Annotated[str, typer.Option(help="RANK:STAGE:DIRECTORY: be one rank.")] = "",
) -> None:
    """Count bytes per rank at every ZeRO stage."""
    if only:
        own, at, place = only.split(":", 2)
        typer.echo(json.dumps(measure(int(own), ranks, int(at), Path(place))))
        return
    if importlib.util.find_spec("deepspeed") is None:
        typer.echo("ZeRO is not measured: deepspeed is not installed (the extra `deepspeed`)", err=True)
        return
    for stage, (whole, shared) in FORMULAS.items():
        if stage not in stages:
            continue
        with tempfile.TemporaryDirectory() as directory:
            AutoModelForCausalLM.from_config(LlamaConfig(**_SHAPE), trust_remote_code=False).save_pretrained(
                Path(directory) / "model"
            )
            command = [sys.executable, "-m", "async_rlhf.experiments.throughput.zero_memory", f"--ranks={ranks}"]
            started = [
                subprocess.Popen(
                    [*command, f"--only={rank}:{stage}:{directory}"], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
                )
                for rank in range(ranks)
            ]
            try:
                said = [process.communicate(timeout=300)[0] for process in started]
            finally:
                for process in started:
                    process.kill()
        found = [json.loads(text.splitlines()[-1]) for text in said]
        per_parameter = max(each["bytes"] / each["parameters"] for each in found)
        result = {
            "stage": stage,
            "ranks": ranks,
            "bytes_per_parameter": round(per_parameter, 2),
            "formula": whole + shared / ranks,
        }
        typer.echo(json.dumps(result) if as_json else "  ".join(f"{name} {value}" for name, value in result.items()))


if __name__ == "__main__":
    typer.run(main)
