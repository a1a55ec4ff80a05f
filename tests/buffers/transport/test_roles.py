"""What each holder of an allowed key may send: every message of the protocol, and one key at a live hub."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.clients.control import control
from async_rlhf.buffers.errors import ConfigError, RefusedError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.queue.journal import Journal
from async_rlhf.buffers.transport import keys, link
from tests.buffers.hub.in_process import InProcessHub
from tests.buffers.hub.place import DEADLINE_S, until
from tests.fuzz.mutants import originals

OF_ACTORS = {"hello", "beat", "put", "release", "bye", "fetch", "fetch_chunk"}
MAY: dict[keys.Role, set[str]] = {
    "actor": OF_ACTORS,
    "relay": OF_ACTORS,
    "learner": {
        "register", "take", "tried", "trained", "commit", "sealed_part", "publish", "chunk", "check", "gather", "broadcast",
    },
    "control": {"get_status", "drain", "gone", "quarantine", "halt"},
}  # fmt: skip
FROM_THE_HUB = {
    "welcome", "credits", "adopt", "ack", "rejected", "later", "stop", "registered", "batch", "trial", "waiting", "ended",
    "status", "done", "refused", "wanted", "checked", "manifest",
    "receive",
}  # fmt: skip


@pytest.mark.parametrize("its", [["actor"], ["relay"], ["learner"], ["control"], ["actor", "control"]])
def test_a_holder_sends_what_its_roles_may_and_the_rest_is_refused_and_counted(tmp_path: Path, its: list[keys.Role]) -> None:
    may, refused, types = set().union(*(MAY[role] for role in its)), set(), set()
    with closing(Journal(tmp_path)) as journal:
        hub = InProcessHub(Bound(1, 1, 4), journal)
        for frames in originals():
            _, message, _ = wire.decode(frames, max_frame_bytes=1 << 20)
            types.add(message.type)
            hub.exchange.receive(b"x", frames, keys.KeyHolder("stranger", frozenset(its)))
            for answer in hub.turn():
                if isinstance(answer, wire.Refused) and answer.reason == "role":
                    assert repr(message.type) in answer.detail and "'stranger'" in answer.detail
                    refused.add(message.type)
        assert hub.status()["refused"]["role"] >= len(refused)
    assert refused == types - FROM_THE_HUB - may
    assert types - FROM_THE_HUB == set().union(*MAY.values())


def test_a_stolen_key_of_an_actor_becomes_no_learner_no_operator_and_no_other_actor(place: Any, tmp_path: Path) -> None:
    keys.create(tmp_path / "keys", ["gpu2"], link.new_pair)
    hub, stolen = place(Bound(1, 1, 4), keys=tmp_path / "keys"), link.connector(tmp_path / "keys" / "for-gpu2")
    with pytest.raises(RefusedError, match="role: 'register' is for learner, and the key of 'gpu2' is allowed as actor"):
        hub.learner(publishes=False, connect=stolen)
    with control(hub.address, DEADLINE_S, stolen) as thief, pytest.raises(RefusedError, match="'halt' is for control"):
        thief.halt()
    other = hub.actor("both-0", connect=stolen)
    with pytest.raises(RefusedError, match=r"an actor of .gpu2. is called gpu2 or gpu2-\.\.\., not .both-0."):
        until(lambda: False, other)


@pytest.mark.parametrize(("name", "is_welcome"), [("gpu2", True), ("gpu2-7", True), ("gpu20", False), ("gpu", False)])
def test_an_actor_has_its_machines_name(name: str, is_welcome: bool) -> None:
    hello = wire.Hello(actor=name, life="1", capacity=0, fence=0, version=0)
    keys.check_sender(keys.KeyHolder("gpu2", frozenset({"relay"})), hello)
    keys.check_sender(None, hello)
    if is_welcome:
        keys.check_sender(keys.KeyHolder("gpu2", frozenset({"actor"})), hello)
    else:
        with pytest.raises(RefusedError, match="role"):
            keys.check_sender(keys.KeyHolder("gpu2", frozenset({"actor"})), hello)


@pytest.mark.parametrize("machine", ["a:king", "a:", "a:actor,", "a:actor,king", "a:Actor"])
def test_a_role_that_is_none_is_refused_with_those_there_are(tmp_path: Path, machine: str) -> None:
    with pytest.raises(ConfigError, match="give one or more of actor, relay, learner, control"):
        keys.create(tmp_path / "keys", [machine], link.new_pair)
    assert not (tmp_path / "keys").exists()
