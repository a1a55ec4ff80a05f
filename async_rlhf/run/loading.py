"""A configuration from TOML, from values in Python and from overrides, and back.

Everything is checked (`config_checks`) before torch is imported and before any process starts. Relative paths in a file are
relative to that file; on the command line and in Python they are relative to the working directory; `output_dir` always is.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from async_rlhf.buffers.config import REVEALED
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.parsing import toml_table
from async_rlhf.learner.config import FunctionSection
from async_rlhf.run import shipped
from async_rlhf.run.anchoring import anchor, fetch
from async_rlhf.run.config import Config
from async_rlhf.run.config_checks import check, check_described
from async_rlhf.run.config_keys import check_parameters, explain, kind_sections, known
from async_rlhf.run.tables import flat, in_toml, lay, nested, numbered, plain


def load(source: str | Path | Mapping[str, Any] | Config, overrides: Mapping[str, Any] | None = None) -> Config:
    """A configuration with overrides, checked.

    source: a TOML file, the name of a shipped configuration (`quick`), the values themselves, or a `Config`. Values and
    overrides are nested or dotted: `{"queue": {"max_staleness": 0}}` is `{"queue.max_staleness": 0}`. A table is laid upon
    what is there, key by key; an empty one empties it.
    Raises ConfigError: the setting, its value, the limit, the nearest valid choice.
    """
    if isinstance(source, Config):
        return override(source, overrides or {})
    if isinstance(source, Mapping):
        return _overridden({}, source, overrides or {})
    if not isinstance(source, str | Path):
        raise ConfigError(
            f"a configuration is a TOML file, the name of a shipped one, its values (a dictionary) or a Config, not {source!r}"
        )
    path = shipped.configuration_file(source)
    values = read_toml(path, "configuration", shipped.by_name(shipped.configurations()))
    if (path.parent / "manifest.json").exists():  # the file belongs to a run
        values = known(values, Config)
    _prepare(values, path.resolve().parent)
    return _overridden(values, overrides or {})


def read_toml(path: Path, what: str, hint: str) -> dict[str, Any]:
    """The content of a `what` file; hint: where there are others. Raises ConfigError."""
    try:
        return toml_table(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a mark of its encoding
    except FileNotFoundError as error:
        raise ConfigError(f"{what} {str(path)!r} does not exist; {hint}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what} {str(path)!r} cannot be read: {error}") from error


def override(config: Config, overrides: Mapping[str, Any]) -> Config:
    """A configuration with overrides as in `load`, checked; raises ConfigError."""
    values = config.model_dump(mode="json", context=REVEALED)
    _prepare(values, Path.cwd())
    return _overridden(values, overrides)


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """A configuration that was checked with these values for dotted keys; each is checked by itself. Raises ConfigError."""
    laid = config.model_dump(mode="json", context=REVEALED)
    _lay_all(laid, [nested(key, value) for key, value in values.items()])
    return validated(laid)


def _overridden(values: dict[str, Any], *layers: Mapping[str, Any]) -> Config:
    for layer in layers:
        changes = [nested(key, plain(value)) for key, value in layer.items()]
        for change in changes:
            _prepare(change, Path.cwd())
        _lay_all(values, changes)
    check(validated(values))  # a wrong key is named before anything is fetched
    fetch(values)
    config = validated(values)
    check(config)
    check_described(config)
    return config


def validated(values: dict[str, Any]) -> Config:
    """The configuration these values make; raises ConfigError naming every wrong key."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(explain(problem, Config, values) for problem in error.errors())) from error


def parse_override(text: str) -> tuple[str, Any]:
    """`key=value` with a TOML value; what is no TOML value is taken as a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override {text!r} is not key=value; for example learner.learning_rate=5e-5")
    try:
        return key.strip(), toml_table(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value
    except ValueError as error:
        raise ConfigError(f"override {key.strip()}: {str(error).rpartition(': ')[2]}") from error


def parse_settings(sections: Sequence[str], texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Overrides of some sections (`options.judge.url=...` is of the first) as the values of each, checked.

    Raises ConfigError.
    """
    values: dict[str, dict[str, Any]] = {section: {} for section in sections}
    for text in texts:
        key, value = parse_override(text)
        named = key.partition(".")[0]
        own = named if named in sections else sections[0]
        lay(values[own], nested(key.removeprefix(f"{own}."), value))
    _prepare(values, Path.cwd())
    for name, given in values.items():
        section(name, given)
    return values


def section(name: str, values: Any) -> Any:
    """The section of these values. Raises ConfigError."""
    try:
        found = Config.model_fields[name].annotation.model_validate(values)  # type: ignore[union-attr]
    except ValidationError as error:
        problems = ({**problem, "loc": (name, *problem["loc"])} for problem in error.errors())
        raise ConfigError("; ".join(explain(problem, Config, {name: values}) for problem in problems)) from error
    if isinstance(found, FunctionSection):
        check_parameters(found, Config)
    return found


def dotted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested or dotted values as dotted keys. Raises ConfigError."""
    tables: dict[str, Any] = {}
    for key, value in values.items():
        lay(tables, nested(key, plain(value)))
    return dict(flat(tables))


def dump(config: Config) -> str:
    """The resolved configuration as TOML, every value written out, secrets too."""
    return tomli_w.dumps(in_toml(config.model_dump(mode="json", context=REVEALED)))


def differences(old: Config, new: Config) -> list[str]:
    """Dotted keys in which two configurations differ, as `key: old -> new`; of a list of tables each by its number."""
    before, after = (dict(flat(numbered(each.model_dump()))) for each in (old, new))
    keys = [*before, *(key for key in after if key not in before)]

    def shown(values: Mapping[str, Any], key: str) -> str:
        return json.dumps(in_toml(values[key]), default=str) if key in values else "left out"

    return [f"{key}: {shown(before, key)} -> {shown(after, key)}" for key in keys if before.get(key) != after.get(key)]


def _prepare(values: dict[str, Any], base: Path) -> None:
    """Make paths absolute, seen from `base`; an environment may be given by its function alone."""
    _written_out(values, "environment")
    own = values.get("environment")
    if isinstance(own, dict) and isinstance(by_source := own.get("by_source"), dict):
        for source in by_source:
            _written_out(by_source, source)
            anchor({"environment": by_source[source]}, base)
    anchor(values, base)


def _written_out(values: dict[str, Any], name: str) -> None:
    if isinstance(function := values.get(name), str):
        values[name] = {"function": function}


def _lay_all(under: dict[str, Any], changes: Sequence[Mapping[str, Any]]) -> None:
    """Lay tables upon others, one after the other. Where they name another kind (a loss, an estimator, an engine), the keys of
    the former are left out: it begins with its own."""
    for name, section in kind_sections(Config).items():
        own, given = under.get(name), [change[name] for change in changes if isinstance(change.get(name), dict)]
        kinds = [each["kind"] for each in given if "kind" in each]
        if isinstance(own, dict) and kinds and kinds[-1] != own.get("kind", section.model_fields["kind"].default):
            under[name] = {key: value for key, value in own.items() if key in section.model_fields}
    for change in changes:
        lay(under, change)
