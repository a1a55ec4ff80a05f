"""Groups of the device channel that fail, hang or deliver wrong bytes at a chosen call, over real ones by gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from async_rlhf.buffers.device.group import GlooGroup

MAKE, LENGTH, HEAD, BUCKET = -1, 0, 1, 2
"""A group is made; of each set the length of its head, the head, and the buckets are broadcast, the second as BUCKET + 1."""


@dataclass
class Fault:
    """Makes groups that have it (a `MakeGroup`), at one of the calls.

    waits: the call is begun, and it is the wait for it that fails. hangs: instead of failing. aborts: an abort ends that; else
    it hangs as well. spoil: nothing fails, but this is done to what came; it is given that, and what came there before.
    """

    at: int
    waits: bool = False
    hangs: bool = False
    aborts: bool = True
    spoil: Callable[[Tensor, Tensor], object] | None = None
    over: threading.Event = field(default_factory=threading.Event)
    num_met: int = 0
    _before: Tensor | None = None

    def __call__(self, *arguments: Any) -> FaultyGroup:
        if self.at == MAKE:
            self.meet(self.over)
        return FaultyGroup(self, *arguments)

    def meet(self, released: threading.Event) -> None:
        self.num_met += 1
        if self.hangs:
            released.wait()
        raise RuntimeError("an injected fault")

    def come(self, tensor: Tensor) -> None:
        if self.spoil is not None:
            came = tensor.clone()
            self.spoil(tensor, torch.zeros_like(came) if self._before is None else self._before)
            self.num_met, self._before = self.num_met + 1, came


class FaultyGroup:
    """Its buckets pass through buffers, as those of a group on a device do."""

    device = torch.device("cpu")

    def __init__(self, fault: Fault, *arguments: Any) -> None:
        self.fault, self._group, self._call = fault, GlooGroup(*arguments), 0
        self.released = threading.Event() if fault.aborts else fault.over

    def broadcast(self, tensor: Tensor) -> Any:
        self._call = LENGTH if tensor.dtype == torch.int64 else self._call + 1
        has_it = self._call == self.fault.at
        if has_it and not self.fault.waits and self.fault.spoil is None:
            self.fault.meet(self.released)
        return FaultyWork(self, tensor, has_it)

    def abort(self) -> None:
        if not self.fault.aborts:
            self.fault.over.wait()
        self.released.set()


class FaultyWork:
    def __init__(self, group: FaultyGroup, tensor: Tensor, has_it: bool) -> None:
        self._work, self._fault, self._released = group._group.broadcast(tensor), group.fault, group.released
        self._tensor, self._has_it = tensor, has_it

    def wait(self) -> None:
        if self._has_it and self._fault.waits:
            self._fault.meet(self._released)
        self._work.wait()
        if self._has_it:
            self._fault.come(self._tensor)
