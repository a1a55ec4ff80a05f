"""What each holder of an allowed key may say: every message for the hub, at a live hub with keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from async_rlhf.buffers.clients.control import control
from async_rlhf.buffers.errors import ConfigError, RefusedError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.transport import keys, link, roles
from tests.buffers.hub.place import DEADLINE_S, Place, until
from tests.buffers.hub.test_refusals import HEADER

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


MACHINES: dict[str, list[roles.Role]] = {
    "gpu2": ["actor"],
    "site": ["relay"],
    "trainer": ["learner"],
    "desk": ["control"],
    "both": ["actor", "control"],
}
Connects = Callable[[str], link.Connect]


@pytest.fixture
def key_directory(tmp_path: Path) -> Path:
    keys.create(tmp_path / "keys", [f"{name}:{','.join(its)}" for name, its in MACHINES.items()], link.new_pair)
    return tmp_path / "keys"


@pytest.fixture
def connect(key_directory: Path) -> Connects:
    """With the keys of this machine."""
    return lambda machine: link.connector(key_directory / f"for-{machine}")


@pytest.fixture
def hub(place: Callable[..., Place], key_directory: Path) -> Place:
    """Lets in a machine of each role, and one of two."""
    return place(Bound(1, 1, 4), keys=key_directory)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_holder_says_what_its_roles_say_and_the_rest_is_refused_told_and_counted(
    hub: Place, connect: Connects, machine: str
) -> None:
    may = set().union(*(MAY[role] for role in MACHINES[machine]))
    peer, refused = hub.stranger(machine, connect=connect(machine)), set()
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
    assert refused == {message.type for message in SAID} - may
    assert hub.status()["refused"]["role"] == len(refused)


def test_the_table_has_every_message_for_the_hub() -> None:
    types = {message.type for message in get_args(wire.Message)}
    assert {message.type for message in SAID} == types - FROM_THE_HUB == set().union(*MAY.values())


def test_a_stolen_key_of_an_actor_becomes_no_learner_no_operator_and_no_other_actor(hub: Place, connect: Connects) -> None:
    stolen = connect("gpu2")
    with pytest.raises(RefusedError, match="role: 'register' is for learner, and the key of 'gpu2' is allowed as actor"):
        hub.learner(publishes=False, connect=stolen)
    with control(hub.address, DEADLINE_S, stolen) as thief, pytest.raises(RefusedError, match="'halt' is for control"):
        thief.halt()
    other = hub.actor("both-0", connect=stolen)
    with pytest.raises(RefusedError, match=r"an actor of .gpu2. is called gpu2 or gpu2-\.\.\., not .both-0."):
        until(lambda: False, other)
    other.close()
    until(lambda: "unknown-actor" in hub.status()["refused"])  # the goodbye of an actor that is not known
    refused = hub.status()["refused"]  # a message whose answer is late is sent again, and counted again
    assert refused.keys() == {"role", "unknown-actor"} and refused["role"] >= 3


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
