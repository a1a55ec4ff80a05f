"""The supervisor: starts the processes of a run, watches them, starts again what died, drains, ends.

owns        the child processes, the run directory's `run.json`, the socket's directory
waits for   the learner to end; looks round every 0.1 s, and says so when nothing moves for too long
woken by    signals: the first drains (no new credits, finish, checkpoint), the second forces
on close    no process is left: they are told, then killed; and their input closes when this process ends in any way

who dies      what happens
actor         the hub is told at once, its groups go to others; started again with back-off
hub           started again with back-off: it reads its journal, the others say hello again
scorer        started again with back-off; actors ask it again what it had not answered
learner       started again from its newest checkpoint; actors go on until credits run out
supervisor    everybody ends; `--resume` continues
"""

from __future__ import annotations

import logging
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from async_rlhf.config import Config, dialled
from async_rlhf.exit_codes import (
    CONFIGURATION,
    FATAL,
    REWARDS_FAILED,
    InterruptedRunError,
    StalledError,
    WorkerLostError,
)
from async_rlhf.launch.program import Launcher, Node, Process, actor_node, evaluation_node, hub_node, learner_node, scorer_node
from async_rlhf.run_dir import RunDir, Tail
from async_rlhf.scoring import stage_specs
from buffers.clients.control import control
from buffers.errors import AsyncRLHFError, ConfigError, DeadlineError, RewardError
from buffers.transport.link import connector

_log = logging.getLogger(__name__)
_LOOK_S = 0.1
_MAX_BACKOFF_S = 30.0
# A role that ends this often without a single finished step in between will not get better.
_MAX_DEATHS = 6
_CLOSE_S = 15.0


class Progress:
    """What the supervisor tells whoever watches. Every method may be ignored."""

    def event(self, text: str) -> None: ...

    def step(self, record: dict[str, Any], max_steps: int) -> None: ...

    def evaluation(self, record: dict[str, Any]) -> None: ...


@dataclass
class _Child:
    node: Node
    process: Process | None = None
    deaths: int = 0
    start_at: float = 0.0
    expected: bool = True
    """Whether it should be running."""


@dataclass
class _Signals:
    """Counts what the operator asked for."""

    asked: int = 0
    before: dict[int, Any] = field(default_factory=dict)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.asked += 1


