"""Raw gloo, beside which the device channel is measured: one broadcast between two processes, into memory that is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch

from async_rlhf.buffers.device.group import Group, open_store, reach_store
from async_rlhf.experiments.throughput.harness import talking, timed
from async_rlhf.experiments.throughput.weight_roles import DEADLINE_S


@contextmanager
def raw_broadcast(num_bytes: int) -> Iterator[Callable[[], float]]:
    """Seconds of a broadcast to this process."""
    with talking(_send, num_bytes) as pipe:
        flat = torch.ones(num_bytes, dtype=torch.uint8)
        group = Group(reach_store(pipe.recv(), DEADLINE_S), "raw", 1, 2, DEADLINE_S)

        def receive() -> None:
            pipe.send("go")
            group.broadcast(flat).wait()

        yield timed(receive)


def _send(num_bytes: int, pipe: Connection) -> None:
    flat, (store, address) = torch.ones(num_bytes, dtype=torch.uint8), open_store(DEADLINE_S)
    pipe.send(address)
    group = Group(store, "raw", 0, 2, DEADLINE_S)
    while True:
        pipe.recv()
        group.broadcast(flat).wait()
