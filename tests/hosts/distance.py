"""What distance costs a run: tokens a second with its actors on two other hosts, and the time until a version is adopted there.

    python -m tests.hosts.distance run             # the shipped quick run; --scale 100 for a model of 100 M parameters
    python -m tests.hosts.distance publication

Each condition of the network is set in turn while the run goes on, so that the machine's other work meets all alike. All hosts
are this machine: its processors also do the network's work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from async_rlhf.buffers.clients.actor import ActorClient, ActorState
from async_rlhf.buffers.clients.learner import LearnerClient
from async_rlhf.buffers.config import QueueConfig, WeightsConfig
from async_rlhf.buffers.hub.hub import Hub
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.run.run_dir import RunDir
from tests.conftest import QUICK, sets
from tests.hosts.chaos import settings
from tests.hosts.cluster import steps_on, training
from tests.hosts.link import Conditions
from tests.hosts.machines import Host, Hosts

MTU = 65_000  # so that the network itself costs little here
ROUND_TRIP_MS = (0.1, 10, 50, 150)
RATES = (1e9, 100e6)
NEAR = "0.1 ms"
PORT, DEADLINE_S = 5555, 300.0
MIB = 1 << 20


def conditions() -> dict[str, Conditions]:
    """By name: round trips without a limit of rate, and rates at 0.1 ms."""
    by_delay = {f"{ms:g} ms": Conditions(delay_s=ms / 2000) for ms in ROUND_TRIP_MS}
    by_rate = {f"{rate / 1e6:g} Mbit/s": Conditions(delay_s=0.05e-3, rate=rate) for rate in RATES}
    return {**by_delay, **by_rate}


# -- a run ---------------------------------------------------------------------------------------------------------------


def tokens_per_s(run: RunDir, seconds: float) -> float:
    """Completion tokens trained on, from one finished step to the first after so many seconds."""
    steps_on(run, 2, "steps under this condition")
    began, first = time.monotonic(), len(run.read_metrics())
    time.sleep(seconds)
    steps_on(run, 1, "the last step of the turn")
    elapsed, records = time.monotonic() - began, run.read_metrics()[first:]
    return sum(record["num_tokens"] for record in records) / elapsed


def measure_run(folder: Path, overrides: dict[str, object], rounds: int, seconds: float) -> None:
    hosts = Hosts(folder, size="4g", mtu=MTU)
    local: dict[str, object] = {**overrides, "max_steps": 1_000_000, "actors.count": 2, "name": "local"}
    away: dict[str, object] = {**overrides, **settings(folder, hosts.all[1:]), "actors.count": 2, "name": "away"}
    local["queue.max_staleness"] = away["queue.max_staleness"] = 2
    away["placement.hosts"] = [{"cpus": 1}, {"name": "b", "cpus": 1}, {"name": "c", "cpus": 1}]
    found: dict[str, list[float]] = {}
    try:
        for number in range(rounds):
            for name, given in (("local", local), ("away", away)):
                runs = folder / f"{name}-{number}"
                runs.mkdir()
                arguments = ["train", str(QUICK), *sets({**given, "output_dir": str(runs / "runs")})]
                with training(hosts["a"], arguments, runs / "output") as (_, run):
                    steps_on(run, 5, "the first steps")
                    for condition, its in {"local": Conditions()}.items() if name == "local" else conditions().items():
                        hosts.network.set(hosts.between(), its)
                        found.setdefault(condition, []).append(tokens_per_s(run, seconds))
                        report(condition=condition, tokens_per_s=round(found[condition][-1], 1), round=number)
                    hosts.network.set(hosts.between(), Conditions())
    finally:
        hosts.close()
    for condition, speeds in found.items():
        ratios = [speed / near for speed, near in zip(speeds, found[NEAR], strict=True)]
        to_local = [speed / near for speed, near in zip(speeds, found["local"], strict=True)]
        report(
            condition=condition, tokens_per_s=round(statistics.median(speeds), 1),
            to_local=[round(f(to_local), 3) for f in (statistics.median, min, max)],
            to_near=[round(f(ratios), 3) for f in (statistics.median, min, max)],
        )  # fmt: skip


# -- a publication -------------------------------------------------------------------------------------------------------


def serve_hub(addresses: str, folder: Path) -> None:
    bound = Bound(groups_per_batch=1, max_staleness=1, num_groups=1)
    Hub(addresses.split(","), folder, QueueConfig(lease_s=600), bound, weights=WeightsConfig(delta=True)).run()


def learn(address: str, num_bytes: int) -> None:
    """Publishes for each line, a share of elements that it changes first; answers with the time at which it began."""
    words = np.random.default_rng(0).integers(0, 1 << 16, num_bytes // 2, dtype=np.uint16)
    client, random = LearnerClient(address, timeout_s=DEADLINE_S, weights=WeightsConfig()), np.random.default_rng(1)
    for line in sys.stdin:
        client.register(0, 0)
        at = random.integers(0, len(words), int(float(line) * len(words)))
        words[at] = random.integers(0, 1 << 16, len(at), dtype=np.uint16)
        began = time.monotonic()
        client.begin_publish(0, {"w": RawTensor("bfloat16", (len(words),), words.view(np.uint8).data)}).wait()
        say(began)


def act(address: str) -> None:
    """Says when it had adopted each version, in seconds of the clock that all processes of the machine share."""
    client, state = (
        ActorClient(address, f"actor-{time.monotonic_ns()}", beat_s=1.0, timeout_s=DEADLINE_S),
        ActorState(0, 0, -1, ()),
    )
    while True:
        client.poll(state, wire.Telemetry(), timeout_s=0.01)
        if (weights := client.weights()) is not None:
            say(time.monotonic())
            state = ActorState(0, weights.fence, weights.version, ())
            client.beat(state, wire.Telemetry())


def say(value: float) -> None:
    sys.stdout.write(f"{value}\n")
    sys.stdout.flush()


@contextmanager
def role(host: Host, name: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "tests.hosts.distance", name, *map(str, arguments)]
    with subprocess.Popen(host.command(words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


class Published(NamedTuple):
    seconds: float
    """From the learner's call to adopted by the actor."""
    sent: int
    """Bytes in frames from the hub's host to the actor's."""


