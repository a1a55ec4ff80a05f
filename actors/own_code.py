"""Model directories that bring Python code of their own. It is never run: they load without it, or are refused."""

from __future__ import annotations

import json
from pathlib import Path

from async_rlhf.buffers.errors import ConfigError


def check_own_code(directory: Path, where: str) -> None:
    """Raises ConfigError for a model or tokenizer that only its own code could load. where: what names the directory."""
    if not any(map(_brings_code, (directory / "config.json", directory / "tokenizer_config.json"))):
        return
    from transformers import AutoConfig, AutoTokenizer  # slow to import, and few need it

    kinds = [AutoConfig] + [AutoTokenizer] * (directory / "tokenizer_config.json").is_file()
    for kind in kinds:
        try:
            kind.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        except ValueError as error:
            raise ConfigError(
                f"{where} = {str(directory)!r} needs its own code (auto_map), which is never run; use a model that "
                f"transformers knows by itself ({kind.__name__}: {str(error)[:120]})"
            ) from error


def _brings_code(file: Path) -> bool:
    """Whether the file names code. One that is not there or cannot be read is found where it is needed."""
    try:
        return bool(json.loads(file.read_text()).get("auto_map"))
    except (OSError, ValueError, AttributeError):
        return False
