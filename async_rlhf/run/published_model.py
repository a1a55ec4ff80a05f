"""A model by its name on the Hugging Face Hub (`Qwen/Qwen3-0.6B`, also `NAME@REVISION`): from the cache, or fetched into it.

Only before a run begins, by the command that reads the configuration; its processes load the directory and fetch nothing. The
run keeps the path of the snapshot, which names the commit, so that it is resumed with the same files. Of a repository only
weights as safetensors, configurations and tokenizers are taken. `HF_HUB_OFFLINE`, `HF_TOKEN` and `HF_HOME` mean what they do
for huggingface_hub.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.model_directory import INDEX

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?")
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def is_name(text: str, base: Path) -> bool:
    """Whether this is the name of a published model, and no path seen from `base`: there is no folder of its owner's name."""
    return _NAME.fullmatch(text) is not None and not (base / text.split("/")[0]).exists()


def fetched(model: str) -> str:
    """The directory of a published model, or `model` itself where it is no name of one.

    Raises ConfigError when it is not in the cache and cannot be fetched.
    """
    return str(_snapshot(model)) if _NAME.fullmatch(model) else model


def _snapshot(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repository, _, revision = name.partition("@")
    try:
        cached = snapshot_download(repository, revision=revision or None, allow_patterns=_FILES, local_files_only=True)
        if _is_whole(Path(cached)):
            return Path(cached)
    except LocalEntryNotFoundError:
        pass
    print(f"fetching {name} from the Hugging Face Hub (once)", file=sys.stderr)  # noqa: T201
    try:
        directory = Path(snapshot_download(repository, revision=revision or None, allow_patterns=_FILES))
    except (OSError, ValueError, ImportError) as error:  # whatever huggingface_hub raises, for a proxy too, is one of these
        raise ConfigError(
            f"model = {name!r} is neither a directory nor a GGUF file, nor a model in the cache of the Hugging Face Hub, and "
            f"cannot be fetched: {str(error).splitlines()[0]}"
        ) from error
    if not _is_whole(directory):  # without a network it is the part that was there
        raise ConfigError(
            f"model = {name!r} has no config.json with all its *.safetensors on the Hugging Face Hub, or only a part of it "
            f"could be fetched into {directory}; try again with a network, or give the directory of another model"
        )
    return directory


def _is_whole(directory: Path) -> bool:
    """Whether everything to load is there: a fetch that was interrupted leaves a part."""
    if not (directory / "config.json").is_file():
        return False
    try:
        shards = set(json.loads((directory / INDEX).read_text())["weight_map"].values())
    except FileNotFoundError:
        shards = {"model.safetensors"}
    except (ValueError, KeyError, AttributeError):
        return False
    return all((directory / shard).is_file() for shard in shards)
