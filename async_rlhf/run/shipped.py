"""Configurations and models by name: what comes with the package, and models of the Hugging Face Hub (`Qwen/Qwen3-0.6B`, also
`NAME@REVISION`), from the cache, or fetched into it. And the files of a first project of one's own.

A model, or a file of a data set, is fetched only before a run begins, by the command that reads the configuration; its
processes load what lies here. The run keeps the path of the snapshot, which names the commit, so that it is resumed with the
same files. Of a model only weights as safetensors, configurations and tokenizers are taken. `HF_HUB_OFFLINE`, `HF_TOKEN` and
`HF_HOME` mean what they do for huggingface_hub.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from async_rlhf.buffers.errors import ConfigError, did_you_mean
from async_rlhf.buffers.model_directory import INDEX

_SHIPPED = (Path(__file__).resolve().parent.parent / "configs").resolve()
FILES = ("config.toml", "rewards.py", "words.jsonl")
"""Of a first project."""
FETCHED = {"SmolLM2-135M-Instruct.Q4_1.gguf": "make train-chat"}
"""Models of shipped configurations that come from elsewhere: by file, the command of the repository that fetches it."""
_ANYWHERE = "{async-rlhf}/configs/"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?")
_FILE = re.compile(r"hub:([\w.-]+/[\w.-]+)(?:@([\w.-]+))?/(.+)")
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def configurations() -> dict[str, Path]:
    """By name."""
    return {path.stem: path for path in _SHIPPED.glob("*.toml")}


def plans() -> dict[str, Path]:
    """Specs of `async-rlhf plan`, by name."""
    return {path.stem: path for path in (_SHIPPED / "plans").glob("*.toml")}


def configuration_file(source: str | Path) -> Path:
    """The file of this name, or else the shipped configuration. Raises ConfigError."""
    return named_file("configuration", source, configurations())


def named_file(what: str, source: str | Path, shipped: Mapping[str, Path]) -> Path:
    """The file of this name, or else the shipped one. Raises ConfigError."""
    path = Path(source)
    if path.is_file() or path.suffix or path.parent != Path():
        return path
    if path.name not in shipped:
        hint = did_you_mean(path.name, shipped)
        raise ConfigError(f"{what} {path.name!r} is neither a file nor a shipped configuration; {hint}")
    return shipped[path.name]


def by_name(shipped: Mapping[str, Path]) -> str:
    """The tail of a message about a file that is not there."""
    return f"shipped ones go by their names, from everywhere: {', '.join(sorted(shipped))}"


def model_directory(name: str) -> Path | None:
    """The shipped model of this name."""
    directory = _SHIPPED / "models" / name
    return directory if Path(name).name == name and directory.is_dir() else None


def is_name(text: str, base: Path) -> bool:
    """Whether this is the name of a published model, and no path seen from `base`: there is no folder of its owner's name."""
    return _NAME.fullmatch(text) is not None and not (base / text.split("/")[0]).exists()


def fetched(key: str, model: str) -> str:
    """The directory of a published model, or `model` itself where it is no name of one. key: the setting.

    Raises ConfigError when it is not in the cache and cannot be fetched.
    """
    if _NAME.fullmatch(model) is None:
        return model
    from huggingface_hub import snapshot_download

    repository, _, revision = model.partition("@")
    fetch = partial(snapshot_download, repository, revision=revision or None, allow_patterns=_FILES)
    directory = _fetched(key, model, fetch, _is_whole)
    if not _is_whole(directory):  # without a network it is the part that was there
        raise ConfigError(
            f"{key} = {model!r} has no config.json with all its *.safetensors on the Hugging Face Hub, or the download was "
            f"incomplete, in {directory}; try again with a network, or give the directory of another model"
        )
    return str(directory)


def fetched_file(key: str, source: str) -> str:
    """The file of a data set, in the snapshot that names its commit. Raises ConfigError as `fetched` does."""
    from huggingface_hub import hf_hub_download

    if (found := _FILE.fullmatch(source)) is None or not {".", ".."}.isdisjoint(source.removeprefix("hub:").split("/")):
        raise ConfigError(
            f"{key} = {source!r} names no file of a data set; give hub:OWNER/NAME/FILE or .../NAME@REVISION/FILE, without .."
        )
    repository, revision, file = found.groups()
    fetch = partial(hf_hub_download, repository, file, repo_type="dataset", revision=revision)
    return str(_fetched(key, source, fetch, Path.is_file))


def _fetched(key: str, name: str, fetch: Callable[..., str], is_whole: Callable[[Path], bool]) -> Path:
    """The complete copy in the cache, else the Hub's present one. Raises ConfigError."""
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        with suppress(LocalEntryNotFoundError):
            if is_whole(cached := Path(fetch(local_files_only=True))):
                return cached
        if not HF_HUB_OFFLINE:
            print(f"fetching {name} from the Hugging Face Hub (once)", file=sys.stderr)  # noqa: T201  # a user waits for it
        return Path(fetch())
    except (OSError, ValueError, ImportError) as error:  # whatever huggingface_hub raises, for a proxy too, is one of these
        if HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set; unset it once"
        elif isinstance(error, LocalEntryNotFoundError):
            why = f"the Hub does not answer ({error.__cause__ or error}); try again with a network"
        else:  # an answer of the Hub has its reason in the first line of its last paragraph
            why = str(error).strip().rpartition("\n\n")[2].partition("\n")[0]
        raise ConfigError(
            f"{key} = {name!r} is not in the cache of the Hugging Face Hub and cannot be fetched: {why}, or give a path"
        ) from error


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


def portable(text: str) -> str:
    """JSON whose paths into what is shipped name no folder of this installation; for `at_home` in another."""
    return text.replace(_in_json(), _ANYWHERE)


def at_home(text: str) -> str:
    """The inverse of `portable`: text with the paths of this installation."""
    return text.replace(_ANYWHERE, _in_json())


def _in_json() -> str:
    return json.dumps(f"{_SHIPPED}/")[1:-1]


def write_start(directory: Path) -> list[Path]:
    """The files, written. Raises ConfigError, and writes none, where one of them is there already or cannot be written."""
    paths = [directory / name for name in FILES]
    if there := [str(path) for path in paths if path.exists()]:
        raise ConfigError(
            f"already there: {', '.join(there)}; nothing is overwritten. Name another folder: async-rlhf init DIR"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in paths:
            with path.open("xb") as file:
                file.write((_SHIPPED / "start" / path.name).read_bytes())
    except OSError as error:
        raise ConfigError(f"{str(directory)!r} cannot be written: {error}") from error
    return paths
