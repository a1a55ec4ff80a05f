"""Do costs grow faster than the work? Each curve measures one thing at several sizes, and how much faster it grew.

A curve has its size, what is measured at it, and what the work itself is: tokens that attention reads, operations of the
passes, bytes, rows. Between its smallest and its largest size a cost may grow as the work does: the row's ratio is one growth
over the other, its figures the slopes of both in a log-log fit. Where a cost has a constant part the ratio is below 1. Seconds
are those of the processor.

    python -m async_rlhf.experiments.throughput growth --output growth.json
    python -m async_rlhf.experiments.throughput.growth growth.json growth.png      # the picture of such a file
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path

import numpy as np
import torch

from async_rlhf.actors.data.config import DataConfig
from async_rlhf.actors.data.rows import load_rows
from async_rlhf.actors.served_model.weights import adopt_weights
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.buffers.weights.shared import SealedPool
from async_rlhf.buffers.weights.weight_set import WeightSet
from async_rlhf.experiments.throughput.engine import LAYERS, WIDTH, make_model, requests_of
from async_rlhf.experiments.throughput.harness import Bench, BenchmarkRow, rounded, shown, timed
from async_rlhf.experiments.throughput.learner import make_groups, ours
from async_rlhf.experiments.throughput.queue import QueueLoad, run_queue
from async_rlhf.learner.step.torch_machine import raw

# Of `make_model`, beside the embedding of 100 tokens.
_PARAMETERS = LAYERS * (4 * WIDTH**2 + 3 * WIDTH * 3 * WIDTH)
_STEPS = 16


@dataclass(frozen=True)
class Curve:
    """measure: what it costs at a size, in `unit`, one turn. work: what the work is there, in any unit."""

    title: str
    unit: str
    sizes: Sequence[int]
    measure: Callable[[int], Callable[[], float]]
    work: Callable[[int], float]


def growth(bench: Bench) -> Iterator[BenchmarkRow]:
    """Compare how costs grow with how the work grows, by length, prompt, parameters, rows and clients."""
    torch.set_num_threads(1)
    for curve in curves():
        if bench.load in curve.title:
            yield row_of(curve, curve.sizes[: bench.size(None, 2)], bench.num_turns(3))


def row_of(curve: Curve, sizes: Sequence[int], turns: int) -> BenchmarkRow:
    """Its smallest cost of the turns at each size: what else runs only adds to it."""
    costs = []
    for size in sizes:
        once = curve.measure(size)
        costs.append(min(once() for _ in range(turns + 1)))
    work = [curve.work(size) for size in sizes]
    ratio = rounded(costs[-1] / costs[0] / (work[-1] / work[0]))
    slopes = {"slope": slope(sizes, costs), "slope_of_work": slope(sizes, work)}
    row = BenchmarkRow.of(curve.title, {f"{size:,}": [cost] for size, cost in zip(sizes, costs, strict=True)}, curve.unit)
    return replace(row, ratio=ratio, lowest=ratio, highest=ratio, turns=turns, at_most=1.1, figures=slopes)


def slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Slope of a line through the logarithms."""
    return rounded(float(np.polyfit(np.log(sizes), np.log(values), 1)[0]))


def curves() -> list[Curve]:
    tokens, rows_there = (256, 1024, 4096), (10_000, 30_000, 100_000)
    return [
        Curve("decode steps of 8 rows, by tokens held", "s", tokens, partial(decoding, 8, 0), float),
        Curve("decode steps of 63 short rows and one, by its tokens", "s", tokens, partial(decoding, 1, 63), _held),
        Curve("cache of 63 short rows and one, by its tokens", "bytes", tokens, cache_bytes, _held),
        Curve("learner step of 8 completions of 64, by prompt", "s", tokens, partial(step, 64), partial(_passes, 64)),
        Curve(
            "learner step of 8 completions behind 64, by their length",
            "s",
            (64, 256, 1024),
            partial(step, prompt=64),
            partial(_passes, prompt=64),
        ),
        Curve("publish to adopted, by parameters", "s", (1 << 22, 1 << 24, 1 << 26), weights, float),
        Curve("loading rows, by rows", "s", rows_there, rows, float),
        Curve("hub, 8,192 rollouts, by clients", "s", (2, 16, 64), lambda clients: hub(256, clients), lambda clients: 1.0),
        Curve("hub of 4 clients, by steps of 32 rollouts", "s", (256, 512, 1024), lambda steps: hub(steps, 4), float),
    ]


