"""Raw gloo, beside which the device channel is measured: one broadcast between two processes, into memory that is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from time import perf_counter

import torch

from async_rlhf.buffers.device.group import Group, open_store, reach_store
from async_rlhf.experiments.throughput.harness import talking
from async_rlhf.experiments.throughput.weight_roles import DEADLINE_S

_NAME = "raw"


class RawBroadcast:
    """The receiving end, in this process."""

    def __init__(self, num_bytes: int, pipe: Connection) -> None:
        self._pipe, self._flat = pipe, torch.ones(num_bytes, dtype=torch.uint8)
        self._group = Group(reach_store(pipe.recv(), DEADLINE_S), _NAME, 1, 2, DEADLINE_S)

    @classmethod
    @contextmanager
    def of(cls, num_bytes: int) -> Iterator[RawBroadcast]:
        with talking(_send, num_bytes) as pipe:
            yield cls(num_bytes, pipe)

    def seconds(self) -> float:
        self._pipe.send("go")
        began = perf_counter()
        self._group.broadcast(self._flat).wait()
        return perf_counter() - began


def _send(num_bytes: int, pipe: Connection) -> None:
    flat = torch.ones(num_bytes, dtype=torch.uint8)
    store, address = open_store(DEADLINE_S)
    pipe.send(address)
    group = Group(store, _NAME, 0, 2, DEADLINE_S)
    while True:
        pipe.recv()
        group.broadcast(flat).wait()
