"""Low-rank adapters by peft: injected into a model, merged or alone when weights leave, kept apart in a checkpoint.

W' = W + (alpha / rank) B A (Hu et al. 2021, arXiv 2106.09685): B begins at zero, so training begins at the model it was given.
Engines get W', or B and A alone; the checkpoint's `model/` has W', its `adapter/` is a directory that peft loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.images.tower import tower_parameters
from async_rlhf.buffers.model_directory import from_pretrained, language_model
from async_rlhf.learner.checkpoint.store import CheckpointError
from async_rlhf.learner.config import LoraConfig

_NAME = "default"
_BASE = ".base_layer"
_LENGTH = 32


def add_adapters(model: nn.Module, config: LoraConfig) -> None:
    """Freeze the model and give its layers adapters, in place; the same ones each time. Raises ConfigError."""
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    asked = f"learner.lora.targets = {list(config.targets)}"
    targets = _linear(model) if config.targets == ("all-linear",) else _outside_tower(model, config.targets)
    adapter = PeftConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            inject_adapter_in_model(adapter, model)
        except ValueError as error:
            names = sorted({name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, nn.Linear)})
            raise ConfigError(f"{asked}: {error}. Layers here: {', '.join(names)}") from error
    _check_plain(model, asked)
    owner: Any = model
    if not isinstance(owner.get_input_embeddings(), nn.Embedding):
        raise ConfigError(f"{asked} has the input embeddings, and adapters are for linear layers; leave them out")
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (other := first.setdefault(id(parameter), name)) != name and _BASE in name + other:
            both = f"{name} and {other}".replace(_BASE, "")
            raise ConfigError(f"{asked}: {both} are one tensor, and an adapter of one of them would be lost; leave it out")


def _linear(model: nn.Module) -> list[str]:
    """The layers of "all-linear": all linear layers but the output layer and those that read images. Experts in one parameter
    are not among them."""
    owner: Any = model
    last, tower = owner.get_output_embeddings(), tower_parameters(model)
    linear = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear | Conv1D))
    # A router gives more than its product.
    wanted = [name for name, layer in linear if layer is not last and "Router" not in type(layer).__name__]
    return [name for name in wanted if f"{name}.weight" not in tower]


def _outside_tower(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """The same, of a model that reads images the whole names of those layers that do not."""
    if not (tower := tower_parameters(model)):
        return list(targets)
    named = [name for name, _ in model.named_modules() for target in targets if f".{name}".endswith(f".{target}")]
    return [name for name in named if f"{name}.weight" not in tower] or list(targets)


def _check_plain(model: nn.Module, asked: str) -> None:
    """Raise ConfigError for other adapters: the published and saved weights would not be the learned ones."""
    places = {name.partition(".lora_")[0] for name in adapters(model)}
    of_layers = nn.Linear | Conv1D | nn.Embedding
    plain = {place for place in places if isinstance(getattr(model.get_submodule(place), "base_layer", None), of_layers)}
    if wrong := sorted(places - plain):
        kind, others = getattr(model.config, "model_type", "?"), sorted({place.rpartition(".")[2] for place in plain})
        raise ConfigError(
            f"{asked} with model type {kind!r}: peft puts adapters on {wrong[0].replace(_BASE, '')}, where one parameter holds "
            f"all experts, and those are not published. Choose among: {', '.join(others)}"
        )


def check_targets(directory: Path, config: LoraConfig) -> list[str]:
    """The layers that get adapters, found without weights. Raises ConfigError as `add_adapters`."""
    from transformers import AutoConfig

    with torch.device("meta"):
        model = language_model(directory).from_config(from_pretrained(AutoConfig, directory), trust_remote_code=False)
    add_adapters(model, config)
    return [place for place, _ in _adapted(model)]


def merging_error(model: nn.Module) -> float:
    """Mean difference, in nats, that merging random adapters makes to log-probabilities of random tokens. They stay in the
    model, which is then good for nothing else."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        owner: Any = model
        table = owner.get_input_embeddings().weight
        ids = torch.randint(len(table), (1, _LENGTH), device=table.device)
        for parameter in adapters(model).values():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
        apart = torch.log_softmax(model(input_ids=ids, use_cache=False).logits.float(), -1)
        whole = merged(model)
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.zero_()
            elif _BASE in name:
                parameter.copy_(whole[name.replace(_BASE, "")])
        together = torch.log_softmax(model(input_ids=ids, use_cache=False).logits.float(), -1)
        return float((together - apart).abs().mean())


