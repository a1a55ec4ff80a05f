"""The processes of one epoch as a group of their own, and a process's seat in it: what torch.distributed does for the device
channel. Learner and engines are in no other group together; that of the learner's ranks (`learner.step.ranks`) is not touched.

    owns        a seat: one thread, and the group, which that thread alone makes, uses and ends; the learner also the store in
                which the processes of an epoch find each other, on loopback
    waits for   the thread: what it is to do next, then the other processes of the epoch
    woken by    `do`, `leave`, the last process to arrive, the end of a connection
    on close    `leave` returns at once; the thread ends when it is within no collective any more

A collective cannot be relied on to end. Measured with gloo of torch 2.13 over loopback, with a time-out of T seconds:

    a process is killed or stopped before it has joined   the others wait for T, and where one of them gave up, 2 s more
    is killed in the group, idle or within a broadcast    every other one that is in a collective fails within 0.4 s
    is stopped there                                      every other one that waits for it fails after T, from each tensor on
    the group is dropped while nothing is under way       0.01 s

T is gloo's and begins anew with each tensor; nccl, which was not run, may hang at any call. So what waits for a seat has a
deadline of its own, and then leaves it: what is under way is aborted, in a thread that is not waited for. Both threads are
daemons, and they alone hold references to the group: what destroys one waits for its collectives.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

_log = logging.getLogger(__name__)
_LOOPBACK = "127.0.0.1"
_NCCL = {
    "NCCL_SOCKET_IFNAME": "=lo",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""A failure is an error in the thread that waits, where torch would else end the process. Read when a group is made: those of
the learner's ranks are made by then, with other values."""
LEARNER = 0
"""Its rank."""

Order = TypeVar("Order")
Result = TypeVar("Result")


def open_store(timeout_s: float) -> tuple[Store, str]:
    """A store in which processes find each other, served by this process on loopback, and its IP:PORT."""
    listening = socket.create_server((_LOOPBACK, 0))  # a store left to itself would listen on every address
    port, timeout = listening.getsockname()[1], timedelta(seconds=timeout_s)
    store = TCPStore(
        _LOOPBACK, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    return store, f"{_LOOPBACK}:{port}"


def reach_store(address: str, timeout_s: float) -> Store:
    """The store that another process serves there. Raises RuntimeError when none answers in time."""
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


class DeviceGroup(Protocol):
    """The processes of an epoch. device: where what is broadcast must lie; None: in any memory of the host."""

    device: torch.device | None

    def broadcast(self, tensor: Tensor, /) -> dist.Work:
        """The learner's goes to all; begun here, and done when it has been waited for."""
        ...

    def abort(self) -> None:
        """End what is under way, if that can be done. Called by another thread; may itself not return."""
        ...


MakeGroup = Callable[[Store, str, int, int, float], DeviceGroup]
"""store, name, rank, size, timeout_s: made when all `size` processes have come. It and every operation raise RuntimeError when
another process has ended or does nothing for `timeout_s`."""


class GlooGroup:
    """Over loopback, from and into host memory. A broadcast fails by itself after `timeout_s`."""

    device: torch.device | None = None

    def __init__(self, store: Store, name: str, rank: int, size: int, timeout_s: float) -> None:
        make: Any = ProcessGroupGloo  # its stub knows neither the options nor this form
        options = make._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        options._timeout = timedelta(seconds=timeout_s)
        self._group = make(PrefixStore(name, store), rank, size, options)

    def broadcast(self, tensor: Tensor) -> dist.Work:
        return _broadcast(self._group, tensor)

    def abort(self) -> None: ...


class NcclGroup:
    """Between the first devices of the processes, which must be different ones. Never run: made after torch's sources.

    Made by the thread that uses it: what that thread computes has a stream of its own, so that a broadcast that hangs holds up
    nothing else on the device.
    """

    def __init__(self, store: Store, name: str, rank: int, size: int, timeout_s: float) -> None:
        from torch._C._distributed_c10d import ProcessGroupNCCL  # builds for CPUs have none

        self.device: torch.device | None = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        store, timeout = PrefixStore(name, store), timedelta(seconds=timeout_s)
        store.set(f"here-{rank}", "")  # nccl waits without end for a process that does not come
        store.wait([f"here-{each}" for each in range(size)], timeout)
        os.environ |= _NCCL
        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        self._group = ProcessGroupNCCL(store, rank, size, options)

    def broadcast(self, tensor: Tensor) -> dist.Work:
        return _broadcast(self._group, tensor)

    def abort(self) -> None:
        self._group.abort()


def group_on(device: str) -> MakeGroup:
    """What serves processes that compute on this kind of device."""
    return NcclGroup if device == "cuda" else GlooGroup


def _broadcast(group: Any, tensor: Tensor) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = LEARNER, 0
    return group.broadcast([tensor], options)  # type: ignore[no-any-return]


class EpochSeat(Generic[Order, Result]):
    """This process's part in one epoch. work: gives the result of each order, one after the other, in a thread of its own.

    done: called by that thread with each result; with None when the group could not be made, or fails, and then no more.
    """

    def __init__(
        self,
        make: Callable[[], DeviceGroup],
        work: Callable[[DeviceGroup, Order], Result],
        done: Callable[[Result | None], None],
    ) -> None:
        self._make, self._work, self._done = make, work, done
        self._orders: SimpleQueue[Order | None] = SimpleQueue()
        self._left = threading.Event()
        self._busy: DeviceGroup | None = None
        threading.Thread(target=self._run, name="device-channel", daemon=True).start()

    def do(self, order: Order) -> None:
        self._orders.put(order)

    def leave(self) -> None:
        """Nothing more is done, and `done` is not called any more."""
        self._left.set()
        self._orders.put(None)
        if self._busy is not None:
            threading.Thread(target=self._abort, name="device-channel-abort", daemon=True).start()

    def _abort(self) -> None:
        try:
            if (group := self._busy) is not None:
                group.abort()
        except Exception as error:  # noqa: BLE001 (as below)
            _log.warning("the device channel cannot be aborted: %s", str(error).partition("\n")[0])

    def _run(self) -> None:
        try:
            group = self._make()
            for order in iter(self._orders.get, None):
                self._busy = group
                if self._left.is_set():
                    break
                result = self._work(group, order)
                self._busy = None
                self._deliver(result)
                del order, result  # whole sets, which are not kept until the next comes
        except Exception as error:  # noqa: BLE001 (whatever torch.distributed raises: the epoch is over for this process)
            _log.warning("the device channel: %s", str(error).partition("\n")[0])
            self._deliver(None)
        finally:
            self._busy = None

    def _deliver(self, result: Result | None) -> None:
        if not self._left.is_set():
            self._done(result)
