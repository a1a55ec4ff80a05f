"""Checkpoints that are whole or not there: temporary name, fsync, rename, then prune.

`checkpoints/step_000050/` holds `model/`, the optimizer's state and `state.json`; `checkpoints/latest` is a link to the
newest. A directory under its final name is complete, whatever was killed when: it gets that name last and loses it first.
What a killed owner left under another name is put right by the next one. `state.json` names every file with its size and
digest, so that damage done later is found before anything is loaded.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from buffers.errors import ConfigError

# Of what a checkpoint holds; a newer one than this cannot be read here.
SCHEMA = 2
_STATE = "state.json"
_NAME = re.compile(r"step_(\d{6,})")
_UNFINISHED, _REPLACED = ".tmp-", ".replaced-"


class CheckpointError(ConfigError):
    """A checkpoint that is torn, of a newer schema or of another model; starting again would end the same way."""


class Checkpoints:
    """Owns `directory`. The `keep_last` newest are kept, and those of steps that are a multiple of `keep_every` for good."""

    def __init__(self, directory: Path, keep_last: int, keep_every: int | None = None) -> None:
        self._directory, self._keep_last, self._keep_every = directory, keep_last, keep_every
        directory.mkdir(parents=True, exist_ok=True)
        for left_over in directory.glob(f"{_UNFINISHED}*"):
            _remove(left_over)
        for replaced in directory.glob(f"{_REPLACED}*"):
            final = directory / replaced.name.removeprefix(_REPLACED)
            if final.exists():
                _remove(replaced)
            else:  # killed after the old one lost the name and before the new one had it
                replaced.rename(final)

    def save(self, step: int, write: Callable[[Path], None], state: dict[str, Any]) -> Path:
        """Make a checkpoint of `step` steps durable; `write` fills the directory. Returns its final path.

        What `write` raises passes through, and all checkpoints are then as they were.
        """
        final = self._directory / f"step_{step:06d}"
        temporary = self._directory / f"{_UNFINISHED}{final.name}"
        _remove(temporary)
        temporary.mkdir()
        write(temporary)
        files = {str(path.relative_to(temporary)): _digest(path) for path in sorted(temporary.rglob("*")) if path.is_file()}
        whole = {"schema": SCHEMA, "step": step, **state, "files": files}
        (temporary / _STATE).write_text(json.dumps(whole, indent=1) + "\n")
        for path in [*temporary.rglob("*"), temporary]:
            _fsync(path)
        replaced = self._directory / f"{_REPLACED}{final.name}"
        if final.exists():  # a directory cannot take another's name in one go
            final.rename(replaced)
        temporary.rename(final)
        link = self._directory / f"{_UNFINISHED}latest"
        link.symlink_to(final.name)
        link.replace(self._directory / "latest")
        _fsync(self._directory)
        _remove(replaced)
        for old in self.all()[: -self._keep_last]:
            if self._keep_every is not None and _step(old) % self._keep_every == 0:
                continue
            _remove(old.rename(self._directory / f"{_UNFINISHED}{old.name}"))
        return final

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted((path for path in self._directory.iterdir() if _NAME.fullmatch(path.name)), key=_step)

    def latest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest checkpoint and its state, verified, or None. Raises CheckpointError."""
        found = self.all()
        return (found[-1], verified(found[-1])) if found else None


def verified(checkpoint: Path) -> dict[str, Any]:
    """The state of a checkpoint whose files are all there as they were written. Raises CheckpointError."""
    elsewhere = f"Remove {str(checkpoint)!r} to go on from the one before it"
    try:
        state: dict[str, Any] = json.loads((checkpoint / _STATE).read_text())
        schema, files = state["schema"], state["files"]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint.name} is torn: {_STATE} cannot be read ({error!r}). {elsewhere}."
        ) from error
    if schema > SCHEMA:
        raise CheckpointError(
            f"checkpoint {checkpoint.name} has schema {schema}, this version reads up to {SCHEMA}. "
            "It was written by a newer version: use that, or another run directory."
        )
    for name, expected in files.items():
        path = checkpoint / name
        found = _digest(path) if path.is_file() else None
        if found != expected:
            what = (
                "is missing" if found is None else f"has {found['bytes']} bytes of {expected['bytes']}, or others than written"
            )
            raise CheckpointError(f"checkpoint {checkpoint.name} is torn: {name} {what}. {elsewhere}.")
    return state


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def _digest(path: Path) -> dict[str, Any]:
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
            size += len(data)
    return {"bytes": size, "xxh3_128": digest.hexdigest()}


def _remove(path: Path) -> None:
    """A file, a link or a whole directory; nothing when there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
