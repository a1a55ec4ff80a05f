"""How a weight set gets into vLLM's worker processes: they map the sealed memory in which it lies, on this machine once.

What travels through vLLM's own calls is the path of an index (JSON): of each tensor its type and shape, and in which files, one
behind the other, its bytes begin where. A set that lies on this process's heap (it came as chunks) is copied into a file in
memory first.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO

import torch

from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.buffers.weights.addresses import lay

# The class of `worker` that takes them in there, and the variable that names the process which those processes may not outlive.
EXTENSION = "async_rlhf.actors.vllm_engine.worker.WeightLoader"
ACTOR_PID = "ASYNC_RLHF_ACTOR_PID"


@contextmanager
def as_index(tensors: Mapping[str, RawTensor]) -> Iterator[str]:
    """The path of the index, for processes of this user, until the end of the block."""
    # Files in memory without a name: nothing is left of them when the actor is killed.
    with _memory_file() as index, _memory_file() as heap:
        entries = {}
        for name, tensor in tensors.items():
            place = ([_path(heap)], heap.tell()) if tensor.part is None else (tensor.part.paths, tensor.part.offset)
            if tensor.part is None:
                heap.write(tensor.data)
            entries[name] = (tensor.dtype, tensor.shape, *place)
        heap.flush()
        index.write(json.dumps(entries).encode())
        index.flush()
        yield _path(index)


class IndexedWeights(Mapping[str, torch.Tensor]):
    """The tensors of an index, in its order: views of memory that is mapped, which nothing done to them changes for others."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            self._entries = json.load(file)
        self._mapped = {paths: lay(paths) for paths in {tuple(entry[2]) for entry in self._entries.values()}}

    def __getitem__(self, name: str) -> torch.Tensor:
        type_name, shape, paths, start = self._entries[name]
        dtype, count = getattr(torch, type_name), math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._mapped[tuple(paths)], dtype=dtype, count=count, offset=start).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _memory_file() -> IO[bytes]:
    return os.fdopen(os.memfd_create("weights"), "wb")


def _path(file: IO[bytes]) -> str:
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"
