"""A run with actors and a learner rank on other hosts: agents that a command starts, here as processes of this machine."""

from __future__ import annotations

import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.files import content_digest
from async_rlhf.inspect.chaos import problems
from async_rlhf.launch import connection
from async_rlhf.launch.program import role_of
from async_rlhf.preparation import prepare
from async_rlhf.run.hosts.connections import connect, found_by
from async_rlhf.run.hosts.placement import inventory_of, placement_of
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.supervision.supervisor import Supervisor
from tests.async_rlhf.test_supervisor import Heard
from tests.async_rlhf.two_hosts import AHEAD_S, clock_ahead
from tests.conftest import has_ended

AGENT = (sys.executable, "-m", "async_rlhf.launch.agent")
# On one of two hosts there is no model, and its clock is five minutes ahead.
DIFFERENT = """
import os, sys
from async_rlhf.launch import agent, depot
if "{host}" == "127.0.0.1":
    depot.Depot.problem = lambda *_: "it is not here"
    os.environ["PYTHONPATH"] = PATH
    exec(open(PATH.split(":")[0] + "/sitecustomize.py").read())
sys.exit(agent.main())
"""
# Two hosts with a driver; one of them is this machine.
WITH_DEVICES = """
import os, socket, sys
os.environ["PATH"] = "{folder}:" + os.environ["PATH"]
if "{host}" == "localhost":
    socket.gethostname = lambda: "another"
from async_rlhf.launch import agent
sys.exit(agent.main())
"""
ANOTHER_VERSION = (
    "import sys; from async_rlhf.launch import agent; agent.version = lambda name: '0.0.1'; sys.exit(agent.main())"
)


@pytest.fixture
def on_hosts(small: Any, tmp_path: Path) -> Any:
    """`on_hosts(**overrides)`: the small run with two actors, each on a host of its own."""

    def make(**overrides: Any) -> Any:
        launch = {"launch.kind": "hosts", "launch.hosts": ["localhost", "127.0.0.1"], "launch.command": AGENT}
        return small(**{**launch, "launch.directory": str(tmp_path / "there"), "actors.count": 2, **overrides})

    return make


def agents() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # a zombie, or gone since
            line = " ".join(child.cmdline())
            if "async_rlhf.launch" in line and "fork_server" not in line:
                found.append(child)
    return found


def assert_nothing_lost(run: RunDir) -> None:
    """Of a run that was drained."""
    done = run.config().model_copy(update={"max_steps": len(run.read_metrics())})
    assert problems(run, done) == [] and run.read_ledger()["ledger"]["quarantined"] == 0


@pytest.mark.rest
def test_a_run_on_hosts_goes_on_while_a_relay_and_a_host_are_lost_and_uses_them_again(on_hosts: Any, tmp_path: Path) -> None:
    """Three actors: two and a relay on the first host, one and a learner rank on the second; a scorer on each."""
    relays: list[psutil.Process] = []
    lost: list[psutil.Process] = []
    ranks: list[psutil.Process] = []
    back: list[bool] = []

    def step() -> None:
        first, relay = supervisor._children["actor-0"], supervisor._children["relay-1"]
        if not relays and times_relayed(run) == 1:
            relays.append(psutil.Process(relay.process.pid))
            relays[0].kill()
        elif relays and not lost and times_relayed(run) == 2:
            victim = next(each for each in agents() if first.process.pid in {child.pid for child in each.children()})
            (other,) = (each for each in agents() if each != victim)
            ranks.extend(each for each in other.children() if role_of(each.cmdline()) == "learner_rank")
            lost.extend([victim, *victim.children(recursive=True)])
            victim.kill()
        elif (
            lost
            and not back
            and any("lost" in text for text in heard.events)
            and first._progressed
            and all(map(has_ended, lost))
        ):
            back.append(ranks[0].is_running())
            supervisor.drain()

    path = f"PATH = {clock_ahead(tmp_path / 'clock', AHEAD_S)!r}\n"
    own = {"cpus": 1}  # the hub's: no actor fits there
    overrides = {
        "max_steps": 100_000, "actors.count": 3, "actors.restart_backoff_s": 0.1, "scoring.placement": "process",
        "launch.command": [sys.executable, "-c", path + DIFFERENT], "launch.interface": "lo",
        "placement.hosts": [own, {"name": "localhost", "cpus": 2}, {"name": "127.0.0.1", "cpus": 1}],
        "learner.ranks": 2, "placement.learner_hosts": ["", "127.0.0.1"],
    }  # fmt: skip
    heard = Heard(step)
    supervisor: Supervisor
    supervisor, run = prepare(on_hosts(**overrides), progress=heard)
    assert not supervisor.run()
    assert len(lost) >= 5 and len(ranks) == 1 and back == [True]  # the agent, its roles, and what they have started
    assert "relay-1 ended by signal 9 (SIGKILL); starting it again in 0.1 s" in heard.events
    assert not any("learner" in text for text in heard.events)
    assert "rank 1 of 2, which meet at 127.0.0.1:" in run.log("learner-rank-1").read_text()
    assert sorted(text for text in heard.events if "lost" in text) == [
        f"{name} is lost: host 'localhost': its command ({sys.executable}) ended with code -9: no output; it is tried "
        "again from 0.1 s on"
        for name in ("actor-0", "actor-1", "relay-1", "scorer-1")
    ]
    assert_nothing_lost(run)
    for name in ("actor-0", "actor-2"):  # the other one may be starting still
        assert "ended: drained" in run.log(name).read_text() and run.spans(name).read_text()
    written = run.config()
    assert written.address.startswith("tcp://127.0.0.1:") and written.security.keys == str(run.path / "keys")
    secrets = [path.read_text().strip() for path in run.path.rglob("*.secret")]
    shown = [path.read_text() for path in (run.path / "config.toml", *(run.path / "logs").iterdir())]
    assert {path.parent.name for path in run.path.rglob("*.secret")} == {"keys", "for-relay-1", "for-actor-2"}
    assert len(secrets) == 4 and not any(secret in text for secret in secrets for text in (*shown, *heard.events))
    there = tmp_path / "there"
    assert not agents() and [path.name for path in there.iterdir()] == ["contents"]
    assert (there / "contents" / content_digest(Path(written.model) / "model.safetensors")).exists()


