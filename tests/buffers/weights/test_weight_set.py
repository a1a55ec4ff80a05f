"""A weight set is whole and what its manifest names, or it does not exist."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rlhf.buffers.errors import DamagedError, WeightsError
from async_rlhf.buffers.protocol.message import TensorSpec
from async_rlhf.buffers.protocol.wire import Publish
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.buffers.weights import weight_set as weights_module
from async_rlhf.buffers.weights.assembly import Assembly
from async_rlhf.buffers.weights.shared import HeapMemory, SealedMemory
from async_rlhf.buffers.weights.store import WeightStore
from async_rlhf.buffers.weights.weight_set import CHUNK_BYTES, WeightSet

LARGE = CHUNK_BYTES * 2 + 12


def weights(version: int = 1, fence: int = 1, size: int = LARGE) -> WeightSet:
    """Two tensors and an empty one, over three chunks."""
    data = random.Random(version).randbytes(size)
    tensors = {
        "large": RawTensor("uint8", (size,), data),
        "empty": RawTensor("float32", (0, 4), b""),
        "small": RawTensor("bfloat16", (2, 1), data[:4]),
    }
    return WeightSet.of(fence, version, tensors)


def test_a_set_arrives_in_any_order_and_even_twice() -> None:
    sent = weights()
    assert sent.num_chunks == 3
    assembly = Assembly(sent.announcement())
    for index in (2, 0, 0):
        assert not assembly.is_complete
        with pytest.raises(WeightsError, match="is not complete"):
            assembly.whole()
        assembly.add(index, sent.chunk(index))
    assembly.add(1, sent.chunk(1))
    got = assembly.whole()
    assert got == sent
    for name, tensor in sent.tensors().items():
        assert (got.tensors()[name].dtype, got.tensors()[name].shape) == (tensor.dtype, tensor.shape)
        assert bytes(got.tensors()[name].data) == bytes(tensor.data)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, LARGE + 3), st.integers(1, 255))
def test_any_flipped_byte_is_found_and_named(offset: int, flip: int) -> None:
    sent = weights()
    assembly = Assembly(sent.manifest())
    for index in range(sent.num_chunks):
        chunk = bytearray(sent.chunk(index))
        if index == offset // CHUNK_BYTES:
            chunk[offset % CHUNK_BYTES] ^= flip
        assembly.add(index, bytes(chunk))
    with pytest.raises(
        WeightsError, match="tensor '{}' does not match its digest".format("large" if offset < LARGE else "small")
    ):
        assembly.whole()


def test_a_chunk_that_does_not_fit_is_refused() -> None:
    sent = weights()
    assembly = Assembly(sent.manifest())
    for index, data in ((3, b""), (0, sent.chunk(0)[:-1]), (2, sent.chunk(0)), (2, b"")):
        with pytest.raises(WeightsError, match=f"chunk {index} of {len(data)} bytes does not fit"):
            assembly.add(index, data)
    with pytest.raises(WeightsError, match="has chunks 0 to 2, not 3"):
        sent.chunk(3)


@pytest.mark.parametrize(
    ("tensors", "num_bytes", "message"),
    [
        ([("a", "float32", [3])], 11, "tensors need 12 bytes, announced 11"),
        ([("a", "float32", [1]), ("a", "float32", [1])], 8, "a tensor name occurs twice"),
        ([("a", "object", [1])], 8, "cannot travel"),
        ([("a", "uint8", [1 << 60, 4])], 1 << 62, "no room for"),
    ],
)
def test_an_impossible_announcement_is_refused(tensors: list[tuple[str, str, list[int]]], num_bytes: int, message: str) -> None:
    specs = [TensorSpec(name=name, dtype=dtype, shape=shape, digest="0") for name, dtype, shape in tensors]
    with pytest.raises(WeightsError, match=message):
        Assembly(Publish(fence=1, version=1, num_bytes=num_bytes, tensors=specs))


def test_a_set_is_verified_in_pieces_and_no_further_than_it_has_come() -> None:
    sent = weights()
    assembly = Assembly(sent.manifest())
    hashed: list[int] = []
    honest = assembly._verifier.advance

    def advance(front: int, max_bytes: int) -> None:
        before = assembly._verifier._done
        honest(front, max_bytes)
        hashed.append(assembly._verifier._done - before)

    assembly._verifier.advance = advance  # type: ignore[method-assign]
    for index in (0, 2):
        assembly.add(index, sent.chunk(index))
        while assembly._verifier._done < CHUNK_BYTES:
            assembly.advance(CHUNK_BYTES // 4)
        assembly.advance()
    assert hashed == [CHUNK_BYTES // 4] * 4 + [0, 0], "behind the gap nothing can be verified yet"
    assembly.add(1, sent.chunk(1))
    assert assembly.is_complete and not assembly.is_verified
    while not assembly.is_verified:
        assembly.advance(CHUNK_BYTES)
    assert sum(hashed) == LARGE + 4 and max(hashed) <= CHUNK_BYTES
    assert assembly.whole() == sent


def test_a_large_set_is_copied_by_several_threads_into_the_same_set(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {str(n): RawTensor("uint8", (1000 * n,), random.Random(n).randbytes(1000 * n)) for n in range(20)}
    alone = WeightSet.of(1, 1, tensors)
    monkeypatch.setattr(weights_module, "_MANY_BYTES", 0)
    for make in (HeapMemory, SealedMemory.make):
        together = WeightSet.of(1, 1, tensors, make=make)
        assert together == alone
        assert Assembly(together.announcement(), given=together.memory).whole() == alone


def test_a_store_serves_what_it_was_given_until_it_is_dropped() -> None:
    store = WeightStore()
    for version in (1, 2, 3):
        store.add(weights(version, size=8))
    store.drop_below(2)
    assert [version in store for version in (1, 2, 3)] == [False, True, True]
    assert store.get(3) == weights(3, size=8)
    with pytest.raises(WeightsError, match=r"version 1 is not here; there are \[2, 3\]"):
        store.get(1)


def test_a_restored_learner_takes_back_the_versions_the_former_one_went_on_to() -> None:
    store = WeightStore()
    for version in (1, 2, 3):
        store.add(weights(version, fence=1, size=8))
    store.add(weights(2, fence=2, size=8))
    assert [version in store for version in (1, 2, 3)] == [True, True, False]
    assert store.get(2).fence == 2


def test_a_store_on_disk_survives_and_forgets_there_too(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    for version in (1, 2):
        store.add(weights(version))
    store.drop_below(2)
    again = WeightStore(tmp_path)
    assert 1 not in again
    assert again.get(2) == weights(2)
    again.drop_below(3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("offset", [0, 9, 60, -1])
def test_a_damaged_file_is_named(tmp_path: Path, offset: int) -> None:
    WeightStore(tmp_path).add(weights(1, size=100))
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DamagedError, match=f"{path} is damaged"):
        WeightStore(tmp_path)
