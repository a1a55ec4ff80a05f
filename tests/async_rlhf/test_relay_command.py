"""`async-rlhf serve relay`: what it refuses, and that it starts and ends."""

from __future__ import annotations

import shutil
import signal
from contextlib import closing
from pathlib import Path

import pytest

from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.transport import keys, link
from tests.buffers.hub.place import Place
from tests.conftest import Start, invoke


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tcp://10.0.0.1:5555", "ipc://relay"], "'tcp://10.0.0.1:5555' is beyond this machine and needs --keys"),
        (["ipc://hub", "tcp://0.0.0.0:5555"], "'tcp://0.0.0.0:5555' is beyond this machine and needs --own-keys"),
        (["ipc://hub", "ipc://relay", "--set", "transport=smoke"], "weights.transport = 'smoke'"),
        (["ipc://hub", "ipc:///nowhere/relay"], "'ipc:///nowhere/relay' cannot be listened at"),
    ],
)
def test_a_relay_that_cannot_be_is_refused_with_the_reason(arguments: list[str], message: str) -> None:
    code, output = invoke("serve", "relay", *arguments)
    assert code != 0 and message in output


def test_a_relay_whose_key_the_hub_does_not_know_ends_and_says_why(command: Start, socket_dir: Path, tmp_path: Path) -> None:
    for name in ("home", "strangers"):
        keys.create(tmp_path / name, [], link.new_pair)
    shutil.copy(tmp_path / "home" / "hub.public", tmp_path / "strangers" / "hub.public")
    with closing(Place(tmp_path / "run", f"ipc://{socket_dir}/hub", Bound(1, 1, 1), keys=tmp_path / "home")) as hub:
        hub.begin()
        relay = command("serve", "relay", hub.address, f"ipc://{socket_dir}/relay", "--keys", str(tmp_path / "strangers"))
        relay.ends_with(1, "the handshake failed", "this key is not allowed")


def test_a_relay_runs_until_it_is_interrupted(command: Start, socket_dir: Path) -> None:
    relay = command("serve", "relay", f"ipc://{socket_dir}/hub", f"ipc://{socket_dir}/relay")
    assert relay.process.stdout.readline().startswith("relays between ipc://")
    relay.process.send_signal(signal.SIGINT)
    relay.ends_with(0)
