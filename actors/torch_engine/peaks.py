"""What a device reaches at best, measured: a large matrix product, and a copy of memory that no cache holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from async_rlhf.actors.config import EngineConfig


@dataclass(frozen=True)
class Peaks:
    """flops: of a product in the engine's dtype, a second. memory_bytes_per_s: read and written by a copy. host_bytes_per_s:
    from the host's memory to the device; on a CPU that of its own."""

    flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    host_bytes_per_s: float


def measure_peaks(config: EngineConfig, seconds: float) -> Peaks:
    """With the engine's device, dtype and threads. seconds: for each of the three, a third time at least."""
    torch.set_num_threads(config.threads)
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    on_cpu = device.type == "cpu"
    width, size = (1024, 256 << 20) if on_cpu else (8192, 2 << 30)
    square = torch.ones(width, width, dtype=dtype, device=device)
    product = torch.empty_like(square)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    flops = 2 * width**3 / _best_s(lambda: torch.mm(square, square, out=product), device, seconds)
    copied = 2 * size / _best_s(lambda: target.copy_(source), device, seconds)
    if on_cpu:
        import psutil

        return Peaks(flops, float(psutil.virtual_memory().total), copied, copied)
    host = torch.ones(size // 8, dtype=torch.uint8, pin_memory=True)
    moved = size // 8 / _best_s(lambda: target[: size // 8].copy_(host), device, seconds)
    return Peaks(flops, float(torch.cuda.get_device_properties(device).total_memory), copied, moved)


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
