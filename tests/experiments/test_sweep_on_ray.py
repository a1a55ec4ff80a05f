"""A sweep whose cells run on the nodes of a Ray cluster: real raylets on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from async_rlhf.api import train
from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError
from async_rlhf.experiments.staleness import on_ray
from async_rlhf.experiments.staleness.config import load_sweep
from async_rlhf.experiments.staleness.sweep import CellProgress, Job, run_sweep
from async_rlhf.run.loading import override
from async_rlhf.run.run_dir import RunDir
from tests.conftest import REPOSITORY
from tests.experiments.written import write_sweep
from tests.raylets import two_nodes

pytestmark = pytest.mark.rest

# Gives 0 or 1 by the length; the run of this name waits after its first step until the file `open` is there.
_REWARD = """
import time
from pathlib import Path

HERE = Path(__file__).parent

def odd(completion):
    while (HERE / "sweeps/tiny/queue.max_staleness-0_seed-3/metrics.jsonl").exists() and not (HERE / "open").exists():
        time.sleep(0.02)
    return float(len(completion) % 2)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head that runs no cells, and two nodes."""
    with two_nodes() as found:
        yield found


@pytest.fixture
def sweep(tmp_path: Path) -> Callable[..., Path]:
    """`sweep([3, 4])` writes a synchronous sweep over these seeds, with a reward of its own; returns its file."""

    def write(seeds: list[int], **overrides: Any) -> Path:
        (tmp_path / "odd.py").write_text(_REWARD)
        own = {"rewards.functions": [f"{tmp_path}/odd.py:odd"], "scoring.timeout_s": 200.0}
        return write_sweep(tmp_path, [0], seeds, **{"max_steps": 3, **own, **overrides})

    return write


def on_first_step(monkeypatch: pytest.MonkeyPatch, seed: int, act: Callable[[], object]) -> None:
    """Once, when the first step of this seed's cell is shown."""
    acts = [act]

    def step(self: CellProgress, record: dict[str, Any], max_steps: int) -> None:
        if self._head.endswith(f"seed = {seed}") and acts:
            acts.pop()()

    monkeypatch.setattr(CellProgress, "step", step)


def nodes_of(said: list[str], seed: int) -> list[str]:
    """Where the cell of this seed was begun, in order."""
    return [found[1] for text in said if (found := re.search(rf"seed = {seed}: on \S+ \((\w+)\)$", text))]


def test_cells_run_on_nodes_of_their_own_and_one_whose_node_dies_ends_on_another_as_it_would_have_here(
    cluster: Cluster, sweep: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, said = sweep([3, 4]), list[str]()

    def lose_its_node() -> None:
        (first,) = nodes_of(said, 3)
        node = next(each for each in cluster.worker_nodes if each.node_id.startswith(first))
        (raylet,) = node.all_processes["raylet"]
        processes = [*psutil.Process(raylet.process.pid).children(recursive=True)]
        cluster.remove_node(node, allow_graceful=False)
        for process in processes:
            process.kill()
        (tmp_path / "open").touch()

    on_first_step(monkeypatch, 3, lose_its_node)
    assert run_sweep(path, (), said.append, ray=cluster.address)
    lost, ended = nodes_of(said, 3)
    assert nodes_of(said, 4) == [ended] and lost != ended
    assert [text for text in said if "seed = 3" in text and f"({lost}) is lost, or its worker" in text]
    assert not ray.is_initialized()
    _, (cell, _) = load_sweep(path)
    alone = train(override(cell.config, {"output_dir": str(tmp_path / "here")}), quiet=True)
    kept = json.loads((tmp_path / "sweeps/tiny/cells/queue.max_staleness-0_seed-3.json").read_text())
    rewards = [step["reward"] for step in RunDir(alone.run_dir).read_metrics()]
    assert kept["rewards"] == rewards and len(rewards) == 3 and len(set(rewards)) > 1
    assert run_sweep(path, (), said.append), "the results are known here too, and nothing is run again"


def test_an_interrupt_drains_the_cells_and_says_where_their_runs_are_kept(
    cluster: Cluster, sweep: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, said = sweep([5, 6], max_steps=500), list[str]()
    on_first_step(monkeypatch, 5, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert not run_sweep(path, (), said.append, jobs=1, ray=cluster.address)
    run = tmp_path / "sweeps/tiny/queue.max_staleness-0_seed-5"
    assert not run.with_name("queue.max_staleness-0_seed-6").exists() and 0 < len(RunDir(run).read_metrics()) < 500
    *_, kept, last = said
    assert f"not ended; its run is kept in {run} of " in kept
    again = f"async-rlhf sweep {path} --ray {cluster.address} --jobs 1"
    assert last == f"drained: 2 of 2 cells are left. The same command goes on here: {again}"


def test_a_node_that_has_another_file_is_given_no_run(
    cluster: Cluster, sweep: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, contents, other = sweep([3]), on_ray.contents, {str(tmp_path / "odd.py"): "another digest"}
    monkeypatch.setattr(on_ray, "contents", lambda *given, **named: contents(*given, **named) | other)
    with pytest.raises(
        AsyncRLHFError, match=r"1 of 1 cells failed, .*not the same there as here: \S*/odd.py. Every node needs"
    ):
        run_sweep(path, (), ray=cluster.address)
    assert not list((tmp_path / "sweeps" / "tiny").glob("queue*"))


def test_a_job_finds_the_shipped_files_of_another_installation_and_ends_with_its_process_when_it_is_asked_nothing(
    sweep: Callable[..., Path],
) -> None:
    _, (cell,) = load_sweep(sweep([3], max_steps=500))
    job = Job(cell, "cell 1/1", 64, Path("kept.json"))
    text = on_ray._text(job)
    assert str(REPOSITORY / "configs") not in text and on_ray._read(text) == job
    code = (
        "import sys, threading\nfrom async_rlhf.experiments.staleness.on_ray import CellOnNode\n"
        "cell = CellOnNode(sys.argv[1], dict(), 0.5)\nthreading.Event().wait()"
    )
    assert subprocess.run([sys.executable, "-c", code, text], cwd=REPOSITORY, timeout=300, check=False).returncode == 1


def test_what_no_cluster_could_do_is_refused(sweep: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for overrides, jobs, message in (
        ([], 0, "--jobs 0: choose 1 or more"),
        (["launch.kind=ray"], None, "a cell runs on one node, with launch.kind = 'local'"),
        ([], None, "--ray = '127.0.0.1:1': no Ray cluster answers there"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            run_sweep(sweep([3]), overrides, jobs=jobs, ray="127.0.0.1:1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--ray = 'auto' needs the package ray: pip install 'async-rlhf\[ray\]'"):
        run_sweep(sweep([3]), (), ray="auto")
