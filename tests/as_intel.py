"""`pytest -p tests.as_intel`: MKL takes the processor for one of Intel.

On others it never uses the kernels of Intel's, and MKL_ENABLE_INSTRUCTIONS says nothing to it. Which it is on, its function
`mkl_serv_intel_cpu_true` answers; here by 1.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import torch

_ANSWER_1 = bytes.fromhex("b801000000c3")  # mov eax, 1; ret


def take_for_intel() -> None:
    """Before the first product. Raises AttributeError where torch is built without MKL, OSError where code is not changed."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    function = ctypes.cast(library.mkl_serv_intel_cpu_true, ctypes.c_void_p).value or 0
    page, anything = function & -mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(2 * mmap.PAGESIZE), anything):
        raise OSError(ctypes.get_errno(), "mprotect")
    ctypes.memmove(function, _ANSWER_1, len(_ANSWER_1))


take_for_intel()
