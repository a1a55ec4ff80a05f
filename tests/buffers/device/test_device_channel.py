"""Weights broadcast from a learner to engines, through a real hub and real process groups, in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import psutil
import pytest

from async_rlhf.buffers.config import WeightsConfig
from async_rlhf.buffers.device.ends import EngineEnd, LearnerEnd
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.buffers.weights.weight_set import WeightSet
from tests.buffers.hub.place import DEADLINE_S, until
from tests.buffers.weights.fleet import Adopter, Fleet, tensors

TIMEOUT_S = 60.0  # of a broadcast: none of these is to reach it
DEVICE = WeightsConfig(transport="device", device_timeout_s=TIMEOUT_S)


def await_threads() -> None:
    """A process that ends in order while one is in torch.distributed is aborted by it; roles end otherwise (`end_with`)."""
    for thread in threading.enumerate():
        if thread.name == "device-channel":
            thread.join(DEADLINE_S)


@pytest.fixture
def channel(fleet: Callable[..., Fleet], stack: ExitStack) -> Fleet:
    """A hub and a learner that broadcasts."""
    made = fleet(DEVICE, DEVICE)
    made.source._broadcaster = LearnerEnd(TIMEOUT_S)
    stack.callback(await_threads)
    stack.callback(made.close)
    return made


def engine(channel: Fleet, name: str) -> Adopter:
    made = channel.member(name, DEVICE, take_seat=EngineEnd(TIMEOUT_S))
    until(lambda: name in channel.status()["actors"], made)
    return made


def publish(channel: Fleet, content: int, *engines: Adopter) -> None:
    """And let the engines look meanwhile: the broadcast needs them."""
    publication = channel.meanwhile(lambda: channel.publish(content))
    until(publication.done, *engines)
    publication.result()
    until(lambda: all(each.fence == channel.source.fence for each in engines), *engines)
    for each in engines:
        each.check(content)


def counted(channel: Fleet) -> dict[str, int]:
    names = ("epochs", "broadcasts", "broadcasts_failed", "broadcasts_refused", "served_bytes")
    return {name: channel.weights[name] for name in names}


def test_engines_adopt_what_was_broadcast_and_the_hub_serves_nothing(channel: Fleet) -> None:
    anna, bert = engine(channel, "anna"), engine(channel, "bert")
    for content in range(3):
        publish(channel, content, anna, bert)
    found = counted(channel)
    assert found["broadcasts"] == 3 and not found["broadcasts_failed"] and not found["broadcasts_refused"], found
    assert channel.weights["sets"] == 3, "the hub has them too"
    assert anna.came == bert.came == ["broadcast"] * 3


def test_a_version_is_served_before_its_bytes_are_at_the_hub(channel: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    anna, goes_on = engine(channel, "anna"), threading.Event()
    sender = channel.source._weight_sender
    honest = sender.publish

    def late(weights: WeightSet) -> None:
        assert goes_on.wait(DEADLINE_S)
        honest(weights)

    monkeypatch.setattr(sender, "publish", late)
    publication = channel.meanwhile(lambda: channel.publish(5))
    until(lambda: anna.adopted, anna)
    anna.check(5)
    assert channel.weights["sets"] == 0 and channel.status()["version"] == 0
    stranger = channel.member("late", DEVICE)
    until(lambda: "late" in channel.status()["actors"], stranger)
    assert not stranger.adopted
    goes_on.set()
    until(publication.done, anna, stranger)
    publication.result()
    until(lambda: stranger.adopted, stranger)
    stranger.check(5)


def test_who_joins_gets_the_newest_set_from_the_hub_and_takes_part_in_the_next(channel: Fleet) -> None:
    anna = engine(channel, "anna")
    publish(channel, 0, anna)
    bert = engine(channel, "bert")
    until(lambda: bert.adopted, bert, anna)
    assert bert.came == ["hub"]
    publish(channel, 1, anna, bert)
    anna.close()
    until(lambda: "anna" not in channel.status()["actors"], bert)
    publish(channel, 2, bert)
    assert anna.came == ["broadcast"] * 2 and bert.came == ["hub", "broadcast", "broadcast"]
    assert counted(channel)["broadcasts_failed"] == 0


def test_what_is_not_what_the_learner_broadcast_is_fetched_and_counted(channel: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    anna = engine(channel, "anna")
    monkeypatch.setattr(channel.source._broadcaster, "send", _another_digest(channel.source._broadcaster.send))
    publish(channel, 3, anna)
    assert anna.came == ["hub"]
    until(lambda: counted(channel)["broadcasts_refused"] == 1, anna)


def _another_digest(send: Callable[..., str | None]) -> Callable[..., str | None]:
    return lambda *arguments: send(*arguments) and "0" * 32


def test_without_an_engine_that_takes_part_all_is_as_before(channel: Fleet) -> None:
    anna = channel.member("anna", DEVICE)
    publish(channel, 1, anna)
    assert anna.came == ["hub"] and counted(channel)["broadcasts"] == 0


def test_a_hub_that_forgot_everything_gathers_its_engines_anew(channel: Fleet) -> None:
    anna = engine(channel, "anna")
    publish(channel, 1, anna)
    channel.restart()
    until(lambda: "anna" in channel.status()["actors"], anna)
    publish(channel, 2, anna)
    assert anna.came == ["broadcast"] * 2 and counted(channel)["epochs"] == 1


def test_nothing_listens_beyond_this_machine(channel: Fleet) -> None:
    anna = engine(channel, "anna")
    publish(channel, 1, anna)
    listening = {each.laddr.ip for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"} and anna.came == ["broadcast"]


@pytest.mark.parametrize("size", [0, 1, 7])
def test_tensors_of_any_size_come_as_they_are(channel: Fleet, size: int) -> None:
    odd: dict[str, Any] = {"odd": RawTensor("uint8", (size,), bytes(range(size))), **tensors(4)}
    anna = engine(channel, "anna")
    channel.source.register(0, 0)
    publication = channel.meanwhile(lambda: channel.source.publish(0, odd))
    until(publication.done, anna)
    publication.result()
    until(lambda: anna.adopted, anna)
    assert anna.tensors == {name: bytes(raw.data) for name, raw in odd.items()} and anna.came == ["broadcast"]
