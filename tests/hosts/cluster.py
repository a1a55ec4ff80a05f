"""Runs over several hosts: hub, learner and supervisor on the first, agents with actors on the others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from async_rlhf.inspect.chaos import problems
from async_rlhf.launch.program import role_of
from async_rlhf.run.run_dir import RunDir
from tests.conftest import invoke, steps, wait_for
from tests.hosts.machines import Host

AGENT = (sys.executable, "-P", "-m", "async_rlhf.launch.agent")


def command_for(hosts: Sequence[Host], *environment: str) -> list[str]:
    """`launch.command`: a shell that enters the host it is given the name of."""
    enter = [" ".join(host.command_from_another(["env", *environment, *AGENT])) for host in hosts]
    cases = "\n".join(f"{host.name}) exec {words};;" for host, words in zip(hosts, enter, strict=True))
    return ["sh", "-c", f'case "$1" in\n{cases}\nesac', "agent", "{host}"]


@contextmanager
def training(host: Host, arguments: list[str], output: Path) -> Iterator[tuple[subprocess.Popen[bytes], RunDir]]:
    """A run that is started on a host; drained at the end of the block, when its books must close."""
    words = host.command([sys.executable, "-m", "async_rlhf", *arguments])
    with output.open("w") as file:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
    try:
        begun = wait_for(lambda: next(iter((output.parent / "runs").glob("*/run.json")), None), "the run")
        run = RunDir(begun.parent)
        yield process, run
        host.run(f"{sys.executable} -m async_rlhf stop {run.path}")
        assert process.wait(timeout=300) == 0, output.read_text()
    finally:
        process.kill()
        process.wait()
    assert_nothing_lost(run)


def assert_nothing_lost(run: RunDir) -> None:
    """Of a run that was drained."""
    done = run.config().model_copy(update={"max_steps": len(run.read_metrics())})
    assert problems(run, done) == [] and run.read_ledger()["ledger"]["quarantined"] == 0


def hub_of(run: RunDir) -> dict[str, Any]:
    """What it says of itself; it is asked over its socket, which is a file."""
    code, output = invoke("status", run.path, "--json")
    return {} if code else dict(json.loads(output)["hub"])


def actors(run: RunDir) -> dict[str, Any]:
    """What the hub says of its actors."""
    return dict(hub_of(run).get("actors", {}))


def of_actors(run: RunDir, names: Sequence[str], key: str) -> list[Any]:
    """Of actors on other hosts; empty as long as the hub does not know them all."""
    known = actors(run)
    return [known[name][key] for name in names] if set(names) <= known.keys() else []


def more_groups(run: RunDir, names: Sequence[str], what: str) -> None:
    """Wait until each of these actors has made further groups. Few are seen with one: the learner waits for each."""
    before = wait_for(lambda: of_actors(run, names, "groups_total"), what)
    wait_for(lambda: all(map(float.__gt__, of_actors(run, names, "groups_total") or before, before)), what)


def roles_of_agent(agent: psutil.Process) -> dict[str, psutil.Process]:
    """Its roles, which are called by their log's name."""
    found = {}
    for role in agent.children():
        words = " ".join(role.cmdline()).split()
        if role_of(words) not in (None, "fork_server"):
            found[Path(words[2]).name] = role
    return found


def steps_on(run: RunDir, count: int, what: str) -> None:
    """Wait for so many more steps."""
    step = steps(run.path)
    wait_for(lambda: steps(run.path) >= step + count, what)
