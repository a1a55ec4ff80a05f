"""Measures of a run at a moment: memory, descriptors and threads of each of its processes, files and bytes of its directory.

A process is named by its role. Processes that a role starts (reward workers) are counted with it, as `ROLE's processes`, all in
one. Memory is what ends with the process (USS): pages that it shares with others would count several times.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from async_rlhf.buffers.interpreter import python
from async_rlhf.launch.program import role_of

MIB = 1 << 20
GROWING = ("metrics.jsonl", "data", "changes.jsonl", "evaluations.jsonl", "quarantine.jsonl")
"""Parts of a run directory that keep everything by design: a line a step, a row, a change, an evaluation."""
MEASURES = {"memory": "MiB", "descriptors": "", "threads": "", "disk": "MiB", "files": "", "processes": ""}
"""The measures, and the unit of each."""


@contextmanager
def command(arguments: list[str], output: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A command of this program; killed at the end of the block, and what it has started ends with it."""
    words = python("-m", "async_rlhf", *arguments)
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@dataclass(frozen=True)
class Census:
    """The processes of a run that goes on, seen from beside it. roots: pids by name, of the supervisor and what else is
    watched."""

    roots: Mapping[str, int]

    def role(self, name: str) -> psutil.Process | None:
        """The process of this role, when it lives."""
        return next((process for process, role in self._living() if role == name), None)

    def measure(self) -> list[tuple[str, int, dict[str, float]]]:
        """Name, pid and measures of each process that lives."""
        found = []
        for process, name in self._living():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied), process.oneshot():  # it may just have ended
                memory = process.memory_full_info().uss / MIB
                held = {"memory": memory, "descriptors": process.num_fds(), "threads": process.num_threads()}
                found.append((name, process.pid, held))
        return found

    def _living(self) -> Iterator[tuple[psutil.Process, str]]:
        for name, pid in self.roots.items():
            with suppress(psutil.NoSuchProcess):
                root = psutil.Process(pid)
                yield root, name
                for child in root.children():
                    with suppress(psutil.NoSuchProcess):
                        if child.status() == psutil.STATUS_ZOMBIE:
                            continue
                        role = role_of(child.cmdline())
                        yield child, role or f"{name}'s processes"
                        for below in child.children(recursive=True):
                            yield below, f"{role or name}'s processes"


def sizes(directory: Path) -> tuple[dict[str, int], Counter[str]]:
    """Bytes and files of a run directory, by its parts; files that end meanwhile are left out."""
    num_bytes, files = Counter[str](), Counter[str]()
    for folder, _, names in os.walk(directory):
        for path in (Path(folder, name) for name in names):
            part = path.relative_to(directory).parts[0].removesuffix(".1")
            with suppress(FileNotFoundError):
                num_bytes[part] += path.lstat().st_size
                files[part] += 1
    return num_bytes, files


def rotated(directory: Path) -> set[tuple[str, int, int]]:
    """The files that now lie beside one that began anew; each is another one than the one before it."""
    found = set()
    for path in (*directory.glob("*.1"), *directory.glob("*/*.1")):
        with suppress(FileNotFoundError):
            stat = path.stat()
            found.add((path.name, stat.st_ino, stat.st_mtime_ns))
    return found
