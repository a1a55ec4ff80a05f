"""Sealed memory: mapped by processes that know its place, unchanged meanwhile, and gone with the last one that has it."""

from __future__ import annotations

import fcntl
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
from async_rlhf.buffers.weights.addresses import lay
from async_rlhf.buffers.weights.assembly import Assembly
from async_rlhf.buffers.weights.shared import HAS_SEALS, HeapMemory, SealedPool, attach, path_of
from async_rlhf.buffers.weights.weight_set import WeightSet
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.skipif(not HAS_SEALS, reason="this system has no sealed memory")
# A process that holds a sealed set, says where it lies, and waits for its end.
HOLDER = """
import sys
from async_rlhf.buffers.weights.shared import SealedPool
memory = SealedPool().make(8)
memory.write(0, b"12345678")
memory.seal()
print(memory.places[0].model_dump_json(), flush=True)
sys.stdin.read()
"""


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=300)


@contextmanager
def holder() -> Iterator[tuple[subprocess.Popen[str], SealedPlace]]:
    with running([sys.executable, "-c", HOLDER]) as process:
        assert process.stdout is not None
        yield process, SealedPlace.model_validate_json(process.stdout.readline())


def used() -> tuple[int, int]:
    """Descriptors and mappings of this process."""
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("async-rlhf-weights")


SIZE = 1 << 14


def numbered(pool: SealedPool, number: int) -> WeightSet:
    return WeightSet.of(1, number, {"w": RawTensor("uint8", (SIZE,), bytes([number] * SIZE))}, make=pool.make)


def sealed_set() -> WeightSet:
    return WeightSet.of(1, 1, {"w": RawTensor("uint8", (4,), b"abcd")}, make=SealedPool().make)


def test_a_set_of_another_process_is_mapped_and_outlives_its_kill() -> None:
    with holder() as (process, place):
        memory = attach([place], 8)
        assert memory is not None
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=300)
        assert bytes(memory.view) == b"12345678"
        again = attach(memory.places, 8)
        assert again is not None and bytes(again.view) == b"12345678"
        assert attach([place], 8) is None, "the name died with the process"


def test_what_is_not_what_was_named_is_not_mapped() -> None:
    mine = SealedPool().make(8)
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
    mapped = [line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines() if "async-rlhf-weights" in line]
    assert mapped and set(mapped) == {"r--s"}, "not even the process that wrote it has an address to write to"
    assert bytes(weights.blob) == b"abcd"


def test_a_set_dropped_gives_its_descriptors_and_mappings_back() -> None:
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
    assert isinstance(SealedPool().make(0), HeapMemory)
    with pytest.raises(WeightsError, match="no room for"):
        SealedPool().make(sys.maxsize)


def test_a_set_is_written_into_one_that_no_process_has_any_more() -> None:
    pool = SealedPool()
    first = numbered(pool, 1)
    (old,) = first.announcement().places
    reader = attach([old], SIZE)
    del first
    second = numbered(pool, 2)
    assert reader is not None and bytes(reader.view) == bytes([1] * SIZE), "a set that is read is not written"
    assert second.announcement().places[0].descriptor != old.descriptor
    view = reader.view
    del reader
    third = numbered(pool, 3)
    assert bytes(view) == bytes([1] * SIZE), "also where a view is all that is left of it"
    del view, second
    fourth = numbered(pool, 4)
    (new,) = fourth.announcement().places
    assert new.descriptor == old.descriptor
    assert attach([old], SIZE) is None, "the old place is that of the old bytes"
    found = attach([new], SIZE)
    assert found is not None and bytes(found.view) == bytes([4] * SIZE)
    assert bytes(third.blob) == bytes([3] * SIZE)


READER = """
import sys
from async_rlhf.buffers.protocol.message import SealedPlace
from async_rlhf.buffers.weights.shared import attach
memory = attach([SealedPlace.model_validate_json(sys.argv[1])], int(sys.argv[2]))
print(memory is not None, flush=True)
sys.stdin.read()
"""


def test_a_reader_that_is_killed_no_longer_keeps_a_set_from_being_written() -> None:
    pool = SealedPool()
    first = numbered(pool, 1)
    (place,) = first.announcement().places
    command = [sys.executable, "-c", READER, place.model_dump_json(), str(SIZE)]
    with running(command) as process:
        assert process.stdout is not None and process.stdout.readline() == "True\n"
        del first
        second = numbered(pool, 2)
        assert second.announcement().places[0].descriptor != place.descriptor
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=300)
    third = numbered(pool, 3)
    assert third.announcement().places[0].descriptor == place.descriptor


def test_what_is_being_written_again_is_not_mapped() -> None:
    pool = SealedPool()
    first = numbered(pool, 1)
    (place,) = first.announcement().places
    del first
    memory = pool.make(SIZE)
    memory.write(0, bytes(SIZE))
    assert not memory.places and attach([place], SIZE) is None
    assert os.stat(path_of(place)).st_mtime_ns == 0, "nor by the old place if it is killed meanwhile"
    assert attach([place.model_copy(update={"token": "0" * 32})], SIZE) is None
    memory.seal()
    assert [each.descriptor for each in memory.places] == [place.descriptor] and attach([place], SIZE) is None
    assert attach(memory.places, SIZE) is not None


def test_a_pool_gives_back_what_it_does_not_need() -> None:
    pool = SealedPool()
    before = used()
    sets = [numbered(pool, each) for each in range(3)]
    del sets
    kept = numbered(pool, 4)
    assert used()[0] == before[0] + 1
    del kept
    assert pool.make(2 * SIZE).view.nbytes == 2 * SIZE
    assert used() == before


def test_sets_that_are_read_for_long_cost_their_writer_a_few_descriptors() -> None:
    pool, before = SealedPool(), used()[0]
    readers = [attach(numbered(pool, number).announcement().places, SIZE) for number in range(10)]
    assert used()[0] <= before + len(readers) + 3
    assert all(each is not None and bytes(each.view) == bytes([number] * SIZE) for number, each in enumerate(readers))


def test_files_of_which_one_is_gone_are_not_kept_open() -> None:
    weights = sealed_set()
    assert weights.memory is not None
    before = used()
    with pytest.raises(FileNotFoundError):
        lay([path_of(weights.memory.places[0]), "/proc/self/fd/gone"])
    assert used() == before


ELSEWHERE = """
import fcntl, os
for name in [name for name in dir(fcntl) if "SEAL" in name]:
    delattr(fcntl, name)
del os.memfd_create
from async_rlhf.buffers.weights import shared
print(type(shared.SealedPool().make(8)).__name__)
"""


def test_a_system_without_sealed_memory_has_sets_on_the_heap() -> None:
    with running([sys.executable, "-c", ELSEWHERE]) as process:
        assert process.communicate(timeout=300)[0] == "HeapMemory\n"
