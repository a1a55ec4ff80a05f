"""The files of a process on another host: the configuration with the paths there, and those that its role needs.

    each            the files of loss and estimator, which declare what a configuration is checked for
    actor           its keys where it reaches the hub itself, rows, images, the files and keys of rewards, the model, teachers
    scorer          the files and keys of rewards, the model, teachers
    relay           its keys
    learner rank    the model, a teacher, the images of rows, DeepSpeed's settings; a checkpoint comes from rank 0

Pure but for reading the names of files: `launch.connection` sends what the host does not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from async_rlhf.actors.config import RewardsConfig, ScoringConfig
from async_rlhf.actors.environments import EnvironmentConfig
from async_rlhf.launch.connection import NodeFiles
from async_rlhf.launch.orders import MAX_FILES
from async_rlhf.launch.program import Node
from async_rlhf.run.config import Config
from async_rlhf.run.loading import dump
from async_rlhf.run.own_code import own_file, with_neighbours
from async_rlhf.run.run_dir import RunDir

_OF_A_PEER = ("hub.public", "peer.secret")
_MODEL_FILES = (".json", ".safetensors", ".txt", ".model", ".jinja", ".gguf")


def large_files(config: Config) -> Iterator[Path]:
    """The model, and the files that rewards read."""
    for path in (config.model, *config.scoring.reference.directories, *_read_by_rewards(config).values()):
        yield from _files(Path(path))


def pack(config: Config, node: Node, directory: str) -> NodeFiles:
    """See `connection.Pack`. Raises OSError for a file that cannot be read, ValueError for too many."""
    run, contents = RunDir(config.run_dir), _Contents(config, directory)
    reaches_hub = node.role in ("actor", "relay") and node.arguments[0] == config.address
    changed: dict[str, Any] = {"security": config.security.model_copy(update={"keys": None})}
    changed["hooks"] = type(config.hooks)()  # they run here, and may hold keys
    for section in ("loss", "advantage"):  # every role reads their declarations
        chosen: Any = getattr(config, section)
        changed[section] = chosen.model_copy(update={"kind": contents.code(chosen.kind, section)})
    returns = {f"logs/{node.name}.log": node.log}
    if reaches_hub:
        assert config.security.directory is not None
        own_keys = contents.keys(config.security.directory / f"for-{node.name}", "keys")
        changed["security"] = config.security.model_copy(update={"keys": own_keys})
    if node.role != "relay":
        changed["model"] = contents.there(config.model, "model")
    if node.role == "learner_rank":
        changed["scoring"] = contents.scoring() if config.held_reference else config.scoring
        if (deepspeed := config.learner.deepspeed_config) is not None:
            settings = {"deepspeed_config": contents.there(deepspeed, "deepspeed")}
            changed["learner"] = config.learner.model_copy(update=settings)
    if node.role in ("actor", "scorer"):
        changed["rewards"], changed["scoring"] = contents.rewards(), contents.scoring()
    if node.role in ("actor", "learner_rank"):
        contents.files |= {f"data/images/{digest}": run.images.path(digest) for digest in run.images}
        if (count := len(contents.files)) > MAX_FILES:
            raise ValueError(
                f"a process on another host gets {count} files, images of prompts among them; highest: {MAX_FILES}"
            )
    if node.role == "actor":
        changed["environment"] = contents.environment()
        contents.files |= {f"data/{file.name}": file for file in sorted((run.path / "data").iterdir()) if file.is_file()}
        returns[f"spans/{node.name}.jsonl"] = run.spans(node.name)
        changed["max_log_bytes"] = _NEVER  # appended lines are sent from there, so no file may begin anew
    contents.inline["config.toml"] = dump(config.model_copy(update=changed)).encode()
    return NodeFiles(contents.files, contents.inline, returns)


_NEVER = 1 << 62


class _Contents:
    """files: name below the node's directory there -> file here. inline: -> what is in it. Each method returns what is called
    how there."""

    def __init__(self, config: Config, directory: str) -> None:
        self.files, self.inline = dict[str, Path](), dict[str, bytes]()
        self._config, self._directory = config, directory
        self._folders: dict[Path, str] = {}

    def there(self, path: str, name: str) -> str:
        """A file, or a folder with those of a model."""
        self.files |= {f"{name}/{each.name}": each for each in _files(Path(path))}
        return f"{self._directory}/{name}" + ("" if Path(path).is_dir() else f"/{Path(path).name}")

    def code(self, target: str, name: str) -> str:
        """`path.py:function`, with the neighbours that it imports; a target that names no file stays as it is."""
        if (file := own_file(target)) is None:
            return target
        folder = self._folders.setdefault(file.parent, f"{name}/{len(self._folders)}")
        self.files |= {f"{folder}/{each.relative_to(file.parent)}": each for each in with_neighbours(file)}
        return target.replace(str(file), f"{self._directory}/{folder}/{file.name}")

    def keys(self, directory: Path, name: str) -> str:
        """The directory there of a peer's keys, with which it reaches their maker."""
        self.inline |= {f"{name}/{file}": (directory / file).read_bytes() for file in _OF_A_PEER}
        return f"{self._directory}/{name}"

    def environment(self) -> EnvironmentConfig:
        section = self._config.environment
        there = {
            source: {
                "function": self.code(each.function, "environment"),
                "options": self._options(each.options, f"environment/options/{number}"),
            }
            for number, (source, each) in enumerate({**section.by_source, "": section}.items())
        }
        by_source = {source: each.model_copy(update=there[source]) for source, each in section.by_source.items()}
        return section.model_copy(update={**there[""], "by_source": by_source})

    def rewards(self) -> RewardsConfig:
        section = self._config.rewards
        options = {name: self._options(each, f"options/{name}") for name, each in section.options.items()}
        for name, path in _read_by_rewards(self._config).items():
            options[name]["path"] = self.there(path, f"options/{name}/{Path(path).name}")
        functions = tuple(self.code(target, "rewards") for target in section.functions)
        return section.model_copy(update={"functions": functions, "options": options})

    def _options(self, own: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Options with the keys of its server as they are there: by their folder's name, which a run's processes share."""
        there, keys = {**own}, own.get("keys")
        if isinstance(keys, str) and all((Path(keys) / file).is_file() for file in _OF_A_PEER):
            there["keys"] = self.keys(Path(keys), f"{name}/{Path(keys).name}")
        return there

    def scoring(self) -> ScoringConfig:
        """The section with the teachers' paths there."""
        section = self._config.scoring
        there = {path: self.there(path, f"teachers/{number}") for number, path in enumerate(section.reference.directories)}
        by_source = {source: there.get(path, path) for source, path in section.reference.by_source.items()}
        changed = {"path": there.get(section.reference.path, section.reference.path), "by_source": by_source}
        return section.model_copy(update={"reference": section.reference.model_copy(update=changed)})


def _read_by_rewards(config: Config) -> dict[str, str]:
    """The option `path` of each reward that has one, by the reward's name."""
    chosen = {name: options.get("path") for name, options in config.rewards.options.items()}
    return {name: path for name, path in chosen.items() if isinstance(path, str) and Path(path).exists()}


def _files(path: Path) -> list[Path]:
    """The file itself, or those of a model in a folder."""
    if not path.is_dir():
        return [path]
    return sorted(each for each in path.iterdir() if each.suffix in _MODEL_FILES and each.is_file() and each.name[0] != ".")
