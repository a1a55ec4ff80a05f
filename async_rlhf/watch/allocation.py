"""How the page's process takes memory: an answer of megabytes is made now and then, in one of several threads.

glibc gives each thread an arena of its own, which keeps the most that its thread ever took, and learns from a large text that
is freed to keep the next one. Other allocators are left as they are.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

# From glibc's malloc.h.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_LARGE_BYTES = 1 << 17


def keep_little() -> None:
    """From now on all threads share one arena, and what is large is given back when it is freed. Before other threads begin."""
    with suppress(OSError, AttributeError):
        allocator = ctypes.CDLL(None)
        allocator.mallopt(_M_ARENA_MAX, 1)
        allocator.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
