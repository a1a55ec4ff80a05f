"""A short burst of what `make fuzz` does at length."""

from __future__ import annotations

from itertools import islice
from typing import get_args

from async_rlhf.buffers.errors import WireError
from async_rlhf.buffers.protocol import wire
from tests.fuzz.campaign import run
from tests.fuzz.mutants import MAX_FRAME_BYTES, mutants, originals


def test_rubbish_neither_ends_nor_grows_the_hub_nor_hinders_who_is_honest() -> None:
    report = run(20_000, seed=1)
    refused = report.status["refused"]
    assert {"malformed", "protocol", "unknown-type", "field", "oversized", "unknown-actor", "fenced"} <= refused.keys()
    assert sum(refused.values()) > 15_000
    assert report.growth_mib < 32 and report.steps > 3 and report.status["ledger"]["closes"]


def test_every_message_is_spoilt_and_most_mutants_are_no_message() -> None:
    assert {wire.decode(frames, max_frame_bytes=MAX_FRAME_BYTES)[1].type for frames in originals()} == {
        model.type for model in get_args(wire.Message)
    }
    refused = 0
    for frames in islice(mutants(0), 2000):
        try:
            wire.decode(frames, max_frame_bytes=MAX_FRAME_BYTES)
        except WireError:
            refused += 1
    assert 800 < refused < 1900


def test_a_seed_gives_the_same_frames() -> None:
    assert list(islice(mutants(3), 200)) == list(islice(mutants(3), 200))
