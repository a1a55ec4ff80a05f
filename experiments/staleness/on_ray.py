"""Cells of a sweep on the nodes of a Ray cluster, one a node at a time.

owns        the connection to the cluster, where this process had none; a Ray actor for each cell that runs, on its node
waits for   a node that is free; the end of a cell, in waits of a second
on close    the actors are killed; they end their runs anyway when they have heard nothing for 30 s

Ray carries JSON and nothing else: the cell there, its progress and at the end its result back. On the node the cell is a run of
that machine (`sweep.Here`). Its actor takes all CPUs of the node, and all GPUs where cells use any, so cells and the cluster's
other work wait for each other. Files are not sent: before it begins a cell compares digests of what it reads on its node with
those here. Nodes that join later are not used. Needs the extra `ray`; called by `sweep`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import ray
import xxhash
from pydantic import TypeAdapter
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from async_rlhf.actors.data.rows import load_rows
from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError
from async_rlhf.buffers.files import content_digest
from async_rlhf.experiments.staleness.sweep import Here, Job, Outcome
from async_rlhf.launch.machine import installed
from async_rlhf.launch.ray import first_line, join
from async_rlhf.run import shipped
from async_rlhf.run.checks.preflight import preflight
from async_rlhf.run.config import Config
from async_rlhf.run.display import Progress
from async_rlhf.run.hosts.node_files import large_files
from async_rlhf.run.hosts.placement import on_cuda
from async_rlhf.run.own_code import own_code
from async_rlhf.run.run_data import Rows
from async_rlhf.run.run_dir import RunDir

_LOST_AFTER_S = 30.0
_TRIES = 3
"""Nodes on which a cell may be lost; then it has failed: perhaps it is the cell that ends them."""
_LOOK_S = 1.0
_SAID_AFTER_S = 30.0
_JOB, _OUTCOME = TypeAdapter(Job), TypeAdapter[Outcome | None](Outcome | None)


class CellOnNode(Progress):
    """A cell's run in a Ray actor, whose methods Ray calls from threads of their own.

    Owns a thread that ends the process, and with it the run, when `news` has not been called for `lost_after_s`: a worker of
    Ray outlives its node's daemon for long.
    """

    def __init__(self, job: str, expected: dict[str, str], lost_after_s: float) -> None:
        self._job, self._expected, self._lost_after_s = _read(job), expected, lost_after_s
        self._here, self._texts, self._step = Here(), list[str](), 0
        self._heard = time.monotonic()
        threading.Thread(target=self._end_when_alone, daemon=True).start()

    def run(self) -> bytes:
        """Its outcome. Where the cell was lost on another node, which is cut off and sees these directories, its run there ends
        in a while, and is waited for."""
        run, deadline = RunDir(self._job.cell.config.run_dir), time.monotonic() + 2 * self._lost_after_s
        while run.is_alive() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        problem = self._missing()
        return _OUTCOME.dump_json(problem or self._here.run(self._job, self))

    def _missing(self) -> str:
        """Why this node cannot run the cell; empty where it can."""
        try:
            found = contents([self._job.cell.config])
        except (AsyncRLHFError, OSError) as error:
            return str(error)
        other = ", ".join([name for name, digest in found.items() if self._expected.get(name) != digest][:5])
        what = "Every node needs this version of async-rlhf, and at the same path every file that the cells name"
        return f"not the same there as here: {other}. {what} (a shared file system, or copies)" if other else ""

    def news(self) -> tuple[list[str], int]:
        """Lines since the last call, and the newest step."""
        self._heard = time.monotonic()
        lines = self._texts[:]
        del self._texts[: len(lines)]  # what the thread of the run adds meanwhile stays behind them
        return lines, self._step

    def interrupt(self) -> None:
        self._here.interrupt()

    def event(self, text: str) -> None:
        self._texts.append(text)

    def step(self, record: dict[str, Any], max_steps: int | None) -> None:
        self._step = record["step"]

    def _end_when_alone(self) -> None:
        while time.monotonic() < self._heard + self._lost_after_s:
            time.sleep(0.1)
        os._exit(1)


@contextmanager
def nodes(address: str, at_most: int | None, jobs: Sequence[Job]) -> Iterator[Nodes]:
    """The cluster at this address (IP:PORT of its head, or `auto`), joined until the block ends.

    at_most: cells at once. Raises ConfigError where there is no such cluster, or no node of it for a cell.
    """
    if at_most is not None and at_most < 1:
        raise ConfigError(f"--jobs {at_most}: choose 1 or more, or leave it out for one cell a node")
    for job in jobs:
        if (kind := job.cell.config.launch.kind) != "local":
            raise ConfigError(f"launch.kind = {kind!r} with --ray: a cell runs on one node, with launch.kind = 'local'")
    is_ours = not ray.is_initialized()
    if is_ours:
        join(address, "--ray")
    try:
        yield Nodes(at_most, jobs)
    finally:
        if is_ours:
            ray.shutdown()


class Nodes:
    """See `sweep.Cells`. Made by `nodes`, which says what it is given."""

    def __init__(self, at_most: int | None, jobs: Sequence[Job]) -> None:
        self._signals, self._free = 0, SimpleQueue[str]()
        self._needed = ("CPU", "GPU") if any(on_cuda(job.cell.config) for job in jobs) else ("CPU",)
        living = [node for node in ray.nodes() if node["Alive"]]
        fits = (node for node in living if all(node["Resources"].get(kind, 0) >= 1 for kind in self._needed))
        self._nodes = {node["NodeID"]: node for node in fits}
        if not self._nodes:
            raise ConfigError(f"--ray: no node of the cluster has a {' and a '.join(self._needed)} for a cell")
        self._expected = contents([job.cell.config for job in jobs], is_here=False)
        own = ray.get_runtime_context().get_node_id()  # the last to be used: it runs this command too
        for node in sorted(self._nodes, key=lambda node: (node == own, node)):
            self._free.put(node)
        self.at_once = min(at_most or len(self._nodes), len(self._nodes))

    def run(self, job: Job, progress: Progress) -> Outcome | None:
        lost, reason = list[str](), "no node of the cluster is left"
        while len(lost) < _TRIES and (node := self._take()) is not None:
            try:
                return self._run_on(node, job, progress)
            except RayError as error:
                lost.append(self._name(node))
                reason = f"lost on {', '.join(lost)}: {first_line(error)}"
                progress.event(f"{lost[-1]} is lost, or its worker: {first_line(error)}")
            finally:
                self._free.put(node)
        if self._signals:
            return None
        progress.event(f"failed: {reason}")
        return reason

    def interrupt(self) -> None:
        self._signals += 1

    def _take(self) -> str | None:
        """A node that is free, which others that are free have been longer. None when none lives, or a signal has come."""
        while not self._signals:
            living = {node["NodeID"] for node in ray.nodes() if node["Alive"]} & set(self._nodes)
            if not living:
                return None
            if (node := self._free.get()) in living:
                return node
        return None

    def _run_on(self, node: str, job: Job, progress: Progress) -> Outcome | None:
        """Pass on lines of the cell, and signals to it, until it has ended. Raises RayError when the node is lost."""
        options = {**self._claim(node), "max_concurrency": 3, "max_restarts": 0}
        actor = ray.remote(CellOnNode).options(**options).remote(_text(job), self._expected, _LOST_AFTER_S)
        try:
            progress.event(f"on {self._name(node)}")
            ended, news, sent, began, has_begun = actor.run.remote(), actor.news.remote(), 0, time.monotonic(), False
            while has_begun or not self._signals:
                while sent < self._signals:
                    actor.interrupt.remote()
                    sent += 1
                has_ended = bool(ray.wait([ended], timeout=_LOOK_S)[0])
                if has_ended or ray.wait([news], timeout=0)[0]:
                    texts, step = ray.get(news if not has_ended else actor.news.remote())
                    news, has_begun = actor.news.remote(), True
                    for text in texts:
                        progress.event(text)
                    if step:
                        progress.step({"step": step}, job.cell.config.max_steps)
                elif not has_begun and time.monotonic() > began + _SAID_AFTER_S:
                    progress.event(f"waits for {self._name(node)}, whose CPUs other work of the cluster may have")
                    began = float("inf")
                if has_ended:
                    outcome: Outcome | None = _OUTCOME.validate_json(ray.get(ended))
                    if outcome is None:
                        progress.event(
                            f"not ended; its run is kept in {job.cell.config.run_dir.absolute()} of {self._name(node)}"
                        )
                    return outcome
            return None
        finally:
            ray.kill(actor)

    def _claim(self, node: str) -> dict[str, Any]:
        """Ray's options of what is to have this node alone."""
        there = self._nodes[node]["Resources"]
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        gpus = there["GPU"] if "GPU" in self._needed else 0
        return {"num_cpus": there["CPU"], "num_gpus": gpus, "scheduling_strategy": strategy}

    def _name(self, node: str) -> str:
        return f"{self._nodes[node]['NodeManagerHostname']} ({node[:8]})"


