"""The files of a user's own code that a configuration names, and those that they import. Nothing is imported here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from async_rlhf.run.config import Config


def own_code(config: Config) -> Iterator[Path]:
    """Files of rewards, environments, loss and estimator, each `with_neighbours`. Raises OSError."""
    environments = [own.function for own in config.environment.all.values()]
    targets = (*config.rewards.functions, *environments, config.loss.kind, config.advantage.kind)
    for file in dict.fromkeys(map(own_file, targets)):
        if file is not None:
            yield from with_neighbours(file)


def own_file(target: str) -> Path | None:
    """The file of `[NAME=][FORM:]path.py:name`; a function of a package is found by its name."""
    file = Path((target.partition("=")[2] or target).rpartition(":")[0].rpartition(":")[2])
    return file if file.suffix == ".py" and file.is_file() else None


def with_neighbours(file: Path) -> Iterator[Path]:
    """A Python file, and of its folder the files and packages that it imports, and so on. Raises OSError."""
    known, seen, waiting = {"async_rlhf"}, set[Path](), [file]
    while waiting:
        if (each := waiting.pop()) in seen:
            continue
        seen.add(each)
        yield each
        names = set(_imported(each)) - known
        known |= names
        found = (path for name in names for path in (file.parent / f"{name}.py", *(file.parent / name).rglob("*.py")))
        waiting += [path for path in found if path.is_file() and _is_module(path.relative_to(file.parent))]


def _imported(file: Path) -> Iterator[str]:
    """The packages and modules that it imports by their whole name; none where no interpreter could read it."""
    with suppress(SyntaxError, ValueError):
        for statement in ast.walk(ast.parse(file.read_bytes(), str(file))):
            if isinstance(statement, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in statement.names)
            elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
                yield statement.module.partition(".")[0]


def _is_module(path: Path) -> bool:
    """Whether a statement can import it."""
    return all(map(str.isidentifier, path.with_suffix("").parts))
