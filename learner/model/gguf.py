"""A GGUF file as `model`: converted once, by a process of its own, into a Hugging Face directory that every role can load:
dequantised weights as safetensors, the tokenizer with its chat template. Needs the `gguf` extra.

The supervisor stays without torch. Converted models lie in the user's cache (`XDG_CACHE_HOME`, else `~/.cache`), under a
name that changes with the file, and are found there by the next run and by `--resume`; a directory appears whole or not at all.
`python -m async_rlhf.learner.model.gguf FILE DIRECTORY` converts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.files import content_digest
from async_rlhf.buffers.interpreter import python
from async_rlhf.buffers.model_directory import LOADING, from_pretrained, load_whole

_DEADLINE_S = 1800.0


def model_directory(model: str) -> str:
    """The directory to load for `model`: itself, or the one its GGUF file was converted to, here if need be.

    Raises ConfigError when the file cannot be converted.
    """
    file = Path(model)
    if file.suffix != ".gguf":
        return model
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "async-rlhf"
    directory = cache / f"{file.stem}-{content_digest(file)}"
    if not (directory / "config.json").is_file():
        print(f"converting {file.name} into {directory} (once)", file=sys.stderr)  # noqa: T201  # a user waits for it
        command = python("-m", "async_rlhf.learner.model.gguf", str(file), str(directory))
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_DEADLINE_S, stdin=subprocess.DEVNULL, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"model = {model!r} was not converted within {_DEADLINE_S:.0f} s") from error
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
            raise ConfigError(f"model = {model!r} cannot be used: {reason[0]}")
    return str(directory)


def convert(file: Path, directory: Path) -> None:
    """Write the model in `file` to the new `directory` in float32.

    Raises ConfigError when the file is no GGUF model that transformers can read, or the reader is not installed.
    """
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{file} is a GGUF file: install the reader with pip install 'async-rlhf[gguf]'") from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        quantised = load_whole(AutoModelForCausalLM, file.parent, gguf_file=file.name, dtype=torch.float32)
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
