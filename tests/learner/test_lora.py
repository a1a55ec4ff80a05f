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

from async_rlhf.actors.torch_engine.loading import load_engine
from async_rlhf.actors.torch_engine.settings import TorchEngineConfig
from async_rlhf.buffers.attention import FAMILIES
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.doctor import families
from async_rlhf.learner.checkpoint.store import CheckpointError
from async_rlhf.learner.config import LoraConfig
from async_rlhf.learner.model.lora import adapters, add_adapters, check_targets, merging_error, write_adapter
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
    engine, canary = load_engine(str(tmp_path), TorchEngineConfig(slots=2)), alone.canary()
    engine.load_weights(1, alone.tensors())
    np.testing.assert_allclose(engine.probe(canary.ids), canary.logprobs, rtol=0, atol=1e-4)


def test_a_checkpoint_without_or_with_other_adapters_is_named_as_such(model_dir: Path, tmp_path: Path) -> None:
    for name, backend in (("plain", making.make_backend(model_dir)), ("other", make_backend(model_dir, rank=3))):
        save(backend, tmp_path / name)
    with pytest.raises(CheckpointError, match="checkpoint plain has no adapters"):
        make_backend(model_dir).load(tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"checkpoint other has other adapters than learner.lora asks for"):
        make_backend(model_dir).load(tmp_path / "other")


# Experts in one parameter; dense layers beside them by names that peft takes for experts; routers; layers of an own class.
KINDS = ("mixtral", "deepseek_v3", "llama4_text", "falcon")
REFUSED = {
    "afmoe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe", "hunyuan_v1_moe", "solar_open",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("kind", [k if k in KINDS else pytest.param(k, marks=pytest.mark.rest) for k in sorted(FAMILIES)])
def test_random_adapters_are_the_same_merged_and_by_peft_or_the_targets_refused_by_name(kind: str, tmp_path: Path) -> None:
    own, config = families.model(kind), LoraConfig(rank=2, alpha=4.0, targets=("all-linear",))
    own.save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    if kind in REFUSED:
        for find in (lambda: check_targets(tmp_path / "model", config), lambda: add_adapters(model, config)):
            with pytest.raises(ConfigError, match=rf"model type '{kind}': peft puts adapters on .*experts.*Choose among: .+"):
                find()
        return
    assert len(check_targets(tmp_path / "model", config)) >= 2 * model.config.num_hidden_layers
    add_adapters(model, config)
    for parameter in adapters(model).values():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(3, 64, (1, 20))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        write_adapter(tmp_path / "adapter", adapters(model), config)
        by_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), tmp_path / "adapter")
        torch.testing.assert_close(by_peft(input_ids=ids, use_cache=False).logits, expected, rtol=0, atol=1e-3)
    assert merging_error(model) < 1e-4
