"""A set in sealed memory comes part by part: each is verified while the next is copied, none is a version before the last."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rlhf.buffers.config import WeightsConfig
from async_rlhf.buffers.errors import WeightsError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.protocol.message import SealedPlace
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.buffers.weights import digests, server, shared
from async_rlhf.buffers.weights.addresses import Addresses, lay
from async_rlhf.buffers.weights.assembly import Assembly, EarlyParts
from async_rlhf.buffers.weights.digests import Digests
from async_rlhf.buffers.weights.shared import HAS_SEALS, SealedPool, attach, path_of
from async_rlhf.buffers.weights.weight_set import WeightSet
from tests.buffers.hub.place import until
from tests.buffers.weights.fleet import Fleet, words
from tests.conftest import python

PAGE = os.sysconf("SC_PAGESIZE")
sealed = pytest.mark.skipif(not HAS_SEALS, reason="this system has no sealed memory")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "PART_BYTES", PAGE)


def published(version: int = 1, fence: int = 1) -> tuple[WeightSet, list[wire.SealedPart]]:
    """A set of three parts: a tensor that ends with the first, one over all three, one of no bytes, one in the last."""
    sizes = {"a": PAGE, "b": PAGE + 9, "empty": 0, "c": 7}
    content = random.Random(version)
    tensors = {name: RawTensor("uint8", (size,), content.randbytes(size)) for name, size in sizes.items()}
    parts: list[wire.SealedPart] = []
    weights = WeightSet.of(fence, version, tensors, make=SealedPool().make, sealed=parts.append)
    assert [[spec.name for spec in part.tensors] for part in parts] == [["a"], [], ["b", "empty", "c"]]
    return weights, parts


def early(parts: list[wire.SealedPart]) -> EarlyParts:
    return EarlyParts(parts[0], SealedPool().make(parts[0].num_bytes))


# -- memory --------------------------------------------------------------------------------------------------------------


@sealed
def test_the_parts_of_a_set_are_one_to_who_maps_them() -> None:
    weights, parts = published()
    assert weights.memory is not None and [part.place for part in parts] == weights.memory.places
    memory = attach(weights.memory.places, len(weights.blob))
    assert memory is not None and memory.view == weights.blob
    with pytest.raises(WeightsError, match="no room for"):
        memory.write(PAGE - 1, b"xy")
    assert memory.view == weights.blob
    places = weights.memory.places
    for wrong in (places[:2], [*places, places[0]], [*places[:2], places[1]], [places[1], *places[1:-1]]):
        assert attach(wrong, len(weights.blob)) is None, "a part is missing, or of another size"


@sealed
def test_a_part_can_be_mapped_while_the_next_is_written_and_is_taken_once() -> None:
    writer, reader = SealedPool().make(2 * PAGE), SealedPool().make(2 * PAGE)
    writer.write(0, b"a" * PAGE)
    assert not writer.places, "it is not sealed"
    writer.seal(0)
    writer.write(PAGE, b"b" * PAGE)
    assert reader.take(0, writer.places[0]) and not reader.take(0, writer.places[0])
    assert len(writer.places) == 1 and not reader.take(2, writer.places[0])
    assert bytes(reader.view) == b"a" * PAGE + bytes(PAGE), "what is not there is read as zeros"
    with pytest.raises(WeightsError):
        writer.write(0, b"c")


@sealed
def test_a_set_has_at_most_sixteen_parts() -> None:
    for size in (0, 1, PAGE, PAGE + 1, 16 * PAGE, 16 * PAGE + 1, 33 * PAGE - 1, 1 << 40):
        parts, each = shared.num_parts(size), shared.part_bytes(size)
        assert 1 <= parts <= 16 and each % PAGE == 0 and (parts - 1) * each < max(1, size) <= parts * each


@sealed
@pytest.mark.parametrize("fills", [True, False])
def test_a_part_holds_what_was_written_whatever_pages_the_kernel_gives(fills: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "PART_BYTES", 6 << 20)
    if not fills:  # an old kernel
        monkeypatch.setattr(Addresses, "fill", lambda self, offset, num_bytes: False)
    data = random.Random(1).randbytes((8 << 20) + 5)
    memory = SealedPool().make(len(data))
    for start in range(0, len(data), 1 << 18):
        memory.write(start, data[start : start + (1 << 18)])
    memory.seal()
    assert memory.view == data
    mapped = attach(memory.places, len(data))
    assert mapped is not None and mapped.view == data and bytes(lay([*map(path_of, memory.places)])) == data


FORKS = """
import os, time
from async_rlhf.buffers.weights.shared import SealedPool
memory = SealedPool().make(2 << 20)
memory.write(0, bytes(2 << 20))
reader, writer = os.pipe()
child = os.fork()
if not child:
    os.read(reader, 1)
    os._exit(0)
