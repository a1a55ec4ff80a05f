"""An actor verifies a large set in turns of bounded time, between two decode steps; one that it maps, the hub has verified."""

from __future__ import annotations

import itertools

import pytest

from async_rlhf.buffers.config import WeightsConfig
from async_rlhf.buffers.errors import WeightsError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.buffers.weights.assembly import PIECE_BYTES
from async_rlhf.buffers.weights.receiver import TURN_S, WeightReceiver
from async_rlhf.buffers.weights.shared import HAS_SEALS, SealedMemory
from async_rlhf.buffers.weights.weight_set import WeightSet

WEIGHTS = WeightSet.of(1, 1, {"w": RawTensor("uint8", (4 * PIECE_BYTES,), bytes(4 * PIECE_BYTES))}, make=SealedMemory.make)


def fetching(seconds_a_piece: float) -> WeightReceiver:
    """Wants version 1; every look at its clock takes so long."""
    passed, requests = itertools.count(step=seconds_a_piece), itertools.count(1)
    receiver = WeightReceiver(lambda message: next(requests), lambda: next(passed), "ipc://hub", WeightsConfig())
    receiver.adopt((1, 1))
    return receiver


def test_a_turn_ends_when_its_time_is_over_and_a_fast_machine_needs_few() -> None:
    def turns(seconds_a_piece: float) -> int:
        receiver = fetching(seconds_a_piece)
        receiver.receive(WEIGHTS.manifest().model_copy(update={"place": None}), [])
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
