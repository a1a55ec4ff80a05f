"""The processes that share a gradient: who they are, what they say to each other, and who is to blame when one is missing.

    owns        the process group (gloo over loopback, and nccl beside it on cuda), the file of progress counters
    waits for   every other rank, at each collective, for `timeout_s`; a follower for its next command, for `idle_timeout_s`
    woken by    the last rank to arrive, or the end of a connection
    on close    the group is left

Rank 0 leads: it alone talks to the hub, and sends each rank a command and its tensors as JSON and raw bytes; nothing is
pickled. Before each collective a rank counts one up in its slot of a file that all map, so that whoever is waited for can
be named by those who waited.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from async_rlhf.buffers.errors import AsyncRLHFError

_BUCKET = 1 << 24  # elements of one all-reduce: enough to fill the wire, little beside a model
_BLAME_S = 3.0
_MEETING_S = 300.0  # importing what a rank needs takes long on a busy machine

Tensors = Mapping[str, Tensor]


class RankLostError(AsyncRLHFError):
    """A rank of the learner ended or did not come in time; it is named. The learner begins again at its last checkpoint."""


class Ranks:
    """This process's place among `size` ranks; a single one (`Ranks()`) says and waits for nothing.

    `ended` names a rank that has ended, and how, where somebody can know.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._counters: Any = np.zeros(size, np.int64)
        self._processes: Any = np.zeros(size, np.int64)
        self._control: Any = None
        self.ended: Callable[[], str | None] = lambda: None

    @classmethod
    def join(
        cls, rank: int, size: int, directory: Path, *, timeout_s: float, idle_timeout_s: float, device: str = "cpu"
    ) -> Ranks:
        """Meet the others through files in `directory` (empty before, the same for all). Raises RankLostError."""
        ranks = cls(rank, size)
        if size == 1:
            return ranks
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # nothing of the group listens beyond this machine
        if rank == 0:
            np.zeros((2, size), np.int64).tofile(directory / "progress")
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        with ranks.named("the meeting of the ranks", counted=False):
            store = FileStore(str(directory / "meeting"), size)
            store.set(f"here-{rank}", "")
            store.wait([f"here-{each}" for each in range(size)], timedelta(seconds=_MEETING_S))
            ranks._counters, ranks._processes = np.memmap(directory / "progress", np.int64, "r+", shape=(2, size))
            ranks._processes[rank] = os.getpid()
            timeout = timedelta(seconds=timeout_s)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
            ranks._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=idle_timeout_s))
        return ranks

    @contextmanager
    def named(self, what: str, *, counted: bool = True) -> Iterator[None]:
        """Around something ranks do together: a failure of it says `what` it was and who was missing.

        Counted is what all of them do equally often.
        """
        if self.size == 1:
            yield
            return
        self._counters[self.rank] += counted
        try:
            yield
        except RuntimeError as error:  # what torch.distributed raises
            raise RankLostError(f"{what}: {self._blame()} ({str(error).splitlines()[0]})") from error

    def total(self, value: float) -> float:
        """The sum over all ranks."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.float64)
        with self.named("a sum over the ranks"):
            dist.all_reduce(tensor)
        return float(tensor)

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes its sum over all ranks, in place."""
        if self.size == 1:
            return
        with self.named("the sum of gradients"):
            for bucket in _buckets(tensors):
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.all_reduce(flat)
                for tensor, part in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
                    tensor.copy_(part.view_as(tensor))

    def gather(self, tensors: Tensors) -> list[dict[str, Tensor]] | None:
        """What every rank has, in their order, on rank 0; None on the others."""
        if self.size == 1:
            return [dict(tensors)]
        with self.named("the gathering of a report"):
            if self.rank > 0:
                self._send(0, {}, [tensors])
                return None
            return [dict(tensors), *(self._receive(rank)[1][0] for rank in range(1, self.size))]

    def command(self, header: Mapping[str, Any], parts: Sequence[Sequence[Tensors]] = ()) -> None:
        """Rank 0: tell every other what to do next, and give rank r its `parts[r]`."""
        for rank in range(1, self.size):
            with self.named(f"the command to rank {rank}", counted=False):
                self._send(rank, header, parts[rank] if parts else [])

    def commanded(self) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
        """The others: what rank 0 says next."""
        with self.named("rank 0's next command", counted=False):
            return self._receive(0)

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()

    def _send(self, to: int, header: Mapping[str, Any], parts: Sequence[Tensors]) -> None:
        shapes = [{n: [str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in part.items()} for part in parts]
        text = json.dumps({"header": header, "parts": shapes}).encode()
        body = [t.contiguous().reshape(-1).view(torch.uint8) for part in parts for t in part.values() if t.numel()]
        payload = torch.cat([torch.frombuffer(bytearray(text), dtype=torch.uint8), *body])
        dist.send(torch.tensor([len(text), len(payload)]), to, group=self._control)
        dist.send(payload, to, group=self._control)

    def _receive(self, source: int) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
        sizes = torch.zeros(2, dtype=torch.int64)
        dist.recv(sizes, source, group=self._control)
        payload = torch.empty(int(sizes[1]), dtype=torch.uint8)
        dist.recv(payload, source, group=self._control)
        start = int(sizes[0])
        said = json.loads(payload[:start].numpy().tobytes())
        parts: list[dict[str, Tensor]] = []
        for shapes in said["parts"]:
            part = {}
            for name, (kind, shape) in shapes.items():
                dtype = getattr(torch, kind)
                size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
                part[name] = payload[start : start + size].clone().view(dtype).reshape(shape)
                start += size
            parts.append(part)
        return said["header"], parts

    def _blame(self) -> str:
        """Who was missing: a rank that has ended or is stopped, else those that came to fewer collectives than others."""
        deadline = time.monotonic() + _BLAME_S
        while time.monotonic() < deadline:
            if ended := self.ended() or self._absent():
                return ended
            time.sleep(0.05)
        behind = [f"rank {rank}" for rank, count in enumerate(self._counters) if count < self._counters.max()]
        return f"{' and '.join(behind)} did not come" if behind else "a rank fell silent in the middle of it"

    def _absent(self) -> str | None:
        for rank, number in enumerate(self._processes.tolist()):
            try:
                status = psutil.Process(number).status() if number else psutil.STATUS_RUNNING
            except psutil.NoSuchProcess:
                status = psutil.STATUS_ZOMBIE
            if status == psutil.STATUS_STOPPED:
                return f"rank {rank} (process {number}) is stopped"
            if status == psutil.STATUS_ZOMBIE:
                return f"rank {rank} (process {number}) has ended"
        return None


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(each.numel() for each in bucket) + tensor.numel() > _BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
