"""From a GGUF file to a Hugging Face directory: dequantised weights as safetensors, the tokenizer with its chat template.

`python -m async_rlhf.learner.model.gguf FILE DIRECTORY` does it once; the directory appears whole or not at all.
Needs the `gguf` extra.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.model_directory import LOADING, from_pretrained


def convert(file: Path, directory: Path) -> None:
    """Write the model in `file` to the new `directory` in float32.

    Raises ConfigError when the file is no GGUF model that transformers can read, or the reader is not installed.
    """
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{file} is a GGUF file: install the reader with pip install 'async-rlhf[gguf]'") from error
    try:
        quantised = from_pretrained(AutoModelForCausalLM, file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = from_pretrained(AutoTokenizer, file.parent, gguf_file=file.name)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise ConfigError(f"{file} cannot be read as a GGUF model: {error}") from error
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the tensors are dequantised: saved with it, they would be taken for packed ones
    with LOADING:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    model.load_state_dict(quantised.state_dict())
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as temporary:
        whole = Path(temporary) / "model"
        model.save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        try:
            os.rename(whole, directory)
        except OSError:
            if not (directory / "config.json").is_file():  # else another process was first, with the same result
                raise
            shutil.rmtree(whole)


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except ConfigError as error:
        sys.exit(f"error: {error}")
