"""A delta makes exactly the set it was made for, whatever the bits mean, and a damaged one makes nothing."""

from __future__ import annotations

import struct
from contextlib import suppress
from unittest.mock import patch

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rlhf.buffers.errors import WeightsError
from async_rlhf.buffers.tensors import ITEM_BYTES, RawTensor
from async_rlhf.buffers.weights import delta
from async_rlhf.buffers.weights.assembly import Assembly
from async_rlhf.buffers.weights.weight_set import WeightSet

# Bit patterns that arithmetic would not keep: NaNs with payloads (quiet and signalling, both signs), infinities, -0.0.
ODD_BITS = {
    2: (0x7FC1, 0xFFC0, 0x7F81, 0xFF80, 0x7F80, 0x8000, 0x0001),
    4: (0x7FC00123, 0xFFC00000, 0x7F800001, 0xFF800000, 0x7F800000, 0x80000000, 0x00000001),
}
DTYPES = st.sampled_from(sorted(ITEM_BYTES))


@st.composite
def two_sets(draw: st.DrawFn) -> tuple[WeightSet, WeightSet]:
    """The same tensors twice: the second with some elements replaced by any bits."""
    old, new = {}, {}
    for number in range(draw(st.integers(1, 4))):
        dtype, count = draw(DTYPES), draw(st.integers(0, 40))
        width = ITEM_BYTES[dtype]
        before = draw(st.binary(min_size=count * width, max_size=count * width))
        words = np.frombuffer(before, f"<u{width}").copy()
        bits = st.sampled_from(ODD_BITS[width]) if width in ODD_BITS else st.nothing()
        changes = st.dictionaries(st.integers(0, count - 1), bits | st.integers(0, 256**width - 1)) if count else st.just({})
        for index, pattern in draw(changes).items():
            words[index] = pattern
        old[str(number)] = RawTensor(dtype, (count,), before)
        new[str(number)] = RawTensor(dtype, (count,), words.tobytes())
    return WeightSet.of(1, 1, old), WeightSet.of(1, 2, new)


def encoded(old: WeightSet, new: WeightSet) -> bytes:
    data = delta.encode(memoryview(old.blob), memoryview(new.blob), new.specs, limit=1 << 30)
    assert data is not None
    return data


def applied(old: WeightSet, new: WeightSet, *deltas: bytes) -> WeightSet:
    assembly = Assembly(new.announcement())
    assembly.patch(old, deltas)
    return assembly.whole()


@settings(max_examples=200, deadline=None)
@given(two_sets(), st.sampled_from((8, 16, 1 << 20)))
def test_a_delta_applied_gives_back_every_bit(sets: tuple[WeightSet, WeightSet], block_bytes: int) -> None:
    old, new = sets
    before = bytes(old.blob)
    with patch.object(delta, "BLOCK_BYTES", block_bytes):
        assert applied(old, new, encoded(old, new)) == new
        assert applied(new, old, encoded(new, old)).blob == old.blob
        assert applied(old, new, encoded(old, new), encoded(new, old), encoded(old, new)) == new
    assert bytes(old.blob) == before


@settings(max_examples=200, deadline=None)
@given(two_sets(), st.data())
def test_a_damaged_delta_makes_the_right_set_or_none(sets: tuple[WeightSet, WeightSet], data: st.DataObject) -> None:
    """A bit of a compressed frame's header may mean nothing; but what comes out is never anything else."""
    old, new = sets
    damaged = bytearray(encoded(old, new))
    match data.draw(st.sampled_from(("flip", "cut", "add", "replace"))):
        case "flip" if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
        case "cut" if damaged:
            del damaged[data.draw(st.integers(0, len(damaged) - 1)) :]
        case "replace":
            damaged[:] = data.draw(st.binary(max_size=60))
        case _:
            damaged += data.draw(st.binary(min_size=1, max_size=20))
    with suppress(WeightsError):
        assert applied(old, new, bytes(damaged)) == new


def test_a_delta_to_another_set_is_refused_by_the_digests() -> None:
    sets = [WeightSet.of(1, v, {"w": RawTensor("int32", (4,), np.full(4, v, "<i4").tobytes())}) for v in (1, 2, 3)]
    with pytest.raises(WeightsError, match="tensor 'w' does not match its digest"):
        applied(sets[1], sets[2], encoded(sets[0], sets[2]))


def test_a_part_that_would_unpack_to_more_than_its_block_is_refused_before_it_is_unpacked() -> None:
    old, new = (WeightSet.of(1, v, {"w": RawTensor("uint8", (8,), bytes([v]) * 8)}) for v in (1, 2))
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    with pytest.raises(WeightsError, match="a part of another size than the 1 bytes it should have"):
        applied(old, new, struct.pack("<II", len(bomb), 0) + bomb)


def test_a_delta_that_is_no_smaller_than_its_limit_is_not_made() -> None:
    rng = np.random.default_rng(0)
    old, new = (WeightSet.of(1, v, {"w": RawTensor("uint8", (4096,), rng.bytes(4096))}) for v in (1, 2))
    assert delta.encode(memoryview(old.blob), memoryview(new.blob), new.specs, limit=2048) is None
    assert delta.encode(memoryview(old.blob), memoryview(old.blob), new.specs, limit=2048) == bytes(8)


def test_one_unit_in_the_last_place_of_a_few_elements_costs_a_small_part_of_the_set() -> None:
    rng = np.random.default_rng(0)
    before = rng.standard_normal(1 << 20).astype("<f4").view("<u4") >> 16
    after = before + rng.choice([-1, 0, 1], before.size, p=[0.01, 0.98, 0.01]).astype("<i4").view("<u4")
    old, new = (
        WeightSet.of(1, v, {"w": RawTensor("bfloat16", (words.size,), words.astype("<u2").tobytes())})
        for v, words in ((1, before), (2, after))
    )
    data = encoded(old, new)
    assert applied(old, new, data) == new
    assert len(data) < 0.02 * len(new.blob)
