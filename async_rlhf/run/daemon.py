"""The supervisor: starts the processes of a run, watches them, starts again what died, drains, ends.

owns        the child processes, the run directory's lock and `run.json`, the sockets' directory, a courier to the hub
waits for   the learner to end; looks round every 0.1 s, and ends the run when no step is finished for too long
woken by    signals: the first drains (no new credits, finish, checkpoint), the second forces
on close    no process is left: each gets the command to end, then is killed; its input closes when this process ends

who dies      what happens
actor         reported to the hub until it confirms; its groups go to others; started again with back-off
hub           started again with back-off: it reads its journal, the others say hello again
scorer        started again with back-off; actors ask it again what it had not answered
learner       started again from its newest checkpoint; actors go on until credits run out
supervisor    every process ends; `--resume` continues

An end that the supervisor did not request is a death, whatever its code; so is silence longer than `watchdog_s`, after which
the frozen process is killed. When a role is given up is for `child` to say.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from types import FrameType
from typing import Any

from async_rlhf.buffers.clients.control import Control, control
from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError, DamagedError, RewardError
from async_rlhf.buffers.transport.link import connector
from async_rlhf.launch.exit_codes import (
    CONFIGURATION,
    DAMAGED,
    FATAL,
    REFUSED_TO_TRAIN,
    REWARDS_FAILED,
    InterruptedRunError,
    RefusedToTrainError,
    StalledError,
    WorkerLostError,
)
from async_rlhf.launch.program import Launcher, actor_node, evaluation_node, hub_node, learner_node, scorer_node
from async_rlhf.launch.sockets import hub_address, scorer_address, socket_directory
from async_rlhf.launch.tether import PROGRESS
from async_rlhf.run.child import MAX_DEATHS, Child, SupervisedTime
from async_rlhf.run.config import Config
from async_rlhf.run.courier import Courier
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.run_files import Tail, read_lines
from async_rlhf.run.scoring import stage_specs

_LOOK_S = 0.1
_CLOSE_S = 15.0


class Progress:
    """What the supervisor reports. Every method may be ignored."""

    def event(self, text: str) -> None: ...

    def step(self, record: dict[str, Any], max_steps: int) -> None: ...

    def evaluation(self, record: dict[str, Any]) -> None: ...


@dataclass
class _Signals:
    """Counts SIGINT and SIGTERM."""

    count: int = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


class Supervisor:
    """See the module docstring. `run` returns when the run has ended as it should.

    max_deaths: lives in a row in which a role did not work, after which it is given up. Raises what ended the run otherwise:
    StalledError, WorkerLostError, RefusedToTrainError, RewardError, ConfigError, DamagedError,
    InterruptedRunError.
    """

    def __init__(
        self,
        config: Config,
        run: RunDir,
        launcher: Launcher,
        progress: Progress | None = None,
        *,
        max_deaths: int = MAX_DEATHS,
    ) -> None:
        self._config, self._run, self._launcher, self._progress = config, run, launcher, progress or Progress()
        self._max_deaths = max_deaths
        self._signals = _Signals()
        self._draining = False
        self._step = self._highest = self._num_records = 0
        self._tail = Tail(run.metrics)
        self._now = SupervisedTime()
        self._last_step_at = self._now()
        self._children: dict[str, Child] = {}
        self._address = self._scorer = ""
        self._connect = connector(config.security.directory)

    def run(self) -> bool:
        """Run to the end; True when all steps are done (or the data ended), False when it was drained before."""
        try:
            with _signals(self._signals), self._listening():
                before = chain.from_iterable(iter(self._tail.read, []))  # a read is of so many bytes at most
                self._step = self._highest = max((record["step"] for record in before if _is_step(record)), default=0)
                self._courier = Courier(self._ask_for)
                try:
                    self._start_all()
                    self._watch()
                finally:
                    self._close()
                finished = not self._draining or self._step >= self._config.max_steps
                if finished and self._config.evaluation.at_end:
                    self._evaluate(str(self._run.latest / "model"), "end")
                return finished
        finally:
            self._run.retire()

    def processes(self) -> dict[str, int]:
        """Names and process ids of what runs now."""
        running = {name: child.process for name, child in self._children.items() if child.node.role != "evaluation"}
        return {name: process.pid for name, process in running.items() if process is not None and process.poll() is None}

    @property
    def num_records(self) -> int:
        """Steps recorded since the start, those that were done again included."""
        return self._num_records

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """A private directory for the sockets of this machine's processes, and its name in the run directory."""
        _check_free(self._config.address)
        with ExitStack() as stack:
            with _refused_when_full():
                directory = stack.enter_context(socket_directory())
                self._run.announce(directory)
            self._address = hub_address(directory)
            if any(self._config.scoring.in_process(spec.name) for spec in stage_specs(self._config)):
                self._scorer = scorer_address(directory)
            yield

    def _ask_for(self, timeout_s: float) -> AbstractContextManager[Control]:
        return control(self._address, timeout_s=timeout_s, connect=self._connect)

    def _start_all(self) -> None:
        run, address = self._run, self._address
        # Shared memory is for who came by ipc: the hub's own machine does, wherever else it listens.
        listens = (address, self._config.address) if self._config.address else (address,)
        nodes = [hub_node(listens, run.log("hub")), learner_node(address, run.log("learner"))]
        if self._scorer:
            nodes.append(scorer_node(self._scorer, run.log("scorer")))
        nodes += [actor_node(address, i, run.log(f"actor-{i}"), self._scorer) for i in range(self._config.actors.count)]
        fresh = not any(record.get("label") == "start" for record in read_lines(run.evaluations).records)
        if self._config.evaluation.at_start and fresh and self._step == 0:
            nodes.append(evaluation_node(self._config.model, "start", run.log("evaluation-start")))
        self._children = {node.name: Child(node) for node in nodes}
        with _refused_when_full():
            for child in self._children.values():
                self._start(child)

    def _start(self, child: Child) -> None:
        child.started(self._launcher.start(self._run.path, child.node), self._now())

    # -- watching ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Until the learner has ended well."""
        while self._children["learner"].wanted:
            time.sleep(_LOOK_S)
            self._report_steps()
            for child in self._children.values():
                self._look_after(child)
            if complaint := self._courier.complaint():
                self._progress.event(f"the hub did not answer: {complaint}")
            if self._signals.count and not self._draining:
                self._draining = True
                self._progress.event("draining: no new work, finishing what has begun (again to force)")
                self._courier.drain()
            if self._signals.count > 1:
                raise InterruptedRunError(f"forced to end at step {self._step}; continue with --resume")
            if self._now() - self._last_step_at > self._config.stall_timeout_s:
                raise StalledError(self._stall_report())

    def _look_after(self, child: Child) -> None:
        """Notice that a process has ended or is frozen; start it again when it should be running and its time has come."""
        now, name = self._now(), child.node.name
        if child.process is not None:
            if (code := child.process.poll()) is not None:
                self._ended(child, code)
            elif beats := child.process.heard():
                child.heard(now)
                if PROGRESS in beats:
                    child.progressed()
            elif child.silent_s(now) > self._config.watchdog_s:
                self._progress.event(f"{name} is frozen: no beat for {child.silent_s(now):.0f} s (watchdog_s); ending it")
                child.process.kill()
        elif child.wanted and now >= child.start_at and not self._courier.owes(name):
            if child.ended_well and not self._courier.hub_goes_on:
                child.wanted = False  # the hub has stopped it
            elif child.ended_well:
                self._died(child, "with code 0, and the run goes on")
            else:
                self._start_again(child)

    def _ended(self, child: Child, code: int) -> None:
        role, process = child.node.role, child.process
        assert process is not None
        if role == "evaluation" or (role == "learner" and code == 0):
            child.process, child.wanted = None, False
            self._report_evaluation(child, code)
            return
        words = process.last_words() if code > 0 else ""
        if code in FATAL:
            kinds: dict[int, type[AsyncRLHFError]] = {
                CONFIGURATION: ConfigError,
                DAMAGED: DamagedError,
                REWARDS_FAILED: RewardError,
                REFUSED_TO_TRAIN: RefusedToTrainError,
            }
            raise kinds.get(code, WorkerLostError)(words or f"{child.node.name} ended with code {code}; see {child.node.log}")
        if role == "actor":
            self._courier.gone(child.node.name)
            if code == 0:
                child.ends_well(self._now())  # perhaps at the hub's request: its state shows
                return
        self._died(child, f"by signal {-code}" if code < 0 else f"with code {code}" + (f" ({words})" if words else ""))

    def _died(self, child: Child, how: str) -> None:
        name, pause_s = child.node.name, child.died(self._now(), self._config.actors.restart_backoff_s)
        if child.deaths >= self._max_deaths:
            raise WorkerLostError(
                f"{name} ended {child.deaths} times without having worked in between: the last time {how}; see {child.node.log}"
            )
        self._progress.event(f"{name} ended {how}; starting it again in {pause_s:.1f} s")

    def _start_again(self, child: Child) -> None:
        try:
            self._start(child)
        except OSError as error:
            self._died(child, f"before it began: {error}")
            return
        if child.node.role == "hub" and self._draining:
            self._courier.drain()

    def _report_steps(self) -> None:
        for record in filter(_is_step, self._tail.read()):
            self._num_records += 1
            self._last_step_at = self._now()
            self._step = record["step"]
            if self._step > self._highest:  # a step that is done again is no progress
                self._highest = self._step
                for name in ("hub", "learner"):
                    self._children[name].progressed()
            self._progress.step(record, self._config.max_steps)

    def _stall_report(self) -> str:
        """What each process waits for."""
        try:
            with self._ask_for(5.0) as hub:
                status = hub.status()
            waits = f"learner waits for: {status['waiting_for'] or 'nothing'}; ledger {status['ledger']}; {status['actors']}"
        except AsyncRLHFError as error:
            waits = f"the hub does not answer: {error}"
        running = [name for name, child in self._children.items() if child.process is not None]
        return (
            f"no step was finished for {self._config.stall_timeout_s:.0f} s (done: {self._step}). {waits}. "
            f"Running: {', '.join(running)}. Logs: {self._run.path / 'logs'}"
        )

    # -- evaluation and ending ---------------------------------------------------------------------------------------

    def _report_evaluation(self, child: Child, code: int) -> None:
        if child.node.role != "evaluation":
            return
        label = child.node.arguments[1]
        record = next((r for r in reversed(read_lines(self._run.evaluations).records) if r.get("label") == label), None)
        if code != 0 or record is None:
            self._progress.event(f"{child.node.name} failed (code {code}); see {child.node.log}")
        else:
            self._progress.evaluation(record)

    def _evaluate(self, model: str, label: str) -> None:
        """Evaluate and wait for it; a failure is reported, the run has ended well all the same."""
        child = Child(evaluation_node(model, label, self._run.log(f"evaluation-{label}")))
        try:
            self._start(child)
        except OSError as error:
            self._progress.event(f"{child.node.name} cannot be started: {error}")
            return
        process, deadline = child.process, self._now() + self._config.stall_timeout_s
        assert process is not None
        try:
            while (code := process.poll()) is None and self._now() < deadline and self._signals.count < 2:
                time.sleep(_LOOK_S)
            self._report_evaluation(child, -1 if code is None else code)
        finally:
            process.kill()

    def _close(self) -> None:
        """The start evaluation may finish, the hub halts, actors end by its command; the rest is killed."""
        with suppress(DamagedError):
            self._report_steps()
        self._courier.close()
        hub = self._children.get("hub")
        if hub is not None and hub.process is not None and hub.process.poll() is None:
            with suppress(AsyncRLHFError), self._ask_for(5.0) as hub_control:  # a silent hub is killed below
                hub_control.halt()
        deadline = self._now() + (_CLOSE_S if self._signals.count < 2 else 0.0)
        for child in self._children.values():
            ends_itself = child.node.role != "scorer"  # which only ever answers
            while ends_itself and child.process is not None and child.process.poll() is None and self._now() < deadline:
                time.sleep(_LOOK_S)
            if child.process is not None:
                if child.process.poll() == 0:
                    self._report_evaluation(child, 0)
                child.process.kill()


def _is_step(record: dict[str, Any]) -> bool:
    """The learner writes whole records; whatever else stands in its file after a crash is left out."""
    return type(record.get("step")) is int


@contextmanager
def _refused_when_full() -> Iterator[None]:
    """What cannot be made before the run has begun (no room, no right) is for the operator to mend."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"the run cannot be started: {error}") from error


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
