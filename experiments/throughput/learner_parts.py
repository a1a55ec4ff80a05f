"""Where does a learner step go? Its parts in milliseconds, beside the time that its products with weights take by themselves.

Three models on one core: the shipped one with the batch of `configs/quick.toml` (16 prompts of 54 tokens, 8 completions of 4 to
8), and random ones of 39 and 100 million parameters with the long-tailed lengths of the part `learner`. Seconds are of the
thread, so that other programs count less.

- ours:      `Controller.step`, as a run calls it
- products:  each matrix product with weights of that step once more, at its shapes, on matrices that lie ready

Its parts: the batch made of groups; the forward pass; the backward pass; clipping and optimizer; the rest is the loss and what
is counted. Of both passes apart: their products, attention (a profile's share), and what is left, small operations and the
interpreter. Beside the step: making the weights ready and copying them, as a publication does.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

from async_rlhf.buffers.weights.shared import SealedPool
from async_rlhf.buffers.weights.weight_set import WeightSet
from async_rlhf.experiments.throughput.harness import MODEL, Bench, BenchmarkRow, timed
from async_rlhf.experiments.throughput.learner import CONFIG, WIDE, advantages_of, long_tailed, make_groups
from async_rlhf.launch.heap import keep_freed_memory
from async_rlhf.learner.batch.rows import BatchRow, make_rows
from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.step.controller import Controller, make_backend

LARGE = {**WIDE, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 7, "num_attention_heads": 12}
# Model, lengths of completions [prompts, completions], tokens of a prompt, turns, goal.
_QUICK = np.random.default_rng(0).integers(4, 9, (16, 8))
_LOADS: dict[str, tuple[dict[str, int] | None, np.ndarray, int, int, float]] = {
    "tiny, batch of quick": (None, _QUICK, 54, 20, 1.6),
    "39 M, long-tailed": (WIDE, long_tailed(2, 8), 60, 5, 1.25),
    "100 M, long-tailed": (LARGE, long_tailed(2, 8), 60, 3, 1.25),
}
# Of the controller and of its machine, by the name of the part.
_PARTS = {"batch": "partition", "forward": "predict", "backward": "backward", "optimizer": "apply"}
_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::addmm_": 1}  # with weights, and which argument is the first matrix
_ATTENTION = ("_Blockwise", "_BlockwiseBackward")
_REPEATS = 5


def learner_parts(bench: Bench) -> Iterator[BenchmarkRow]:
    """Measure the parts of a learner step, beside its matrix products alone."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as a learner does
    for name, (shape, lengths, prompt, turns, goal) in list(_LOADS.items())[: bench.size(3, 1)]:
        if bench.load in name:
            with tempfile.TemporaryDirectory(prefix="async-rlhf-bench-") as directory:
                model = MODEL if shape is None else _random(shape, Path(directory) / "model")
                groups = make_groups(lengths, 99 if shape is None else shape["vocab_size"], prompt)
                rows = make_rows(groups, advantages_of(groups))
                backend = make_backend(model, CONFIG, LossConfig())
                yield _measured(name, backend, rows, bench.num_turns(turns), goal)


def _random(shape: dict[str, int], directory: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**shape), trust_remote_code=False).save_pretrained(directory)
    return directory


def _measured(name: str, backend: Controller, rows: Sequence[BatchRow], turns: int, goal: float) -> BenchmarkRow:
    products, attention_share = _profiled(backend, rows)
    parts: dict[str, list[float]] = {part: [] for part in _PARTS}
    seconds: dict[str, list[float]] = {"ours": [], "products": []}
    with _timing(backend, parts):
        for _ in range(turns):
            for each in parts.values():
                each.append(0.0)
            seconds["ours"].append(timed(lambda: backend.step([rows], 0), time.thread_time)())
            seconds["products"].append(sum(count * _alone(*shapes) for shapes, count in products.items()))
    of_parts = {part: statistics.median(each) for part, each in parts.items()}
    whole, alone = (statistics.median(each) for each in seconds.values())
    passes = of_parts["forward"] + of_parts["backward"]
    pool = SealedPool()
    publish = [timed(lambda: WeightSet.of(1, 1, backend.tensors(), make=pool.make), time.thread_time)() for _ in range(3)][-1]
    figures = {
        **of_parts, "rest": whole - sum(of_parts.values()), "attention": attention_share * passes,
        "small_operations": passes * (1 - attention_share) - alone, "publication": publish,
    }  # fmt: skip
    in_ms = {f"{part}_ms": 1000 * value for part, value in figures.items()}
    sides = {side: [1000 * each for each in values] for side, values in seconds.items()}
    return BenchmarkRow.of(name, sides, "ms", at_most=goal, figures=in_ms)


def _timing(backend: Controller, parts: Mapping[str, list[float]]) -> ExitStack:
    """Within it the last number of each part grows by the seconds of its calls."""
    stack = ExitStack()
    for part, method in _PARTS.items():
        owner: Any = backend if hasattr(backend, method) else backend.machine
        stack.enter_context(patch.object(owner, method, _counting(getattr(owner, method), parts[part])))
    return stack


def _counting(do: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def counted(*given: Any, **named: Any) -> Any:
        began = time.thread_time()
        try:
            return do(*given, **named)
        finally:
            seconds[-1] += time.thread_time() - began

    return counted


def _profiled(backend: Controller, rows: Sequence[BatchRow]) -> tuple[Counter[tuple[Any, ...]], float]:
    """How often matrices of which shapes are multiplied, and attention's share of the passes."""
    backend.step([rows], 0)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        backend.step([rows], 0)
    products = Counter[tuple[Any, ...]]()
    attention = passes = 0.0
    for event in found.events() or ():
        if event.name in _PRODUCTS:
            first = _PRODUCTS[event.name]
            products[tuple(map(tuple, event.input_shapes[first : first + 2]))] += 1
        if event.name in _ATTENTION:
            attention += event.cpu_time_total
        if event.cpu_parent is None:
            passes += event.cpu_time_total
    return products, attention / passes


def _alone(first: tuple[int, ...], second: tuple[int, ...]) -> float:
    """Seconds of one product."""
    a, b = torch.randn(first), torch.randn(second)
    return statistics.median(timed(lambda: torch.matmul(a, b), time.thread_time)() for _ in range(_REPEATS))
