"""A sweep file and the grid of runs it stands for. Starts nothing, writes nothing.

    [sweep]
    name = "staleness-quick"
    base = "../../configs/quick.toml"       # relative to this file
    output_dir = "runs/sweeps"              # relative to the working directory
    seeds = [0, 1]
    [sweep.overrides]                       # for every run
    max_steps = 30
    [sweep.values]                          # the grid: every combination, with every seed
    queue.max_staleness = [0, 1, 4]

Keys are those of a run's configuration, dotted or as tables. Paths in overrides and values are relative to the working
directory, as on the command line.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from async_rlhf.buffers.config import Section
from async_rlhf.buffers.errors import ConfigError, did_you_mean
from async_rlhf.run.config import Config, load, read_toml

_OWN_KEYS = {"name": "sweep.name", "output_dir": "sweep.output_dir", "seed": "sweep.seeds"}


class SweepConfig(Section):
    """The `[sweep]` table."""

    name: str = Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the directory under `output_dir`."""
    base: str
    """Configuration every run begins with, relative to the sweep file."""
    output_dir: str = "runs/sweeps"
    """Where the sweep's directory is made, relative to the working directory."""
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    """Seeds; every setting is run with each of them."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Dotted keys of the run's configuration and their value in every run."""
    values: dict[str, Any] = Field(min_length=1)
    """Dotted keys of the run's configuration and the list of values each is swept over."""

    @property
    def directory(self) -> Path:
        return Path(self.output_dir) / self.name


@dataclass(frozen=True)
class Cell:
    """One run of the grid. `setting` holds the swept keys and their values."""

    config: Config
    setting: Mapping[str, Any]

    @property
    def label(self) -> str:
        return " ".join(f"{key}={value}" for key, value in {**self.setting, "seed": self.config.seed}.items())


def load_sweep(path: Path) -> tuple[SweepConfig, list[Cell]]:
    """The sweep in a TOML file and its cells, every cell's configuration loaded and checked.

    Cells are ordered by seed first, so that whatever else the machine does meanwhile falls on every setting, and an
    interrupted sweep leaves whole seeds. Raises ConfigError.
    """
    sweep = _sweep(path)
    return sweep, _cells(sweep, path.resolve().parent / sweep.base)


def _sweep(path: Path) -> SweepConfig:
    content = read_toml(path, "sweep", "experiments/staleness/")
    for key in content:
        if key != "sweep":
            raise ConfigError(f"sweep {str(path)!r}: unknown key {key!r}: {did_you_mean(key, ['sweep'])}")
    if not isinstance(table := content.get("sweep"), dict):
        raise ConfigError(f"sweep {str(path)!r} has no table [sweep]")
    try:
        sweep = SweepConfig.model_validate(table)
    except ValidationError as error:
        reasons = "; ".join(_explain(problem) for problem in error.errors())
        raise ConfigError(f"sweep {str(path)!r}: {reasons}") from error
    flat = sweep.model_copy(update={"overrides": dict(_flat(sweep.overrides)), "values": dict(_flat(sweep.values))})
    _check(flat, path)
    return flat


def _check(sweep: SweepConfig, path: Path) -> None:
    """What no single field can see. Raises ConfigError."""
    where = f"sweep {str(path)!r}"
    for key in (*sweep.overrides, *sweep.values):
        if key in _OWN_KEYS:
            raise ConfigError(f"{where}: {key!r} is decided by the sweep; set {_OWN_KEYS[key]}")
    if both := sorted(sweep.overrides.keys() & sweep.values.keys()):
        raise ConfigError(f"{where}: {both[0]!r} is swept and overridden; leave it in one of the two")
    for key, values in {"seeds": list(sweep.seeds), **sweep.values}.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{where}: values of {key!r} = {values!r}; give a list with at least one value")
        if any(value in values[:i] for i, value in enumerate(values)):
            raise ConfigError(f"{where}: values of {key!r} = {values!r} hold one twice; give each once")


def _cells(sweep: SweepConfig, base: Path) -> list[Cell]:
    settings = [dict(zip(sweep.values, combination, strict=True)) for combination in itertools.product(*sweep.values.values())]
    cells: dict[str, Cell] = {}
    for seed, setting in itertools.product(sweep.seeds, settings):
        name = "_".join(_word(f"{key}-{value}") for key, value in {**setting, "seed": seed}.items())
        own = {"name": name, "output_dir": str(sweep.directory), "seed": seed}
        shown = ", ".join(f"{key} = {value!r}" for key, value in setting.items())
        try:
            config = load(base, {**sweep.overrides, **setting, **own})
        except ConfigError as error:
            raise ConfigError(f"the cell with {shown}, seed {seed}: {error}") from error
        if name in cells:
            raise ConfigError(f"two cells would share the directory {name!r}; give values that differ in letters or digits")
        cells[name] = Cell(config, setting)
    return list(cells.values())


def _word(text: str) -> str:
    """`text` with every character a run's name may not have replaced by a dash."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`{"queue": {"max_staleness": 1}}` and `{"queue.max_staleness": 1}` mean the same."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _explain(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {where!r}: {did_you_mean(where, SweepConfig.model_fields)}"
    if problem["type"] == "missing":
        return f"key {where!r} is missing and has no default"
    return f"{where} = {problem['input']!r}: {problem['msg']}"
