"""What processes that compute keep of the memory that they free."""

from __future__ import annotations

import subprocess
import sys

import pytest

from async_rlhf.launch.heap import keep_freed_memory
from tests.conftest import REPOSITORY

FAULTS = """
import resource, sys, torch
from async_rlhf.launch.heap import keep_freed_memory
print(keep_freed_memory() if "keep" in sys.argv else False)
def used():
    kept = [torch.ones(1 << 20) for _ in range(32)]
used()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
used()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*arguments: str) -> tuple[bool, int]:
    command = [sys.executable, "-c", FAULTS, *arguments]
    told = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=300).stdout.split()
    return told[0] == "True", int(told[1])


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_memory_that_is_freed_serves_the_next_allocations() -> None:
    is_set, count = faults("keep")
    if not is_set:
        pytest.skip("another C library")
    assert 3 * count < faults()[1]


@pytest.mark.parametrize("variable", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_settings_of_the_environment_are_kept(variable: str) -> None:
    assert not keep_freed_memory({variable: "1"})
