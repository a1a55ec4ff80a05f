"""What comes with the package: configurations and models by name, and the files of a first project of one's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from async_rlhf.buffers.errors import ConfigError, did_you_mean

_SHIPPED = (Path(__file__).resolve().parent.parent / "configs").resolve()
FILES = ("config.toml", "rewards.py", "words.jsonl")
"""Of a first project."""
FETCHED = {"SmolLM2-135M-Instruct.Q4_1.gguf": "make train-chat"}
"""Models of shipped configurations that come from elsewhere: by file, the command of the repository that fetches it."""
_ANYWHERE = "{async-rlhf}/configs/"


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
        raise ConfigError(f"{what} {path.name!r} is no file, and none of this name is shipped; {hint}")
    return shipped[path.name]


def by_name(shipped: Mapping[str, Path]) -> str:
    """The tail of a message about a file that is not there."""
    return f"shipped ones go by their names, from everywhere: {', '.join(sorted(shipped))}"


def model_directory(name: str) -> Path | None:
    """The shipped model of this name."""
    directory = _SHIPPED / "models" / name
    return directory if Path(name).name == name and directory.is_dir() else None


def portable(text: str) -> str:
    """JSON whose paths into what is shipped name no folder of this installation; for `at_home` in another."""
    return text.replace(_in_json(), _ANYWHERE)


def at_home(text: str) -> str:
    """What `portable` made, with the paths of this installation."""
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
