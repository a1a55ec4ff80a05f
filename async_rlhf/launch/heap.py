"""What the C library does with memory that is freed. glibc only; others are left as they are."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress

# Of malloc.h. 32 MiB is the most that glibc takes for the second, and what it rises to by itself.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _MAPPED_BYTES = 1 << 30, 32 << 20
_OF_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Keep up to 1 GiB of what this process frees for its next allocations; whether that could be set, and no variable does.

    Each pass over a batch frees its activations. Given back to the kernel they come again page by page: an eighth of an actor's
    processor time with the shipped model, a twentieth of the learner's.
    """
    if any(name in environment for name in _OF_USERS):
        return False
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        return bool(mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES) and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))
    return False
