"""The digest of the device channel: the number of its formula, whatever the device, the parts and the alignment."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.buffers.device import digest as digests
from async_rlhf.buffers.device.digest import SetDigest
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


def spec(length: int, name: str = "t") -> TensorSpec:
    return TensorSpec(name=name, dtype="uint8", shape=[length], digest="?")


def of(data: bytes, fronts: Sequence[int] = (), shift: int = 0) -> str:
    """fronts: how much has come when. shift: of the bytes in memory."""
    made = SetDigest([spec(len(data))])
    come(made, flat(bytes(shift) + data)[shift:], fronts)
    return made.specs[0].digest


def come(made: SetDigest, data: torch.Tensor, fronts: Sequence[int]) -> None:
    """Part by part, in memory that is used again."""
    places = sorted({0, len(data), *(min(front, len(data)) for front in fronts)})
    for here, there in itertools.pairwise(places):
        made.add(data[here:there])
        data[here:there] = 0


def drawn(length: int) -> bytes:
    return random.Random(length).randbytes(length)


@given(st.binary(max_size=200))
def test_it_is_the_number_of_the_formula(data: bytes) -> None:
    assert of(data) == twin(data)


@pytest.mark.parametrize("length", [ROW - 8, ROW, ROW + 8, 3 * ROW + 13, (1 << 21) + 1, (1 << 22) + 5 * ROW + 3])
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


@given(st.binary(max_size=120), st.lists(st.integers(0, 120), max_size=6), st.integers(0, 9))
def test_when_the_bytes_come_and_where_they_lie_changes_nothing(data: bytes, fronts: list[int], shift: int) -> None:
    assert of(data, fronts, shift) == twin(data)


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
    specs = [spec(length, f"t{n}") for n, length in enumerate(lengths)]
    data, parts = drawn(sum(lengths)), []
    for length in lengths:
        parts.append(data[sum(map(len, parts)) :][:length])
    made = SetDigest(specs)
    come(made, flat(data), fronts)
    assert [each.digest for each in made.specs] == [twin(part) for part in parts]
    assert [each.name for each in made.specs] == [each.name for each in specs]
