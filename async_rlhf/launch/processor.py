"""The name of this machine's processor. Without torch.

Libraries choose kernels by a processor's instruction sets, and kernels sum in different orders: so numbers depend on both.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

# Linux' names of the instruction sets by which ATen, oneDNN and MKL choose kernels of sums and products.
_INSTRUCTIONS = (
    *("sse4_1", "avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx_vnni"),
    *("avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "sve", "sve2", "bf16", "svebf16", "i8mm"),
)  # fmt: skip
_APPLE = {"AdvSIMD": "asimd", "FEAT_DotProd": "asimddp", "FEAT_BF16": "bf16", "FEAT_I8MM": "i8mm"}
# Variables that limit the libraries to fewer; MKL obeys the third on Intel processors only, and its CBWR elsewhere too.
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
_LINUX = Path("/proc/cpuinfo")
_MACOS = ("sysctl", "machdep.cpu.brand_string", "hw.optional")


def processor(environment: Mapping[str, str] = os.environ) -> str:
    """Its model, its instruction sets that matter for numbers, and the libraries' limits: "AMD EPYC (sse4_1 avx2
    fma; MKL_CBWR=COMPATIBLE)"."""
    name, instructions = described()
    told = [f"{variable}={environment[variable]}" for variable in LIMITS if variable in environment]
    notes = "; ".join(filter(None, [" ".join(instructions), *told]))
    return f"{name} ({notes})" if notes else name


def described(text: str | None = None) -> tuple[str, tuple[str, ...]]:
    """Model and instruction sets of the first processor of `/proc/cpuinfo`, or of what `sysctl` prints; platform.machine() and
    none where it names neither. text: None is that of this machine."""
    lines = (_text() if text is None else text).splitlines()
    rows = [(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in lines)]
    facts = dict(reversed(rows))  # the first of a name wins
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    optional = (key.rpartition(".")[2].removesuffix("_0") for key, value in rows if "." in key and value == "1")
    flags |= {_APPLE.get(each, each) for each in optional}
    parts = [f"{key[4:]} {facts[key]}" for key in ("CPU implementer", "CPU part") if key in facts]
    name = facts.get("model name") or facts.get("machdep.cpu.brand_string") or " ".join([platform.machine(), *parts])
    return name, tuple(each for each in _INSTRUCTIONS if each in flags)


def _text() -> str:
    with suppress(OSError, subprocess.SubprocessError):
        if _LINUX.exists():
            return _LINUX.read_text()
        return subprocess.run(_MACOS, capture_output=True, text=True, check=False, timeout=10, stdin=subprocess.DEVNULL).stdout
    return ""
