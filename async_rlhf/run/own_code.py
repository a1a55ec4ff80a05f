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
        names = sorted(set(_imported(each, len(each.relative_to(file.parent).parts))) - known)
        known.update(names)
        found = (path for name in names for path in (file.parent / f"{name}.py", *sorted((file.parent / name).rglob("*.py"))))
        waiting += [path for path in found if path.is_file() and _is_module(path.relative_to(file.parent))]


def _imported(file: Path, depth: int) -> Iterator[str]:
    """The packages and modules that it imports by their whole name; none where no interpreter could read it. depth: how many
    dots before a name lead to the folder."""
    with suppress(SyntaxError, ValueError):
        for statement in ast.walk(ast.parse(file.read_bytes(), str(file))):
            if isinstance(statement, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in statement.names)
            elif isinstance(statement, ast.ImportFrom) and statement.level in (0, depth):
                names = [statement.module] if statement.module else [alias.name for alias in statement.names]
                yield from (name.partition(".")[0] for name in names)
            elif isinstance(statement, ast.Call) and ast.unparse(statement.func).rpartition(".")[2] == "import_module":
                named = (name.value for name in statement.args[:1] if isinstance(name, ast.Constant))
                yield from (name.partition(".")[0] for name in named if isinstance(name, str))


def _is_module(path: Path) -> bool:
    """Whether a statement can import it."""
    return all(map(str.isidentifier, path.with_suffix("").parts))
