"""How fast is the built-in engine next to the real vLLM on a CPU? The loads of `engine`, in turns, in one run.

Both are given the same requests with seeds and return log-probabilities. vLLM decodes in two processes of its own beside
this one, each of which spins while it waits for the other; the built-in engine has this process only. `threads` is what
either's tensors may use. Run as
`python -m async_rlhf.experiments.throughput.vllm_side [--json]`; skipped where vLLM is not installed.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from transformers import PreTrainedModel

from async_rlhf.actors.config import EngineConfig
from async_rlhf.actors.engine import Engine
from async_rlhf.actors.engines import load_engine
from async_rlhf.experiments.throughput.engine import DType, Load, loads_for, make_model, run_engine


@dataclass(frozen=True)
class Result:
    """Useful tokens per second, medians over the repeats, and ours over vLLM's."""

    load: str
    useful_tokens: int
    vllm_tokens_per_s: float
    engine_tokens_per_s: float
    ratio: float


def result_of(load: Load, seconds: Mapping[str, list[float]]) -> Result:
    """seconds: how long each turn of either took."""
    useful = sum(load.lengths)
    speed = {name: useful / statistics.median(times) for name, times in seconds.items()}
    return Result(
        load=load.name,
        useful_tokens=useful,
        vllm_tokens_per_s=round(speed["vllm"], 1),
        engine_tokens_per_s=round(speed["torch"], 1),
        ratio=round(speed["torch"] / speed["vllm"], 3),
    )


def measure(engines: Mapping[str, Engine], load: Load, repeats: int) -> Result:
    """Runs both in turns, so that a slow moment of the machine falls on both; the first turn warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(repeats + 1):
        for name, engine in engines.items():
            time.sleep(1.5)  # until vLLM's processes have stopped spinning
            started = time.perf_counter()
            run_engine(engine, load)
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return result_of(load, seconds)


def compare(loads: Sequence[Load], repeats: int, threads: int, model: PreTrainedModel) -> list[Result]:
    """One result a load; both engines are started once for each, with its number of slots."""
    results = []
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        dtype = str(model.dtype).removeprefix("torch.")
        for load in loads:
            engines: dict[str, Engine] = {}
            try:
                for kind in ("vllm", "torch"):
                    config = EngineConfig.model_validate(
                        {"kind": kind, "slots": load.batch, "threads": threads, "dtype": dtype, "batch_invariant": False}
                    )
                    engines[kind] = load_engine(directory, config, version=0)
                results.append(measure(engines, load, repeats))
            finally:
                for engine in engines.values():
                    engine.close()
    return results


def main(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per load instead of a table.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Timed turns of each after one to warm up.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads, the same for both.")] = 1,
    model: Annotated[Path | None, typer.Option(help="A model directory or GGUF file instead of the tiny model.")] = None,
    dtype: Annotated[DType, typer.Option(help="Type of weights and activations.")] = "float32",
    slots: Annotated[int | None, typer.Option(min=1, help="Sequences decoded together.")] = None,
    only: Annotated[Literal["equal", "mixed"] | None, typer.Option(help="Only this load.")] = None,
) -> None:
    """Compare the built-in engine with vLLM on a CPU."""
    if importlib.util.find_spec("vllm") is None:
        typer.echo("skipped: vLLM is not installed (make test installs its CPU build)", err=True)
        return
    torch.set_num_threads(threads)
    results = compare(loads_for(model, slots, only), repeats, threads, make_model(model, dtype))
    if not as_json:
        typer.echo(f"{'load':<8}{'useful tokens':>14}{'vLLM tok/s':>16}{'engine tok/s':>14}{'ratio':>8}")
    for result in results:
        if as_json:
            settings = {"threads": threads, "repeats": repeats, "model": model and str(model), "dtype": dtype}
            typer.echo(json.dumps(asdict(result) | settings))
        else:
            typer.echo(
                f"{result.load:<8}{result.useful_tokens:>14}{result.vllm_tokens_per_s:>16.0f}"
                f"{result.engine_tokens_per_s:>14.0f}{result.ratio:>8.2f}"
            )


if __name__ == "__main__":
    typer.run(main)
