"""Checkpoints that are whole or not there: temporary name, fsync, rename, then prune.

`checkpoints/step_000050/` holds `model/`, the optimizer's state and `state.json`; `checkpoints/latest` is a link to the
newest. A directory under its final name is complete, whatever was killed when: it gets that name last and loses it first.
What a killed owner left under another name is put right by the next one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NAME = re.compile(r"step_(\d{6,})")
_UNFINISHED, _REPLACED = ".tmp-", ".replaced-"


class Checkpoints:
    """Owns `directory`. `keep_last` newest are kept."""

    def __init__(self, directory: Path, keep_last: int) -> None:
        self._directory, self._keep_last = directory, keep_last
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
        (temporary / "state.json").write_text(json.dumps({"step": step, **state}, indent=1) + "\n")
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
            _remove(old.rename(self._directory / f"{_UNFINISHED}{old.name}"))
        return final

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        names = {path: _NAME.fullmatch(path.name) for path in self._directory.iterdir()}
        steps = {path: int(name[1]) for path, name in names.items() if name}
        return sorted(steps, key=steps.__getitem__)

    def latest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest complete checkpoint and its state, or None."""
        found = self.all()
        if not found:
            return None
        state: dict[str, Any] = json.loads((found[-1] / "state.json").read_text())
        return found[-1], state


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
