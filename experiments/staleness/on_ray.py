"""Cells of a sweep on the nodes of a Ray cluster, one a node at a time.

owns        the connection to the cluster, where this process had none; a Ray actor for each cell that runs, on its node
waits for   a node that is free; what a cell reports, in a call of a second at most
woken by    the answers of those calls
on close    the actors are killed; they end their runs anyway when they have heard nothing for 30 s

Ray carries JSON and nothing else: the cell there, reports and at the end its result back. On the node the cell is a run of that
machine (`sweep.Here`). Its actor takes all CPUs of the node, and all GPUs where cells use any, so cells and the cluster's other
work wait for each other. Files are not sent: before the first cell every node loads the data, looks at what cells name and
compares digests. Nodes that join later are not used. Needs the extra `ray`; called by `sweep`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import NamedTemporaryFile
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
from async_rlhf.launch.ray import first_line, join
from async_rlhf.run import shipped
from async_rlhf.run.checks.preflight import preflight
from async_rlhf.run.config import Config
from async_rlhf.run.display.progress import Progress
from async_rlhf.run.hosts.node_files import places, with_neighbours
from async_rlhf.run.hosts.placement import on_cuda
from async_rlhf.run.run_data import Rows
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.scoring import own_file

_LOST_AFTER_S = 30.0
_TRIES = 3
"""Nodes on which a cell may be lost; then it has failed: perhaps it is the cell that ends them."""
_REPORTS_S = 1.0
_LOOK_S = 0.1
_LOOKING_S = 900.0
_SAID_AFTER = 30


@dataclass(frozen=True)
class Report:
    """What happened to a cell on its node: words for a person, a step, or its end with what `Here.run` said."""

    text: str = ""
    step: int | None = None
    has_ended: bool = False
    outcome: Outcome | None = None


_JOB, _REPORTS = TypeAdapter(Job), TypeAdapter(list[Report])


class CellOnNode:
    """A cell's run in a Ray actor. Ray calls `reports` and `interrupt` from two threads, the run has one of its own.

    Owns a thread that ends the process, and with it the run, when `reports` has not been called for `lost_after_s`.
    """

    def __init__(self, job: str, lost_after_s: float) -> None:
        self._job, self._lost_after_s = _read(job), lost_after_s
        self._here, self._found = Here(), SimpleQueue[Report]()
        self._silent_s = 0.0
        for work in (self._run, self._end_when_alone):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()

    def reports(self) -> bytes:
        """What has happened since the last call; waits a second for something."""
        self._silent_s = 0.0
        reports = list[Report]()
        with suppress(Empty):
            reports.append(self._found.get(timeout=_REPORTS_S))
            while True:
                reports.append(self._found.get_nowait())
        return _REPORTS.dump_json(reports)

    def interrupt(self) -> None:
        self._here.interrupt()

    def _run(self) -> None:
        try:
            self._wait_for_another()
            outcome = self._here.run(self._job, _Reporting(self._found))
        except Exception as error:  # noqa: BLE001 - the top of a process: unreported, the sweep would wait for ever
            outcome = Outcome(None, f"{type(error).__name__}: {error}")
        self._found.put(Report(has_ended=True, outcome=outcome))

    def _wait_for_another(self) -> None:
        """Where the cell was lost on another node, which is cut off and sees these directories, its run ends in a while."""
        run, deadline = RunDir(self._job.cell.config.run_dir), time.monotonic() + 2 * self._lost_after_s
        while run.is_alive() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def _end_when_alone(self) -> None:
        while self._silent_s < self._lost_after_s:
            time.sleep(_LOOK_S)
            self._silent_s += _LOOK_S
        os._exit(1)


class _Reporting(Progress):
    def __init__(self, found: SimpleQueue[Report]) -> None:
        self._found = found

    def event(self, text: str) -> None:
        self._found.put(Report(text=text))

    def step(self, record: dict[str, Any], max_steps: int | None) -> None:
        self._found.put(Report(step=record["step"]))


@contextmanager
def nodes(address: str, at_most: int | None, directory: Path, jobs: Sequence[Job]) -> Iterator[Nodes]:
    """The cluster at this address (IP:PORT of its head, or `auto`), joined until the block ends.

    at_most: cells at once. directory: of the sweep. Raises ConfigError where there is no such cluster, or a node of it cannot
    run the cells.
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
        yield Nodes(at_most, directory, jobs)
    finally:
        if is_ours:
            ray.shutdown()


