"""What does `engine.batch_invariant` cost? The built-in engine with it and without, in one process, in turns.

The mixed load of `engine`, in processor time; multi-head attention and grouped queries (four heads a key head), or any plain
Llama (`--model DIRECTORY`). One engine each for 64, 16 and 1 slots.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch

from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.experiments.throughput.engine import DTypeOption, Load, ModelOption, make_model, run_engine
from async_rlhf.experiments.throughput.harness import Bench, Row, alternate, timed


def invariance(bench: Bench, model: ModelOption = None, dtype: DTypeOption = "float32") -> Iterator[Row]:
    """Compare the processor seconds of the built-in engine with batch invariance and without."""
    torch.set_num_threads(1)
    for name, num_key_heads in ({"multi-head": 4, "grouped-query": 1} if model is None else {model.name: 0}).items():
        made = make_model(model, dtype, num_key_heads)
        for batch in bench.size((64, 16, 1), (4,)):
            load = Load.mixed(batch)
            sides = {
                side: timed(
                    partial(run_engine, TorchEngine(made, slots=batch, max_length=512, batch_invariant=on), load),
                    time.process_time,
                )
                for side, on in (("invariant", True), ("plain", False))
            }
            yield Row.of(f"{name}, {batch} slots", alternate(sides, bench.num_turns(5)), "CPU s")
