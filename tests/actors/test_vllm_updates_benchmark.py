"""The benchmark of vLLM's gap at an update, on the engine that the tests of this room share. No time is asserted."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from async_rlhf.actors.engine import OnUpdate, Request, RolloutKey
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.experiments.throughput import vllm_updates
from async_rlhf.experiments.throughput.updates import PROMPT_TOKENS
from tests.actors.vllm_model import make_model, raw_weights

# vLLM and what it imports warn of their own affairs.
pytestmark = [pytest.mark.rest, pytest.mark.filterwarnings("ignore")]


def test_an_update_is_measured_in_every_mode(vllm_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_updates, "SEQUENCES", 3)
    monkeypatch.setattr(vllm_updates, "OUTPUTS_BETWEEN", 3)
    lengths = np.random.default_rng(0).integers(100, 200, 1000).tolist()
    requests = (Request(RolloutKey(n, 0, 0), (9,) * PROMPT_TOKENS, length, Sampling(), n) for n, length in enumerate(lengths))
    busy = vllm_updates.Busy(vllm_engine, requests)
    try:
        for number, mode in enumerate(get_args(OnUpdate)):
            row = vllm_updates.measure(busy, mode, raw_weights(make_model(1)), 1 + 3 * number, updates=2).row()
            assert (row.load, vllm_engine.version) == (mode, 3 + 3 * number)
            gap, step, last = row.sides["gap"], row.sides["step"], row.figures["gap_p99_ms"]
            assert gap and step and last and 0 < gap <= last and (row.figures["adopted_p50_ms"] or 0) > 0
    finally:
        vllm_engine.abort([RolloutKey(n, 0, 0) for n in range(1000)])
        vllm_engine.on_update = "keep"
        vllm_engine.load_weights(0, raw_weights(make_model(0)))
