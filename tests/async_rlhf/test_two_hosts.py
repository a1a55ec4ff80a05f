"""Runs on two hosts. B has a relay and a clock five minutes ahead: its cable is pulled for a moment and for long, its relay
dies, its disk is full, it dies. And B has a learner rank, and dies and comes back.

They are on one machine: network namespaces on a bridge in a third, whose cable to B can be pulled. B has a file system of its
own for its files, of a few MiB. Needs user namespaces, `ip`, `unshare` and `nsenter`; no rights.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rlhf.buffers.transport import keys, link
from async_rlhf.launch.program import role_of
from async_rlhf.run.run_dir import RunDir
from tests.async_rlhf.test_hosts import AHEAD_S, assert_nothing_lost, clock_ahead, times_relayed
from tests.conftest import invoke, output_of, wait_for

A, B = "10.77.0.1", "10.77.0.2"


def obstacle() -> str | None:
    """Why there can be no namespaces here."""
    if missing := [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]:
        return f"{missing[0]} is not installed"
    tried = subprocess.run(
        ["unshare", "-rnm", "ip", "link", "add", "br0", "type", "bridge"], capture_output=True, text=True, check=False
    )
    return f"network namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else None


class TwoHosts:
    """Made at once; `b_files` is B's own disk."""

    def __init__(self, b_files: Path, size: str) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []
        self._bridge = self._hold(["unshare", "-rnm"])
        self._run(self._bridge, "ip link add br0 type bridge && ip link set br0 up")
        self.a, self.b = (self._attach(name, address) for name, address in (("a", A), ("b", B)))
        self._run(self.b, f"mount -t tmpfs -o size={size} none {b_files}")

    def command(self, host: int, words: Sequence[str]) -> list[str]:
        """These words, to be run on a host."""
        return ["nsenter", "-t", str(host), "-U", "-n", "-m", "--preserve-credentials", f"--wd={os.getcwd()}", "--", *words]

    def command_from_another(self, host: int, words: Sequence[str]) -> list[str]:
        """These words, to be run on a host by a process of another: it has the rights already."""
        return ["nsenter", "-t", str(host), "-n", "-m", f"--wd={os.getcwd()}", "--", *words]

    def cut(self) -> None:
        """B's cable is out: both ends see a link that is up, and nothing arrives."""
        self._run(self._bridge, "ip link set pb nomaster")

    def heal(self) -> None:
        self._run(self._bridge, "ip link set pb master br0")

    def fill_disk(self, b_files: Path) -> None:
        """B's disk takes no further byte."""
        self._run(self.b, f"dd if=/dev/zero of={b_files}/filler bs=4k 2>/dev/null || true")

    def close(self) -> None:
        for holder in reversed(self._holders):
            holder.kill()
            holder.wait()

    def _attach(self, name: str, address: str) -> int:
        host = self._hold([*self.command(self._bridge, ["unshare", "-nm"])])
        self._run(
            self._bridge,
            f"ip link add p{name} type veth peer name e{name} && ip link set e{name} netns {host}"
            f" && ip link set p{name} master br0 && ip link set p{name} up",
        )
        self._run(host, f"ip link set lo up && ip addr add {address}/24 dev e{name} && ip link set e{name} up")
        return host

    def _hold(self, enter: list[str]) -> int:
        """A process that keeps new namespaces; they exist when it has become `sleep`."""
        holder = subprocess.Popen([*enter, "sleep", "infinity"], stdin=subprocess.DEVNULL)
        self._holders.append(holder)
        command = Path(f"/proc/{holder.pid}/comm")
        wait_for(lambda: command.read_text().strip() == "sleep", "a network namespace")
        return holder.pid

    def _run(self, host: int, script: str) -> None:
        done = subprocess.run(self.command(host, ["sh", "-c", script]), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{script}: {done.stderr}"


OBSTACLE = obstacle()
pytestmark = [pytest.mark.rest, pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))]
PORT = 5555  # of a network that nobody else is in
SHORT_S = 3.0


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    (tmp_path / "b").mkdir()
    made = TwoHosts(tmp_path / "b", "4m")
    yield made
    made.close()


def actors(run: RunDir) -> dict[str, Any]:
    """What the hub says of its actors; it is asked over its socket, which is a file."""
    code, output = invoke("status", run.path, "--json")
    return {} if code else dict(json.loads(output)["hub"].get("actors", {}))


def far(run: RunDir, key: str) -> list[Any]:
    """Of B's actors; empty as long as the hub does not know them both."""
    known = actors(run)
    return [known[name][key] for name in ("actor-1", "actor-2")] if {"actor-1", "actor-2"} <= known.keys() else []


def is_heard(run: RunDir) -> bool:
    return max(far(run, "silent_s"), default=60) < SHORT_S


def on_b(training: subprocess.Popen[bytes]) -> dict[str, psutil.Process]:
    """The agent and its roles, which are called by their log's name."""
    found = {}
    for agent in psutil.Process(training.pid).children():
        if "async_rlhf.launch.agent" in agent.cmdline():
            found["agent"] = agent
            for role in agent.children():
                words = " ".join(role.cmdline()).split()
                if role_of(words) not in (None, "fork_server"):
                    found[Path(words[2]).name] = role
    return found


