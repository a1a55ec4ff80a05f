"""The files of an agent: contents by digest, kept for later runs, and a private directory for each agent and each of its nodes.

    DIRECTORY/contents/<digest>      read-only; written once, under a temporary name until their digest has been checked
    DIRECTORY/agent-XXXXXXXX/<node>  what a node is given: links to contents, or to where the host has the same (copies on a
                                     disk without links), and its own small files with mode 0600
    DIRECTORY/agent-XXXXXXXX/.sockets  where the sockets of its nodes are (`sockets`: paths of sockets must be short)

An agent holds a lock on its own directories and removes them at its end; what a killed one left is removed by the next. Nothing
else is written outside DIRECTORY, whatever an order names (`orders.RelativeName`). Contents may be deleted at any time.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from functools import lru_cache
from pathlib import Path

import xxhash
from huggingface_hub.constants import HF_HUB_CACHE

from async_rlhf.buffers.errors import WireError
from async_rlhf.buffers.files import content_digest, lock_directory
from async_rlhf.launch.orders import HUB_CACHE, MAX_FILES
from async_rlhf.launch.sockets import remove_left, socket_directory

_PREFIX, _SOCKETS = "agent-", ".sockets"


def known_digest(path: Path) -> str:
    """`content_digest`, computed once for a file that does not change. Raises OSError."""
    found = path.stat()
    return _known(path, found.st_size, found.st_mtime_ns)


@lru_cache(MAX_FILES)
def _known(path: Path, size: int, changed: int) -> str:
    return content_digest(path)


def place_elsewhere(path: Path) -> str:
    """Where another host may have the same file: at the same path, or in its own Hub cache, in which paths name the commit. Of
    code nowhere, for that finds its neighbours in its own folder."""
    if path.suffix == ".py":
        return ""
    path = path.absolute()
    return f"{HUB_CACHE}/{path.relative_to(HF_HUB_CACHE)}" if path.is_relative_to(HF_HUB_CACHE) else str(path)


class Depot:
    """Raises OSError as the disk does."""

    def __init__(self, directory: str) -> None:
        root = Path(directory).expanduser().absolute()
        self._contents = root / "contents"
        self._contents.mkdir(parents=True, exist_ok=True, mode=0o700)
        _remove_left(root)
        new = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=root))
        self._lock = lock_directory(new)
        self.own = new.rename(root / new.name[1:])  # no other agent that starts here finds it without its lock
        self._closing = ExitStack()
        self.sockets = self._closing.enter_context(socket_directory())
        (self.own / _SOCKETS).write_text(str(self.sockets))
        self._arriving: dict[str, xxhash.xxh3_128] = {}
        self._elsewhere: dict[str, Path] = {}

    def missing(self, places: Mapping[str, str]) -> list[str]:
        """The contents that are neither kept here nor at their places on this host; those at their places are used there."""
        missing = []
        for digest, place in places.items():
            path = Path(place.replace(HUB_CACHE, HF_HUB_CACHE))
            self._elsewhere.pop(digest, None)
            if not (self._contents / digest).is_file():
                if self._is_at(path, digest):
                    self._elsewhere[digest] = path
                else:
                    missing.append(digest)
        return missing

    def add(self, name: str, data: bytes, *, last: bool) -> None:
        """Append to the content that will have this digest. Raises WireError when, with the last bytes, it has another."""
        temporary, so_far = self.own / f".{name}", self._arriving.setdefault(name, xxhash.xxh3_128())
        with temporary.open("ab") as file:
            file.write(data)
        so_far.update(data)
        if not last:
            return
        del self._arriving[name]
        if (digest := so_far.hexdigest()) != name:
            temporary.unlink()
            raise WireError(f"a content came with digest {digest} instead of {name}", "digest")
        with suppress(PermissionError):  # a disk without modes
            temporary.chmod(0o444)
        temporary.replace(self._contents / name)

    def lay_out(self, node: str, files: Mapping[str, str], inline: Mapping[str, bytes]) -> Path:
        """Make the directory of a node anew, without the files of an earlier life."""
        directory = self.own / node
        shutil.rmtree(directory, ignore_errors=True)
        for name, content in files.items():
            path = _made(directory / name)
            link, there = (
                (os.symlink, self._elsewhere[content]) if content in self._elsewhere else (os.link, self._contents / content)
            )
            try:
                link(there, path)
            except OSError:  # a disk without links
                shutil.copyfile(there, path)
        for name, data in inline.items():
            path = _made(directory / name)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
        return directory

    @staticmethod
    def _is_at(path: Path, digest: str) -> bool:
        with suppress(OSError):
            return path.is_absolute() and known_digest(path) == digest
        return False

    def close(self) -> None:
        self._closing.close()
        shutil.rmtree(self.own, ignore_errors=True)
        self._lock.close()


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def _remove_left(root: Path) -> None:
    """The directories of agents that were killed: nothing holds their locks."""
    for path in root.glob(f"{_PREFIX}*"):
        with suppress(OSError), closing(lock_directory(path)):
            with suppress(OSError):
                remove_left(Path((path / _SOCKETS).read_text()))
            shutil.rmtree(path)
