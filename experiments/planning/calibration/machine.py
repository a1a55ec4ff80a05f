"""`async-rlhf try machine`: what this machine reaches at best, measured, as the device of a spec."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.model.stages import Device


def measure(device: str, dtype: str, threads: int, seconds: float) -> Device:
    """By a large matrix product, a copy of memory that no cache holds, and one from the host to the device, which stands for
    the links to other devices and nodes, too: where there are others, put their figures in its place.

    device: of torch. seconds: for each of the three, three repetitions at least. Raises ConfigError for a device that cannot be
    used.
    """
    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device = {device!r} cannot be used: {error}; use 'cpu'") from error
    torch.set_num_threads(threads)
    on_cpu = where.type == "cpu"
    width, size = (1024, 256 << 20) if on_cpu else (8192, 2 << 30)
    square = torch.ones(width, width, dtype=getattr(torch, dtype), device=where)
    product = torch.empty_like(square)
    source = torch.ones(size, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    flops = 2 * width**3 / _best_s(lambda: torch.mm(square, square, out=product), where, seconds)
    copied = 2 * size / _best_s(lambda: target.copy_(source), where, seconds)
    if on_cpu:
        import psutil

        memory_bytes, moved = psutil.virtual_memory().total, copied
    else:
        host = torch.ones(size // 8, dtype=torch.uint8, pin_memory=True)
        moved = size // 8 / _best_s(lambda: target[: size // 8].copy_(host), where, seconds)
        memory_bytes = torch.cuda.get_device_properties(where).total_memory
    return Device(
        peak_flops=flops,
        memory_bytes=float(memory_bytes),
        memory_bytes_per_s=copied,
        link_bytes_per_s=moved,
        network_bytes_per_s=moved,
        host_bytes_per_s=moved,
        is_cpu=on_cpu,
    )


def _best_s(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The least time of one of its repetitions."""
    best, began = float("inf"), time.perf_counter()
    count = 0
    while count < 3 or time.perf_counter() - began < seconds:
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best, count = min(best, time.perf_counter() - started), count + 1
    return best
