"""Bytes of one published weight set: whole, with the adapters merged, and the adapters alone.

python -m async_rlhf.experiments.throughput.adapters [--model DIR] [--rank 8] [--json]
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from async_rlhf.experiments.throughput.sides import MODEL
from async_rlhf.learner.config import LearnerConfig, LoraConfig, LossConfig
from async_rlhf.learner.step.controller import make_backend


def published_bytes(model: Path, lora: LoraConfig) -> int:
    """Bytes of the tensors that one publication carries."""
    backend = make_backend(model, LearnerConfig(lora=lora), LossConfig())
    return sum(len(tensor.data) for tensor in backend.tensors().values())


def main(
    model: Annotated[Path, typer.Option(help="Model directory.")] = MODEL,
    rank: Annotated[int, typer.Option(help="Rank of the adapters.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line instead of a sentence.")] = False,
) -> None:
    """Count the bytes of one publication of a LoRA run, merged and as adapters alone."""
    merged, alone = (published_bytes(model, LoraConfig(rank=rank, publish=how)) for how in ("merged", "adapter"))
    if as_json:
        typer.echo(json.dumps({"model": model.name, "rank": rank, "merged_bytes": merged, "adapter_bytes": alone}))
    else:
        typer.echo(f"{model.name}, rank {rank}: merged {merged:,} bytes, adapter {alone:,} bytes: 1/{merged / alone:.1f}")


if __name__ == "__main__":
    typer.run(main)
