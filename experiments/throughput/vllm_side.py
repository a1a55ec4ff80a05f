"""How fast is the built-in engine next to the real vLLM on a CPU? The loads of `engine`, in turns, in one run.

Both are given the same requests with seeds and return log-probabilities. vLLM decodes in two processes of its own, each
of which spins while it waits for the other; the built-in engine has this process only. `threads` is what the tensors of
either may use.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import torch

from async_rlhf.actors.config import EngineConfig
from async_rlhf.actors.engine import Engine, load_engine
from async_rlhf.experiments.throughput.engine import (
    DTypeOption,
    Load,
    LoadOption,
    ModelOption,
    SlotsOption,
    ThreadsOption,
    loads_for,
    make_model,
    run_engine,
)
from async_rlhf.experiments.throughput.harness import Bench, MissingError, Row, alternate, rates, timed

# vLLM's processes stop spinning within it.
_SETTLE_S = 1.5


def vllm_side(
    bench: Bench,
    model: ModelOption = None,
    dtype: DTypeOption = "float32",
    slots: SlotsOption = None,
    load: LoadOption = None,
    threads: ThreadsOption = 1,
) -> Iterator[Row]:
    """Compare the built-in engine with vLLM on a CPU, in useful tokens a second."""
    require_vllm()
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as directory:
        make_model(model, dtype).save_pretrained(directory)
        for each in loads_for(model, slots or bench.size(None, 8), load):
            with ExitStack() as stack:
                sides = {}
                for name, kind in (("engine", "torch"), ("vLLM", "vllm")):
                    settings = {"kind": kind, "slots": each.batch, "threads": threads, "dtype": dtype, "batch_invariant": False}
                    started = load_engine(directory, EngineConfig.model_validate(settings), version=0)
                    sides[name] = _side(stack.enter_context(closing(started)), each)
                yield Row.of(each.title(model, dtype), rates(sum(each.lengths), alternate(sides, bench.num_turns(3))), "tok/s")


def _side(engine: Engine, load: Load) -> Callable[[], float]:
    def run() -> float:
        time.sleep(_SETTLE_S)
        return timed(lambda: run_engine(engine, load))()

    return run


def require_vllm() -> None:
    """Raises MissingError where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise MissingError("vLLM is not installed (make test installs its CPU build)")
