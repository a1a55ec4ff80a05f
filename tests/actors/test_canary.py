"""The canary: after every adoption the engine must say of a fixed probe what the learner says of it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_rlhf.actors.config import EngineConfig
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.actors.torch_engine.loading import load_engine
from async_rlhf.buffers.clients.control import control
from async_rlhf.buffers.errors import WeightsError
from async_rlhf.learner.config import LearnerConfig, LossConfig
from async_rlhf.learner.step.controller import Controller, make_backend
from async_rlhf.run.processes import roles
from async_rlhf.run.run_dir import RunDir

MODEL = Path(__file__).resolve().parents[2] / "configs" / "models" / "tiny-speller"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_sixteen_bits_they_agree_within_the_tolerance_of_the_type(dtype: Any) -> None:
    config = EngineConfig(slots=2, dtype=dtype)
    backend = make_backend(MODEL, LearnerConfig(), LossConfig(), publish_dtype=dtype)
    engine = load_engine(str(MODEL), config)
    engine.load_weights(0, backend.tensors())
    canary = backend.canary()
    drift = np.abs(engine.probe(canary.ids) - np.array(canary.logprobs)).max()
    assert 0 < drift < config.canary_tolerance


def test_updates_that_rounding_swallows_are_no_difference_of_engine_and_learner() -> None:
    """Each weight moves by a fifth of its last bfloat16 digit, all of them uphill: what is served stays as it was."""
    backend = make_backend(MODEL, LearnerConfig(), LossConfig(), publish_dtype="bfloat16")
    assert isinstance(backend, Controller)
    model: Any = backend.machine.policy.model
    for p in model.parameters():
        p.data = p.data.bfloat16().float()
    ids = torch.arange(4, 60)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    before = backend.canary(ids[0].tolist())
    for p in model.parameters():
        moved = p.data + 0.2 * torch.finfo(torch.bfloat16).eps * p.data.abs() * p.grad.sign()
        p.data = torch.where(moved.bfloat16() == p.data.bfloat16(), moved, p.data)
    assert backend.canary(ids[0].tolist()) == before
    with torch.no_grad():
        logits = model(input_ids=ids[:, :-1]).logits[0]
    unrounded = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    assert float((unrounded - torch.tensor(before.logprobs)).abs().max()) > EngineConfig(dtype="bfloat16").canary_tolerance


def test_an_actor_whose_engine_computes_with_other_weights_refuses_to_generate(
    small: Any, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that arrives whole but never reaches the arithmetic: digests cannot see it, the canary does."""
    adopt = TorchEngine.load_weights

    def adopt_and_lose_one(self: TorchEngine, version: int, tensors: Any) -> None:
        adopt(self, version, tensors)
        next(iter(self._model.parameters())).data.mul_(1.5)

    monkeypatch.setattr(TorchEngine, "load_weights", adopt_and_lose_one)
    config = small()
    run, address = RunDir.create(config), f"ipc://{socket_dir}/hub"
    threads = [
        threading.Thread(target=roles.run_hub, args=(run, config, address)),
        threading.Thread(target=roles.run_learner, args=(run, config, address)),
    ]
    for thread in threads:
        thread.start()
    try:
        with pytest.raises(
            WeightsError, match=r"engine and learner differ by .* nats on the same probe.*Nothing was generated"
        ):
            roles.run_actor(run, config, address, "actor-0")
        with control(address, timeout_s=60.0) as asked:
            status = asked.status()
            assert status["ledger"]["credited"] == 0
            asked.drain()
    finally:
        threads[1].join(timeout=300)
        with control(address, timeout_s=60.0) as asked:
            asked.halt()
        threads[0].join(timeout=300)