class Nodes:
    """See `sweep.Cells`. Made by `nodes`, which says what it is given."""

    def __init__(self, at_most: int | None, directory: Path, jobs: Sequence[Job]) -> None:
        self._signals = 0
        self._busy, self._freed = set[str](), threading.Condition()
        self._needed = ("CPU", "GPU") if any(on_cuda(job.cell.config) for job in jobs) else ("CPU",)
        found = {node["NodeID"]: node for node in ray.nodes() if node["Alive"] and self._fits(node["Resources"])}
        own = ray.get_runtime_context().get_node_id()  # the last to be used: it runs this command too
        self._nodes = dict(sorted(found.items(), key=lambda item: (item[0] == own, item[0])))
        if not found:
            raise ConfigError(f"--ray: no node of the cluster has a {' and a '.join(self._needed)} for a cell")
        self.at_once = min(at_most or len(found), len(found))
        self.sees_runs = self._look(directory.absolute(), jobs)

    def run(self, job: Job, progress: Progress) -> Outcome | None:
        lost, reason = list[str](), "no node of the cluster is left"
        while len(lost) < _TRIES and (node := self._take(lost)) is not None:
            try:
                return self._run_on(node, job, progress)
            except RayError as error:
                lost.append(node)
                reason = f"lost on {', '.join(map(self._name, lost))}: {first_line(error)}"
                progress.event(f"{self._name(node)} is lost, or its worker: {first_line(error)}")
            finally:
                self._give(node)
        if self._signals:
            return None
        progress.event(f"failed: {reason}")
        return Outcome(None, reason)

    def interrupt(self) -> None:
        self._signals += 1

    def _run_on(self, node: str, job: Job, progress: Progress) -> Outcome | None:
        """Raises RayError when the node is lost."""
        options = {**self._claim(node, whole=True), "max_concurrency": 2, "max_restarts": 0}
        actor = ray.remote(CellOnNode).options(**options).remote(_text(job), _LOST_AFTER_S)
        try:
            progress.event(f"on {self._name(node)}")
            return self._follow(actor, node, job, progress)
        finally:
            ray.kill(actor)

    def _follow(self, actor: Any, node: str, job: Job, progress: Progress) -> Outcome | None:
        """Pass on what the cell reports, and signals to it, until it has ended."""
        has_begun, num_waits, told = False, 0, 0
        asked = actor.reports.remote()
        while has_begun or not self._signals:
            while told < self._signals:
                actor.interrupt.remote()
                told += 1
            if not ray.wait([asked], timeout=_REPORTS_S)[0]:
                num_waits += 1
                if num_waits == _SAID_AFTER and not has_begun:
                    progress.event(f"waits for {self._name(node)}, whose CPUs other work of the cluster may have")
                continue
            reports, has_begun = _REPORTS.validate_json(ray.get(asked)), True
            asked = actor.reports.remote()
            for report in reports:
                if report.text:
                    progress.event(report.text)
                if report.step is not None:
                    progress.step({"step": report.step}, job.cell.config.max_steps)
                if report.has_ended:
                    if report.outcome is None and not self.sees_runs:
                        progress.event(self._stays(job, node))
                    return report.outcome
        return None

    def _stays(self, job: Job, node: str) -> str:
        return (
            f"not ended, and kept on {self._name(node)} alone, in {job.cell.config.run_dir.absolute()}: it goes on there when "
            "it comes to this node again, and begins anew on another"
        )

    def _take(self, lost: Collection[str]) -> str | None:
        """A node that is free, and while others live none on which this cell was lost. None when no node is left, or a signal
        has come."""
        with self._freed:
            while not self._signals and (living := self._living()):
                rather = [node for node in living if node not in lost] or living
                if free := [node for node in rather if node not in self._busy]:
                    self._busy.add(free[0])
                    return free[0]
                self._freed.wait(_REPORTS_S)
        return None

    def _give(self, node: str) -> None:
        with self._freed:
            self._busy.remove(node)
            self._freed.notify_all()

    def _living(self) -> list[str]:
        there = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return [node for node in self._nodes if node in there]

    def _fits(self, resources: dict[str, float]) -> bool:
        return all(resources.get(each, 0) >= 1 for each in self._needed)

    def _claim(self, node: str, *, whole: bool) -> dict[str, Any]:
        """Ray's options of what is to run on this node. Without `whole` it runs beside other work; of a GPU, which Ray hides
        from what has none, it then has a sliver."""
        there = self._nodes[node]["Resources"]
        cpus, gpus = (there["CPU"], there.get("GPU", 0.0)) if whole else (0, 0.01)
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        return {"num_cpus": cpus, "num_gpus": gpus if "GPU" in self._needed else 0, "scheduling_strategy": strategy}

    def _name(self, node: str) -> str:
        return f"{self._nodes[node]['NodeManagerHostname']} ({node[:8]})"

    def _look(self, directory: Path, jobs: Sequence[Job]) -> bool:
        """Whether all nodes see the directory. Raises ConfigError for what a node lacks."""
        above = next(each for each in (directory, *directory.parents) if each.exists())
        expected, texts = contents([job.cell.config for job in jobs], is_here=False), [_text(job) for job in jobs]
        try:
            with NamedTemporaryFile(dir=above, prefix=".seen-") as file:
                answers = {
                    node: ray.remote(look).options(**self._claim(node, whole=False)).remote(texts, expected, file.name)
                    for node in self._nodes
                }
                found = {node: _answer(answer) for node, answer in answers.items()}
        except OSError as error:
            raise ConfigError(f"{str(above)!r} cannot be written: {error}") from error
        problems = [f"{self._name(node)}: {problem}" for node, (problem, _) in found.items() if problem]
        if problems:
            raise ConfigError(
                f"--ray: nodes cannot run the cells: {'; '.join(problems)}. Every node needs this version of async-rlhf, and "
                "at the same path every file that the cells name (a shared file system, or copies); shipped ones it has"
            )
        return all(sees for _, sees in found.values())


