"""Sealed memory: mapped by who is told the place, changed by nobody, and gone with the last process that has it."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from async_rlhf.buffers.errors import WeightsError
from async_rlhf.buffers.protocol.message import SealedPlace
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.buffers.weights import shared
from async_rlhf.buffers.weights.assembly import Assembly
from async_rlhf.buffers.weights.shared import HAS_SEALS, HeapMemory, SealedMemory, attach
from async_rlhf.buffers.weights.weight_set import WeightSet
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.skipif(not HAS_SEALS, reason="this system has no sealed memory")
# A process that holds a sealed set, says where it lies, and waits for its end.
HOLDER = """
import sys, time
from async_rlhf.buffers.weights.shared import SealedMemory
memory = SealedMemory.make(8)
memory.write(0, b"12345678")
if "sealed" in sys.argv:
    memory.seal()
print(memory.places[0].model_dump_json(), flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], SealedPlace]]:
    command = [sys.executable, "-c", HOLDER, *arguments]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, SealedPlace.model_validate_json(process.stdout.readline())
    finally:
        process.kill()
        process.communicate(timeout=300)


def sealed_set() -> WeightSet:
    return WeightSet.of(1, 1, {"w": RawTensor("uint8", (4,), b"abcd")}, make=SealedMemory.make)


def test_a_set_of_another_process_is_mapped_and_outlives_its_kill() -> None:
    with holder("sealed") as (process, place):
        memory = attach([place], 8)
        assert memory is not None
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=300)
        assert bytes(memory.view) == b"12345678"
        again = attach(memory.places, 8)
        assert again is not None and bytes(again.view) == b"12345678"
        assert attach([place], 8) is None, "the name died with the process"


def test_what_is_not_sealed_or_not_what_was_named_is_not_mapped() -> None:
    with holder() as (_, place):
        assert attach([place], 8) is None
    mine = SealedMemory.make(8)
    mine.write(0, bytes(8))
    mine.seal()
    (place,) = mine.places
    assert attach([place], 8) is not None
    assert attach([place], 9) is None and attach([], 8) is None and attach([place, place], 8) is None
    assert attach([place.model_copy(update={"token": "0" * 32})], 8) is None
    assert attach([place.model_copy(update={"pid": 1 << 30})], 8) is None
    read_end, write_end = os.pipe()  # would block whoever opened it
    try:
        assert attach([place.model_copy(update={"descriptor": read_end})], 8) is None
    finally:
        os.close(read_end)
        os.close(write_end)


def test_sealed_memory_cannot_be_changed_or_cut_short_by_anybody() -> None:
    weights = sealed_set()
    assert weights.memory is not None
    with pytest.raises(WeightsError, match="no room for 4 bytes"):
        weights.memory.write(0, b"x")
    writer = os.open(f"/proc/self/fd/{weights.memory.places[0].descriptor}", os.O_RDWR)
    try:
        for attack in (lambda: os.pwrite(writer, b"x", 0), lambda: os.ftruncate(writer, 1)):
            with pytest.raises(PermissionError):
                attack()
        with pytest.raises(PermissionError):
            fcntl.fcntl(writer, fcntl.F_ADD_SEALS, 0)
    finally:
        os.close(writer)
    with pytest.raises(TypeError):
        weights.tensors()["w"].data[0] = 0  # type: ignore[index]
    assert bytes(weights.blob) == b"abcd"


def test_a_set_dropped_gives_its_descriptors_and_mappings_back() -> None:
    def used() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("async-rlhf-weights")

    before = used()
    weights = sealed_set()
    announced = weights.announcement()
    given = attach(announced.places, 4)
    assembly = Assembly(announced, given=given)
    assert assembly.whole() == weights
    assert used() != before
    del weights, given, assembly
    assert used() == before


def test_mapped_bytes_that_are_not_what_their_digests_say_are_refused() -> None:
    weights = sealed_set()
    announced = weights.announcement()
    wrong = announced.tensors[0].model_copy(update={"digest": "0" * 32})
    with pytest.raises(WeightsError, match="tensor 'w' does not match its digest"):
        Assembly(announced.model_copy(update={"tensors": [wrong]}), given=weights.memory).whole()


def test_a_set_without_bytes_or_too_large_for_any_memory_is_no_special_case() -> None:
    assert isinstance(SealedMemory.make(0), HeapMemory)
    with pytest.raises(WeightsError, match="no room for"):
        SealedMemory.make(sys.maxsize)


def test_a_set_is_sealed_as_soon_as_the_kernel_lets_go_of_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SealedMemory.make(8)
    memory.write(0, bytes(8))
    held = mmap.mmap(memory.places[0].descriptor, 8)  # a writable mapping keeps the seal away
    monkeypatch.setattr(shared.time, "sleep", lambda pause_s: held.close())
    memory.seal()
    assert attach(memory.places, 8) is not None
