"""What distance costs a run: tokens a second with its actors on two other hosts, and the time until a version is adopted there.

    python -m tests.hosts.distance run             # the shipped quick run; --set model=DIR for another model
    python -m tests.hosts.distance publication

Each condition of the network is set in turn while the run goes on, so that the machine's other work meets all alike. All hosts
are this machine: its processors also do the network's work.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
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
from tests.conftest import QUICK, sets, steps
from tests.hosts.chaos import settings
from tests.hosts.cluster import steps_on, training
from tests.hosts.link import Conditions
from tests.hosts.machines import Host, Hosts
from tests.hosts.switch import say

MTU = 65_000  # so that the network itself costs little here
ROUND_TRIP_MS = (0.1, 10, 50, 150)
RATES = (1e9, 100e6)
LOCAL, NEAR = "local", "0.1 ms"
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
    began, first = time.monotonic(), steps(run.path)
    time.sleep(seconds)
    steps_on(run, 1, "the last step of the turn")
    elapsed, records = time.monotonic() - began, run.read_metrics()[first:]
    return sum(record["num_tokens"] for record in records) / elapsed


def measure_run(folder: Path, chosen: Sequence[str], rounds: int, seconds: float) -> None:
    """chosen: words of `train`, behind those that make it a run of two actors."""
    found: dict[str, list[float]] = {}
    with closing(Hosts(folder, size="4g", mtu=MTU)) as hosts:
        local: dict[str, object] = {"max_steps": 1_000_000, "actors.count": 2, "queue.max_staleness": 2}
        of_hosts = [{"cpus": 1}, {"name": "b", "cpus": 1}, {"name": "c", "cpus": 1}]
        away = {**settings(folder, hosts.all[1:]), **local, "placement.hosts": of_hosts}
        for number in range(rounds):
            for given, its in ((local, {LOCAL: Conditions()}), (away, conditions())):
                runs = folder / f"{min(its)}-{number}".replace(" ", "")
                runs.mkdir()
                arguments = ["train", str(QUICK), *sets({**given, "output_dir": str(runs / "runs")}), *chosen]
                with training(hosts["a"], arguments, runs / "output") as (_, run):
                    steps_on(run, 5, "the first steps")
                    for name, condition in its.items():
                        hosts.network.set(hosts.between(), condition)
                        found.setdefault(name, []).append(tokens_per_s(run, seconds))
                        say({"condition": name, "tokens_per_s": round(found[name][-1], 1), "round": number})
                    hosts.network.set(hosts.between(), Conditions())
    for name, speeds in found.items():
        row: dict[str, Any] = {"condition": name, "tokens_per_s": round(statistics.median(speeds), 1)}
        for other in (LOCAL, NEAR):
            ratios = [speed / its for speed, its in zip(speeds, found[other], strict=True)]
            row[f"to_{other}"] = [round(f(ratios), 3) for f in (statistics.median, min, max)]
        say(row)


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


@contextmanager
def role(host: Host, name: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "tests.hosts.distance", name, *map(str, arguments)]
    with host.running(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


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
        with closing(Hosts(folder, ("a", "b"), mtu=MTU)) as hosts:
            a, b = hosts.all
            address, network = f"ipc://{folder}/hub", f"tcp://{a.address}:{PORT}"
            with (
                role(a, "hub", f"{address},{network}", folder),
                role(a, "learner", address, num_bytes) as learner,
                role(b, "actor", network) as actor,
            ):
                publish(hosts, learner, actor, changed)
                for name, condition in conditions().items():
                    hosts.network.set(hosts.between(), condition)
                    measured = [publish(hosts, learner, actor, changed) for _ in range(turns)]
                    say({"load": load, "condition": name, **shown(measured, condition)})


def shown(measured: Sequence[Published], condition: Conditions) -> dict[str, float]:
    """Medians, and the time beside a round trip and beside bytes over rate."""
    seconds, sent = (statistics.median(values) for values in zip(*measured, strict=True))
    at_rate = {"of_bytes_over_rate": round(seconds * condition.rate / 8 / sent, 2)} if condition.rate else {}
    trips = round(seconds / (2 * condition.delay_s), 2)
    return {"seconds": round(seconds, 3), "sent_mb": sent / 1e6, "trips": trips, **at_rate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "publication", "hub", "learner", "actor"))
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of the run, as of `train`")
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
                measure_run(Path(name), [word for each in given.set for word in ("--set", each)], given.rounds, given.seconds)
            else:
                measure_publication(Path(name), given.rounds)


if __name__ == "__main__":
    main()