def _answer(answer: Any) -> tuple[str, bool]:
    """What a node's `look` found."""
    try:
        problem, sees = json.loads(ray.get(answer, timeout=_LOOKING_S))
    except RayError as error:
        return str(error).strip().splitlines()[-1], False
    return problem, sees


def look(jobs: Sequence[str], expected: dict[str, str], file: str) -> str:
    """On a node: what it lacks to run these cells, as text, and whether it sees this file; as JSON."""
    try:
        found = contents([_read(job).cell.config for job in jobs])
    except (AsyncRLHFError, OSError) as error:
        return json.dumps([str(error), False])
    other = [name for name, digest in expected.items() if found.get(name) != digest]
    return json.dumps([f"not the same as here: {', '.join(other[:5])}" if other else "", Path(file).exists()])


def contents(configs: Sequence[Config], *, is_here: bool = True) -> dict[str, str]:
    """Digests of what these runs read, by name. is_here: whether they will be on this machine; then ConfigError is raised for
    one that could not begin. Raises OSError."""
    found, known = {f"async-rlhf {version('async-rlhf')}": ""}, dict[str, Rows]()
    for config in configs:
        data = config.data.model_dump_json()
        rows = known[data] = known.get(data) or load_rows(config.data)
        preflight(config, rows, is_here=is_here)
        written = json.dumps([[row.prompt, row.columns] for part in rows for row in part])
        found[f"the rows of {config.data.source or 'data.sources'}"] = xxhash.xxh3_128_hexdigest(written.encode())
        for file in _files(config):
            name = shipped.portable(str(file))
            found[name] = found.get(name) or content_digest(file)
    return found


def _files(config: Config) -> Iterator[Path]:
    """The model, what rewards read, and the code of rewards, environment, loss and advantage that is in files of one's own."""
    for place in places(config):
        yield from (place.here / name for name in place.names)
    for target in (*config.rewards.functions, config.environment.function, config.loss.kind, config.advantage.kind):
        if (file := own_file(target)) is not None:
            yield from with_neighbours(file)


def _text(job: Job) -> str:
    """For another machine: shipped files by their names, the sweep's directory by its whole path."""
    config = job.cell.config
    config = config.model_copy(update={"output_dir": str(Path(config.output_dir).absolute())})
    values = _JOB.dump_python(replace(job, cell=replace(job.cell, config=config)), mode="json")
    return shipped.portable(json.dumps(values))


def _read(text: str) -> Job:
    return _JOB.validate_python(json.loads(shipped.at_home(text)))
