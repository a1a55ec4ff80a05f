"""How fast is the built-in engine next to `transformers` generate? Both in one process, in turns, on one CPU.

Two loads, end tokens disabled so that every length is forced:

- equal: as many sequences as there are slots, of 8 prompt and 32 new tokens, all at once. Nothing to gain from batching.
- mixed: eight requests a slot, new tokens log-normal (median 48, at most 256). `generate` takes them in static batches in
  the same order, each of which runs to its longest.

The model is a tiny Llama with random weights (128 equal sequences, 64 slots for mixed ones): bare overhead. Or any other
(`--model DIRECTORY --dtype bfloat16`, 16 slots), for instance the one that `make train-chat` fetches: a directory, or a
GGUF file, which is converted once.

Only tokens that were asked for are counted. `generate` samples without top-k or top-p and returns no
log-probabilities; the engine returns them. Run as `python -m async_rlhf.experiments.throughput.engine [--json]`.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from async_rlhf.actors.engine import Engine, Request, RolloutKey
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.launch.gguf import model_directory

NUM_PROMPT_TOKENS = 8
DType = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Load:
    """A list of requests (their numbers of new tokens), and how many are decoded together."""

    name: str
    lengths: tuple[int, ...]
    batch: int

    @classmethod
    def equal(cls, batch: int) -> Load:
        return cls("equal", (32,) * batch, batch)

    @classmethod
    def mixed(cls, batch: int) -> Load:
        lengths = np.random.default_rng(0).lognormal(np.log(48), 0.8, 8 * batch)
        return cls("mixed", tuple(np.clip(lengths, 1, 256).astype(int).tolist()), batch)


def loads_for(model: Path | None, slots: int | None, only: Literal["equal", "mixed"] | None) -> list[Load]:
    """Both loads, or the one of that name; slots: None for as many as suit the model."""
    usual = (128, 64) if model is None else (16, 16)
    loads = Load.equal(slots or usual[0]), Load.mixed(slots or usual[1])
    return [load for load in loads if only in (None, load.name)]


@dataclass(frozen=True)
class Result:
    """Useful tokens per second, medians over the repeats, and their ratio."""

    load: str
    useful_tokens: int
    generate_tokens_per_s: float
    engine_tokens_per_s: float
    ratio: float


def make_model(model: Path | None = None, dtype: DType = "float32", num_key_heads: int = 4) -> PreTrainedModel:
    """That of a directory or GGUF file, or a Llama of 0.87 million random parameters or fewer; it never ends by itself."""
    if model is not None:
        directory = model_directory(str(model.expanduser()))
        loaded = AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, dtype), local_files_only=True, trust_remote_code=False
        )
        loaded.config.eos_token_id = loaded.generation_config.eos_token_id = None
        return loaded.eval()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=num_key_heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), trust_remote_code=False).eval()


def make_prompts(load: Load) -> list[tuple[int, ...]]:
    shape = (len(load.lengths), NUM_PROMPT_TOKENS)
    return [tuple(row) for row in np.random.default_rng(1).integers(1, 100, shape).tolist()]


def run_engine(engine: Engine, load: Load) -> None:
    work = enumerate(zip(make_prompts(load), load.lengths, strict=True))
    engine.submit([Request(RolloutKey(n, 0, 0), prompt, length, 1.0, n) for n, (prompt, length) in work])
    num_tokens = 0
    while engine.num_unfinished:
        num_tokens += sum(len(completion.token_ids) for completion in engine.step())
    assert num_tokens == sum(load.lengths)


def run_generate(model: PreTrainedModel, load: Load) -> None:
    prompts = torch.tensor(make_prompts(load))
    for start in range(0, len(load.lengths), load.batch):
        batch = prompts[start : start + load.batch]
        longest = max(load.lengths[start : start + load.batch])
        out = model.generate(
            input_ids=batch,
            attention_mask=torch.ones_like(batch),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            max_new_tokens=longest,
        )
        assert out.shape == (len(batch), NUM_PROMPT_TOKENS + longest)


def measure(load: Load, repeats: int, make: Callable[[], PreTrainedModel]) -> Result:
    """Runs both in turns, so that a slow moment of the machine falls on both; the first turn warms up.

    The engine lives on between its turns, as it does in an actor; `generate` has nothing that could.
    """
    engine, model = TorchEngine(make(), slots=load.batch, max_length=512), make()
    runs: dict[str, Callable[[], None]] = {
        "generate": lambda: run_generate(model, load),
        "engine": lambda: run_engine(engine, load),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - started)
    useful = sum(load.lengths)
    speed = {name: useful / statistics.median(times) for name, times in seconds.items()}
    return Result(
        load=load.name,
        useful_tokens=useful,
        generate_tokens_per_s=round(speed["generate"], 1),
        engine_tokens_per_s=round(speed["engine"], 1),
        ratio=round(speed["engine"] / speed["generate"], 3),
    )


def main(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per load instead of a table.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Timed turns of each after one to warm up.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads, the same for both.")] = 1,
    model: Annotated[Path | None, typer.Option(help="A model directory or GGUF file instead of the tiny model.")] = None,
    dtype: Annotated[DType, typer.Option(help="Type of weights and activations.")] = "float32",
    slots: Annotated[int | None, typer.Option(min=1, help="Sequences decoded together.")] = None,
    only: Annotated[Literal["equal", "mixed"] | None, typer.Option(help="Only this load.")] = None,
) -> None:
    """Compare the built-in engine with transformers generate."""
    torch.set_num_threads(threads)
    if not as_json:
        typer.echo(f"{'load':<8}{'useful tokens':>14}{'generate tok/s':>16}{'engine tok/s':>14}{'ratio':>8}")
    for load in loads_for(model, slots, only):
        result = measure(load, repeats, partial(make_model, model, dtype))
        if as_json:
            settings = {
                "threads": threads,
                "repeats": repeats,
                "model": model and str(model),
                "dtype": dtype,
                "slots": load.batch,
            }
            typer.echo(json.dumps(asdict(result) | settings))
        else:
            typer.echo(
                f"{result.load:<8}{result.useful_tokens:>14}{result.generate_tokens_per_s:>16.0f}"
                f"{result.engine_tokens_per_s:>14.0f}{result.ratio:>8.2f}"
            )


if __name__ == "__main__":
    typer.run(main)
