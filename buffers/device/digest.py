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
    """The digests of a set's tensors, taken while its bytes come, in the order of `specs`. specs: with the digests of the
    tensors that have come whole."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._coming = iter(specs)
        self.specs: list[TensorSpec] = []
        self._begin()

    def add(self, data: Tensor) -> None:
        """uint8 [n] on any device: the bytes that come next, which may change afterwards."""
        while len(data) and self._spec is not None:
            part, data = data[: self._left], data[self._left :]
            self._left -= len(part)
            self._take(part)
            if not self._left:
                self._end(self._spec)
                self._begin()

    def _begin(self) -> None:
        """Set of the next tensor that has bytes the two partial digests, how many are to come, and those of a word begun."""
        self._begun: Tensor | None = None
        while (spec := next(self._coming, None)) is not None:
            self._left = num_bytes(spec.dtype, spec.shape)
            self._values = [self._left, self._left]
            if self._left:
                break
            self._end(spec)
        self._spec = spec

    def _end(self, spec: TensorSpec) -> None:
        digest = "".join(f"{value:016x}" for value in self._values)
        self.specs.append(spec.model_copy(update={"digest": digest}))

    def _take(self, part: Tensor) -> None:
        """The next bytes of the tensor; a word that they do not end is taken with those that follow."""
        if self._begun is not None:
            missing = _WORD_BYTES - len(self._begun)
            self._begun, part = torch.cat((self._begun, part[:missing])), part[missing:]
            if len(self._begun) < _WORD_BYTES and self._left:
                return
            self._add(_words(self._begun))
            self._begun = None
        whole = len(part) - len(part) % _WORD_BYTES if self._left else len(part)
        for piece in torch.split(part[:whole], _PIECE_BYTES):
            self._add(_words(piece))
        if whole < len(part):
            self._begun = part[whole:].clone()

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
