"""A trained model as a Hugging Face directory that loads like the one it began with: written, and read back. Holds nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.model_directory import language_model, load_whole
from async_rlhf.learner.checkpoint.store import CheckpointError

# Written by `save_pretrained`; everything else beside the weights comes from the model that training began with.
_OWN_FILES = ("config.json", "model")
# Keys of config.json in which versions 4 of transformers, and what is built on them, find what newer ones write elsewhere. They
# take a default where one is missing: rotations of another base are another model.
_OLDER = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "torch_dtype")
_COMES_ALONG = {".json", ".txt", ".model", ".jinja"}


def load_model(directory: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A causal language model in evaluation mode; raises ConfigError when the directory holds none."""
    try:
        model = load_whole(language_model(directory), directory, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model = {str(directory)!r} is no Hugging Face causal language model: {error}") from error
    return cast(nn.Module, model.to(device).eval())


def saved_weights(checkpoint: Path, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a checkpoint's model, on the CPU. Raises CheckpointError for names and shapes other than `wanted`'s."""
    saved = load_model(checkpoint / "model", torch.device("cpu")).state_dict()
    ours, theirs = ({name: tuple(tensor.shape) for name, tensor in state.items()} for state in (wanted, saved))
    if ours != theirs:
        name = next(name for name in [*ours, *theirs] if ours.get(name) != theirs.get(name))
        raise CheckpointError(
            f"checkpoint {checkpoint.name} is of another model: {name} is {theirs.get(name, 'not there')} in it and "
            f"{ours.get(name, 'not there')} here. Resume with the model it was made from, or start a new run."
        )
    return saved


def write_model(directory: Path, model: nn.Module, state: Mapping[str, Tensor], began_with: Path) -> None:
    """`state` is a state dict of `model`, in float32, from which training goes on exactly; the configuration names the type of
    the directory `began_with`, into which whoever loads it turns the weights. The tokenizer's files come from there too."""
    saved: Any = model
    if (began_with / "generation_config.json").exists():
        saved.generation_config = GenerationConfig()  # many published ones do not pass the check made when saving
    saved.save_pretrained(directory, state_dict=dict(state), safe_serialization=True)
    described, began = (json.loads((each / "config.json").read_text()) for each in (directory, began_with))
    described["dtype"] = began.get("dtype") or began.get("torch_dtype") or described.get("dtype")
    for part in (began.get("text_config", {}), began):
        if part.get("model_type") == described.get("model_type"):
            described = {key: value for key, value in part.items() if key in _OLDER} | described
    (directory / "config.json").write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")
    for path in began_with.iterdir():
        if path.suffix in _COMES_ALONG and not path.name.startswith(_OWN_FILES):
            shutil.copyfile(path, directory / path.name)  # no mode, which a disk may not have
        elif path.name == "additional_chat_templates":
            (directory / path.name).mkdir()
            for template in path.iterdir():
                shutil.copyfile(template, directory / path.name / template.name)