def contents(configs: Sequence[Config], *, is_here: bool = True) -> dict[str, str]:
    """Digests of what these runs read, by name: their rows, the model, what rewards read, and code in files of one's own.
    is_here: whether they will be on this machine; then ConfigError is raised for one that could not begin. Raises OSError."""
    found, known = {f"async-rlhf {installed()}": ""}, dict[str, Rows]()
    for config in configs:
        data = config.data.model_dump_json()
        rows = known[data] = known.get(data) or load_rows(config.data)
        preflight(config, rows, is_here=is_here)
        written = json.dumps([[row.prompt, row.columns] for part in rows for row in part])
        found[f"the rows of {config.data.source or 'data.sources'}"] = xxhash.xxh3_128_hexdigest(written.encode())
        files = [*large_files(config), *own_code(config)]
        found |= {name: content_digest(file) for file in files if (name := shipped.portable(str(file))) not in found}
    return found


def _text(job: Job) -> str:
    """For another machine: shipped files by their names, the sweep's directory by its whole path."""
    config = job.cell.config
    config = config.model_copy(update={"output_dir": str(Path(config.output_dir).absolute())})
    values = _JOB.dump_python(replace(job, cell=replace(job.cell, config=config)), mode="json")
    return shipped.portable(json.dumps(values))


def _read(text: str) -> Job:
    return _JOB.validate_python(json.loads(shipped.at_home(text)))