def engine_of(prompts: Sequence[int]) -> TorchEngine:
    """One that runs a row behind a prompt of each length, equal ones computed once, and has just computed all of them."""
    engine = TorchEngine(make_model(None, "float32", max(prompts) + 1024), slots=len(prompts), prefill_tokens=1 << 20)
    words = np.random.default_rng(0).integers(1, 100, max(prompts)).tolist()
    engine.submit(requests_of((words[:size] for size in prompts), repeat(1000)))
    engine.step()
    return engine


def decoding(long: int, short: int, size: int) -> Callable[[], float]:
    engine = engine_of([size] * long + [64] * short)
    return timed(lambda: [engine.step() for _ in range(_STEPS)], time.process_time)


def cache_bytes(size: int) -> Callable[[], float]:
    engine = engine_of([size] + [64] * 63)
    return lambda: float(engine.cache_bytes)


def _held(size: int) -> float:
    return size + 63 * 64


def step(completion: int, prompt: int) -> Callable[[], float]:
    """A step of the learner: 8 completions of one prompt."""
    with tempfile.TemporaryDirectory(prefix="async-rlhf-bench-") as directory:
        make_model(None, "float32", prompt + completion).save_pretrained(directory)
        (group,) = make_groups(np.full((1, 8), completion), 100)
        group = replace(group, prompt_ids=np.random.default_rng(0).integers(1, 100, prompt).astype(np.int32))
        side = ours(Path(directory), [group])
    return lambda: side().cpu


def _passes(completion: int, prompt: int) -> float:
    """Operations of a forward pass that computes the prompt once, with attention to all before: 2 for each parameter and token,
    and 4 for each pair and column of a layer (Kaplan et al. 2020, arXiv 2001.08361, table 1)."""
    tokens = prompt + 8 * completion
    pairs = prompt**2 / 2 + 8 * completion * (prompt + completion / 2)
    return 2 * _PARAMETERS * tokens + 4 * LAYERS * WIDTH * pairs


def weights(size: int) -> Callable[[], float]:
    """A set of so many numbers in sealed memory, verified by its digests as it is made, and adopted."""
    learned, served = (torch.nn.Linear(1 << 10, size >> 10, bias=False) for _ in range(2))

    def publish() -> None:
        tensors = {name: raw(each.detach()) for name, each in learned.named_parameters()}
        adopt_weights(served, WeightSet.of(1, 1, tensors, make=SealedPool().make).tensors())

    return timed(publish, time.process_time)


def rows(size: int) -> Callable[[], float]:
    def load() -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.writelines(json.dumps({"prompt": f"what is {n} + {n}?", "answer": str(2 * n)}) + "\n" for n in range(size))
            file.flush()
            found, _ = load_rows(DataConfig(source=file.name, held_out=0))
            assert len(found) == size

    return timed(load, time.process_time)


def hub(steps: int, clients: int) -> Callable[[], float]:
    """So many batches of four groups of 2 KB rollouts, put by so many clients, taken and committed. What the first credits
    bring is put before it is measured, so few steps cost nothing."""
    return lambda: run_queue(QueueLoad("2 KB", 2048, "group", 4 * steps, batch=4, clients=clients)).hub_cpu_s


def picture(results: Path, path: Path) -> None:
    """Each curve of a results file with a line that grows as its work does."""
    from matplotlib.figure import Figure

    rows = [row for row in json.loads(results.read_text())["rows"] if row["part"] == "growth"]
    work = {curve.title: curve.work for curve in curves()}
    figure = Figure(figsize=(11, 2.6 * -(-len(rows) // 3)), layout="constrained")
    for place, row in enumerate(rows, start=1):
        axes = figure.add_subplot(-(-len(rows) // 3), 3, place)
        sizes, costs = [int(size.replace(",", "")) for size in row["sides"]], list(row["sides"].values())
        line = [costs[0] * work[row["load"]](size) / work[row["load"]](sizes[0]) for size in sizes]
        axes.loglog(sizes, line, "--", color="0.6", label="as the work grows")
        axes.loglog(sizes, costs, "o-", label="measured")
        what, _, by = row["load"].partition(", by ")
        axes.set_title(what, fontsize=9)
        axes.set_xlabel(by)
        axes.set_ylabel({"s": "processor seconds"}.get(row["unit"], row["unit"]))
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        ends = [min(*costs, *line), max(*costs, *line)]
        axes.set_yticks(ends, list(map(shown, ends)))
        axes.minorticks_off()
    figure.axes[0].legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    picture(*map(Path, sys.argv[1:3]))