def merged(model: nn.Module, named: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Parameters under the names they had without adapters, adapted ones as W'.

    named: some of the model's parameters (as they are, where the model's own are shared out), each with its adapter; None: all.
    """
    named = {name: p.detach() for name, p in model.named_parameters()} if named is None else named
    weights = {name.replace(_BASE, ""): tensor for name, tensor in named.items() if ".lora_" not in name}
    for place, layer in _adapted(model):
        if f"{place}{_BASE}.weight" in named:
            product = named[f"{place}.lora_B.{_NAME}.weight"] @ named[f"{place}.lora_A.{_NAME}.weight"]
            product = product.T if layer.fan_in_fan_out else product
            weights[f"{place}.weight"] = weights[f"{place}.weight"] + product * layer.scaling[_NAME]
    return weights


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that have an adapter, by name."""
    layers = dict(model.named_modules())
    for name, _ in model.named_parameters():
        place, adapted, kind = name.partition(_BASE)
        if adapted and kind == ".weight":
            yield place, layers[place]


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """`merged` as a state dict: with buffers, and with every name of tied weights."""
    own = merged(model)
    by_place = {p.data_ptr(): name.replace(_BASE, "") for name, p in model.named_parameters()}
    state = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
    return {name.replace(_BASE, ""): own.get(by_place.get(tensor.data_ptr(), ""), tensor) for name, tensor in state.items()}


def factors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """`<name>.lora_A` [r, columns] and `<name>.lora_B` [rows, r] of every adapted parameter W; W' = W + B A; float32."""
    for place, layer in _adapted(model):
        a, b = (half[_NAME].weight.detach().float() for half in (layer.lora_A, layer.lora_B))
        b = b * layer.scaling[_NAME]
        if layer.fan_in_fan_out:  # its weight is stored [columns, rows]
            a, b = b.T, a.T
        yield f"{place}.weight.lora_A", a
        yield f"{place}.weight.lora_B", b


def adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' own weights, under the model's names."""
    return {name: p for name, p in model.named_parameters() if ".lora_" in name}


def write_adapter(directory: Path, weights: Mapping[str, Tensor], config: LoraConfig) -> None:
    """A directory as `peft.PeftModel.from_pretrained` reads it."""
    from peft import LoraConfig as PeftConfig

    layers = sorted({name.partition(".lora_")[0] for name in weights})
    adapter = PeftConfig(task_type="CAUSAL_LM", r=config.rank, lora_alpha=config.alpha, target_modules=layers, lora_dropout=0.0)
    adapter.save_pretrained(str(directory))
    save_file({_in_peft(name): tensor for name, tensor in weights.items()}, directory / "adapter_model.safetensors")


def read_adapter(directory: Path, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapters of a checkpoint, with the names and shapes of `wanted`. Raises CheckpointError when they have others."""
    file, checkpoint = directory / "adapter_model.safetensors", directory.parent.name
    if not file.exists():
        raise CheckpointError(f"checkpoint {checkpoint} has no adapters; it was made with learner.lora.rank = 0")
    saved = load_file(file)
    for name, tensor in wanted.items():
        if _in_peft(name) not in saved or saved[_in_peft(name)].shape != tensor.shape:
            raise CheckpointError(f"checkpoint {checkpoint} has other adapters than learner.lora asks for: {name}")
    return {name: saved[_in_peft(name)] for name in wanted}


def _in_peft(name: str) -> str:
    return f"base_model.model.{name.replace(f'.{_NAME}.', '.')}"
