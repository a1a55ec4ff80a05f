"""The processes that share a gradient: their devices, their messages, and the name of a missing one.

    owns        the process group (gloo, and nccl beside it on cuda), the store in which ranks find each other: rank 0 serves it
    waits for   every other rank, at each collective, command and report, for `timeout_s`; a worker rank for its next command,
                for `idle_timeout_s`
    woken by    the last rank to arrive, or the end of a connection
    on close    the group is left

Rank 0 controls: it alone talks to the hub, and sends each rank a command and its tensors as JSON and raw bytes; nothing is
pickled. Each rank counts its collectives. One that fails leaves its count in the store, so that those who waited can name the
rank that did not come; which process has ended the supervisor reports.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError

_BUCKET = 1 << 24  # elements of one all-reduce: enough to fill the wire, little beside a model
_BLAME_S = 3.0
_LEAVE = timedelta(seconds=15)

Tensors = Mapping[str, Tensor]


def take_device(name: str, rank: int = 0) -> torch.device:
    """The device of this rank, from now on the one that libraries mean by "cuda". Raises ConfigError when it cannot be used.

    `cuda` gives every rank its own: by its number among those that its process may see, which may be that one alone.
    """
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", rank % max(1, torch.cuda.device_count()))
        torch.empty(0, device=device)  # its error names the missing part
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for each new shape, and lengths of texts vary
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"learner.device = {name!r} cannot be used: {error}; use 'cpu'") from error
    return device


def communication(name: str, interface: str = "lo") -> str:
    """The backend of a process group whose ranks compute on `name`, as `init_process_group` takes it.

    Sets what gloo and nccl read from the environment: this rank listens on this network interface of its machine alone, and one
    whose collective fails or takes too long on the device is ended by nccl (SIGABRT) rather than left with what it has half
    summed.
    """
    # "=" for nccl: exactly this one, and not all whose names begin so
    names = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    os.environ |= {**names, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    return "cpu:gloo,cuda:nccl" if torch.device(name).type == "cuda" else "gloo"


class RankLostError(AsyncRLHFError):
    """A rank of the learner ended or did not come in time; it is named. The learner begins again at its last checkpoint."""


class Ranks:
    """This process's place among `size` ranks; a single one (`Ranks()`) sends nothing and waits for nothing."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._count = 0
        self._store: Any = None
        self._control: Any = None
        self._timeout = self._idle = timedelta(0)

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        meeting: str,
        *,
        timeout_s: float,
        idle_timeout_s: float,
        device: str = "cpu",
        interface: str = "lo",
    ) -> Ranks:
        """Meet the others. meeting: IP:PORT of rank 0, free before. interface: of this machine, by which it reaches rank 0.

        They are waited for as for a command: a host may be sent the model first. Raises RankLostError.
        """
        ranks = cls(rank, size)
        if size == 1:
            return ranks
        take_device(device, rank)  # before the group: nccl binds it to the device that is current
        with ranks.named("the meeting of the ranks", counted=False):
            timeout, idle = ranks._timeout, ranks._idle = timedelta(seconds=timeout_s), timedelta(seconds=idle_timeout_s)
            ranks._store = _store(rank, size, meeting, idle)
            ranks._await_all("here", idle)
            backend = communication(device, interface)
            dist.init_process_group(backend, store=ranks._store, rank=rank, world_size=size, timeout=timeout)
            ranks._control = dist.new_group(backend="gloo", timeout=idle)
        return ranks

    @contextmanager
    def named(self, what: str, *, counted: bool = True) -> Iterator[None]:
        """Around a collective operation: an error says `what` it was and which ranks are missing. counted: all ranks do it
        equally often."""
        if self.size == 1:
            yield
            return
        self._count += counted
        try:
            yield
        except RuntimeError as error:  # raised by torch.distributed
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
            for bucket in buckets(tensors, _BUCKET):
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.all_reduce(flat)
                for tensor, part in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
                    tensor.copy_(part.view_as(tensor))

    def gather(self, tensors: Tensors) -> list[dict[str, Tensor]] | None:
        """Every rank's tensors, in the order of ranks, on rank 0; None on the others."""
        if self.size == 1:
            return [dict(tensors)]
        with self.named("the gathering of a report"):
            if self.rank > 0:
                self._send(0, {}, [tensors])
                return None
            return [dict(tensors), *(self._receive(rank)[1][0] for rank in range(1, self.size))]

    def shared(self, read: Callable[[], Tensors]) -> dict[str, Tensor]:
        """The tensors that `read` gives on rank 0, on every rank's CPU."""
        tensors = {name: tensor.contiguous() for name, tensor in read().items()} if self.rank == 0 else {}
        with self.named("the sharing out of what was read"):
            for rank in range(1, self.size if self.rank == 0 else 1):
                self._send(rank, {"shapes": _shapes(tensors)}, [])
            if self.rank > 0:
                shapes = self._receive(0)[0]["shapes"]
                tensors = {name: torch.empty(shape, dtype=getattr(torch, kind)) for name, (kind, shape) in shapes.items()}
            for tensor in tensors.values() if self.size > 1 else ():
                if tensor.numel():
                    dist.broadcast(tensor.reshape(-1).view(torch.uint8), 0)
        return tensors

    def command(self, header: Mapping[str, Any], parts: Sequence[Sequence[Tensors]] = ()) -> None:
        """Rank 0: send every worker rank its next command, and give rank r its `parts[r]`."""
        for rank in range(1, self.size):
            with self.named(f"the command to rank {rank}", counted=False):
                self._send(rank, header, parts[rank] if parts else [])

    def commanded(self) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
        """Worker ranks: rank 0's next command."""
        with self.named("rank 0's next command", counted=False):
            return self._receive(0, self._idle)

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()
            with suppress(RuntimeError):  # nothing depends on the others any more
                self._await_all("gone", _LEAVE)  # else rank 0 takes the store from those that still need it

    def _send(self, to: int, header: Mapping[str, Any], parts: Sequence[Tensors]) -> None:
        text = json.dumps({"header": header, "parts": [_shapes(part) for part in parts]}).encode()
        body = [t.contiguous().reshape(-1).view(torch.uint8) for part in parts for t in part.values() if t.numel()]
        payload = torch.cat([torch.frombuffer(bytearray(text), dtype=torch.uint8), *body])
        for tensor in (torch.tensor([len(text), len(payload)]), payload):
            _finish(dist.isend(tensor, to, group=self._control), self._timeout)

    def _receive(self, source: int, timeout: timedelta | None = None) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
        """timeout: for the beginning; the rest comes in the time of any collective."""
        sizes = torch.zeros(2, dtype=torch.int64)
        _finish(dist.irecv(sizes, source, group=self._control), timeout or self._timeout)
        payload = torch.empty(int(sizes[1]), dtype=torch.uint8)
        _finish(dist.irecv(payload, source, group=self._control), self._timeout)
        text, body = torch.split(payload, [int(sizes[0]), len(payload) - int(sizes[0])])
        message = json.loads(text.numpy().tobytes())
        named = [(name, getattr(torch, kind), shape) for part in message["parts"] for name, (kind, shape) in part.items()]
        pieces = iter(torch.split(body, [math.prod(shape) * dtype.itemsize for _, dtype, shape in named]))
        tensors = (piece.clone().view(dtype).reshape(shape) for (_, dtype, shape), piece in zip(named, pieces, strict=True))
        return message["header"], [{name: next(tensors) for name in part} for part in message["parts"]]

    def _await_all(self, word: str, timeout: timedelta) -> None:
        """Leave a word in the store, and wait until all ranks have. Raises RuntimeError."""
        self._store.set(f"{word}-{self.rank}", "")
        self._store.wait([f"{word}-{rank}" for rank in range(self.size)], timeout)

    def _blame(self) -> str:
        """The ranks that came to fewer collectives, by the counts that failing ranks leave."""
        if self._store is None:
            return "rank 0 did not come"
        counts, deadline = {self.rank: self._count}, time.monotonic() + _BLAME_S
        try:
            self._store.set(f"count-{self.rank}", str(self._count))
            while len(counts) < self.size and time.monotonic() < deadline:
                time.sleep(0.05)
                left = [rank for rank in range(self.size) if rank not in counts and self._store.check([f"count-{rank}"])]
                counts |= {rank: int(self._store.get(f"count-{rank}")) for rank in left}
        except RuntimeError:
            return "rank 0 has ended"
        behind = [f"rank {rank}" for rank in range(self.size) if counts.get(rank, -1) < max(counts.values())]
        return f"{' and '.join(behind)} did not come" if behind else "a rank fell silent in the middle of it"