def publish(hosts: Hosts, learner: subprocess.Popen[str], actor: subprocess.Popen[str], changed: float) -> Published:
    a, b = hosts.all
    assert learner.stdin is not None and learner.stdout is not None and actor.stdout is not None
    before = hosts.network.sent(a, b)
    learner.stdin.write(f"{changed}\n")
    learner.stdin.flush()
    began, adopted = float(learner.stdout.readline()), float(actor.stdout.readline())
    return Published(adopted - began, hosts.network.sent(a, b) - before)


def measure_publication(folder: Path, turns: int) -> None:
    """Full sets and deltas of a model, and deltas of an adapter. At 0.1 ms the time is that of the hosts themselves."""
    for load, num_bytes, changed in (("full set", 200 * MIB, 1.0), ("delta", 200 * MIB, 0.02), ("adapter", 4 * MIB, 0.02)):
        hosts = Hosts(folder, ("a", "b"), mtu=MTU)
        address = f"ipc://{folder}/hub"
        network = f"tcp://{hosts.all[0].address}:{PORT}"
        a, b = hosts.all
        try:
            with (
                role(a, "hub", f"{address},{network}", folder),
                role(a, "learner", address, num_bytes) as learner,
                role(b, "actor", network) as actor,
            ):
                publish(hosts, learner, actor, changed)
                for condition, its in conditions().items():
                    hosts.network.set(hosts.between(), its)
                    measured = [publish(hosts, learner, actor, changed) for _ in range(turns)]
                    seconds = statistics.median(each.seconds for each in measured)
                    sent = statistics.median(each.sent for each in measured)
                    trips = seconds / (2 * its.delay_s)
                    at_rate = {"of_bytes_over_rate": round(seconds * its.rate / 8 / sent, 2)} if its.rate else {}
                    report(
                        load=load,
                        condition=condition,
                        seconds=round(seconds, 3),
                        sent_mb=sent / 1e6,
                        trips=round(trips, 2),
                        **at_rate,
                    )
        finally:
            hosts.close()


def report(**row: Any) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "publication", "hub", "learner", "actor"))
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of the run, a TOML value")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a condition in a round")
    given = parser.parse_args()
    if given.what == "hub":
        serve_hub(given.arguments[0], Path(given.arguments[1]))
    elif given.what == "learner":
        learn(given.arguments[0], int(given.arguments[1]))
    elif given.what == "actor":
        act(given.arguments[0])
    else:
        with tempfile.TemporaryDirectory() as name:
            if given.what == "run":
                measure_run(Path(name), dict(each.split("=", 1) for each in given.set), given.rounds, given.seconds)
            else:
                measure_publication(Path(name), given.rounds)


if __name__ == "__main__":
    main()
