"""`async-rlhf relay`: what it refuses, and that it starts and ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from async_rlhf.cli import app


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tcp://10.0.0.1:5555", "ipc://relay"], "'tcp://10.0.0.1:5555' is beyond this machine, which needs --keys"),
        (["ipc://hub", "tcp://0.0.0.0:5555"], "'tcp://0.0.0.0:5555' is beyond this machine, which needs --own-keys"),
        (["ipc://hub", "ipc://relay", "--set", "transport=smoke"], "weights.transport = 'smoke'"),
    ],
)
def test_a_relay_that_cannot_be_is_refused_with_the_reason(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["relay", *arguments])
    assert result.exit_code != 0
    assert message in result.output


def test_a_relay_runs_until_it_is_interrupted(socket_dir: Path) -> None:
    command = [sys.executable, "-m", "async_rlhf", "relay", f"ipc://{socket_dir}/hub", f"ipc://{socket_dir}/relay"]
    relay = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert relay.stdout is not None
        assert relay.stdout.readline().startswith("relays between ipc://")
        relay.send_signal(signal.SIGINT)
        _, errors = relay.communicate(timeout=60)
        assert relay.returncode == 0, errors
    finally:
        relay.kill()
        relay.communicate()
