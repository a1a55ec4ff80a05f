"""A GGUF file as `model`: converted once, by a process of its own, into a directory that every role can load.

The supervisor stays without torch. Converted models lie in the user's cache (`XDG_CACHE_HOME`, else `~/.cache`), under a
name that changes with the file, and are found there by the next run and by `--resume`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import xxhash

from async_rlhf.buffers.errors import ConfigError

_DEADLINE_S = 1800.0
_BLOCK = 1 << 24


def model_directory(model: str) -> str:
    """The directory to load for `model`: itself, or the one its GGUF file was converted to, here if need be.

    Raises ConfigError when the file cannot be converted.
    """
    file = Path(model)
    if file.suffix != ".gguf":
        return model
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "async-rlhf"
    directory = cache / f"{file.stem}-{_digest(file)}"
    if not (directory / "config.json").is_file():
        print(f"converting {file.name} into {directory} (once)", file=sys.stderr)  # noqa: T201
        command = [sys.executable, "-P", "-m", "async_rlhf.learner.model.gguf", str(file), str(directory)]
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


def _digest(file: Path) -> str:
    digest = xxhash.xxh3_64()
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
