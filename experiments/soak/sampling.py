"""What a run holds at a moment: memory, descriptors and threads of each of its processes, files and bytes of its directory.

A process is named by its role. Processes that a role starts (reward workers) are counted with it, as `ROLE's processes`, all in
one. Memory is what ends with the process (USS): pages that it shares with others would count several times.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from async_rlhf.launch.program import role_of

MIB = 1 << 20
GROWING = ("metrics.jsonl", "data", "changes.jsonl", "evaluations.jsonl", "quarantine.jsonl")
"""Parts of a run directory that keep everything by design: a line a step, a row, a change, an evaluation."""
MEASURES = {"memory": "MiB", "descriptors": "", "threads": "", "disk": "MiB", "files": "", "processes": ""}
"""What is measured, and its unit."""


@dataclass
class Census:
    """The processes of a run that goes on, seen from beside it. roots: pids by name, of the supervisor and what else is
    watched."""

    roots: Mapping[str, int]
    _known: dict[int, tuple[psutil.Process, str]] = field(default_factory=dict)

    def role(self, name: str) -> psutil.Process | None:
        """The process of this role, when it lives."""
        self._look()
        return next((process for process, role in self._known.values() if role == name), None)

    def measure(self) -> list[tuple[str, int, dict[str, float]]]:
        """Name, pid and measures of each process that lives."""
        self._look()
        found = []
        for pid, (process, name) in self._known.items():
            try:
                with process.oneshot():
                    memory = process.memory_full_info().uss / MIB
                    threads, descriptors = process.num_threads(), process.num_fds()
            except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has just ended
                continue
            found.append((name, pid, {"memory": memory, "descriptors": descriptors, "threads": threads}))
        return found

    def _look(self) -> None:
        living: dict[int, tuple[psutil.Process, str]] = {}
        for name, pid in self.roots.items():
            try:
                root = self._process(pid)
                living[pid] = (root, name)
                children = root.children()
            except psutil.NoSuchProcess:
                continue
            for child in children:
                self._add(child, self._name(child, name), living)
        self._known = living

    def _process(self, pid: int) -> psutil.Process:
        return self._known[pid][0] if pid in self._known else psutil.Process(pid)

    def _add(self, process: psutil.Process, name: str, living: dict[int, tuple[psutil.Process, str]]) -> None:
        """With all below it."""
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return
            living[process.pid] = (process, name)
            below = name if name.endswith("'s processes") else f"{name}'s processes"
            for child in process.children():
                self._add(child, below, living)
        except psutil.NoSuchProcess:
            pass

    def _name(self, process: psutil.Process, parent: str) -> str:
        try:
            line = process.cmdline()
        except psutil.NoSuchProcess:
            line = []
        return role_of(line) or f"{parent}'s processes"


def sizes(directory: Path) -> tuple[dict[str, int], Counter[str]]:
    """Bytes and files of a run directory, by its parts; files that end meanwhile are left out."""
    num_bytes: dict[str, int] = {}
    files: Counter[str] = Counter()
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder, name)
            part = path.relative_to(directory).parts[0].removesuffix(".1")
            try:
                num_bytes[part] = num_bytes.get(part, 0) + path.lstat().st_size
            except FileNotFoundError:
                continue
            files[part] += 1
    return num_bytes, files


def rotated(directory: Path) -> set[tuple[str, int, int]]:
    """The files that now lie beside one that began anew; each is another one than the one before it."""
    found = set()
    for path in (*directory.glob("*.1"), *directory.glob("*/*.1")):
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue
        found.add((path.name, stat.st_ino, stat.st_mtime_ns))
    return found
