"""Holds a process to some CPUs of its machine from its first instruction on, and sets with how many threads it computes.

A CPU's number counts those that the starting process may use itself (it may be held to some of the machine's, by `taskset` or
a container). `machine_cpus` alone translates a number back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from async_rlhf.buffers.errors import ConfigError

_THREADS = "ASYNC_RLHF_THREADS"


def can_hold() -> bool:
    """Whether this system holds processes to CPUs: Linux does, macOS does not."""
    return hasattr(os, "sched_setaffinity")


def machine_cpus(cpus: tuple[int, ...]) -> set[int]:
    """What the machine calls these CPUs. Raises ConfigError for a number beyond what this process may use, and where
    processes cannot be held to CPUs."""
    if not can_hold():
        raise ConfigError("placement.strategy: this machine cannot hold processes to CPUs (Linux can); leave it out")
    usable = sorted(os.sched_getaffinity(0))
    if beyond := [cpu for cpu in cpus if cpu >= len(usable)]:
        raise ConfigError(
            f"CPU {beyond[0]} of this machine is to be used, and the run may use {len(usable)} of it, from 0 on; let "
            f"placement.hosts say cpus = {len(usable)}, or leave it out"
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


def environment(threads: int | None, variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that set how many threads a process computes with; None: as its configuration says.

    Where parts share CPUs, not all threads of a process run at once. One that spins while it waits for another takes a CPU that
    the other needs, and a decode step takes time slices instead of milliseconds. So they sleep while they wait, unless
    OMP_WAIT_POLICY says otherwise.
    """
    if threads is None:
        return {}
    waits = variables.get("OMP_WAIT_POLICY", "PASSIVE")
    return {_THREADS: str(threads), "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": waits}


def assigned_threads(variables: Mapping[str, str] = os.environ) -> int | None:
    """As the launcher has set it for this process; None: as its configuration says."""
    found = variables.get(_THREADS)
    return None if found is None else int(found)


def as_ranges(cpus: tuple[int, ...] | None) -> str:
    """Consecutive CPUs as Linux writes them, `0-3`; `all` for None."""
    if cpus is None:
        return "all"
    return f"{cpus[0]}-{cpus[-1]}" if len(cpus) > 1 else str(cpus[0])