@contextmanager
def training(hosts: TwoHosts, arguments: list[str], output: Path) -> Iterator[tuple[subprocess.Popen[bytes], RunDir]]:
    """A run that is started on A; drained at the end of the block, when its books must close."""
    words = hosts.command(hosts.a, [sys.executable, "-m", "async_rlhf", *arguments])
    with output.open("w") as file:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
    try:
        begun = wait_for(lambda: next(iter((output.parent / "runs").glob("*/run.json")), None), "the run")
        run = RunDir(begun.parent)
        yield process, run
        output_of(0, "stop", run.path)
        assert process.wait(timeout=300) == 0, output.read_text()
    finally:
        process.kill()
        process.wait()
    assert_nothing_lost(run)


def steps_on(run: RunDir, count: int, what: str) -> None:
    """Wait for so many more steps."""
    step = len(run.read_metrics())
    wait_for(lambda: len(run.read_metrics()) >= step + count, what)


def test_a_host_that_is_cut_off_comes_back_and_nothing_is_lost(hosts: TwoHosts, small_arguments: Any, tmp_path: Path) -> None:
    keys.create(tmp_path / "keys", [], link.new_pair)
    clock = f"PYTHONPATH={clock_ahead(tmp_path / 'clock', AHEAD_S)}"
    agent = hosts.command_from_another(hosts.b, ["env", clock, sys.executable, "-m", "async_rlhf.launch.agent"])
    overrides = {
        "address": f"tcp://{A}:{PORT}", "security.keys": str(tmp_path / "keys"),
        "launch.kind": "hosts", "launch.hosts": ["b"], "launch.command": agent,
        "launch.directory": str(tmp_path / "b" / "there"), "actors.count": 3,
        "placement.hosts": [{"cpus": 3}, {"name": "b", "cpus": 2}], "max_steps": 100_000,
        "queue.lease_s": 6 * SHORT_S, "checkpoint.save_every": 1000,
    }  # fmt: skip
    with training(hosts, small_arguments(**overrides), tmp_path / "output") as (process, run):
        wait_for(lambda: all(found := far(run, "groups")) and found, "groups on the other host")
        assert times_relayed(run) == 1
        before = on_b(process)
        assert {"agent", "actor-1", "actor-2", "relay-1"} <= before.keys()

        hosts.cut()
        wait_for(lambda: min(far(run, "silent_s"), default=SHORT_S + 1) > SHORT_S, "a short silence")
        hosts.heal()
        wait_for(lambda: is_heard(run), "the other host's voice")

        hosts.cut()
        wait_for(lambda: not any(far(run, "groups")), "the end of their leases")
        steps_on(run, 2, "steps without the other host")
        hosts.heal()
        wait_for(lambda: all(found := far(run, "groups")) and found, "new groups on the other host")

        before["relay-1"].kill()
        wait_for(lambda: times_relayed(run) == 2, "both actors behind another relay")
        wait_for(lambda: is_heard(run) and all(far(run, "groups")), "groups through it")

        hosts.fill_disk(tmp_path / "b")
        steps_on(run, 2, "steps with a full disk")
        wait_for(lambda: is_heard(run), "the other host's voice")
        now = on_b(process)
        assert all(now[name] == before[name] for name in ("agent", "actor-1", "actor-2")), "they are the same processes"
        assert now["relay-1"] != before["relay-1"]

        before["agent"].kill()
        wait_for(lambda: not any(far(run, "groups")), "its groups for others")


def test_a_learner_whose_second_host_dies_names_it_and_goes_on_from_its_checkpoint_when_it_is_back(
    hosts: TwoHosts, small_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    down, output = tmp_path / "down", tmp_path / "output"
    script = f'test -e {down} && echo "no route to B" >&2 && exit 1; exec "$@"'
    agent = hosts.command_from_another(hosts.b, [sys.executable, "-m", "async_rlhf.launch.agent"])
    overrides = {
        "launch.kind": "hosts", "launch.hosts": [B], "launch.interface": "ea", "launch.directory": str(tmp_path / "b"),
        "launch.command": ["sh", "-c", script, "sh", *agent],
        "placement.hosts": [{"cpus": 4}, {"name": B}], "placement.learner_hosts": ["", B], "learner.ranks": 2,
        "actors.count": 1, "max_steps": 100_000,
    }  # fmt: skip
    with training(hosts, small_arguments(**overrides), output) as (process, run):
        wait_for(lambda: run.latest.exists() and len(run.read_metrics()) > 2, "a checkpoint and a step after it")
        down.touch()
        for each in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # what those that are killed had started ends too
                if "async_rlhf.launch.agent" in each.cmdline() or role_of(each.cmdline()) == "learner_rank":
                    each.kill()
        lost = f"learner is lost: rank 1: host '{B}': its command (sh) ended with code"
        wait_for(lambda: f"{lost} 1: no route to B" in output.read_text(), "another start on the host that is down")
        assert f"{lost} -9: no output" in output.read_text()
        down.unlink()
        steps_on(run, 3, "steps with both hosts")
    assert "over ea" in run.log("learner").read_text() and "over eb" in run.log("learner-rank-1").read_text()
    assert "starting it again" not in output.read_text()
