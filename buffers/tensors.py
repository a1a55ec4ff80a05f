"""A tensor as bytes: what travels in a weight set, without torch on this floor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from async_rlhf.buffers.errors import WeightsError

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}


@dataclass(frozen=True)
class FilePart:
    """Bytes from `offset` on of files that lie one behind the other, and that other processes of this machine can open, as long
    as `owner` is kept."""

    paths: tuple[str, ...]
    offset: int
    owner: object


@dataclass(frozen=True)
class RawTensor:
    """Row-major little-endian bytes with a torch dtype name; `len(data)` is checked against dtype and shape."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview
    part: FilePart | None = field(default=None, compare=False, repr=False)
    """The place of the same bytes for other processes, if they have one."""

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise WeightsError(f"dtype {self.dtype!r} cannot travel; known: {', '.join(ITEM_BYTES)}")
        wanted = num_bytes(self.dtype, self.shape)
        if wanted != len(self.data):
            raise WeightsError(f"{self.dtype} {self.shape} needs {wanted} bytes, got {len(self.data)}")


def num_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Size of such a tensor; `dtype` is one of `ITEM_BYTES`."""
    return math.prod(shape) * ITEM_BYTES[dtype]