memory.seal()
os.write(writer, b"x")
os.waitpid(child, 0)
print("sealed")
"""


@sealed
def test_a_process_that_was_forked_meanwhile_does_not_keep_a_part_from_being_sealed() -> None:
    assert python("-c", FORKS).stdout == "sealed\n"


# -- digests -------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), max_size=8), st.lists(st.integers(0, 300), max_size=8), st.integers(1, 3), st.data())
def test_digests_are_those_of_the_tensors_wherever_one_stops(
    sizes: list[int], stops: list[int], threads: int, data: st.DataObject
) -> None:
    whole = random.Random(sum(sizes)).randbytes(sum(sizes))
    read: list[tuple[int, int]] = []

    def take(start: int, end: int) -> bytes:
        read.append((start, end))
        return whole[start:end]

    known = data.draw(st.integers(0, len(sizes)))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(digests, "CACHED_BYTES", 7)
        patched.setattr(digests, "_MANY_BYTES", 0)
        taken, found = Digests(sizes[:known], threads), []
        for stop in sorted(stops):
            found += taken.advance(stop, take)
        taken.extend(sizes[known:])
        found += taken.advance(len(whole), take)
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    assert found == [xxhash.xxh3_128_hexdigest(whole[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    assert sorted(byte for start, end in read for byte in range(start, end)) == list(range(len(whole))), "each byte once"


# -- parts before their announcement -------------------------------------------------------------------------------------


@sealed
@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=9), st.integers(1, 3 * PAGE))
def test_parts_in_any_order_and_twice_are_verified_once_and_the_set_is_there_at_the_last(order: list[int], piece: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shared, "PART_BYTES", PAGE)
        weights, parts = published()
        coming, read = early(parts), 0
        for index in order:
            assert coming.add(parts[index])
            is_busy = True
            while is_busy:
                before = coming.verifier.num_verified
                is_busy = coming.advance(piece)
                read += coming.verifier.num_verified - before
        assert coming.fits(weights.announcement()) == (set(order) == {0, 1, 2})
        if set(order) == {0, 1, 2}:
            assert coming.verifier.is_done and read == len(weights.blob)
            assembly = Assembly(weights.announcement(), given=coming.memory, begun=coming.verifier)
            assert assembly.is_verified and assembly.whole() == weights


@sealed
def test_parts_are_no_other_set_however_alike() -> None:
    weights, parts = published()
    again, _ = published()
    coming = early(parts)
    assert all(map(coming.add, parts)) and coming.fits(weights.announcement())
    announced = weights.announcement()
    wrong = announced.tensors[0].model_copy(update={"digest": "0" * 32})
    for change in (
        {"version": 2}, {"fence": 2}, {"places": again.announcement().places}, {"places": announced.places[:2]},
        {"tensors": [wrong, *announced.tensors[1:]]}, {"tensors": announced.tensors[:-1]},
    ):  # fmt: skip
        assert not coming.fits(announced.model_copy(update=change)), change


@sealed
def test_a_part_that_is_not_what_its_digest_says_is_found_before_the_set_is_announced() -> None:
    weights, parts = published()
    wrong = [spec.model_copy(update={"digest": "0" * 32}) for spec in parts[2].tensors]
    coming = early(parts)
    for part in (*parts[:2], parts[2].model_copy(update={"tensors": wrong})):
        coming.add(part)
    with pytest.raises(WeightsError, match="version 1: tensor 'b' does not match its digest"):
        while coming.advance(PAGE):
            pass
    assert not coming.fits(weights.announcement())


@sealed
def test_tensors_larger_than_what_has_come_are_no_work() -> None:
    """Else the hub would go round and round."""
    _, parts = published()
    coming, spec = early(parts), parts[0].tensors[0]
    coming.add(parts[0].model_copy(update={"tensors": [spec.model_copy(update={"shape": [1 << 60]})]}))
    assert not coming.advance(1 << 30)
    with pytest.raises(WeightsError, match="cannot travel"):
        coming.add(parts[1].model_copy(update={"tensors": [spec.model_copy(update={"dtype": "object"})]}))


# -- through a hub -------------------------------------------------------------------------------------------------------


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Parts of each set that the hub mapped all at once, when it was announced."""
    found: list[int] = []

    def attach_all(places: list[SealedPlace], num_bytes: int) -> Any:
        found.append(len(places))
        return attach(places, num_bytes)

    monkeypatch.setattr(shared, "PART_BYTES", 1 << 20)
    monkeypatch.setattr(server, "attach", attach_all)
    return found


@sealed
def test_a_set_whose_parts_have_come_is_verified_before_it_is_announced(fleet: Any, attached: list[int]) -> None:
    hub = fleet(WeightsConfig(), WeightsConfig())
    anna = hub.member("anna", WeightsConfig())
    for content in (0, 1):
        hub.publish(content)
        anna.adopt(content)
    assert hub.weights["sets_mapped"] == 2 and hub.weights["served_bytes"] == 0
    assert attached == [], "the parts had been mapped one by one"


@sealed
@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_part_that_was_lost_costs_time_and_nothing_else(
    lost: int, fleet: Callable[..., Fleet], attached: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = fleet(WeightsConfig(), WeightsConfig())
    connection = hub.source._weight_connection
    honest = connection.send

    def send(message: wire.Message, arrays: Any = None) -> int:
        return 0 if isinstance(message, wire.SealedPart) and message.index == lost else honest(message, arrays)

    monkeypatch.setattr(connection, "send", send)
    monkeypatch.setattr(hub.source._weight_sender._connection, "send", send)
    anna = hub.member("anna", WeightsConfig())
    hub.publish(0)
    anna.adopt(0)
    assert attached == [4] and hub.weights["sets_mapped"] == 1


@sealed
def test_parts_of_a_set_that_is_there_or_over_leave_nothing_at_the_hub(fleet: Any, attached: list[int]) -> None:
    hub = fleet(WeightsConfig(), WeightsConfig())
    hub.publish(0)
    late = [hub.source.fence, hub.source.fence - 1]
    tensors = {"w": RawTensor("uint8", (8,), b"12345678")}
    parts: list[wire.SealedPart] = []
    kept = [
        WeightSet.of(fence, version, tensors, None, SealedPool().make, parts.append) for fence in late for version in (0, 5)
    ]
    for part in parts:
        hub.source._connection.send(part)
    hub.source._connection.ask(wire.Commit(fence=hub.source.fence, step=0), timeout_s=60.0)  # behind them
    running = hub._running
    assert kept and running is not None and not running.done()
    anna = hub.member("anna", WeightsConfig())
    anna.adopt(0)
    hub.publish(1)
    until(lambda: anna.tensors["w"] == words(1).tobytes(), anna)
    assert attached == []