def _store(rank: int, size: int, meeting: str, timeout: timedelta) -> TCPStore:
    """Rank 0 listens on this address alone. Raises RankLostError when it cannot, RuntimeError when it does not."""
    host, _, port = meeting.rpartition(":")
    try:
        listening = socket.create_server((host, int(port))).detach() if rank == 0 else None
    except OSError as error:
        raise RankLostError(f"rank 0 cannot be met at {meeting}: {error}") from error
    return TCPStore(
        host,
        int(port),
        size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening,
    )


def _finish(work: dist.Work | None, timeout: timedelta) -> None:
    """Raises RuntimeError when the other rank takes longer."""
    assert work is not None  # it is for ranks outside the group alone
    work.wait(timeout)


def _shapes(tensors: Tensors) -> dict[str, list[Any]]:
    return {name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()}


T = TypeVar("T", bound=Tensor)


def buckets(tensors: Iterable[T], most: int) -> Iterator[list[T]]:
    """Tensors in order, in buckets of at most `most` elements in all (on all ranks), and at least one tensor."""
    bucket, held = list[T](), 0
    for tensor in tensors:
        size = int(getattr(tensor, "ds_numel", tensor.numel()))
        if bucket and held + size > most:
            yield bucket
            bucket, held = [], 0
        bucket.append(tensor)
        held += size
    if bucket:
        yield bucket
