"""What does `engine.batch_invariant` cost? The built-in engine with it and without, in one process, in turns.

The loads of `engine`, in processor time; multi-head attention and grouped queries (four heads a key head), or any plain Llama
(`--model DIRECTORY`). Run as `python -m async_rlhf.experiments.throughput.invariance [--json]`.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import PreTrainedModel

from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.experiments.throughput.engine import DType, Load, make_model, run_engine

BATCHES = (64, 16, 1)


@dataclass(frozen=True)
class Result:
    """Processor seconds with batch invariance / without: the median of the turns' ratios, the lowest and the highest."""

    model: str
    batch: int
    ratio: float
    lowest: float
    highest: float


def measure(name: str, model: PreTrainedModel, load: Load, turns: int) -> Result:
    """One turn of each warms up."""
    engines = [TorchEngine(model, slots=load.batch, max_length=512, batch_invariant=each) for each in (False, True)]
    ratios = []
    for turn in range(turns + 1):
        order = (0, 1) if turn % 2 else (1, 0)
        seconds = {index: _seconds(engines[index], load) for index in order}
        ratios.append(seconds[1] / seconds[0])
    found = [round(ratio, 3) for ratio in (statistics.median(ratios[1:]), min(ratios[1:]), max(ratios[1:]))]
    return Result(name, load.batch, *found)


def _seconds(engine: TorchEngine, load: Load) -> float:
    started = time.process_time()
    run_engine(engine, load)
    return time.process_time() - started


def main(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per load instead of a table.")] = False,
    turns: Annotated[int, typer.Option(min=1, help="Timed turns of each after one to warm up.")] = 7,
    model: Annotated[Path | None, typer.Option(help="A model directory or GGUF file instead of the tiny models.")] = None,
    dtype: Annotated[DType, typer.Option(help="Type of weights and activations.")] = "float32",
) -> None:
    """Compare the built-in engine with batch invariance and without."""
    torch.set_num_threads(1)
    models = {"multi-head": 4, "grouped-query": 1} if model is None else {model.name: 0}
    if not as_json:
        typer.echo(f"{'model':<16}{'batch':>6}{'ratio':>8}{'lowest':>8}{'highest':>8}")
    for name, num_key_heads in models.items():
        made = make_model(model, dtype, num_key_heads)
        for batch in BATCHES:
            result = measure(name, made, Load.mixed(batch), turns)
            if as_json:
                typer.echo(json.dumps(asdict(result)))
            else:
                typer.echo(f"{name:<16}{batch:>6}{result.ratio:>8.2f}{result.lowest:>8.2f}{result.highest:>8.2f}")


if __name__ == "__main__":
    typer.run(main)
