"""Checkpoints in the background: a thread writes the training state while training goes on.

    owns        the thread that writes; of a device's state one copy in host memory, used again for the next, and the thread
                that makes it
    waits for   the copy of a device's state, for `_COPY_S`, before weights change; the attempt before, for `_WRITE_S`, when
                another begins or the run ends
    woken by    the end of the thread
    on close    nothing: who needs the last checkpoint durable calls `wait`

What lies in host memory is written where it lies (`Lent`): only what is not written when weights are about to change is copied.
What lies on a device is copied during the next forward and backward passes (`begin_copy`). What cannot be written (a full disk)
is counted and logged; the checkpoints before it stay, and the next that is due is tried.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor

from async_rlhf.buffers.errors import DeadlineError
from async_rlhf.learner.checkpoint.store import Checkpoints

_log = logging.getLogger(__name__)
_COPY_S, _WRITE_S = 600.0, 3600.0
T = TypeVar("T")


def _result(future: Future[T], within_s: float, what: str) -> T:
    try:
        return future.result(within_s)
    except TimeoutError as error:
        raise DeadlineError(f"{what} within {within_s:.0f} s") from error


class Lent:
    """Tensors in host memory that a thread writes while their owner goes on to read them.

    `live` are those that will change, `held` what the thread has: others on the same memory.
    """

    def __init__(self, live: Iterable[Tensor], held: Iterable[Tensor]) -> None:
        self._live, self._unwritten = list(live), {tensor.data_ptr() for tensor in held}

    def is_written(self, tensors: Iterable[Tensor]) -> None:
        self._unwritten.difference_update([tensor.data_ptr() for tensor in tensors])

    def take_back(self) -> None:
        """The live ones may change after this: those that are not written move to new memory, the old stays with the thread."""
        for tensor in self._live:
            if tensor.data_ptr() in self._unwritten:
                tensor.data = tensor.data.clone()


def begin_copy(tensors: Mapping[str, Tensor], memory: dict[int, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """Begin to copy into reused host memory, in a thread; tensors that share storage share it in the copy as well.
    What comes back waits for the copies, by name. Raises DeadlineError, or what copying raised."""
    copying = ThreadPoolExecutor(1, "freeze").submit(_copied, dict(tensors), memory)
    return lambda: _result(copying, _COPY_S, "the copy of the training state was not made")


def _copied(tensors: Mapping[str, Tensor], memory: dict[int, Tensor]) -> dict[str, Tensor]:
    made: dict[tuple[int, tuple[int, ...]], Tensor] = {}
    copied = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        place = (tensor.data_ptr(), tuple(tensor.shape))
        if place not in made or not tensor.numel():
            held = memory.get(number)
            if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
                held = memory[number] = torch.empty(tensor.shape, dtype=tensor.dtype)
            made[place] = held.copy_(tensor.detach())
        copied[name] = made[place]
    return copied


class CheckpointWriter:
    """See the module docstring."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._attempt: Future[None] | None = None
        self.durable = checkpoints.newest
        """Step of the newest checkpoint, 0 when there is none."""
        self.floor = checkpoints.floor
        """Step of the oldest checkpoint kept for resuming; groups trained on before it are no longer needed."""
        self.failed = 0
        """Checkpoints that could not be written."""
        self.reason = ""
        """Why the last attempt failed; empty when it did not."""
        self.seconds = 0.0
        """Duration of the last attempt."""

    def begin(self, step: int, write: Callable[[Path], None], state: dict[str, Any]) -> None:
        """Start to write the checkpoint of `step` steps; waits for the attempt before, if that is not over."""
        self.wait()
        self._attempt = ThreadPoolExecutor(1, "checkpoint").submit(self._save, step, write, state)

    def wait(self) -> None:
        """Return when no write is under way. Raises DeadlineError, and every error that is not the disk's."""
        if self._attempt is not None:
            _result(self._attempt, _WRITE_S, "a checkpoint was not written")

    def _save(self, step: int, write: Callable[[Path], None], state: dict[str, Any]) -> None:
        began = time.monotonic()
        try:
            self._checkpoints.save(step, write, state)
        except (OSError, SafetensorError) as error:
            self.failed += 1
            self.reason = f"the checkpoint of step {step} could not be written: {error}"
            _log.error("%s; the one before it stays", self.reason)
        else:
            self.durable, self.floor, self.reason = step, self._checkpoints.floor, ""
        self.seconds = time.monotonic() - began
