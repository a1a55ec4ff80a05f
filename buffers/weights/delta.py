"""Lossless differences between two weight sets of the same tensors: only elements whose bits changed, compressed.

A set is cut into blocks of elements of one width. Of each block travel a bitmap of the changed elements and, for each of
them, the difference of the bit patterns taken as integers modulo 2^bits, zigzag coded (0, -1, 1, -2 -> 0, 1, 2, 3) and
split into byte planes. One unit in the last place is then a 1 or a 2 in the lowest plane and 0 in the others, whatever the
number; and NaN payloads, infinities and -0.0 are bit patterns like any other. Both parts are compressed with Zstandard.
Nothing here is trusted: what does not decode to exactly the expected sizes raises WeightsError, and whether the result is
the wanted set is decided by its digests (`assembly`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import zstandard

from async_rlhf.buffers.errors import WeightsError
from async_rlhf.buffers.protocol.message import TensorSpec
from async_rlhf.buffers.tensors import ITEM_BYTES, num_bytes

BLOCK_BYTES = 1 << 20
_HEAD = struct.Struct("<II")  # bytes of the bitmap, bytes of the values; both 0 when nothing changed
_UNCHANGED = _HEAD.pack(0, 0)
# Level 1: zlib's level 1 made larger deltas of real versions at a third of the speed.
_LEVEL = 1

Words = npt.NDArray[np.unsignedinteger]


def encode(old: memoryview, new: memoryview, specs: Sequence[TensorSpec], limit: int) -> bytes | None:
    """The delta from `old` to `new`, two sets of the same tensors; None when it has `limit` bytes or more."""
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    parts, size = [], 0
    for start, end, width in _blocks(specs):
        parts.append(_encode_block(_words(old, start, end, width), _words(new, start, end, width), compressor))
        size += len(parts[-1])
        if size >= limit:
            return None
    return b"".join(parts)


def decode(delta: memoryview, specs: Sequence[TensorSpec]) -> Iterator[tuple[int, int, int, memoryview]]:
    """(start, end, width, encoded block) for each block in order. Raises WeightsError."""
    at = 0
    for start, end, width in _blocks(specs):
        if at + _HEAD.size > len(delta):
            raise WeightsError("a delta ends too early")
        size = _HEAD.size + sum(_HEAD.unpack_from(delta, at))
        yield start, end, width, delta[at : at + size]
        at += size
    if at != len(delta):
        raise WeightsError(f"a delta of {len(delta)} bytes should have {at}")


def patch(old: memoryview, block: memoryview, width: int) -> memoryview:
    """The block of the set that `decode` gave `block` for, made of the `old` one. Raises WeightsError."""
    num_bitmap, num_values = _HEAD.unpack_from(block)
    if not num_bitmap:
        if num_values:
            raise WeightsError("a delta has values for elements that did not change")
        return old
    count = len(old) // width
    bitmap = np.frombuffer(_decompress(block[_HEAD.size : _HEAD.size + num_bitmap], -(-count // 8)), np.uint8)
    changed = np.flatnonzero(np.unpackbits(bitmap, count=count).view(np.bool_))
    planes = np.frombuffer(_decompress(block[_HEAD.size + num_bitmap :], len(changed) * width), np.uint8)
    coded = np.ascontiguousarray(planes.reshape(width, -1).T).view(f"<u{width}").reshape(-1)
    new = np.frombuffer(old, f"<u{width}").copy()
    new[changed] += (coded >> 1) ^ (~(coded & 1) + 1)  # two's complement, whatever the width
    return memoryview(new.view(np.uint8).data)


def _encode_block(old: Words, new: Words, compressor: zstandard.ZstdCompressor) -> bytes:
    differs = old != new
    changed = np.flatnonzero(differs)
    if not len(changed):
        return _UNCHANGED
    width = new.dtype.itemsize
    difference = (new[changed] - old[changed]).view(f"<i{width}")
    coded = (difference << 1) ^ (difference >> (8 * width - 1))
    planes = np.ascontiguousarray(coded.view(np.uint8).reshape(-1, width).T)
    bitmap, values = compressor.compress(np.packbits(differs).data), compressor.compress(planes.data)
    return _HEAD.pack(len(bitmap), len(values)) + bitmap + values


def _decompress(data: memoryview, num_bytes: int) -> bytes:
    """Exactly `num_bytes` bytes; the size is checked before any memory is taken."""
    try:
        if zstandard.frame_content_size(data) != num_bytes:
            raise WeightsError(f"a delta has a part of another size than the {num_bytes} bytes it should have")
        unpacked = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WeightsError(f"a delta is damaged: {error}") from error
    if len(unpacked) != num_bytes:
        raise WeightsError(f"a delta has a part of {len(unpacked)} bytes that should have {num_bytes}")
    return unpacked


def _blocks(specs: Sequence[TensorSpec]) -> Iterator[tuple[int, int, int]]:
    """(start, end, bytes of an element): neighbouring tensors of one width are cut into blocks as if they were one."""
    runs: list[list[int]] = []
    end = 0
    for spec in specs:
        start, end, width = end, end + num_bytes(spec.dtype, spec.shape), ITEM_BYTES[spec.dtype]
        if runs and runs[-1][2] == width:
            runs[-1][1] = end
        else:
            runs.append([start, end, width])
    for first, last, width in runs:
        for start in range(first, last, BLOCK_BYTES):
            yield start, min(start + BLOCK_BYTES, last), width


def _words(data: memoryview, start: int, end: int, width: int) -> Words:
    return np.frombuffer(data[start:end], f"<u{width}")
