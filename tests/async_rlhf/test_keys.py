"""Keys in a whole run: what is refused before the start, how they are made, and a run that trains with them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.transport import keys, link
from tests.conftest import Train, invoke, kept_port, output_of, wait_for


@pytest.fixture
def key_directory(tmp_path: Path) -> Path:
    keys.create(tmp_path / "keys", ["far"], link.new_pair)
    return tmp_path / "keys"


@pytest.fixture
def port() -> Iterator[int]:
    with kept_port() as port:
        yield port


def test_without_keys_only_this_machine_is_listened_to_and_with_them_any_interface_at_an_address_that_can_be(
    small: Any, key_directory: Path
) -> None:
    keyed = {"security.keys": str(key_directory)}
    others = ["0.0.0.0", "*", "192.168.1.5"]
    for host in (*others, "127.0.0.2", "[::]", "eth0", "example.com", "127.0.0.1.example.com"):
        with pytest.raises(ConfigError, match="without keys the hub listens only on this machine"):
            small(address=f"tcp://{host}:5555")
    for host in (*others, "127.0.0.1", "localhost"):
        assert small(address=f"tcp://{host}:5555", **keyed).security.directory == key_directory
    for address in (
        "tcp://[::]:5555",
        "tcp://eth0:5555",
        "tcp://10.0.0.1",
        "tcp://10.0.0.1:0",
        "tcp://*:x",
        "udp://*:5",
        "tcp://*:65536",
    ):
        with pytest.raises(ConfigError, match="tcp://IP:PORT"):
            small(address=address, **keyed)


def test_keys_that_cannot_be_used_are_refused_before_the_start(small: Any, key_directory: Path) -> None:
    with pytest.raises(ConfigError, match="is no directory"):
        small(**{"security.keys": str(key_directory / "nowhere")})
    with pytest.raises(ConfigError, match=r"allowed' is no directory"):
        small(**{"security.keys": str(key_directory / "for-far")})  # a peer's directory is not the hub's
    (key_directory / "hub.secret").chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        small(**{"security.keys": str(key_directory)})


def test_keys_are_made_once_and_what_to_copy_where_is_said(tmp_path: Path) -> None:
    directory = str(tmp_path / "keys")
    output = output_of(0, "keys", "new", directory, "--name", "gpu2", "--name", "site:relay")
    assert f"move {directory}/for-gpu2 to gpu2" in output and f"move {directory}/for-site to site" in output
    assert {file.stem: file.read_text().split()[1:] for file in Path(directory, "allowed").iterdir()} == {
        "gpu2": ["actor"], "site": ["relay"], "local": ["actor", "control", "learner", "relay"],
    }  # fmt: skip
    secrets = [file.read_text().strip() for file in Path(directory).rglob("*.secret")]
    assert len(secrets) == 4 and not any(secret in output for secret in secrets)
    assert "never written over" in output_of(3, "keys", "new", directory)


def test_a_run_trains_with_keys_and_shows_no_secret(training: Train, tmp_path: Path, key_directory: Path, port: int) -> None:
    """One of its actors is started by hand, with the keys made for another machine and a configuration of its own.

    However long that takes: the run goes on until it is asked to stop.
    """
    address = {"address": f"tcp://0.0.0.0:{port}", "security.keys": str(key_directory)}
    started = training(**address, **{"actors.count": 1, "max_steps": 100_000})
    run = started.run.path
    wait_for(lambda: (run / "run.json").exists(), "the run")
    there = tmp_path / "there"
    there.mkdir()
    written = (run / "config.toml").read_text()
    (there / "config.toml").write_text(written.replace(str(key_directory), str(key_directory / "for-far")))
    shutil.copytree(run / "data", there / "data")
    far = subprocess.Popen(
        [sys.executable, "-m", "async_rlhf.run.processes.roles", "actor", str(there), f"tcp://127.0.0.1:{port}", "far-0"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        started.reach(1)
        status = wait_for(lambda: _status_with(run, "far-0"), "the actor that was started by hand")
        assert status["hub"]["handshakes_failed"] == 0 and status["hub"]["connections"] >= 3
        for role in ("learner", "actor"):  # wherever else the hub listens, its own machine shares memory
            assert " ipc://" in " ".join(started.child(role).cmdline())
        output_of(0, "stop", run)
        output = started.ends_with(0)
        assert far.wait(timeout=300) == 0
    finally:
        far.kill()
        said = far.communicate(timeout=300)[1]
    secrets = [file.read_text().strip() for file in key_directory.rglob("*.secret")]
    for text in (output, said, *(file.read_text(errors="replace") for file in run.rglob("*") if file.is_file())):
        assert not any(secret in text for secret in secrets)


def _status_with(run: Path, actor: str) -> dict[str, Any] | None:
    code, output = invoke("status", run, "--json")
    found: dict[str, Any] = {"hub": None} if code else json.loads(output)
    return found if actor in (found["hub"] or {}).get("actors", {}) else None
