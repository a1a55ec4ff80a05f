"""Checkpoints that are whole or not there: temporary name, fsync, rename, then prune.

`checkpoints/step_000050/` holds `model/`, the optimizer's state and `state.json`; `checkpoints/latest` is a link to the
newest, `checkpoints/best` one to the best that was evaluated (`evaluated`). Both are for other programs: a disk may have no
links (a cloud drive, exFAT), and what they lead to is found without them. A directory under its final name is complete,
whatever was killed when: it gets that name last and loses it first. What a killed owner left under another name is put right
by the next one. `state.json` names every file with its size and digest, so that damage done later is found before anything is
loaded. Which one a run goes on from: `resuming`.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from async_rlhf.buffers.errors import ConfigError, DamagedError
from async_rlhf.buffers.files import DISK, content_digest

# Format of a checkpoint; newer ones cannot be read here.
SCHEMA = 2
_log = logging.getLogger(__name__)
_STATE = "state.json"
_NAME = re.compile(r"step_(\d{6,})")
_UNFINISHED, _ASIDE = ".tmp-", ".aside-"


class CheckpointError(ConfigError):
    """A checkpoint of a newer schema or another model, or one that cannot be written; starting again would end the same way."""


class Checkpoints:
    """Owns `directory`. The `keep_last` newest are kept, those of steps that are a multiple of `keep_every` for good, and those
    whose steps are `needed` at the moment. What was set aside is removed with the next `save`.
    """

    def __init__(
        self,
        directory: Path,
        keep_last: int,
        keep_every: int | None = None,
        needed: Callable[[], Callable[[int], bool]] = lambda: lambda step: False,
    ) -> None:
        self._directory, self._keep_last, self._keep_every, self._needed = directory, keep_last, keep_every, needed
        self._has_links = True
        directory.mkdir(parents=True, exist_ok=True)
        for left_over in directory.glob(f"{_UNFINISHED}*"):
            _remove(left_over)
        self._link()

    def save(self, step: int, write: Callable[[Path], None], state: dict[str, Any]) -> Path:
        """Make a checkpoint of `step` steps durable; `write` fills the directory. Returns its final path.

        Errors of `write` pass through, and all checkpoints are then as they were.
        """
        final = self._directory / f"step_{step:06d}"
        temporary = self._directory / f"{_UNFINISHED}{final.name}"
        _remove(temporary)
        try:
            _write(temporary, write, {"schema": SCHEMA, "step": step, **state})
            if final.exists():  # no step is saved twice, but for one that is made again from an older checkpoint
                self.set_aside(step - 1)
            temporary.rename(final)
        finally:
            _remove(temporary)  # half a checkpoint would keep a full disk full
        self._link()
        DISK.sync_path(self._directory)
        for old in self._directory.glob(f"{_ASIDE}*"):
            _remove(old)
        is_needed = self._needed()
        for old in self.all()[: -self._keep_last]:
            if is_needed(step_of(old)) or (self._keep_every is not None and step_of(old) % self._keep_every == 0):
                continue
            _remove(old.rename(self._directory / f"{_UNFINISHED}{old.name}"))
        return final

    def keep(self, last: int, every: int | None) -> None:
        """Set other values of `keep_last` and `keep_every`, from the next `save` on."""
        self._keep_last, self._keep_every = last, every

    def set_aside(self, after: int) -> None:
        """Hide the checkpoints of more than `after` steps until another is saved; the newest that is left is `latest`."""
        for newer in reversed(self.all()):  # the newest first: after a kill in between, the rest is a valid past of the run
            if step_of(newer) > after:
                aside = self._directory / f"{_ASIDE}{newer.name}"
                _remove(aside)
                newer.rename(aside)
        self._link()
        DISK.sync_path(self._directory)

    @property
    def floor(self) -> int:
        """The step of the oldest of the `keep_last` newest; 0, the start of the run, while there are fewer."""
        kept = self.all()[-self._keep_last :]
        return step_of(kept[0]) if len(kept) == self._keep_last else 0

    @property
    def newest(self) -> int:
        """The step of the newest; 0, the start of the run, when there is none."""
        return max(map(step_of, self.all()), default=0)

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return complete(self._directory)

    def _link(self) -> None:
        """Link `latest` to the newest checkpoint; without one remove the link."""
        paths = self.all()
        try:
            lead(self._directory / "latest", paths[-1].name if paths else None)
        except OSError as error:
            if self._has_links:
                _log.warning("checkpoints/latest is no link here (%s); async-rlhf finds what it names without", error.strerror)
            self._has_links = False


def lead(link: Path, target: str | None) -> None:
    """Atomically make a link to its neighbour of this name; None removes the link.

    Raises OSError where there can be none, also on a disk without links; nothing has its name then.
    """
    if target is None:
        _remove(link)
    elif not link.is_symlink() or link.readlink() != Path(target):
        new = link.with_name(f".new-{link.name}")
        try:
            _remove(new)
            new.symlink_to(target)
            if not link.is_symlink():
                _remove(link)  # a copy of the run may have a copied checkpoint in place of the link
            new.replace(link)
        except OSError:
            _remove(link)  # it leads to another, which may be removed
            raise


def complete(directory: Path) -> list[Path]:
    """The checkpoints in a directory that have their final names, oldest first."""
    found = directory.iterdir() if directory.is_dir() else ()
    return sorted((path for path in found if _NAME.fullmatch(path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def verified(checkpoint: Path, *, contents: bool = True) -> dict[str, Any]:
    """The state of a checkpoint whose files are all there as they were written; without `contents` by their sizes alone.

    Raises DamagedError, and CheckpointError for one of a newer schema.
    """
    try:
        state: dict[str, Any] = json.loads((checkpoint / _STATE).read_text())
        schema, files = state["schema"], state["files"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise DamagedError(f"checkpoint {checkpoint.name} is torn: {_STATE} cannot be read ({error!r})") from error
    if schema > SCHEMA:
        raise CheckpointError(
            f"checkpoint {checkpoint.name} has schema {schema}, this version reads up to {SCHEMA}. "
            "It was written by a newer version: use that, or another run directory."
        )
    for name, expected in files.items():
        path = checkpoint / name
        if not path.is_file():
            raise DamagedError(f"checkpoint {checkpoint.name} is torn: {name} is missing")
        if (size := path.stat().st_size) != expected["bytes"]:
            raise DamagedError(f"checkpoint {checkpoint.name} is torn: {name} has {size} bytes of {expected['bytes']}")
        if contents and _digest(path) != expected:
            raise DamagedError(f"checkpoint {checkpoint.name} is torn: {name} has other bytes than were written")
    return state


def _write(directory: Path, write: Callable[[Path], None], state: dict[str, Any]) -> None:
    """All of a checkpoint, durable under this name."""
    directory.mkdir()
    write(directory)
    files = {str(path.relative_to(directory)): _digest(path) for path in sorted(directory.rglob("*")) if path.is_file()}
    (directory / _STATE).write_text(json.dumps({**state, "files": files}, indent=1) + "\n")
    for path in [*directory.rglob("*"), directory]:
        if path.is_file():  # safetensors gives its files to this user alone, whatever the umask
            with suppress(PermissionError):  # a disk without modes
                path.chmod(directory.stat().st_mode & 0o666)
        DISK.sync_path(path)


def _digest(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "xxh3_128": content_digest(path)}


def _remove(path: Path) -> None:
    """Remove a file, a link or a whole directory, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
