"""A disk in memory that loses, tears and fills up: `async_rlhf.buffers.files.Disk` for the simulated hub.

Model. A crash keeps of every file what was synced, and of what was appended since any pages, in any order: those that were
not written are zeros, and where the file ends is open. Of the names made, replaced and removed since their directory was
synced it keeps any prefix, in order, and a rename is one step (as a file system with a metadata log does). A full disk takes
part of a write and refuses the rest.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from async_rlhf.buffers.files import Disk, File

_PAGE_BYTES, _LOST_PAGES = 128, 0.4


class HubKilledError(BaseException):
    """The fuse burnt down in the middle of a disk operation."""


@dataclass(eq=False)
class Node:
    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""


class MemoryFile:
    """An open file of a `MemoryDisk`."""

    def __init__(self, disk: MemoryDisk, node: Node) -> None:
        self._disk, self.node = disk, node

    def write(self, data: bytes | memoryview, /) -> int:
        part = self._disk.room(len(data))
        self.node.data += data[:part]
        self._disk.spend("write")
        self._disk.refuse_when_full()
        return len(data)

    def flush(self) -> None:
        pass

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        pass


class MemoryDisk(Disk):
    """See the module docstring. `fuse`: disk operations until the hub is killed in one, or None."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.full = False
        self.fuse: int | None = None
        self._names: dict[Path, Node] = {}
        self._durable: dict[Path, Node] = {}
        self._pending: list[dict[Path, Node | None]] = []

    # -- faults ------------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """The machine stopped: what was not durable is lost in part."""
        keep = self._rng.randint(0, len(self._pending))
        for changes in self._pending[:keep]:
            self._set(self._durable, changes)
        self._pending.clear()
        for node in self._durable.values():
            node.data = self._survivor(node)
            node.durable = bytes(node.data)
        self._names = dict(self._durable)
        self.fuse = None

    def _survivor(self, node: Node) -> bytearray:
        if not node.data.startswith(node.durable):
            return node.data if self._rng.random() < 0.5 else bytearray(node.durable)
        ends = len(node.data) if self._rng.random() < 0.8 else self._rng.randint(len(node.durable), len(node.data))
        kept = node.data[:ends]
        begin = len(node.durable)
        while begin < len(kept):  # pages need not begin where a round does
            end = min(len(kept), begin + self._rng.randint(1, 2 * _PAGE_BYTES))
            if self._rng.random() < _LOST_PAGES:
                kept[begin:end] = bytes(end - begin)
            begin = end
        return kept

    def room(self, wanted: int) -> int:
        return self._rng.randint(0, wanted) if self.full or self.fuse == 0 else wanted

    def refuse_when_full(self) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "no space left on the simulated device")

    def spend(self, operation: str) -> None:
        if self.fuse is not None:
            if self.fuse == 0:
                self.fuse = None
                raise HubKilledError(operation)
            self.fuse -= 1

    # -- files -------------------------------------------------------------------------------------------------------

    def make(self, directory: Path) -> None:
        pass

    def names(self, directory: Path) -> list[str]:
        return [path.name for path in self._names if path.parent == directory]

    def is_readable(self, path: Path) -> bool:
        return path in self._names

    def lock(self, path: Path) -> File:
        return MemoryFile(self, Node())

    def create(self, path: Path, private: bool = False) -> File:
        return MemoryFile(self, self._link(path, Node()))

    def append(self, path: Path) -> File:
        return MemoryFile(self, self._names[path] if path in self._names else self._link(path, Node()))

    def reader(self, path: Path) -> File:
        return MemoryFile(self, self._node(path))

    def read_at(self, file: File, length: int, offset: int) -> bytes:
        assert isinstance(file, MemoryFile)
        return bytes(file.node.data[offset : offset + length])

    def read(self, path: Path) -> bytes:
        return bytes(self._node(path).data)

    def size(self, path: Path) -> int:
        return len(self._node(path).data)

    def sync(self, file: File) -> None:
        assert isinstance(file, MemoryFile)
        self.spend("sync")
        self.refuse_when_full()
        file.node.durable = bytes(file.node.data)

    def sync_path(self, path: Path) -> None:
        self.spend("sync_path")
        if path in self._names:
            self._names[path].durable = bytes(self._names[path].data)
            return
        for changes in self._pending:
            if path in [name.parent for name in changes]:
                self._set(self._durable, changes)
        self._pending = [changes for changes in self._pending if path not in [name.parent for name in changes]]

    def truncate(self, path: Path, size: int) -> None:
        self.spend("truncate")
        del self._node(path).data[size:]

    def replace(self, path: Path, new: Path) -> None:
        self.spend("replace")
        self._note({new: self._node(path), path: None})

    def deposit(self, path: Path, data: bytes) -> None:
        """By a producer, who has no part in the faults: written beside, durable, renamed in."""
        (fuse, full), (self.fuse, self.full) = (self.fuse, self.full), (None, False)
        temporary = path.with_name(f".{path.name}")
        file = self.create(temporary)
        file.write(data)
        self.sync(file)
        self.replace(temporary, path)
        self.sync_path(path.parent)
        self.fuse, self.full = fuse, full

    def unlink(self, path: Path) -> None:
        self.spend("unlink")
        if path in self._names:
            self._note({path: None})

    def unlink_all(self, paths: Sequence[Path]) -> None:
        for path in paths:
            self.unlink(path)

    def _link(self, path: Path, node: Node) -> Node:
        self.spend("create")
        self.refuse_when_full()
        self._note({path: node})
        return node

    def _note(self, changes: dict[Path, Node | None]) -> None:
        self._set(self._names, changes)
        self._pending.append(changes)

    def _node(self, path: Path) -> Node:
        if path not in self._names:
            raise FileNotFoundError(errno.ENOENT, "no such simulated file", str(path))
        return self._names[path]

    @staticmethod
    def _set(names: dict[Path, Node], changes: dict[Path, Node | None]) -> None:
        for path, node in changes.items():
            if node is None:
                names.pop(path, None)
            else:
                names[path] = node