def times_relayed(run: RunDir) -> int:
    """Lives of the relay in which both actors of its host came to it."""
    log = run.log("relay-1")
    return log.read_text().count("2 actors are relayed") if log.exists() else 0


def test_actors_fill_the_devices_that_agents_find_and_must_fit_into_them(on_hosts: Any, tmp_path: Path) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho '0, GPU-a, Small, 64'\necho '1, GPU-b, Small, 64'\n")
    driver.chmod(driver.stat().st_mode | stat.S_IXUSR)
    command = [sys.executable, "-c", WITH_DEVICES.replace("{folder}", str(tmp_path))]
    wanted = {"engine.device": "cuda", "actors.count": "fill", "launch.command": command}
    config, connections = connect(on_hosts(**wanted))
    hosts, _ = found_by(connections)
    assert connections is not None
    connections.close()
    found = [(host.name, host.devices, host.device_memory, host.device_name, host.own) for host in hosts]
    assert found == [("localhost", 2, 64 << 20, "Small", False), ("127.0.0.1", 2, 64 << 20, "Small", True)]
    slots = placement_of(config, inventory_of(config, hosts)).slots
    assert [(slots[f"actor-{number}"].host, slots[f"actor-{number}"].devices) for number in range(4)] == [
        ("localhost", (0,)), ("127.0.0.1", (0,)), ("localhost", (1,)), ("127.0.0.1", (1,)),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"actor-0 needs about actor .* of device 0 of localhost \(64 MiB\)"):
        prepare(on_hosts(**wanted))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"launch.command": ["no-such-program", "{host}"]}, r"host 'localhost': .*no-such-program"),
        ({"launch.command": [sys.executable, "-c", "exit('no route to {host}')"]}, "code 1: no route to localhost"),
        (
            {"launch.command": [sys.executable, "-c", "print('Welcome to {host}')"]},
            "may pass on nothing.*It is b'Welcome to",
        ),
        ({"launch.command": [sys.executable, "-c", "import sys; sys.stdin.read()"]}, r"no answer within 5 s"),
        ({"launch.command": [sys.executable, "-c", ANOTHER_VERSION]}, "async-rlhf 0.0.1 is installed there, and .* here"),
    ],
)
def test_a_host_that_is_not_fit_is_named_before_the_run_begins(
    on_hosts: Any, overrides: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "no answer" in message:
        monkeypatch.setattr(connection, "START_S", 5.0)
    with pytest.raises(ConfigError, match=f"the run cannot be started: .*{message}"):
        prepare(on_hosts(**overrides))
    assert not (tmp_path / "runs").exists()
