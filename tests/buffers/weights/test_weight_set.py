"""A weight set is whole and what its manifest names, or it does not exist; large ones are verified in turns of bounded time."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rlhf.buffers.config import WeightsConfig
from async_rlhf.buffers.errors import DamagedError, WeightsError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.protocol.message import TensorSpec
from async_rlhf.buffers.protocol.wire import Publish
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.buffers.weights import digests
from async_rlhf.buffers.weights.assembly import PIECE_BYTES, Assembly
from async_rlhf.buffers.weights.receiver import TURN_S, WeightReceiver
from async_rlhf.buffers.weights.shared import HAS_SEALS, HeapMemory, SealedPool
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
        before = assembly._verifier.num_verified
        honest(front, max_bytes)
        hashed.append(assembly._verifier.num_verified - before)

    assembly._verifier.advance = advance  # type: ignore[method-assign]
    for index in (0, 2):
        assembly.add(index, sent.chunk(index))
        while assembly._verifier.num_verified < CHUNK_BYTES:
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
    monkeypatch.setattr(digests, "_MANY_BYTES", 0)
    for make in (HeapMemory, SealedPool().make):
        together = WeightSet.of(1, 1, tensors, make=make)
        assert together == alone
        assert Assembly(together.announcement(), given=together.memory).whole() == alone


def test_a_store_serves_what_it_was_given_until_it_is_dropped() -> None:
    store = WeightStore()
    for version in (1, 2, 3):
        store.add(weights(version, size=8))
    store.keep(lambda version: version >= 2)
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
    store.keep(lambda version: version >= 2)
    again = WeightStore(tmp_path)
    assert 1 not in again
    assert again.get(2) == weights(2)
    again.keep(lambda version: version >= 3)
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


WEIGHTS = WeightSet.of(1, 1, {"w": RawTensor("uint8", (4 * PIECE_BYTES,), bytes(4 * PIECE_BYTES))}, make=SealedPool().make)


def fetching(seconds_a_piece: float) -> WeightReceiver:
    """Wants version 1; every look at its clock takes so long."""
    passed, requests = itertools.count(step=seconds_a_piece), itertools.count(1)
    receiver = WeightReceiver(lambda message: next(requests), lambda: next(passed), "ipc://hub", WeightsConfig())
    receiver.adopt((1, 1))
    return receiver


def test_a_turn_ends_when_its_time_is_over_and_a_fast_machine_needs_few() -> None:
    def turns(seconds_a_piece: float) -> int:
        receiver = fetching(seconds_a_piece)
        receiver.receive(WEIGHTS.manifest().model_copy(update={"places": []}), [])
        for index in (*range(1, WEIGHTS.num_chunks), 0):  # the first comes last: nothing can be verified before
            receiver.receive(wire.Chunk(fence=1, version=1, index=index), [bytes(WEIGHTS.chunk(index))])
        needed = 1
        while receiver.has_work:
            receiver.advance()
            needed += 1
        taken = receiver.take()
        assert taken is not None and taken == WEIGHTS and bytes(taken.blob[-4:]) == bytes(4)
        return needed

    assert turns(seconds_a_piece=2 * TURN_S) == 4
    assert turns(seconds_a_piece=TURN_S / 2) == 2
    assert turns(seconds_a_piece=TURN_S / 100) == 1


@pytest.mark.skipif(not HAS_SEALS, reason="this system has no sealed memory")
def test_a_set_that_is_mapped_is_there_at_once_but_its_announcement_must_fit() -> None:
    receiver, given = fetching(seconds_a_piece=2 * TURN_S), WEIGHTS.manifest()
    receiver.receive(given, [])
    taken = receiver.take()
    assert not receiver.has_work and taken is not None and taken == WEIGHTS
    assert taken.memory is not None and taken.memory is not WEIGHTS.memory, "the same bytes, mapped again"

    receiver = fetching(seconds_a_piece=TURN_S)
    for _ in range(3):  # fetched again each time
        receiver.receive(given.model_copy(update={"tensors": given.tensors * 2}), [])
        assert receiver.take() is None
    with pytest.raises(WeightsError, match=f"tensors need {8 * PIECE_BYTES} bytes, announced {4 * PIECE_BYTES}"):
        receiver.receive(given.model_copy(update={"tensors": given.tensors * 2}), [])
