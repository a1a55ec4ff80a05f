"""What does it cost that Ray starts the actors? The same command with children of this machine and with Ray, in turns.

The quick run with two actors: children of the supervisor, or each in the agent of a raylet of its own. The cluster, all of it
on this machine, is there before the command, as in a job. From the command to the first step; then steps a second in the middle
of the run, where nothing starts and nothing runs out.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from async_rlhf.experiments.throughput.harness import Bench, MissingError, Row, alternate
from async_rlhf.experiments.throughput.pipeline import window_rate
from async_rlhf.experiments.throughput.sides import Steps
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.run_files import Tail

_NUM_ACTORS = 2
_NODE = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
_RUN_LIMIT_S = 300.0


def launchers(bench: Bench) -> Iterator[Row]:
    """Compare a run whose actors Ray starts with one whose actors are children: time to the first step, steps a second."""
    steps = bench.size(Steps.of_ours(max_staleness=1), Steps(first=1, measured=1))
    with raylets() as address, tempfile.TemporaryDirectory(prefix="async-rlhf-bench-") as folder:
        sides = {"ray": ["--launcher", "ray", "--address", address], "local": ["--launcher", "local"]}
        runs = {name: partial(run, arguments, steps, Path(folder)) for name, arguments in sides.items()}
        found = alternate(runs, bench.num_turns(3), warm_up=0)
    yield Row.of("command to first step", {name: [ends[0] for ends in found[name]] for name in found}, "s", at_most=1.3)
    rates = {name: [window_rate(ends, steps, 1) for ends in found[name]] for name in ("local", "ray")}
    yield Row.of("steps", rates, "steps/s", at_most=1.3)


@contextmanager
def raylets() -> Iterator[str]:
    """The address of a cluster with a node for each actor, and a head that holds none."""
    try:
        from ray.cluster_utils import Cluster
    except ImportError as error:
        raise MissingError("ray is not installed: pip install 'async-rlhf[ray]'") from error
    cluster = Cluster(initialize_head=True, head_node_args={**_NODE, "num_cpus": 0})
    try:
        for _ in range(_NUM_ACTORS):
            cluster.add_node(**_NODE)
        yield cluster.address
    finally:
        cluster.shutdown()


def run(arguments: list[str], steps: Steps, folder: Path) -> list[float]:
    """One run in a directory of its own: seconds from the command to the end of each step (seen within 10 ms).

    Raises RuntimeError with the end of what it printed when it fails.
    """
    place = Path(tempfile.mkdtemp(dir=folder))
    settings = {
        "output_dir": place,
        "max_steps": steps.total,
        "actors.count": _NUM_ACTORS,
        "evaluation.at_start": "false",
        "evaluation.at_end": "false",
        "launch.directory": folder / "there",
    }
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    tail, ends, began = Tail(RunDir(place / "quick").metrics), list[float](), time.monotonic()
    with (place / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "async_rlhf", "train", "quick", *arguments, *sets],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            ended = False
            while not ended and time.monotonic() - began < _RUN_LIMIT_S:
                ended = process.poll() is not None  # before the last look
                ends += [time.monotonic() - began for _ in tail.read()]
                time.sleep(0.01)
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise RuntimeError(f"a run ended with code {process.returncode}: {(place / 'output').read_text()[-2000:]}")
    return ends
