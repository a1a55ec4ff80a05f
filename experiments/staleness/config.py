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
    [sweep.axes.correction]                 # one more axis; each of its values has a name, and sets several keys
    none = { loss.kind = "ppo_clip", loss.is_cap = "none" }
    decoupled = { loss.kind = "decoupled_ppo" }

Keys are those of a run's configuration, dotted or as tables. Paths in overrides and values are relative to the working
directory, as on the command line. `--set KEY=VALUE` is laid upon the overrides; `sweep.name`, `sweep.output_dir`, `sweep.seeds`
and the budget can be set in the same way.

Every run ends after `max_steps`, or with the budget of `sweep.samples`; or earlier, where `max_trained_tokens` or `max_seconds`
are overridden.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from async_rlhf.buffers.config import Section
from async_rlhf.buffers.errors import ConfigError, did_you_mean
from async_rlhf.run import shipped
from async_rlhf.run.config import Config
from async_rlhf.run.config_keys import explain, kind_sections
from async_rlhf.run.loading import dotted, load, read_toml

SHIPPED = {path.stem: path for path in Path(__file__).resolve().parent.glob("*.toml")}
"""Sweeps by name."""
_OWN_KEYS = {"name": "sweep.name", "output_dir": "sweep.output_dir", "seed": "sweep.seeds"}
_GIVEN = {*_OWN_KEYS.values(), "sweep.samples"}
Setting = Mapping[str, Any]


class SweepConfig(Section):
    """The `[sweep]` table."""

    name: str = Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the directory under `output_dir`."""
    base: str
    """Configuration every run begins with, relative to the sweep file."""
    output_dir: str = "runs/sweeps"
    """Where the sweep's directory is made, relative to the working directory."""
    seeds: tuple[Annotated[int, Field(ge=0)], ...]
    """Seeds; every setting is run with each of them."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Dotted keys of the run's configuration and their value in every run."""
    values: dict[str, Any] = Field(default_factory=dict)
    """Dotted keys of the run's configuration and the list of values each is swept over."""
    axes: dict[str, dict[str, dict[str, Any]]] = Field(default_factory=dict)
    """Further axes: by the axis's name and that of each value, the dotted keys that it sets together."""
    results: str = ""
    """Directory, relative to the sweep file, of tables and of what finished cells measured; empty: beside the runs. A cell
    whose result is there is not run again, also where its run directory is gone."""
    samples: int | None = Field(default=None, ge=1)
    """Completions that every run trains on: decides `max_steps` where settings differ in the size of a batch."""

    @property
    def directory(self) -> Path:
        return Path(self.output_dir) / self.name

    @property
    def results_dir(self) -> Path:
        """The directory of a loaded sweep's results."""
        return Path(self.results) if self.results else self.directory

    def kept(self, name: str) -> Path:
        """The file with the result of a finished cell of this name."""
        return self.results_dir / "cells" / f"{name}.json"

    @property
    def question(self) -> str:
        """The question that the sweep answers."""
        *others, last = self.levels
        return f"What do {', '.join(others)} and {last} do to learning?" if others else f"What does {last} do to learning?"

    @property
    def grid(self) -> str:
        """The swept keys and their values."""
        return "; ".join(f"{axis} = {', '.join(str(value) for value, _ in levels)}" for axis, levels in self.levels.items())

    @property
    def levels(self) -> dict[str, list[tuple[Any, Setting]]]:
        """By axis: each of its values, and the keys that it sets."""
        named: dict[str, list[tuple[Any, Setting]]] = {axis: list(values.items()) for axis, values in self.axes.items()}
        return {**named, **{key: [(value, {key: value}) for value in values] for key, values in self.values.items()}}

    @property
    def swept(self) -> frozenset[str]:
        """Every key that any axis sets."""
        return frozenset(key for levels in self.levels.values() for _, keys in levels for key in keys)


