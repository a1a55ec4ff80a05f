"""Damage to the network of a run over three hosts, and hosts that die: blow after blow, and then its books must be right.

    python -m tests.hosts.chaos --blows 100 --seed 1

`async-rlhf try chaos` ends and freezes processes; this has what lies between them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import NamedTuple

from async_rlhf.run.run_dir import RunDir
from tests.conftest import steps, train_arguments
from tests.hosts.cluster import command_for, steps_on, training
from tests.hosts.link import Conditions
from tests.hosts.machines import Host, Hosts
from tests.hosts.switch import DEVICE, say

CUT = Conditions(cut=True)
DAMAGE = {
    "lossy": Conditions(loss=0.05, delay_s=0.005),
    "unordered": Conditions(reorder=0.1, duplicate=0.05, delay_s=0.01, jitter_s=0.01),
    "slow": Conditions(rate=10e6),
    "far": Conditions(delay_s=0.075),
    "narrow": Conditions(largest=1000),
}
KINDS = ("one way", "pair", "isolated", "forgotten", "dead host", *DAMAGE)


class Blow(NamedTuple):
    """`hosts`: the host that it is about, and another."""

    kind: str
    hosts: tuple[str, str]
    seconds: float


def blows(names: Sequence[str], count: int, seed: int, longest_s: float) -> list[Blow]:
    """Each kind comes once before any comes again. The first host, which the hub is on, does not die."""
    random, drawn = Random(seed), list[Blow]()
    while len(drawn) < count:
        for kind in random.sample(KINDS, len(KINDS)):
            host = random.choice(names[1:])
            other = random.choice([name for name in names if name != host])
            hosts = (host, other) if kind == "dead host" or random.random() < 0.5 else (other, host)
            drawn.append(Blow(kind, hosts, random.uniform(0.2, 1) * longest_s))
    return drawn[:count]


def strike(hosts: Hosts, blow: Blow) -> None:
    """Do the damage, wait, and mend it."""
    host, other = (hosts[name] for name in blow.hosts)
    network = hosts.network
    if blow.kind == "dead host":
        host.die()
    elif blow.kind == "forgotten":
        network.forget(blow.seconds / 4)  # connections that are idle for so long, and at first all that there are
    else:
        pairs = {"one way": [(host, other)], "pair": hosts.between(host, other), "isolated": hosts.around(host)}
        network.set(pairs.get(blow.kind, hosts.between()), DAMAGE.get(blow.kind, CUT))
    time.sleep(blow.seconds)
    network.forget(0)
    network.set(hosts.between(), Conditions())


def settings(folder: Path, away: Sequence[Host]) -> dict[str, object]:
    """Two actors on each of these hosts; none on the first."""
    return {
        "launch.kind": "hosts", "launch.hosts": [host.name for host in away], "launch.command": command_for(away),
        "launch.directory": str(folder / "there"), "launch.interface": DEVICE, "launch.lost_after_s": 10.0,
        "actors.count": 2 * len(away),
        "placement.hosts": [{"cpus": 1}, *({"name": host.name, "cpus": 2} for host in away)],
        "max_steps": 1_000_000, "checkpoint.save_every": 5, "engine.slots": 8,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blows", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=30.0, help="seconds of a blow")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with closing(Hosts(folder, size="200m", seed=given.seed)) as hosts:
            arguments = train_arguments(folder / "runs", **settings(folder, hosts.all[1:]))
            with training(hosts["a"], arguments, folder / "output") as (_, run):
                steps_on(run, 2, "the first steps")
                for number, blow in enumerate(blows([host.name for host in hosts.all], given.blows, given.seed, given.longest)):
                    report(run, number, blow)
                    strike(hosts, blow)
                    steps_on(run, 1, f"a step after {blow}")
            report(run, given.blows, None)


def report(run: RunDir, number: int, blow: Blow | None) -> None:
    say({"blow": number, "what": blow, "steps": steps(run.path), "at": time.strftime("%T")})


if __name__ == "__main__":
    main()
