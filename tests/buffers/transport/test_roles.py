"""What each holder of an allowed key may say: every message for the hub, at a live hub with keys."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from async_rlhf.buffers.clients.actor import ActorClient, ActorState
from async_rlhf.buffers.clients.connection import Connection
from async_rlhf.buffers.clients.control import control
from async_rlhf.buffers.clients.learner import LearnerClient
from async_rlhf.buffers.config import QueueConfig
from async_rlhf.buffers.errors import ConfigError, RefusedError
from async_rlhf.buffers.hub.hub import Hub
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.transport import keys, link, roles
from tests.buffers.hub.test_refusals import HEADER

DEADLINE_S = 30.0
OF_ACTORS = {"hello", "beat", "put", "release", "bye", "fetch", "fetch_chunk"}
MAY: dict[roles.Role, set[str]] = {
    "actor": OF_ACTORS,
    "relay": OF_ACTORS,
    "learner": {"register", "take", "tried", "trained", "commit", "publish", "chunk", "check"},
    "control": {"get_status", "drain", "gone", "quarantine", "halt"},
}
SAID: list[wire.Message] = [
    wire.Hello(actor="gpu2-0", life="1", capacity=0, fence=0, version=0),
    wire.Beat(capacity=0, fence=0, version=0),
    wire.Put(group=HEADER),
    wire.Release(numbers=[]),
    wire.Fetch(fence=1, version=0),
    wire.FetchChunk(fence=1, version=0, index=0),
    wire.Bye(),
    wire.Register(step=0, committed=0, learner="life"),
    wire.Take(fence=9, step=0),
    wire.Tried(fence=9, step=0, number=0, done=False),
    wire.Trained(fence=9, step=0),
    wire.Commit(fence=9, step=0),
    wire.Publish(fence=9, version=0, num_bytes=0, tensors=[]),
    wire.Chunk(fence=9, version=0, index=0),
    wire.Check(fence=9, version=0),
    wire.GetStatus(),
    wire.Gone(actor="nobody"),
    wire.Drain(),
    wire.Quarantine(number=0, reason="bad"),
    wire.Halt(),
]
FROM_THE_HUB = {
    "welcome", "credits", "adopt", "ack", "rejected", "later", "stop", "registered", "batch", "trial", "waiting", "ended",
    "status", "done", "refused", "wanted", "checked", "manifest",
}  # fmt: skip


class Keyed:
    """A hub that lets in one machine of each role, and one of two."""

    def __init__(self, folder: Path, sockets: Path) -> None:
        self.keys, self.address = folder / "keys", f"ipc://{sockets}/hub"
        machines = ["gpu2", "site:relay", "trainer:learner", "desk:control", "both:actor,control"]
        keys.create(self.keys, machines, link.new_pair)
        access = keys.load_hub(self.keys)
        hub = Hub(self.address, folder / "run", QueueConfig(), Bound(1, 1, 4), access=access)
        self._thread = threading.Thread(target=hub.run)
        self._thread.start()

    def connect(self, machine: str) -> link.Connect:
        return link.connector(self.keys / f"for-{machine}")

    def refused(self) -> dict[str, int]:
        with control(self.address, DEADLINE_S, link.connector(self.keys)) as operator:
            counts: dict[str, int] = operator.status()["refused"]
            return counts

    def close(self) -> None:
        with control(self.address, DEADLINE_S, link.connector(self.keys)) as operator:
            operator.halt()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


@pytest.fixture
def hub(tmp_path: Path, socket_dir: Path) -> Iterator[Keyed]:
    made = Keyed(tmp_path, socket_dir)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("machine", "its_roles"),
    [
        ("gpu2", ["actor"]),
        ("site", ["relay"]),
        ("trainer", ["learner"]),
        ("desk", ["control"]),
        ("both", ["actor", "control"]),
    ],
)
def test_a_holder_says_what_its_roles_say_and_the_rest_is_refused_told_and_counted(
    hub: Keyed, machine: str, its_roles: list[roles.Role]
) -> None:
    may = set().union(*(MAY[role] for role in its_roles))
    peer, refused = Connection(hub.connect(machine)(hub.address, machine)), set()
    try:
        for message in SAID:
            if message.type == "halt" and "halt" in may:
                continue  # it would be obeyed
            if isinstance(message, wire.Hello) and machine != "site":
                message = message.model_copy(update={"actor": machine})
            request, answer = peer.send(message), None
            while answer is None or answer[0] != request:
                answer = peer.receive(DEADLINE_S)
            if isinstance(answer[1], wire.Refused) and answer[1].reason == "role":
                assert repr(message.type) in answer[1].detail and repr(machine) in answer[1].detail
                refused.add(message.type)
    finally:
        peer.close()
    assert refused == {message.type for message in SAID} - may
    assert hub.refused()["role"] == len(refused)


def test_the_table_has_every_message_for_the_hub() -> None:
    types = {get_args(message.model_fields["type"].annotation)[0] for message in get_args(wire.Message)}
    assert {message.type for message in SAID} == types - FROM_THE_HUB == set().union(*MAY.values())


def test_a_stolen_key_of_an_actor_becomes_no_learner_no_operator_and_nobody_elses_actor(hub: Keyed) -> None:
    learner = LearnerClient(hub.address, timeout_s=DEADLINE_S, connect=hub.connect("gpu2"))
    with pytest.raises(RefusedError, match="role: 'register' is for learner, and the key of 'gpu2' is allowed as actor"):
        learner.register(0, 0)
    learner.close()
    with (
        control(hub.address, DEADLINE_S, hub.connect("gpu2")) as thief,
        pytest.raises(RefusedError, match="'halt' is for control"),
    ):
        thief.halt()
    other = ActorClient(hub.address, "both-0", beat_s=5.0, timeout_s=DEADLINE_S, connect=hub.connect("gpu2"))
    with pytest.raises(RefusedError, match=r"an actor of .gpu2. is called gpu2 or gpu2-\.\.\., not .both-0."):
        while True:
            other.poll(ActorState(0, 0, -1, ()), {}, timeout_s=0.5)
    other.close()
    refused = hub.refused()  # a message whose answer is late is sent again, and counted again
    assert refused.keys() == {"role", "unknown-actor"}, "and the goodbye of an actor that is not known"
    assert refused["role"] >= 3


@pytest.mark.parametrize(
    ("holder", "name", "is_welcome"),
    [("gpu2", "gpu2", True), ("gpu2", "gpu2-7", True), ("gpu2", "gpu20", False), ("gpu2", "gpu", False)],
)
def test_an_actor_has_its_machines_name(holder: str, name: str, is_welcome: bool) -> None:
    hello = wire.Hello(actor=name, life="1", capacity=0, fence=0, version=0)
    roles.check(roles.Holder(holder, frozenset({"relay"})), hello)
    roles.check(None, hello)
    if is_welcome:
        roles.check(roles.Holder(holder, frozenset({"actor"})), hello)
    else:
        with pytest.raises(RefusedError, match="role"):
            roles.check(roles.Holder(holder, frozenset({"actor"})), hello)


@pytest.mark.parametrize("machine", ["a:king", "a:", "a:actor,", "a:actor,king", "a:Actor"])
def test_a_role_that_is_none_is_refused_with_those_there_are(tmp_path: Path, machine: str) -> None:
    with pytest.raises(ConfigError, match="give one or more of actor, relay, learner, control"):
        keys.create(tmp_path / "keys", [machine], link.new_pair)
    assert not (tmp_path / "keys").exists()
