"""The keyword parameters of a function, read from its source without running it: names, types and defaults.

A type is `float`, `int`, `bool`, `str`, `Literal[...]`, `tuple[...]` of such, one `| None`, or one with its range:
`Annotated[float, Field(gt=0)]`; a name that the file gives to one stands for it. A parameter without a type has that of its
default.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from async_rlhf.buffers.errors import ConfigError

Parameter = tuple[Any, Any]
"""(type, default or `...`) of a parameter."""


def parameters(node: ast.FunctionDef, tree: ast.Module) -> dict[str, Parameter]:
    """The keyword parameters of a function of a file. Raises ConfigError for one whose type or default cannot be read."""
    targets = [(each.targets[0], each.value) for each in tree.body if isinstance(each, ast.Assign)]
    aliases = {target.id: value for target, value in targets if isinstance(target, ast.Name)}
    taken: dict[str, Parameter] = {}
    for argument, written in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        try:
            default = ... if written is None else ast.literal_eval(written)
            unsaid = Any if default in (None, ...) else type(default)
            taken[argument.arg] = (unsaid if argument.annotation is None else _type(argument.annotation, aliases), default)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"parameter {ast.unparse(argument)!r}: {error}. It is read, not run: a type is float, int, bool, "
                "str, Literal[...], tuple[...], Annotated[float, Field(gt=0)], or one of them | None; a default is a literal"
            ) from error
    return taken


def _type(node: ast.expr, aliases: Mapping[str, ast.expr]) -> Any:
    """An annotation. Raises ValueError for one that is not understood without running its file."""
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Name(id="float" | "int" | "bool" | "str" as name):
            return {"float": float, "int": int, "bool": bool, "str": str}[name]
        case ast.Name(id=name) if name in aliases:
            return _type(aliases[name], {other: value for other, value in aliases.items() if other != name})
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _type(left, aliases) | _type(right, aliases)
        case ast.Subscript(value=outer, slice=inner):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            match last_name(outer):
                case "Literal":
                    return Literal[tuple(map(ast.literal_eval, parts))]
                case "tuple":
                    return tuple[tuple(_type(each, aliases) for each in parts)]  # type: ignore[misc]
                case "Annotated":
                    return Annotated[(_type(parts[0], aliases), *map(_limits, parts[1:]))]
    raise ValueError(f"{ast.unparse(node)} is not understood")


def _limits(node: ast.expr) -> Any:
    """`Field(gt=0)`."""
    if not isinstance(node, ast.Call) or last_name(node.func) != "Field" or node.args:
        raise ValueError(f"{ast.unparse(node)} is not understood")
    return Field(**{str(word.arg): ast.literal_eval(word.value) for word in node.keywords})


def last_name(node: ast.expr) -> str:
    """`name` of `name` and of `anything.name`."""
    return ast.unparse(node).rpartition(".")[2]
