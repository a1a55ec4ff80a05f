"""`async-rlhf serve relay`: what it refuses, and that it starts and ends."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from async_rlhf.buffers.clients.control import control
from async_rlhf.buffers.config import QueueConfig
from async_rlhf.buffers.hub.hub import Hub
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.transport import keys, link
from async_rlhf.cli.commands import app


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
    result = CliRunner().invoke(app, ["serve", "relay", *arguments])
    assert result.exit_code != 0
    assert message in result.output


def test_a_relay_whose_key_the_hub_does_not_know_ends_and_says_why(socket_dir: Path, tmp_path: Path) -> None:
    for name in ("home", "strangers"):
        keys.create(tmp_path / name, [], link.new_pair)
    shutil.copy(tmp_path / "home" / "hub.public", tmp_path / "strangers" / "hub.public")
    address, directory = f"ipc://{socket_dir}/hub", tmp_path / "run"
    hub = Hub(address, directory, QueueConfig(), Bound(1, 1, 1), access=keys.load_hub(tmp_path / "home"))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(hub.run)
        arguments = ["serve", "relay", address, f"ipc://{socket_dir}/relay", "--keys", str(tmp_path / "strangers")]
        result = subprocess.run([sys.executable, "-m", "async_rlhf", *arguments], capture_output=True, text=True, timeout=540)
        with control(address, timeout_s=60, connect=link.connector(tmp_path / "home")) as operator:
            operator.halt()
        running.result(60)
    assert result.returncode == 1, result
    assert "the handshake failed" in result.stderr and "this key is not allowed" in result.stderr


def test_a_relay_runs_until_it_is_interrupted(socket_dir: Path) -> None:
    command = [sys.executable, "-m", "async_rlhf", "serve", "relay", f"ipc://{socket_dir}/hub", f"ipc://{socket_dir}/relay"]
    relay = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert relay.stdout is not None
        assert relay.stdout.readline().startswith("relays between ipc://")
        relay.send_signal(signal.SIGINT)
        _, errors = relay.communicate(timeout=300)
        assert relay.returncode == 0, errors
    finally:
        relay.kill()
        relay.communicate()
