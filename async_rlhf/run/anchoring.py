"""The paths among a configuration's values, and the models and data sets that it names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from async_rlhf.actors.data.config import HUB_PREFIX, anchor_source
from async_rlhf.actors.environments import ADAPTERS
from async_rlhf.actors.reference import is_address
from async_rlhf.actors.rewards import absolute
from async_rlhf.learner.checkpoint.evaluated import without_links
from async_rlhf.run import shipped

# Settings that are a path, or name a function that may lie in a file.
_ANCHORED: tuple[tuple[str, str, Callable[[str, Path], str]], ...] = (
    ("learner", "deepspeed_config", lambda path, base: str(base / path)),
    ("security", "keys", lambda path, base: str(base / path)),
    ("loss", "kind", absolute),
    ("advantage", "kind", absolute),
    ("environment", "function", lambda target, base: absolute(target, base, ADAPTERS)),
)


def anchor(values: dict[str, Any], base: Path) -> None:
    """Make the paths of a configuration's values absolute, seen from `base`."""
    _change_models(values, lambda _, given: _model(given, base))
    for section, key, seen_from in _ANCHORED:
        table = values.get(section)
        if isinstance(table, dict) and isinstance(given := table.get(key), str) and given not in ("", "none"):
            table[key] = seen_from(given, base)
    for _, source in _sources(values):
        anchor_source(source, base)
    rewards = values.get("rewards")
    if isinstance(rewards, dict) and isinstance(functions := rewards.get("functions"), list | tuple | str):
        functions = [functions] if isinstance(functions, str) else functions
        rewards["functions"] = [absolute(str(function), base) for function in functions]
    if isinstance(rewards, dict) and isinstance(options := rewards.get("options"), dict):
        for chosen in options.values():
            if isinstance(chosen, dict) and isinstance(path := chosen.get("path"), str):
                chosen["path"] = str(without_links(base / path))


def fetch(values: dict[str, Any]) -> None:
    """Fetches the files and models of a configuration from the Hub, as `shipped` does it. Raises ConfigError."""
    _change_models(values, shipped.fetched)
    for where, each in _sources(values):
        if isinstance(source := each.get("source"), str) and source.startswith(HUB_PREFIX):
            each["source"] = shipped.fetched_file(f"{where}.source", source)


def _sources(values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tables that name a place of prompts, with their keys."""
    for name in ("data", "evaluation"):
        section = values.get(name)
        several = section.get("sources") if isinstance(section, dict) else None
        numbered = enumerate(several if isinstance(several, list) else ())
        tables = [(name, section), *((f"{name}.sources.{n}", each) for n, each in numbered)]
        yield from ((where, each) for where, each in tables if isinstance(each, dict))


def _change_models(values: dict[str, Any], change: Callable[[str, str], str]) -> None:
    """That of the policy, and of teachers those that no server has. change: is given the key and the model."""
    scoring = values.get("scoring")
    reference = scoring.get("reference") if isinstance(scoring, dict) else None
    tables = [("", values, ("model",))]
    if isinstance(reference, dict):
        where, by_source = "scoring.reference.", reference.get("by_source")
        tables.append((where, reference, ("path",)))
        tables += [(f"{where}by_source.", by_source, tuple(by_source))] if isinstance(by_source, dict) else []
    for where, table, keys in tables:
        for key in keys:
            if isinstance(given := table.get(key), str) and given and not is_address(given):
                table[key] = change(f"{where}{key}", given)


def _model(given: str, base: Path) -> str:
    """The model at this path, or else the shipped one of this name; a published one keeps its name."""
    own = without_links(base / Path(given).expanduser())
    if not own.exists() and (among_shipped := shipped.model_directory(given)) is not None:
        return str(among_shipped)
    return given if shipped.is_name(given, base) else str(own)
