"""How long does vLLM on a CPU put out nothing when new weights come? The load of `updates`, in every mode.

vLLM reports every token as it comes, so its output is seen from outside. *step*: between two outputs without an update.
*gap*: from the last output before an update to the first after it. *adopted*: until the new weights are served.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import torch

from async_rlhf.actors.config import EngineConfig
from async_rlhf.actors.engine import OnUpdate, Request, RolloutKey, load_engine
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.experiments.throughput.engine import ThreadsOption, make_model
from async_rlhf.experiments.throughput.harness import Bench, Row
from async_rlhf.experiments.throughput.updates import SEQUENCES, Update, UpdatesOption, endless_requests, weights_of
from async_rlhf.experiments.throughput.vllm_side import require_vllm

OUTPUTS_BETWEEN, DEADLINE_S = 40, 60.0


def vllm_updates(bench: Bench, updates: UpdatesOption = None, threads: ThreadsOption = 1) -> Iterator[Row]:
    """Measure vLLM's gap at a weight update in each mode, in ms."""
    require_vllm()
    torch.set_num_threads(threads)
    model, count = make_model(), updates or bench.num_turns(20)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        with closing(load_engine(directory, EngineConfig(kind="vllm", slots=SEQUENCES, threads=threads), version=0)) as engine:
            busy = Busy(engine, endless_requests())
            for number, mode in enumerate(get_args(OnUpdate)):
                yield measure(busy, mode, weights_of(model), 1 + number * (count + 1), count).row()


class Busy:
    """An engine that always has waiting requests, and how many tokens it has reported of each."""

    def __init__(self, engine: Any, requests: Iterator[Request]) -> None:
        self.engine = engine
        self._known: dict[RolloutKey, int] = {}
        self._requests = requests

    def turn(self) -> None:
        """Take what ended and submit as many again."""
        for completion in self.engine.step():
            self._known.pop(completion.key, None)
        while self.engine.num_unfinished < 2 * SEQUENCES:
            self.engine.submit([replace(next(self._requests), partial_every=1)])

    def output(self) -> float:
        """Wait for the next output; the time it was seen."""
        deadline = time.perf_counter() + DEADLINE_S
        while time.perf_counter() < deadline:
            if grown := self.engine.partials(self._known):
                self._known.update((partial.key, len(partial.token_ids)) for partial in grown)
                return time.perf_counter()
            time.sleep(0.0005)
        raise TimeoutError(f"vLLM put out nothing within {DEADLINE_S:.0f} s")


def measure(busy: Busy, mode: OnUpdate, weights: dict[str, RawTensor], first: int, updates: int) -> Update:
    """Versions `first` and on; the first of them warms up."""
    busy.engine.on_update = mode
    found = Update(mode)
    for version in range(first, first + updates + 1):
        busy.turn()
        outputs = [busy.output() for _ in range(OUTPUTS_BETWEEN)]
        began = time.perf_counter()
        busy.engine.load_weights(version, weights)
        gap = busy.output() - outputs[-1]
        while busy.engine.version != version:
            busy.turn()
        if version > first:
            found.add(float(np.median(np.diff(outputs))), gap, adopted=time.perf_counter() - began)
    return found
