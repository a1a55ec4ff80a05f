"""Python files that a user names in a configuration: a reward, a loss, an estimator as `path.py:name`."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

PRIVATE = "_async_rlhf_file_"
"""How the names of their modules begin, so that nothing else imports them."""
_LOADED = "__async_rlhf_loaded__"


class MissingFileError(ImportError):
    """There is no such file."""


class UnfinishedImportError(ImportError):
    """The file starts a run that names it while it is being imported."""


def import_file(path: Path) -> ModuleType:
    """Import a file once, under a private name: `if __name__ == "__main__"` does not run. It may import its neighbours, as it
    can when it is run as a script.

    Raises MissingFileError, UnfinishedImportError, and whatever the file raises.
    """
    name = PRIVATE + hashlib.sha256(str(path).encode()).hexdigest()[:16]
    if (module := sys.modules.get(name)) is not None:
        if not hasattr(module, _LOADED):
            raise UnfinishedImportError(f"{path} starts a run while it is being imported")
        return module
    spec = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise MissingFileError(f"{path} does not exist; paths are relative to the configuration's folder")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        setattr(module, _LOADED, True)
    finally:
        if not hasattr(module, _LOADED):
            del sys.modules[name]
    return module


def is_guarded(path: Path) -> bool:
    """Whether what this script does is under `if __name__ == "__main__"`: without, importing it would do it once more."""
    try:
        statements = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False
    tests = (ast.walk(statement.test) for statement in statements if isinstance(statement, ast.If))
    return any(isinstance(node, ast.Name) and node.id == "__name__" for nodes in tests for node in nodes)