class Supervisor:
    """See the module docstring. `run` returns when the run has ended as it should.

    Raises what ended it otherwise: StalledError, WorkerLostError, RewardError, ConfigError, InterruptedRunError.
    """

    def __init__(self, config: Config, run: RunDir, launcher: Launcher, progress: Progress | None = None) -> None:
        self._config, self._run, self._launcher, self._progress = config, run, launcher, progress or Progress()
        self._signals = _Signals()
        self._draining = False
        self._step = self._num_records = 0
        self._tail = Tail(run.metrics)
        self._last_step_at = time.monotonic()
        self._children: dict[str, _Child] = {}
        self._listens_at = self._address = self._scorer = ""
        self._connect = connector(config.security.directory)

    def run(self) -> bool:
        """Run to the end; True when all steps are done (or the data ended), False when it was drained before."""
        with _signals(self._signals), self._sockets() as directory:
            self._listens_at = self._config.address or f"ipc://{directory}/hub"
            self._address = dialled(self._listens_at)
            if any(self._config.scoring.in_process(spec.name) for spec in stage_specs(self._config)):
                self._scorer = f"ipc://{directory}/scorer"
            self._run.announce(self._address, self._scorer)
            self._step = max((record["step"] for record in self._tail.read()), default=0)
            try:
                self._start_all()
                self._watch()
            finally:
                self._close()
                self._run.retire()
            finished = not self._draining or self._step >= self._config.max_steps
            if finished and self._config.evaluation.at_end:
                self._evaluate(str(self._run.latest / "model"), "end")
            return finished

    def processes(self) -> dict[str, int]:
        """Names and process ids of what runs now."""
        running = {name: child.process for name, child in self._children.items() if child.node.role != "evaluation"}
        return {name: process.pid for name, process in running.items() if process is not None and process.poll() is None}

    @property
    def num_records(self) -> int:
        """Steps recorded since the start, those that were done again included."""
        return self._num_records

    @contextmanager
    def _sockets(self) -> Iterator[Path]:
        """A private directory for the sockets of this machine's processes."""
        _check_free(self._config.address)
        # The run directory's own path can be longer than the 107 bytes a socket's may have.
        directory = Path(tempfile.mkdtemp(prefix="async-rlhf-"))
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _start_all(self) -> None:
        run, address = self._run, self._address
        nodes = [hub_node(self._listens_at, run.log("hub")), learner_node(address, run.log("learner"))]
        if self._scorer:
            nodes.append(scorer_node(self._scorer, run.log("scorer")))
        nodes += [actor_node(address, i, run.log(f"actor-{i}"), self._scorer) for i in range(self._config.actors.count)]
        fresh = not any(record["label"] == "start" for record in run.read_evaluations())
        if self._config.evaluation.at_start and fresh and self._step == 0:
            nodes.append(evaluation_node(self._config.model, "start", run.log("evaluation-start")))
        for node in nodes:
            self._children[node.name] = _Child(node, self._launcher.start(run.path, node))

    # -- watching ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Until the learner has ended well."""
        while self._children["learner"].expected:
            time.sleep(_LOOK_S)
            self._report_steps()
            for child in self._children.values():
                self._look_after(child)
            if self._signals.asked and not self._draining:
                self._drain()
            if self._signals.asked > 1:
                raise InterruptedRunError(f"forced to end at step {self._step}; continue with --resume")
            if time.monotonic() - self._last_step_at > self._config.stall_timeout_s:
                raise StalledError(self._stall_report())

    def _look_after(self, child: _Child) -> None:
        """Notice that a process has ended; start it again when it should be running and its time has come."""
        if child.process is not None and (code := child.process.poll()) is not None:
            child.process = None
            if code == 0 or child.node.role == "evaluation":
                child.expected = False
                self._report_evaluation(child, code)
            else:
                self._died(child, code)
        if child.process is None and child.expected and time.monotonic() >= child.start_at:
            child.process = self._launcher.start(self._run.path, child.node)
            if child.node.role == "hub" and self._draining:
                self._ask_hub(lambda hub: hub.drain())

    def _died(self, child: _Child, code: int) -> None:
        name, fatal = child.node.name, _fatal_line(child.node.log)
        if code in FATAL:
            kinds: dict[int, type[AsyncRLHFError]] = {CONFIGURATION: ConfigError, REWARDS_FAILED: RewardError}
            raise kinds.get(code, WorkerLostError)(fatal or f"{name} ended with code {code}; see {child.node.log}")
        child.deaths += 1
        if child.deaths >= _MAX_DEATHS:
            reason = fatal or (f"signal {-code}" if code < 0 else f"code {code}")
            raise WorkerLostError(f"{name} ended {child.deaths} times without a finished step: {reason}; see {child.node.log}")
        backoff = min(_MAX_BACKOFF_S, self._config.actors.restart_backoff_s * 2 ** (child.deaths - 1))
        child.start_at = time.monotonic() + backoff
        how = f"by signal {-code}" if code < 0 else f"with code {code}" + (f" ({fatal})" if fatal else "")
        self._progress.event(f"{name} ended {how}; starting it again in {backoff:.1f} s")
        if child.node.role == "actor":
            self._ask_hub(lambda hub: hub.gone(name))

    def _drain(self) -> None:
        self._draining = True
        self._progress.event("draining: no new work, finishing what has begun (again to force)")
        self._ask_hub(lambda hub: hub.drain())

    def _ask_hub(self, question: Callable[[Any], object]) -> None:
        """Ask, when there is a hub to ask; one that is away learns it from the journal, or is asked again."""
        try:
            with control(self._address, timeout_s=5.0, connect=self._connect) as hub:
                question(hub)
        except DeadlineError as error:
            self._progress.event(f"the hub did not answer: {error}")

    def _report_steps(self) -> None:
        for record in self._tail.read():
            self._num_records += 1
            self._last_step_at = time.monotonic()
            self._step = record["step"]
            self._progress.step(record, self._config.max_steps)
            for child in self._children.values():
                child.deaths = 0

    def _stall_report(self) -> str:
        """Who waits for whom."""
        try:
            with control(self._address, timeout_s=5.0, connect=self._connect) as hub:
                status = hub.status()
            waits = f"learner waits for: {status['waiting_for'] or 'nothing'}; ledger {status['ledger']}; {status['actors']}"
        except DeadlineError as error:
            waits = f"the hub does not answer: {error}"
        running = [name for name, child in self._children.items() if child.process is not None]
        return (
            f"no step was finished for {self._config.stall_timeout_s:.0f} s (done: {self._step}). {waits}. "
            f"Running: {', '.join(running)}. Logs: {self._run.path / 'logs'}"
        )

    # -- evaluation and ending ---------------------------------------------------------------------------------------

    def _report_evaluation(self, child: _Child, code: int) -> None:
        if child.node.role != "evaluation":
            return
        label = child.node.arguments[1]
        record = next((r for r in reversed(self._run.read_evaluations()) if r["label"] == label), None)
        if code != 0 or record is None:
            reason = _fatal_line(child.node.log) or f"code {code}"
            self._progress.event(f"{child.node.name} failed: {reason}; see {child.node.log}")
        else:
            self._progress.evaluation(record)

    def _evaluate(self, model: str, label: str) -> None:
        """Evaluate and wait for it; a failure is reported, the run has ended well all the same."""
        node = evaluation_node(model, label, self._run.log(f"evaluation-{label}"))
        child = _Child(node, self._launcher.start(self._run.path, node))
        deadline = time.monotonic() + self._config.stall_timeout_s
        assert child.process is not None
        try:
            while (code := child.process.poll()) is None and time.monotonic() < deadline and self._signals.asked < 2:
                time.sleep(_LOOK_S)
            self._report_evaluation(child, -1 if code is None else code)
        finally:
            child.process.kill()

    def _close(self) -> None:
        """End everybody: the start evaluation may finish, the hub halts, actors have been told; the rest is killed."""
        self._report_steps()
        hub = self._children.get("hub")
        if hub is not None and hub.process is not None and hub.process.poll() is None:
            self._ask_hub(lambda asked: asked.halt())
        deadline = time.monotonic() + (_CLOSE_S if self._signals.asked < 2 else 0.0)
        for child in self._children.values():
            ends_itself = child.node.role != "scorer"  # which only ever answers
            while ends_itself and child.process is not None and child.process.poll() is None and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
            if child.process is not None:
                if child.process.poll() == 0:
                    self._report_evaluation(child, 0)
                child.process.kill()


@contextmanager
def _signals(handler: _Signals) -> Iterator[None]:
    """SIGINT and SIGTERM are counted while the run lasts; only the main thread may ask for them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _check_free(address: str) -> None:
    """Raises ConfigError when a tcp port is taken."""
    if not address.startswith("tcp://"):
        return
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("" if host == "*" else host, int(port)))
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"address = {address!r} cannot be used: {error}. Choose a free port, or leave it empty"
            ) from error


def _fatal_line(log: Path) -> str:
    """What a role wrote last about its end."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return next((line.removeprefix("fatal: ") for line in reversed(lines[-50:]) if line.startswith("fatal: ")), "")