@dataclass(frozen=True)
class Cell:
    """One run of the grid. setting: the axes and their values here. swept: the keys in which cells may differ."""

    config: Config
    setting: Setting
    swept: frozenset[str] = frozenset()

    @property
    def label(self) -> str:
        return shown((*self.setting.items(), ("seed", self.config.seed)))


def shown(setting: Iterable[tuple[str, Any]]) -> str:
    """Keys and values in words: `queue.max_staleness = 1, seed = 0`."""
    return ", ".join(f"{key} = {value}" for key, value in setting)


def load_sweep(source: Path, given: Mapping[str, Any] | None = None) -> tuple[SweepConfig, list[Cell]]:
    """The sweep in a TOML file, or the shipped one of this name, and its cells, each one's configuration loaded and checked.

    given: keys and values of `--set`. Cells are ordered by seed first, so that whatever else the machine does meanwhile falls
    on every setting, and an interrupted sweep leaves whole seeds. Raises ConfigError.
    """
    path = shipped.named_file("sweep", source, SHIPPED)
    sweep = _sweep(path, given or {})
    return sweep, _cells(sweep, path.resolve().parent / sweep.base)


def _sweep(path: Path, given: Mapping[str, Any]) -> SweepConfig:
    content = read_toml(path, "sweep", shipped.by_name(SHIPPED))
    for key in content:
        if key != "sweep":
            raise ConfigError(f"sweep {str(path)!r}: unknown key {key!r}: {did_you_mean(key, ['sweep'])}")
    if not isinstance(table := content.get("sweep"), dict):
        raise ConfigError(f"sweep {str(path)!r} has no table [sweep]")
    own = {key.removeprefix("sweep."): value for key, value in given.items() if key in _GIVEN}
    more = {key: value for key, value in given.items() if key not in _GIVEN}
    try:
        sweep = SweepConfig.model_validate({**table, **own})
    except ValidationError as error:
        reasons = "; ".join(explain(problem, SweepConfig) for problem in error.errors())
        raise ConfigError(f"sweep {str(path)!r}: {reasons}") from error
    overrides = {**dotted(sweep.overrides), **dotted(more)}
    axes = {axis: {name: dotted(keys) for name, keys in levels.items()} for axis, levels in sweep.axes.items()}
    results = str(path.resolve().parent / sweep.results) if sweep.results else ""
    flat = sweep.model_copy(update={"overrides": overrides, "values": dotted(sweep.values), "axes": axes, "results": results})
    _check(flat, path)
    return flat


def _check(sweep: SweepConfig, path: Path) -> None:
    """Check the fields against each other. Raises ConfigError."""
    where = f"sweep {str(path)!r}"
    if not sweep.values and not sweep.axes:
        raise ConfigError(f"{where} has no axis; give [sweep.values] or [sweep.axes.NAME]")
    for key, values in {"seeds": list(sweep.seeds), **sweep.values}.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{where}: values of {key!r} = {values!r}; give a list with at least one value")
        if any(value in values[:i] for i, value in enumerate(values)):
            raise ConfigError(f"{where}: values of {key!r} = {values!r} hold one twice; give each once")
    for axis in sweep.axes:
        if axis == "seed" or axis in sweep.values:
            raise ConfigError(f"{where}: axis {axis!r} has the name of another axis; give it a name of its own")
    by_axis = {axis: {key for _, keys in levels for key in keys} for axis, levels in sweep.levels.items()}
    for key in sorted(sweep.overrides.keys() | sweep.swept):
        if key in _OWN_KEYS:
            raise ConfigError(f"{where}: {key!r} is decided by the sweep; set {_OWN_KEYS[key]}")
        if key == "max_steps" and sweep.samples is not None:
            raise ConfigError(f"{where}: 'max_steps' follows from sweep.samples = {sweep.samples}; leave out one of the two")
        axes = [axis for axis, keys in by_axis.items() if key in keys]
        if axes and key in sweep.overrides:
            raise ConfigError(
                f"{where}: {key!r} is swept and overridden with {sweep.overrides[key]!r}; leave out one of the two"
            )
        if len(axes) > 1:
            raise ConfigError(f"{where}: {key!r} is set by the axes {' and '.join(axes)}; one must be enough")
    for axis, levels in sweep.axes.items():
        keys = {key for key in by_axis[axis] if not _is_parameter(key, levels.values())}
        lacking = next(((name, key) for name, own in levels.items() for key in sorted(keys - own.keys())), None)
        if lacking is not None or len(levels) < 2:
            what = f"{lacking[0]!r} does not set {lacking[1]!r}, which others do" if lacking else "it has fewer than two values"
            raise ConfigError(f"{where}: axis {axis!r}: {what}")


