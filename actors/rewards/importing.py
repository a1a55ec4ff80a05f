"""What a target `package.module:name` or `/absolute/file.py:name` names, imported in this process.

Errors say what it was to be: a reward, an environment. Never here: what such a thing looks like.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from async_rlhf.buffers.errors import AsyncRLHFError, RewardError, did_you_mean
from async_rlhf.buffers.user_files import MissingFileError, UnfinishedImportError, import_file


def found_in(place: str, name: str, kind: str, target: str, error: type[AsyncRLHFError] = RewardError) -> Any:
    """What `name` is at the top level of `place`, a module or a file. kind, target: what errors call it.

    Raises the error for what cannot be imported, and for a name that is not there.
    """
    try:
        module = _file_module(Path(place), kind) if place.endswith(".py") else _module(place, kind, target)
    except RewardError as failed:
        raise error(str(failed)) from failed
    found = attribute(module, name)
    if found is None:
        public = [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")]
        hint = did_you_mean(name, public) if public else "it defines no function"
        raise error(f"{kind} {target!r}: no {name!r} at the top level of {place}; {hint}")
    return found


def attribute(module: ModuleType, name: str) -> Any:
    """What a dotted name leads to, None for nothing."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _module(name: str, kind: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise RewardError(f"{kind} {target!r}: importing {name} failed: {error}; install what it needs") from error
        raise RewardError(
            f"{kind} {target!r}: there is no module {error.name!r} on Python's path; "
            f"name its file instead ('path/{name.rpartition('.')[2]}.py:{target.rpartition(':')[2]}') or install it"
        ) from error
    except (Exception, SystemExit) as error:  # the module is the user's own code and may raise anything
        raise RewardError(f"{kind} {target!r}: importing {name} raised {type(error).__name__}: {error}") from error


def _file_module(path: Path, kind: str) -> ModuleType:
    try:
        return import_file(path)
    except MissingFileError as error:
        raise RewardError(f"{kind} file {error}") from error
    except UnfinishedImportError as error:
        raise RewardError(f"{error} for its {kind}s; put what starts the run under: if __name__ == '__main__':") from error
    except (Exception, SystemExit) as error:  # the file is the user's own code and may raise anything
        raise RewardError(f"importing {kind} file {path} raised {type(error).__name__}: {error}") from error
