"""Bytes of one published weight set of a LoRA run: with the adapters merged, and the adapters alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

from async_rlhf.experiments.throughput.harness import Bench, Row
from async_rlhf.experiments.throughput.sides import MODEL
from async_rlhf.learner.config import LearnerConfig, LoraConfig, LossConfig
from async_rlhf.learner.step.controller import make_backend


def adapters(
    bench: Bench,
    model: Annotated[Path, typer.Option(help="Model directory.")] = MODEL,
    rank: Annotated[int, typer.Option(help="Rank of the adapters.")] = 8,
) -> Iterator[Row]:
    """Count the bytes of one publication, merged and as adapters alone."""
    sizes = {"merged": [published_bytes(model, rank, "merged")], "adapter": [published_bytes(model, rank, "adapter")]}
    yield Row.of(f"{model.name}, rank {rank}", sizes, "bytes", counted=True)


def published_bytes(model: Path, rank: int, how: Literal["merged", "adapter"]) -> int:
    """Bytes of the tensors that one publication carries."""
    backend = make_backend(model, LearnerConfig(lora=LoraConfig(rank=rank, publish=how)), LossConfig())
    return sum(len(tensor.data) for tensor in backend.tensors().values())
