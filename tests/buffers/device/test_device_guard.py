"""Whatever is wrong with a group of the device channel, at whatever call: every engine has the right version in the end, by the
hub, the fault is counted and named, and after three in a row it is met no more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from async_rlhf.buffers.config import WeightsConfig
from async_rlhf.buffers.device import ends
from async_rlhf.buffers.device.ends import EngineEnd, LearnerEnd
from async_rlhf.buffers.device.group import MakeGroup, group_on
from tests.buffers.device.faults import BUCKET, HEAD, LENGTH, MAKE, Fault
from tests.buffers.device.test_device_channel import await_threads, counted, publish
from tests.buffers.hub.place import until
from tests.buffers.weights.fleet import Adopter, Fleet

HEALTHY = Fault(at=-2)
CALLS = {"made": MAKE, "length": LENGTH, "head": HEAD, "bucket": BUCKET, "another-bucket": BUCKET + 3}
FAULTS = [
    pytest.param(side, {"at": at, "waits": waits, "hangs": hangs, "aborts": aborts}, id="-".join(words), marks=marks)
    for side in ("learner", "engine")
    for name, at in CALLS.items()
    for waits in (False, True)
    if at != MAKE or not waits
    for hangs, aborts in ((False, True), (True, True), (True, False))
    for words in [(side, name, *["wait"] * waits, *["hangs" if hangs else "fails"], *["abort-hangs"] * (not aborts))]
    for marks in [
        () if (name, waits, aborts) in (("made", False, not hangs), ("another-bucket", True, True)) else pytest.mark.rest
    ]
]
Guarded = Callable[..., tuple[Fleet, Adopter]]


@pytest.fixture
def guarded(fleet: Callable[..., Fleet], stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Guarded:
    """A hub, a learner that broadcasts, and an engine, whose groups have these faults."""
    monkeypatch.setattr(ends, "_BUCKET_BYTES", 1 << 19)

    def make(timeout_s: float, learner: MakeGroup = HEALTHY, engine: MakeGroup = HEALTHY) -> tuple[Fleet, Adopter]:
        config = WeightsConfig(transport="device", device_timeout_s=timeout_s)
        made = fleet(config, config)
        stack.callback(await_threads)
        for each in (learner, engine):
            stack.callback(each.over.set if isinstance(each, Fault) else lambda: None)
        stack.callback(made.close)
        made.source._broadcaster = LearnerEnd(timeout_s, learner)
        anna = made.member("anna", config, take_seat=EngineEnd(timeout_s, engine))
        until(lambda: "anna" in made.status()["actors"], anna)
        return made, anna

    return make


def out(channel: Fleet) -> Any:
    return channel.status()["actors"]["anna"].get("no_broadcasts")


def test_buckets_pass_through_a_few_buffers_where_a_group_has_a_device(guarded: Guarded) -> None:
    channel, anna = guarded(60.0)
    for content in range(3):
        publish(channel, content, anna)
    assert anna.came == ["broadcast"] * 3


@pytest.mark.parametrize(("side", "fault"), FAULTS)
def test_a_group_that_fails_or_hangs_at_any_call_costs_three_broadcasts_and_no_version(
    guarded: Guarded, side: str, fault: dict[str, Any]
) -> None:
    faulty = Fault(**fault)
    channel, anna = guarded(1.0, **{side: faulty})
    for content in range(3):
        assert out(channel) is None
        publish(channel, content, anna)
    until(lambda: out(channel), anna)
    assert side == "engine" or (counted(channel)["broadcasts_failed"], counted(channel)["broadcasts"]) == (3, 0)
    publish(channel, 3, anna)
    assert anna.came == ["hub"] * 4 and faulty.num_met == 3
    channel.close()
    ends_itself = not faulty.hangs or (faulty.aborts and faulty.at != MAKE)
    if ends_itself:
        await_threads()
    hung = [thread for thread in threading.enumerate() if thread.name == "device-channel"]
    assert bool(hung) == (not ends_itself), "an abort ends what hangs; what it does not end is not waited for"


@pytest.mark.skipif(torch.cuda.is_available(), reason="nccl may work here")
def test_without_nccl_a_run_goes_on_by_the_hub(guarded: Guarded) -> None:
    channel, anna = guarded(60.0, group_on("cuda"), group_on("cuda"))
    for content in range(4):
        publish(channel, content, anna)
    assert anna.came == ["hub"] * 4 and out(channel) and counted(channel)["broadcasts_failed"] > 0


def one_bit(came: Tensor, before: Tensor) -> None:
    came[len(came) // 2] ^= 1


def older(came: Tensor, before: Tensor) -> None:
    length = min(len(came), len(before))  # heads of two versions differ by the digits of a number
    came[:length] = before[:length]


SPOILS = {
    "one-bit": one_bit,
    "zeros": lambda came, _: came.zero_(),
    "ones": lambda came, _: came.fill_(255),
    "older": older,
}


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("at", [HEAD, BUCKET, BUCKET + 5], ids=["head", "bucket", "another-bucket"])
def test_bytes_that_are_not_those_that_were_sent_are_found_and_come_by_the_hub(guarded: Guarded, spoil: str, at: int) -> None:
    faulty = Fault(at, spoil=SPOILS[spoil])
    channel, anna = guarded(60.0, engine=faulty)
    for content in range(40):  # an engine that comes late is no part of a broadcast
        publish(channel, content, anna)
        if faulty.num_met == 3:
            break
    assert set(anna.came) == {"hub"} and faulty.num_met == 3
    until(lambda: out(channel), anna)
    if at != HEAD:
        assert out(channel) == "what came is not what the learner broadcast" and counted(channel)["broadcasts_refused"] == 3
