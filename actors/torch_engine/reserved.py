"""`RowCache` of a processor: rows grow without copying, and a long one costs its own columns and no other's.

The buffers have as many columns as the longest request may need, but only address space is taken for them: memory comes page by
page as columns are written, and goes when a row ends, but for that of its first columns. So the page table of the system is the
table of blocks, and each row stays one piece for the products that read it.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence

import torch

from async_rlhf.actors.torch_engine.cache import COLUMNS_STEP, RowCache
from async_rlhf.actors.torch_engine.chunks import PaddedChunks
from async_rlhf.actors.torch_engine.scheduler import Size
from async_rlhf.buffers.errors import EngineError

# Columns that a row keeps when it ends: to give back and take so few again costs more than they do.
_KEPT_COLUMNS = 128
# Of Linux, where Python 3.11 does not name it: address space that no swap is set aside for.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class Reserved:
    """Owns address space for one tensor, and the pages of it that were written. Gives both back when it is forgotten.

    tensor: of this shape, contiguous. What was never written or was given back takes no memory and is 0.
    Raises EngineError when there is no room for the addresses (`ulimit -v`, or a system that overcommits nothing).
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        size = math.prod(shape) * dtype.itemsize
        try:
            self._memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except (OSError, OverflowError) as error:
            raise EngineError(
                f"no addresses for {size / 2**30:.1f} GiB of keys or values ({error}): lower engine.slots or "
                "max_completion_length, or raise the limit of address space (ulimit -v; vm.overcommit_memory = 2 sets one too)"
            ) from error
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # with which a token would take two megabytes
            self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        self.tensor = torch.frombuffer(self._memory, dtype=dtype, count=math.prod(shape)).view(shape)

    def give_back(self, start: int, stop: int) -> None:
        """The pages that hold nothing but elements `start` to `stop - 1`."""
        size = self.tensor.element_size()
        first = -(-start * size // mmap.PAGESIZE) * mmap.PAGESIZE
        end = stop * size // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end:
            self._memory.madvise(mmap.MADV_DONTNEED, first, end - first)


class ReservedCache(RowCache):
    """As `RowCache`. max_places: most tokens that all rows hold together."""

    def __init__(
        self, slots: int, max_length: int | None = None, max_places: int | None = None, step: int = COLUMNS_STEP
    ) -> None:
        super().__init__(slots, max_length, max_places, step)
        self._memory: dict[int, Reserved] = {}
        self._expected = 0
        # int64 [R]: columns that may have been written since the row was last given back.
        self._written = torch.zeros(slots, dtype=torch.int64)
        self._kept_columns = _KEPT_COLUMNS if max_places is None else 0

    def expect(self, length: int) -> None:
        self._expected = max(self._expected, length)

    def fits(self, size: Size) -> bool:
        return self._max_places is None or size.total <= self._max_places

    @property
    def num_places(self) -> int:
        return self._num_rows * int(self._written.max()) if self._max_places is None else self._max_places

    @property
    def num_bytes(self) -> int:
        """Bytes of the columns that may have been written."""
        a_column = sum(each.element_size() * each.shape[1] * each.shape[3] for each in self.buffers)
        return int(self._written.sum()) * a_column

    def begin_chunks(self, chunks: PaddedChunks) -> None:
        super().begin_chunks(chunks)
        self._note(*chunks.place)

    def begin_tokens(self, positions: torch.Tensor, length: int, rows: torch.Tensor | None = None) -> None:
        super().begin_tokens(positions, length, rows)
        self._note(self._of_rows, positions)

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        super().copy_rows(sources, targets, length)
        self._written[list(targets)] = self._written[list(targets)].clamp(min=length)

    def put_row(self, row: int, kept: tuple[torch.Tensor, ...]) -> None:
        super().put_row(row, kept)
        self._written[row] = max(int(self._written[row]), kept[0].shape[1])

    def clear_rows(self, rows: Sequence[int]) -> None:
        those = torch.tensor(rows, dtype=torch.int64)
        for row in those[self._written[those] > self._kept_columns].tolist():
            self._give_back(row)

    def release(self, num_rows: int) -> None:
        self.clear_rows(range(num_rows, self._num_rows))

    def _store(self, buffer: torch.Tensor, new: torch.Tensor, chunks: PaddedChunks) -> None:
        """Row by row, for each is contiguous: half the price of an index."""
        for index, row, start, stop in chunks.writes:
            buffer[row, :, start:stop] = new[index, :, : stop - start]

    def reserve(self, length: int, num_rows: int = 0) -> None:
        """Make sure every buffer has at least `length` columns, keeping what they hold."""
        if length <= self._num_columns:
            return
        self._num_columns = self._columns_for(max(length, self._expected, self._num_columns * 3 // 2))
        for buffers in (self.keys, self.values, self.routing):
            for index, old in enumerate(buffers):
                buffers[index] = new = self._new_buffer(old.shape[1], old)
                for row, columns in enumerate(self._written.tolist()):
                    new[row, :, :columns] = old[row, :, :columns]
                del self._memory[old.data_ptr()]

    def _note(self, rows: torch.Tensor, columns: torch.Tensor) -> None:
        self._written.scatter_reduce_(0, rows, columns + 1, "amax")

    def _give_back(self, row: int) -> None:
        """All columns of a row but the first few."""
        for each in self._memory.values():
            _, num_heads, num_columns, width = each.tensor.shape
            for line in range(row * num_heads, (row + 1) * num_heads):
                each.give_back((line * num_columns + self._kept_columns) * width, (line + 1) * num_columns * width)
        self._written[row] = self._kept_columns

    def _new_buffer(self, num_heads: int, like: torch.Tensor) -> torch.Tensor:
        memory = Reserved((self._num_rows, num_heads, self._num_columns, like.shape[-1]), like.dtype)
        self._memory[memory.tensor.data_ptr()] = memory
        return memory.tensor
