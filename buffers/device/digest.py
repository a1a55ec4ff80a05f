"""A digest that is computed where weights lie: integer arithmetic alone, so that every device gives the same number.

The bytes of a tensor are words w_1 to w_n of 64 bits, little-endian and signed; the last one is filled up with zero bytes. Of L
bytes, modulo 2^64:

    D1 = L r^n + sum of w_i r^(n - i)             r = 0x5851f42d4c957f2d
    D2 = L s^n + sum of (w_i >> 32) s^(n - i)     s = 0xd1342543de82ef95     >> keeps the sign

and the digest is D1 and D2, 16 hexadecimal digits each. Both r and s are 5 modulo 8, so that r^k - 1 is divisible by 2 as often
as k is, and twice more. Hence it is certain that

    another value of one word changes D1, because r^(n - i) is odd;
    two different words that change places change D1 where their low halves differ, else D2, as long as a tensor has fewer than
    2^31 words: the difference of two halves is divisible by 2 at most 31 times. D1 alone would see of the highest bits no more
    than how many there are.

Any other change is found but for a chance of about 2^-64. It is no defence against bytes that are chosen to that end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from async_rlhf.buffers.protocol.message import TensorSpec
from async_rlhf.buffers.tensors import num_bytes

R, S = 0x5851F42D4C957F2D, 0xD1342543DE82EF95
_WORD_BYTES = 8
_MODULUS = 1 << 64
_COLUMNS = 2048  # words that one row of a product folds
_PIECE_BYTES = 1 << 21  # taken at a time, so that intermediate results stay in a processor's cache


class SetDigest:
    """The digests of a set's tensors, taken while its bytes come: `flat`, uint8 [n] on any device, are all of them in the order
    of `specs`. specs: with the digests of the tensors that have come whole."""

    def __init__(self, specs: Sequence[TensorSpec], flat: Tensor) -> None:
        self._flat, self._coming = flat, iter(specs)
        self.specs: list[TensorSpec] = []
        self._start = self._done = self._end = 0
        self._values = [0, 0]
        self._begin()
        self.advance(0)

    def advance(self, front: int) -> None:
        """The first `front` bytes have come."""
        while self._spec is not None:
            stop = min(self._end, front)
            if stop < self._end:
                stop -= (stop - self._start) % _WORD_BYTES
            for piece in torch.split(self._flat[self._done : max(self._done, stop)], _PIECE_BYTES):
                self._add(_words(piece))
            self._done = max(self._done, stop)
            if self._done < self._end:
                return
            digest = "".join(f"{value:016x}" for value in self._values)
            self.specs.append(self._spec.model_copy(update={"digest": digest}))
            self._begin()

    def _begin(self) -> None:
        """Set the next tensor's range of bytes, the bytes taken of it and its two partial digests."""
        self._spec = next(self._coming, None)
        self._start = self._done = self._end
        if self._spec is not None:
            length = num_bytes(self._spec.dtype, self._spec.shape)
            self._end, self._values = self._start + length, [length, length]

    def _add(self, words: Tensor) -> None:
        for index, (base, each) in enumerate(((R, words), (S, words >> 32))):
            self._values[index] = (self._values[index] * pow(base, len(each), _MODULUS) + _fold(each, base)) % _MODULUS


def _words(piece: Tensor) -> Tensor:
    """int64 [n]: the bytes of uint8 [m], and zeros behind them."""
    if piece.numel() % _WORD_BYTES:
        piece = F.pad(piece, (0, -piece.numel() % _WORD_BYTES))
    elif piece.storage_offset() % _WORD_BYTES or piece.data_ptr() % _WORD_BYTES:
        piece = piece.clone()  # a tensor may begin anywhere in its set
    return piece.view(torch.int64)


def _fold(words: Tensor, base: int) -> int:
    """The sum of w_i base^(n - i) of int64 [n], modulo 2^64: row by row, and then in the same way of what the rows gave."""
    value, rest = 0, words.numel() % _COLUMNS
    if rest:
        value = int((words[:rest] * _powers(base, words.device)[-rest:]).sum()) % _MODULUS
    if len(words) > rest:
        rows = words[rest:].view(-1, _COLUMNS)
        value = value * pow(base, rows.numel(), _MODULUS)
        value += _fold((rows * _powers(base, words.device)).sum(1), pow(base, _COLUMNS, _MODULUS))
    return value % _MODULUS


@lru_cache(maxsize=64)
def _powers(base: int, device: torch.device) -> Tensor:
    """int64 [columns]: base^(columns - 1) to base^0, modulo 2^64."""
    powers, value = [0] * _COLUMNS, 1
    for column in reversed(range(_COLUMNS)):
        powers[column] = value - _MODULUS if value >> 63 else value
        value = value * base % _MODULUS
    return torch.tensor(powers, dtype=torch.int64, device=device)
