"""A trained model as a Hugging Face directory that loads like the one it began with. Writes files, holds nothing."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig

# Written by `save_pretrained`; everything else beside the weights comes from the model that training began with.
_OWN_FILES = ("config.json", "model")
_COMES_ALONG = {".json", ".txt", ".model", ".jinja"}


def write_model(directory: Path, model: nn.Module, state: Mapping[str, Tensor], began_with: Path) -> None:
    """`state` is a state dict of `model`, in float32; the tokenizer's files come from the directory `began_with`."""
    saved: Any = model
    if (began_with / "generation_config.json").exists():
        saved.generation_config = GenerationConfig()  # many published ones do not pass the check made when saving
    saved.save_pretrained(directory, state_dict=dict(state), safe_serialization=True)
    for path in began_with.iterdir():
        if path.suffix in _COMES_ALONG and not path.name.startswith(_OWN_FILES):
            shutil.copy2(path, directory / path.name)
