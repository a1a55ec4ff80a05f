"""Python files that a user names in a configuration: a reward, a loss, an estimator as `path.py:name`.

A file sees its own folder first, then Python's path, as when it is run as a script; so do the neighbours that it imports. The
modules of a folder are `async_rlhf.buffers.user_files.FOLDER.NAME`: two of one name live beside each other, and a child process
imports what is pickled for it by that name alone, however it was started.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

PRIVATE = f"{__name__}."
"""The prefix of their modules' names."""
__path__: list[str] = []  # folders are found by `_Finder`
_NEVER_OWN = {"async_rlhf", "__main__", "__mp_main__"}
_importing: dict[str, int] = {}
"""The importing thread, by the name of the module."""


class MissingFileError(ImportError):
    """There is no such file."""


class UnfinishedImportError(ImportError):
    """The file starts a run that names it while it is being imported."""


def import_file(path: Path) -> ModuleType:
    """Import a file once, as a module of its folder: `if __name__ == "__main__"` does not run.

    Raises MissingFileError, UnfinishedImportError, and whatever the file raises.
    """
    path = path.absolute()
    is_plain = "." not in path.stem and not path.with_suffix("").is_dir()
    name = f"{PRIVATE}{_escaped(str(path.parent))}.{path.stem if is_plain else _escaped(path.name)}"
    if _importing.get(name) == threading.get_ident():
        raise UnfinishedImportError(f"{path} starts a run while it is being imported")
    if name not in sys.modules:
        if not path.is_file():
            raise MissingFileError(f"{path} does not exist; paths are relative to the configuration's folder")
        sys.path_importer_cache.pop(str(path.parent), None)  # it may have been written a moment ago
    return importlib.import_module(name)


def is_guarded(path: Path) -> bool:
    """Whether the script's work is under `if __name__ == "__main__"`; otherwise an import would repeat it."""
    try:
        statements = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False
    tests = (ast.walk(statement.test) for statement in statements if isinstance(statement, ast.If))
    return any(isinstance(node, ast.Name) and node.id == "__name__" for nodes in tests for node in nodes)


def _escaped(path: str) -> str:
    """The path, escaped as a part of a module's name."""
    return path.replace("%", "%25").replace(".", "%2E")


class _Finder:
    """Finds folders, and their modules as Python would in that folder."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(PRIVATE):
            return None
        folder, *inner = name.removeprefix(PRIVATE).split(".")
        place = Path(unquote(folder))
        if not inner:
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(place)]
            return spec if place.is_absolute() and place.is_dir() else None
        module_spec = PathFinder.find_spec(name, path)
        if module_spec is None and len(inner) == 1 and (file := place / unquote(inner[0])).is_file():
            module_spec = spec_from_file_location(name, file)
        if module_spec is not None and type(module_spec.loader) is SourceFileLoader:
            module_spec.loader = _Loader(name, module_spec.loader.path, PRIVATE + folder)
        return module_spec


sys.meta_path.insert(0, _Finder)


class _Loader(SourceFileLoader):
    """Gives a module an `import` of its own, which its functions have too whenever they run."""

    def __init__(self, name: str, path: str, folder: str) -> None:
        super().__init__(name, path)
        self._folder = folder

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _Import(self._folder)}
        _importing[module.__name__] = threading.get_ident()
        try:
            super().exec_module(module)
        finally:
            _importing.pop(module.__name__, None)


class _Import:
    """`import` in the files of a folder, and the `import_module` that they import."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._place = unquote(folder.removeprefix(PRIVATE))

    def __call__(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        top = name.partition(".")[0]
        if level or not self._has(top):
            module = builtins.__import__(name, globals, locals, fromlist or (), level)
            return self._importlib() if module is importlib else module
        module = builtins.__import__(f"{self._folder}.{name}", globals, locals, fromlist or (), 0)
        return module if fromlist else sys.modules[f"{self._folder}.{top}"]

    def import_module(self, name: str, package: str | None = None) -> ModuleType:
        own = self._has(name.partition(".")[0])
        return importlib.import_module(f"{self._folder}.{name}" if own else name, package)

    def _importlib(self) -> ModuleType:
        own = ModuleType("importlib")
        own.__dict__.update(vars(importlib), import_module=self.import_module)
        return own

    def _has(self, top: str) -> bool:
        """Whether this name is a module of the folder's, and not the same by Python's path: then it is left to that."""
        if f"{self._folder}.{top}" in sys.modules:
            return True
        own = PathFinder.find_spec(top, [self._place]) if top and top not in _NEVER_OWN else None
        if own is None or BuiltinImporter.find_spec(top) or FrozenImporter.find_spec(top):
            return False
        elsewhere = None
        with suppress(ValueError):  # of a module that was made, not found
            elsewhere = find_spec(top)
        if elsewhere is None:
            return True
        # A folder without an __init__.py is a package where there is no other.
        return not _files(own) <= _files(elsewhere) and (own.origin is not None or elsewhere.origin is None)


def _files(spec: ModuleSpec) -> set[str]:
    return {os.path.realpath(each) for each in ([spec.origin] if spec.origin else spec.submodule_search_locations or ())}
