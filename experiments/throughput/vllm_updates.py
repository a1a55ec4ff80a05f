"""How long does vLLM on a CPU put out nothing when new weights come? The load of `updates`, in every mode.

vLLM tells of every token as it comes, so what it puts out is seen from outside. *step*: between two outputs without an
update. *gap*: from the last output before an update to the first after it. *adopted*: until the new weights are served.
Run as `python -m async_rlhf.experiments.throughput.vllm_updates [--json]`; skipped where vLLM is not installed.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, get_args

import numpy as np
import torch
import typer

from async_rlhf.actors.config import EngineConfig
from async_rlhf.actors.engine import OnUpdate, Request, RolloutKey
from async_rlhf.actors.engines import load_engine
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.experiments.throughput.engine import make_model
from async_rlhf.experiments.throughput.updates import SEQUENCES, Gap, in_ms, line, show, weights_of

OUTPUTS_BETWEEN, DEADLINE_S = 40, 60.0


@dataclass(frozen=True)
class Update(Gap):
    """Milliseconds."""

    adopted_p50_ms: float


class Busy:
    """An engine whose line is never empty while there are requests, and how many tokens it has told of each."""

    def __init__(self, engine: Any, requests: Iterator[Request]) -> None:
        self.engine = engine
        self._known: dict[RolloutKey, int] = {}
        self._line = requests

    def turn(self) -> None:
        """Take what ended and submit as many again."""
        for completion in self.engine.step():
            self._known.pop(completion.key, None)
        while self.engine.num_unfinished < 2 * SEQUENCES:
            self.engine.submit([replace(next(self._line), partial_every=1)])

    def output(self) -> float:
        """Wait for the next output; the time it was seen."""
        deadline = time.perf_counter() + DEADLINE_S
        while time.perf_counter() < deadline:
            grown = self.engine.partials(self._known)
            if grown:
                self._known.update((partial.key, len(partial.token_ids)) for partial in grown)
                return time.perf_counter()
            time.sleep(0.0005)
        raise TimeoutError(f"vLLM put out nothing within {DEADLINE_S:.0f} s")


def measure(busy: Busy, mode: OnUpdate, weights: dict[str, RawTensor], first: int, updates: int) -> Update:
    """Versions `first` and on; the first of them warms up."""
    busy.engine.on_update = mode
    steps, gaps, adopted = list[float](), list[float](), list[float]()
    for version in range(first, first + updates + 1):
        busy.turn()
        outputs = [busy.output() for _ in range(OUTPUTS_BETWEEN)]
        began = time.perf_counter()
        busy.engine.load_weights(version, weights)
        gap = busy.output() - outputs[-1]
        while busy.engine.version != version:
            busy.turn()
        if version > first:
            steps += np.diff(outputs).tolist()
            gaps.append(gap)
            adopted.append(time.perf_counter() - began)
    return Update(mode, updates, in_ms(steps, 50), in_ms(gaps, 50), in_ms(gaps, 99), in_ms(adopted, 50))


def main(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per mode instead of lines.")] = False,
    updates: Annotated[int, typer.Option(min=1, help="Updates measured in each mode.")] = 40,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Measure vLLM's gap at a weight update in each mode."""
    if importlib.util.find_spec("vllm") is None:
        typer.echo("skipped: vLLM is not installed (make test installs its CPU build)", err=True)
        return
    torch.set_num_threads(threads)
    model = make_model()
    weights = weights_of(model)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        config = EngineConfig(kind="vllm", slots=SEQUENCES, threads=threads)
        engine = load_engine(directory, config, version=0)
        try:
            busy = Busy(engine, line())
            for number, mode in enumerate(get_args(OnUpdate)):
                show(measure(busy, mode, weights, 1 + number * (updates + 1), updates), as_json)
        finally:
            engine.close()


if __name__ == "__main__":
    typer.run(main)
