"""A page's process keeps little of what its answers took."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

CODE = """
import ctypes, sys, threading
from async_rlhf.watch.server import keep_little

if sys.argv[1] == "little":
    keep_little()
threads = [threading.Thread(target=lambda: [bytearray(2000) for _ in range(500)]) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, file)
libc.fflush(file)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="another allocator than glibc's")
def test_all_threads_of_a_page_share_one_arena() -> None:
    def arenas(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True, check=True)
        return done.stdout.count("<heap nr=")

    assert arenas("little") == 1 < arenas("as it is")
