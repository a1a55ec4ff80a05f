"""Adapters learn, leave merged, and come back bit for bit; what they were put on stays as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import making
import numpy as np
import pytest
import torch
from making import ADVANTAGES, GROUPS, make_model, make_updates, save
from peft import PeftModel
from transformers import AutoModelForCausalLM

from async_rlhf.actors.config import EngineConfig
from async_rlhf.actors.torch_engine.loading import load_engine
from async_rlhf.learner.checkpoint.store import CheckpointError
from async_rlhf.learner.step.controller import Controller

UPDATES = make_updates(1, GROUPS[:2], ADVANTAGES[:2])


@pytest.fixture(params=["llama", "llama-tied"])
def model_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make_model(request.param).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def make_backend(path: Path, **lora: Any) -> Controller:
    return making.make_backend(path, learning_rate=1e-2, lora={"rank": 2, "alpha": 4.0, **lora})


def published(backend: Controller) -> dict[str, np.ndarray]:
    return {n: np.frombuffer(bytes(t.data), np.float32).reshape(t.shape) for n, t in backend.tensors().items()}


def test_training_begins_at_the_model_and_moves_only_what_has_an_adapter(model_dir: Path) -> None:
    backend = make_backend(model_dir, targets=("q_proj", "v_proj"))
    whole = making.make_backend(model_dir)
    start = published(backend)
    assert start.keys() == published(whole).keys()
    assert all(np.array_equal(start[name], value) for name, value in published(whole).items())
    assert backend.step(UPDATES, 0).applied
    moved = {name for name, value in published(backend).items() if not np.array_equal(value, start[name])}
    assert moved == {name for name in start if "q_proj" in name or "v_proj" in name}


def test_what_leaves_is_the_policy_that_learns(model_dir: Path, tmp_path: Path) -> None:
    """Merged weights in a plain model give the adapted policy's log-probabilities; so does the adapter on peft's own way."""
    backend = make_backend(model_dir)
    backend.step(UPDATES, 0)
    save(backend, tmp_path / "saved")
    canary = backend.canary()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "model").eval()
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), tmp_path / "saved" / "adapter").eval()
    ids = torch.tensor([list(canary.ids)])
    for model in (merged, adapted):
        with torch.no_grad():
            logp = torch.log_softmax(model(input_ids=ids[:, :-1]).logits[0], -1).gather(-1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(logp, torch.tensor(list(canary.logprobs)), rtol=0, atol=1e-4)
    state = merged.state_dict()
    assert all(np.array_equal(state[name].numpy(), value) for name, value in published(backend).items())


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize(("name", "targets"), [("llama", {}), ("llama-tied", {}), ("gpt2", {"targets": ("c_attn",)})])
def test_adapters_alone_make_the_merged_weights(tmp_path: Path, name: str, targets: dict[str, Any]) -> None:
    """Also those of layers whose weights are stored turned; and an engine that adds them agrees with the canary."""
    make_model(name).save_pretrained(tmp_path)
    merged, alone = (make_backend(tmp_path, publish=kind, **targets) for kind in ("merged", "adapter"))
    base = published(making.make_backend(tmp_path))
    for backend in (merged, alone):
        backend.step(UPDATES, 0)
    whole, factors = published(merged), published(alone)
    adapted = {name.rpartition(".lora_")[0] for name in factors}
    assert adapted == {name for name in whole if (whole[name] != base[name]).any()}
    for layer in adapted:
        product = factors[f"{layer}.lora_B"] @ factors[f"{layer}.lora_A"]
        np.testing.assert_allclose(base[layer] + product, whole[layer], rtol=0, atol=1e-6)
    engine, canary = load_engine(str(tmp_path), EngineConfig(slots=2)), alone.canary()
    engine.load_weights(1, alone.tensors())
    np.testing.assert_allclose(engine.probe(canary.ids), canary.logprobs, rtol=0, atol=1e-4)


def test_a_checkpoint_without_or_with_other_adapters_is_named_as_such(model_dir: Path, tmp_path: Path) -> None:
    for name, backend in (
        ("plain", making.make_backend(model_dir)),
        ("other", make_backend(model_dir, rank=3)),
    ):
        save(backend, tmp_path / name)
    with pytest.raises(CheckpointError, match="checkpoint plain has no adapters"):
        make_backend(model_dir).load(tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"checkpoint other has other adapters than learner.lora asks for"):
        make_backend(model_dir).load(tmp_path / "other")
