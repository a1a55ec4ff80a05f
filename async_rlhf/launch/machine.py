"""This machine's resources, and how a process of it is shown some devices and held to some CPUs. Without torch.

A device's number counts what CUDA_VISIBLE_DEVICES shows to the supervisor ("3,5": device 0 is the machine's 3), or all devices
where it is not set. `visible` alone translates a number back, so that names of any form (indices, UUIDs, MIG) stay as they are.
A CPU's number counts those that the starting process may use itself (it may be held to some of the machine's, by `taskset` or
a container). `machine_cpus` alone translates a number back.
"""

from __future__ import annotations

import csv
import io
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import xxhash

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.files import content_digest
from async_rlhf.launch.placement import Host

_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
_DEADLINE_S = 20.0  # a driver that nothing keeps loaded takes seconds
_CUDA = "CUDA_VISIBLE_DEVICES"
_THREADS = "ASYNC_RLHF_THREADS"
_ROOMS = ("actors", "buffers", "launch", "learner", "run")


def this_machine(environment: Mapping[str, str] = os.environ, *, look_for_devices: bool = True) -> Host:
    """look_for_devices: False queries no driver; then there are none. Devices of several kinds count as the smallest."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = None
    with suppress(OSError, ValueError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    devices = shown_devices(environment) if look_for_devices else []
    sizes = [size for _, size in devices if size is not None]
    return Host(devices=len(devices), device_memory=min(sizes, default=None), cpus=cpus, memory=memory)


def installed() -> str:
    """Version of async-rlhf and digest of its code, which all hosts of a run must share; clones of one version may differ."""
    return f"{version('async-rlhf')} (code {sources()})"


def sources() -> str:
    """Digest of the code that processes of a run execute, 12 hexadecimal digits. A commit would not include local changes, and
    would differ where only documents differ."""
    package = Path(__file__).resolve().parents[1]
    files = sorted(path for room in _ROOMS for path in (package / room).rglob("*.py"))
    lines = "".join(f"{path.relative_to(package)} {content_digest(path)}\n" for path in files)
    return xxhash.xxh3_128_hexdigest(lines.encode())[:12]


def shown_devices(environment: Mapping[str, str] = os.environ) -> list[tuple[str, int | None]]:
    """`parse` of the driver's list; empty where there is no driver, or it does not answer in time."""
    listed = ""
    with suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(
            _QUERY, capture_output=True, text=True, check=False, timeout=_DEADLINE_S, stdin=subprocess.DEVNULL
        )
        listed = answer.stdout if answer.returncode == 0 else ""
    return parse(listed, environment.get(_CUDA))


def parse(listed: str, shown: str | None) -> list[tuple[str, int | None]]:
    """Name and bytes of each device that is shown, in that order; bytes None where the driver does not list it (MIG).

    listed: index, uuid, name, MiB as CSV. shown: CUDA_VISIBLE_DEVICES; as with CUDA, devices after an unknown one are hidden.
    """
    rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(listed)) if len(row) == 4]
    known = {index: (name, int(mib) << 20 if mib.isdigit() else None) for index, _, name, mib in rows}
    if shown is None:
        return list(known.values())
    by_uuid = {uuid: known[index] for index, uuid, _, _ in rows}
    devices: list[tuple[str, int | None]] = []
    for word in _words(shown):
        if re.fullmatch(r"\d+", word):
            if word not in known:
                break
            devices.append(known[word])
        elif rows and word.startswith(("GPU-", "MIG-")):
            # a UUID may be cut short where it stays the only one
            devices.append(next((device for uuid, device in by_uuid.items() if uuid.startswith(word)), ("", None)))
        else:
            break
    return devices


def visible(devices: tuple[int, ...] | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables by which a process sees these accelerators of its machine and no other: as 0, 1, ... in this order.

    environment: of the process that starts it. None: no variable, it sees what this one sees. Raises ConfigError for a number
    beyond what is shown.
    """
    if devices is None:
        return {}
    names = [str(device) for device in devices]
    if (shown := environment.get(_CUDA)) is not None:
        words = _words(shown)
        if beyond := [device for device in devices if device >= len(words)]:
            raise ConfigError(
                f"the run needs device {beyond[0]} of this machine, but {_CUDA} = {shown!r} shows {len(words)} devices (from "
                "0); unset it, or set fewer devices in [placement]"
            )
        names = [words[device] for device in devices]
    return {_CUDA: ",".join(names)}


def _words(shown: str) -> list[str]:
    return [word.strip() for word in shown.split(",") if word.strip()]


def machine_cpus(cpus: tuple[int, ...]) -> set[int]:
    """The machine's numbers of these CPUs. Raises ConfigError for a number beyond those that this process may use, and where
    processes cannot be held to CPUs."""
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(
            "placement.strategy: this machine cannot hold processes to CPUs (Linux can, macOS cannot); leave it out"
        )
    usable = sorted(os.sched_getaffinity(0))
    if beyond := [cpu for cpu in cpus if cpu >= len(usable)]:
        raise ConfigError(
            f"the run needs CPU {beyond[0]} of this machine, but may use only {len(usable)} (from 0); set cpus = {len(usable)} "
            "in placement.hosts, or leave it out"
        )
    return {usable[cpu] for cpu in cpus}


@contextmanager
def held_to(cpus: tuple[int, ...] | None) -> Iterator[None]:
    """Processes that this thread starts meanwhile may use these CPUs only; None: as it may itself. No other thread is held.

    Raises ConfigError as `machine_cpus`.
    """
    if cpus is None:
        yield
        return
    wanted, before = machine_cpus(cpus), os.sched_getaffinity(0)  # on Linux, of this thread
    os.sched_setaffinity(0, wanted)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def with_threads(threads: int | None, variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that set how many threads a process computes with; None: those of its configuration.

    Where parts share CPUs, not all threads of a process run at once. One that spins while it waits for another takes a CPU that
    the other needs, and a decode step takes time slices instead of milliseconds. So they sleep while they wait, unless
    OMP_WAIT_POLICY says otherwise.
    """
    if threads is None:
        return {}
    waits = variables.get("OMP_WAIT_POLICY", "PASSIVE")
    return {_THREADS: str(threads), "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": waits}


def assigned_threads(variables: Mapping[str, str] = os.environ) -> int | None:
    """The threads that the launcher has set for this process; None: those of its configuration."""
    found = variables.get(_THREADS)
    return None if found is None else int(found)
