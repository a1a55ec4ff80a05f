"""The digests of a set's tensors, taken from its first byte to its last, a piece at a time, in several threads: neither copies
nor digests hold Python's lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import xxhash

A = TypeVar("A")
B = TypeVar("B")
CACHED_BYTES = 1 << 19
"""Bytes read at a time, so that further work on them finds them in the processor's cache."""
_MANY_BYTES = 4 << 20  # below, starting threads costs more than they save
_MAX_THREADS = 4  # more would take cores from engines and learner, and memory is hardly faster


def num_threads() -> int:
    """The number of cores of this process, up to a few."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def in_threads(work: Callable[[A], B], items: Iterable[A], threads: int) -> list[B]:
    """The results of `work`, in order; all threads have ended then. Raises the error of the first item that fails."""
    todo = list(items)
    if min(threads, len(todo)) < 2:
        return list(map(work, todo))
    with ThreadPoolExecutor(min(threads, len(todo)), "weights") as pool:
        return list(pool.map(work, todo))


class _TensorSpan(NamedTuple):
    """Bytes `start` to `end` of the set, all of one tensor; `is_last`: it ends with them."""

    hasher: xxhash.xxh3_128
    start: int
    end: int
    is_last: bool


class Digests:
    """Owns how far they are. sizes: of the tensors, in bytes; more may follow. Each thread has tensors of its own."""

    def __init__(self, sizes: Iterable[int] = (), threads: int = 1) -> None:
        self._sizes: list[int] = []
        self._hasher, self._threads, self._next, self._end = xxhash.xxh3_128(), threads, 0, 0
        self.done = 0
        """Bytes from the first on that have been read."""
        self.extend(sizes)

    def extend(self, sizes: Iterable[int]) -> None:
        was_done = not self.num_open
        self._sizes += sizes
        if was_done and self.num_open:
            self._end += self._sizes[self._next]

    @property
    def num_open(self) -> int:
        """Tensors that have no digest yet."""
        return len(self._sizes) - self._next

    def advance(self, stop: int, read: Callable[[int, int], bytes | memoryview]) -> list[str]:
        """Go on to byte `stop`, or to the end; the digests of the tensors that are whole then, in order.

        read: gives bytes `start` to `end`, from within one tensor, perhaps in another thread.
        """
        spans: list[_TensorSpan] = []
        while self.num_open and (self.done < stop or self.done == self._end):
            end = max(self.done, min(self._end, stop))
            spans.append(_TensorSpan(self._hasher, self.done, end, end == self._end))
            self.done = end
            if spans[-1].is_last:
                self._next, self._hasher = self._next + 1, xxhash.xxh3_128()
                self._end += self._sizes[self._next] if self.num_open else 0

        def take(span: _TensorSpan) -> None:
            for start in range(span.start, span.end, CACHED_BYTES):
                span.hasher.update(read(start, min(span.end, start + CACHED_BYTES)))

        is_much = bool(spans) and spans[-1].end - spans[0].start >= _MANY_BYTES
        in_threads(take, spans, self._threads if is_much else 1)
        return [span.hasher.hexdigest() for span in spans if span.is_last]
