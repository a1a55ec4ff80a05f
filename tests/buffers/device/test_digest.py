"""The digest of the device channel: the number that its formula says, whatever the device, the parts and the alignment."""

from __future__ import annotations

import random
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.buffers.device import digest as digests
from async_rlhf.buffers.device.digest import Digest, SetDigest
from async_rlhf.buffers.protocol.message import TensorSpec

MODULUS = 1 << 64
ROW = 8 * digests._COLUMNS


def twin(data: bytes) -> str:
    """The formula of the module, word by word."""
    words = struct.unpack(f"<{-(-len(data) // 8)}q", data + bytes(-len(data) % 8))
    d1 = d2 = len(data)
    for word in words:
        d1 = (d1 * digests.R + word) % MODULUS
        d2 = (d2 * digests.S + (word >> 32)) % MODULUS
    return f"{d1:016x}{d2:016x}"


def flat(data: bytes) -> torch.Tensor:
    return torch.tensor(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def of(data: bytes) -> str:
    made = Digest(len(data))
    made.update(flat(data))
    return made.hexdigest()


def drawn(length: int) -> bytes:
    return random.Random(length).randbytes(length)


@given(st.binary(max_size=200))
def test_it_is_the_number_of_the_formula(data: bytes) -> None:
    assert of(data) == twin(data)


@pytest.mark.parametrize("length", [ROW - 8, ROW, ROW + 8, 3 * ROW + 13, 130 * ROW, (1 << 19) + 1, (1 << 20) + 5 * ROW + 3])
def test_so_it_is_beyond_a_row_and_beyond_what_is_taken_at_a_time(length: int) -> None:
    assert of(drawn(length)) == twin(drawn(length))


def test_rows_of_rows_are_folded_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_COLUMNS", 4)
    digests._powers.cache_clear()
    try:
        for length in (8 * 4 * 4 * 4 + 8 * 5 + 3, 8 * 4**5):
            assert of(drawn(length)) == twin(drawn(length))
    finally:
        digests._powers.cache_clear()


def test_what_is_computed_where_there_are_no_integer_products_is_the_same() -> None:
    rows = torch.from_numpy(__import__("numpy").frombuffer(drawn(5 * ROW), "<i8").copy()).view(-1, digests._COLUMNS)
    powers = digests._powers(digests.R, torch.device("cpu"))
    assert torch.equal(digests._row_sums(rows, powers), (rows * powers).sum(1))


@given(st.binary(max_size=120), st.lists(st.integers(0, 15), max_size=6), st.integers(0, 9))
def test_parts_and_alignment_change_nothing(data: bytes, cuts: list[int], shift: int) -> None:
    moved = flat(bytes(shift) + data)[shift:]
    made, ends = Digest(len(data)), sorted({8 * cut for cut in cuts if 8 * cut < len(data)})
    for start, end in zip([0, *ends], [*ends, len(data)], strict=True):
        made.update(moved[start:end])
    assert made.hexdigest() == twin(data)


word = st.one_of(st.integers(0, MODULUS - 1), st.sampled_from([0, 1, 1 << 31, 1 << 32, 1 << 63, 1 << 63 | 1 << 31]))
words = st.lists(word, min_size=1, max_size=20)


def packed(values: list[int]) -> str:
    return of(struct.pack(f"<{len(values)}Q", *values))


@given(words, word, st.data())
def test_another_value_of_a_word_changes_it(values: list[int], value: int, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(values) - 1))
    changed = [*values[:place], value, *values[place + 1 :]]
    assert (packed(changed) == packed(values)) == (value == values[place])


@given(words, st.data())
def test_words_that_change_places_change_it(values: list[int], data: st.DataObject) -> None:
    """Also those that differ in the sign alone, of which the first half would see nothing."""
    places = st.integers(0, len(values) - 1)
    here, there = data.draw(places), data.draw(places)
    changed = list(values)
    changed[here], changed[there] = values[there], values[here]
    assert (packed(changed) == packed(values)) == (values[here] == values[there])


@given(words, word)
def test_a_word_more_or_less_at_either_end_changes_it(values: list[int], value: int) -> None:
    assert len({packed(each) for each in (values, [*values, value], [value, *values], values[1:])}) == len(
        {tuple(each) for each in (values, [*values, value], [value, *values], values[1:])}
    )


@given(st.binary(max_size=40), st.integers(1, 9))
def test_zero_bytes_behind_the_end_change_it(data: bytes, more: int) -> None:
    assert of(data + bytes(more)) != of(data)


@given(st.lists(st.integers(0, 40), max_size=6), st.lists(st.integers(0, 240), max_size=8))
def test_a_set_has_the_digests_of_its_tensors_however_its_bytes_come(lengths: list[int], fronts: list[int]) -> None:
    specs = [TensorSpec(name=f"t{n}", dtype="uint8", shape=[length], digest="?") for n, length in enumerate(lengths)]
    data, parts = drawn(sum(lengths)), []
    for length in lengths:
        parts.append(data[sum(map(len, parts)) :][:length])
    made = SetDigest(specs, flat(data))
    for front in [*sorted(min(front, len(data)) for front in fronts), len(data)]:
        made.advance(front)
    assert [spec.digest for spec in made.specs] == [twin(part) for part in parts]
    assert [spec.name for spec in made.specs] == [spec.name for spec in specs]
