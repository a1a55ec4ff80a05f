"""The list of all keys of a configuration, made from the models that check them: docs/configuration.md.

python -m async_rlhf.cli.reference > docs/configuration.md
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from async_rlhf.buffers.config import KindSection
from async_rlhf.run.config import Config
from async_rlhf.run.config_keys import NAME, Setting, own_settings, settings

_HEAD = f"""# Every key of a configuration

Set a key in a TOML file, for one run with `--set KEY=VALUE`, or in Python with `overrides`. Each stands here as `--set`
takes it, with its default. `"none"` leaves a setting open. A table is merged key by key; an empty one (`{{}}`) empties it.
One text is a list of one. `{NAME}` is a name that the user chooses, left out in `[[data.sources]]` and
`[[placement.hosts]]`. Relative paths in a file are relative to that file, in `--set` and in Python to the working directory;
`output_dir` always is.

Made by `python -m async_rlhf.cli.reference`.
"""
# The page that explains each section.
_PAGES = {
    "": "[README.md](../README.md)",
    "data": "[data.md](data.md)",
    "generation": "[generation.md](generation.md)",
    "engine": "[generation.md](generation.md)",
    "environment": "[environments.md](environments.md)",
    "rewards": "[rewards.md](rewards.md)",
    "scoring": "[rewards.md](rewards.md)",
    "actors": "[queue.md](queue.md)",
    "placement": "[machines.md](machines.md)",
    "queue": "[queue.md](queue.md)",
    "weights": "[weights.md](weights.md)",
    "security": "[security.md](security.md)",
    "launch": "[machines.md](machines.md)",
    "learner": "[learner.md](learner.md)",
    "advantage": "[learner.md](learner.md)",
    "loss": "[learner.md](learner.md)",
    "guard": "[learner.md](learner.md)",
    "checkpoint": "[learner.md](learner.md)",
    "evaluation": "[watching.md](watching.md)",
    "tracking": "[watching.md](watching.md)",
    "hooks": "[operating.md](operating.md)",
}
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "≥", "max_length": "≤"}


def reference() -> str:
    """The whole page. Raises ValueError for a key or a section without a meaning."""
    parts = [_HEAD, *_section("", Config)]
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            parts += _section(name, field.annotation)
    return "\n".join(parts)


def _section(name: str, section: type[BaseModel]) -> Iterator[str]:
    """One heading and table; the keys of sections within it stand in the same table, those of Config have their own."""
    if not section.__doc__:
        raise ValueError(f"[{name}] has no meaning: write a docstring in {section.__name__}")
    yield f"## [{name}]\n" if name else "## At the top\n"
    yield f"{_one_line(section.__doc__)} {_PAGES[name]}; `{section.__module__}.{section.__name__}`\n"
    yield "| key=default, type, limits | meaning |\n| --- | --- |"
    yield from _rows([setting for setting in settings(section) if name or "." not in setting.key], f"{name}." if name else "")
    yield ""
    if issubclass(section, KindSection):
        yield from _kinds(name, section)


def _kinds(name: str, section: type[KindSection]) -> Iterator[str]:
    """A table for each kind whose keys have meanings; one of the keys of all where they stand beside a formula."""
    own = {kind: own_settings(section, kind) for kind in section.kinds()}
    documented = {kind: section.of_kind(kind) for kind in own if section.of_kind(kind).__doc__}
    for kind, found in documented.items():
        yield f'`{name}.kind = "{kind}"`: {_one_line(found.__doc__ or "")} `{found.__module__}.{found.__name__}`\n'
        yield "| key=default, type, limits | meaning |\n| --- | --- |"
        yield "\n".join(_row(setting, f"{name}.") for setting in own[kind])
        yield ""
    if rest := {kind: keys for kind, keys in own.items() if keys and kind not in documented}:
        yield f"| `{name}.kind` | keys of its own |\n| --- | --- |"
        yield from (f"| `{kind}` | {'; '.join(_key(each, f'{name}.') for each in keys)} |" for kind, keys in rest.items())
        yield ""


def _rows(section: Sequence[Setting], prefix: str) -> Iterator[str]:
    """A row for each key, but one for all keys of a named table that the section has itself."""
    meanings = {setting.key: setting.field.description for setting in section}
    repeated: dict[str, list[str]] = {}
    for setting in section:
        table, named, key = setting.key.partition(f".{NAME}.")
        if named and meanings.get(key) == setting.field.description:
            repeated.setdefault(f"{prefix}{table}{named}", []).append(key)
        else:
            yield _row(setting, prefix)
    for table, keys in repeated.items():
        yield f"| `{table}KEY` | As `{prefix}KEY` above, for KEY one of {', '.join(f'`{key}`' for key in keys)}. |"


def _row(setting: Setting, prefix: str) -> str:
    field, key = setting.field, f"{prefix}{setting.key}"
    if not field.description:
        raise ValueError(f"{key} has no meaning: write a docstring under the field")
    cells = (_key(setting, prefix), _one_line(field.description))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _key(setting: Setting, prefix: str) -> str:
    field = setting.field
    return f"`{prefix}{setting.key}{_default(field)}` {_type(field.annotation)}{_limits(field)}"


def _type(annotation: Any) -> str:
    kind, inner = get_origin(annotation), get_args(annotation)
    if kind is Literal:
        return ", ".join(f"`{json.dumps(choice)}`" for choice in inner)
    if kind in (Union, UnionType):  # that it may be "none" is said by its default, or stands in its meaning
        return " or ".join(_type(each) for each in inner if each is not NoneType)
    if kind is Annotated:
        return _type(inner[0]) + "".join(_limits(each) for each in inner[1:] if isinstance(each, FieldInfo))
    if kind is tuple:
        return f"list of {_type(inner[0])}" if inner[-1] is Ellipsis else f"[{', '.join(_type(each) for each in inner)}]"
    if kind is dict:
        return f"table of {_type(inner[1])}"
    names = {str: "text", int: "int", float: "float", bool: "bool", Any: "any", SecretStr: "secret text"}
    return names[annotation]


def _default(field: FieldInfo) -> str:
    """The default behind a key; empty for a key that must be set."""
    if field.is_required():
        return ""
    value = field.get_default(call_default_factory=True)
    return f"={json.dumps('none' if value is None else value)}"


def _limits(field: FieldInfo) -> str:
    limits = []
    for constraint in field.metadata:
        for name, sign in _SIGNS.items():
            if (limit := getattr(constraint, name, None)) is not None:
                limits.append(f" {sign}{_number(limit)}" + " characters" * name.endswith("length"))
        if pattern := getattr(constraint, "pattern", None):
            limits.append(f" `{pattern}`")
    return ",".join(limits)


def _number(value: float) -> str:
    """A number as text, large powers of two as such."""
    whole = int(value)
    power = whole.bit_length() - 1
    return f"2^{power}" if whole == value and power > 16 and whole == 1 << power else f"{value}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    typer.echo(reference(), nl=False)
