"""A copy of the training state, taken while the next forward and backward passes run.

    owns        host memory for one copy, used again for the next; a thread while it copies
    waits for   `wait`: the end of the copy, for `_COPY_S`; whoever is about to change the tensors calls it first
    on close    nothing: a copy that nobody asks for is forgotten

So a checkpoint holds up training only as long as copying takes beyond the passes between two updates.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from async_rlhf.buffers.errors import DeadlineError

_COPY_S = 600.0


class Frozen:
    """Copies `tensors` into host memory; those that share storage share it in the copy as well."""

    def __init__(self, tensors: Mapping[str, Tensor], memory: dict[int, Tensor]) -> None:
        self._copied: dict[str, Tensor] = {}
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._copy, args=(dict(tensors), memory), name="freeze", daemon=True)
        self._thread.start()

    def wait(self) -> dict[str, Tensor]:
        """The copies by name, when they are whole. Raises DeadlineError, or what copying raised."""
        self._thread.join(_COPY_S)
        if self._thread.is_alive():
            raise DeadlineError(f"the copy of the training state was not made within {_COPY_S:.0f} s")
        if self._failure is not None:
            raise self._failure
        return self._copied

    def _copy(self, tensors: dict[str, Tensor], memory: dict[int, Tensor]) -> None:
        try:
            made: dict[tuple[int, tuple[int, ...]], Tensor] = {}
            for number, (name, tensor) in enumerate(tensors.items()):
                place = (tensor.data_ptr(), tuple(tensor.shape))
                if place not in made or not tensor.numel():
                    held = memory.get(number)
                    if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
                        held = memory[number] = torch.empty(tensor.shape, dtype=tensor.dtype)
                    made[place] = held.copy_(tensor.detach())
                self._copied[name] = made[place]
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            self._failure = error