def _is_parameter(key: str, levels: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a key belongs to some kinds of its section alone, and every level names one."""
    section, _, name = key.partition(".")
    kinds = kind_sections(Config)
    return section in kinds and name not in kinds[section].model_fields and all(f"{section}.kind" in own for own in levels)


def _cells(sweep: SweepConfig, base: Path) -> list[Cell]:
    combined = list(itertools.product(*sweep.levels.values()))
    cells, by_settings = dict[str, Cell](), dict[str, Cell]()
    for seed, levels in itertools.product(sweep.seeds, combined):
        setting = {axis: value for axis, (value, _) in zip(sweep.levels, levels, strict=True)}
        name = re.sub(r"[^A-Za-z0-9._-]", "-", "_".join(f"{key}-{value}" for key, value in {**setting, "seed": seed}.items()))
        own = {"name": name, "output_dir": str(sweep.directory), "seed": seed}
        try:
            keys = {key: value for _, keys in levels for key, value in keys.items()}
            config = _config(base, {**sweep.overrides, **keys, **own}, sweep)
        except ConfigError as error:
            raise ConfigError(f"the cell with {shown((*setting.items(), ('seed', seed)))}: {error}") from error
        if name in cells:
            raise ConfigError(f"two cells would share the directory {name!r}; give values that differ in letters or digits")
        cell = Cell(config, setting, sweep.swept if sweep.samples is None else sweep.swept | {"max_steps"})
        same = by_settings.setdefault(config.model_copy(update={"name": ""}).model_dump_json(), cell)
        if same is not cell:
            raise ConfigError(
                f"the cells with {same.label} and with {cell.label} have the same configuration; leave out one of the two"
            )
        cells[name] = cell
    return list(cells.values())


def _config(base: Path, keys: Setting, sweep: SweepConfig) -> Config:
    """With the sweep's budget in place of that of the base, where it has one."""
    if (samples := sweep.samples) is None:
        return _comparable(load(base, keys), base)
    keys = {"max_trained_tokens": None, "max_seconds": None, **keys}
    config = _comparable(load(base, {**keys, "max_steps": 1}), base)
    of_step = config.groups_per_batch * config.generation.group_size
    steps, left = divmod(samples, of_step)
    if left:
        raise ConfigError(
            f"sweep.samples = {samples} is no multiple of the {of_step} completions of a step; nearest: "
            f"{max(1, round(samples / of_step)) * of_step}"
        )
    return load(base, {**keys, "max_steps": steps})


def _comparable(config: Config, base: Path) -> Config:
    """Raises ConfigError for a run without an end, or whose prompts are used up, or chosen by how it went."""
    curriculum = config.data.curriculum
    if config.max_steps is None or config.data.spool is not None or curriculum.is_on:
        own = f"data.curriculum.reward = {curriculum.reward!r}" if curriculum.is_on else f"data.source = {config.data.source!r}"
        has = "no max_steps" if config.max_steps is None else own
        raise ConfigError(
            f"the runs of a sweep are compared over the same steps and prompts, and {base} has {has}; set max_steps, and data "
            "that are all there and come in their order"
        )
    return config
