"""The supervisor: starts the processes of a run, watches them, starts again what died, drains, ends.

owns        the child processes, the run directory's lock and `run.json`, the sockets' directory, a notifier to the hub
waits for   the learner to end; polls every 0.1 s, and ends the run when no step is finished for too long, unless nothing
            is missing but what an operator brings (`resources`)
woken by    signals: the first drains (no new credits, finish, checkpoint), the second forces
on close    no process is left: each gets the command to end, then is killed; its input closes when this process ends

who dies      what happens
actor         reported to the hub until it confirms; its groups go to others; started again with back-off
hub           started again with back-off: it reads its journal, the others say hello again
scorer        started again with back-off; actors ask it again what it had not answered
relay         started again with back-off; its actors go on with what they have, and say hello through the next
evaluation    started again by the evaluator; tracker: started again with back-off, or given up, and the run goes on
learner       started again, with all its ranks, from its newest checkpoint; actors go on until credits run out
host          its roles are started there again, with back-off and for ever; they are given up with the run, when that stalls
supervisor    every process ends; `--resume` continues

An end that the supervisor did not request is a death, whatever its code; so is silence longer than `watchdog_s`, after which
the frozen process is killed. When a role is given up is for `child` to say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from async_rlhf.buffers.clients.control import Control, control
from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError, DamagedError
from async_rlhf.buffers.transport.link import connector
from async_rlhf.launch.exit_codes import FATAL, HOST_LOST, InterruptedRunError, StalledError, WorkerLostError, ending, exit_code
from async_rlhf.launch.placement import Placement
from async_rlhf.launch.program import Launcher, Process
from async_rlhf.launch.ranks import start_ranks
from async_rlhf.launch.run_lock import holder
from async_rlhf.launch.sockets import check_free, hub_address, socket_directory
from async_rlhf.launch.tether import PROGRESS
from async_rlhf.learner.loop.budget import Spent
from async_rlhf.run.config import Config
from async_rlhf.run.display import Progress
from async_rlhf.run.display.terminal import on_signals
from async_rlhf.run.hosts.connections import meeting_address
from async_rlhf.run.hosts.placement import nodes_of, placement_of
from async_rlhf.run.processes.tracking import tracker_nodes
from async_rlhf.run.run_dir import RunDir, RunEnd
from async_rlhf.run.run_files import Tail, is_step, line_of_step
from async_rlhf.run.supervision.child import MAX_DEATHS, Child, Every, SupervisedTime
from async_rlhf.run.supervision.evaluator import Evaluator
from async_rlhf.run.supervision.hooks import Events
from async_rlhf.run.supervision.hub_notifier import HubNotifier
from async_rlhf.run.supervision.promise import BitsPromise
from async_rlhf.run.supervision.resources import OperatorWait, RunDisk

_LOOK_S = 0.1
_LOCK_S = 1.0  # a network file system frees the lock of a host only after many seconds of its silence
_CLOSE_S = 15.0
_TRACKING_S = 60.0  # for the tracker to send the rest, once no role is left
_PAUSE_S = 0.5  # before a role that ended is started again; it doubles, see `child`


class Supervisor:
    """See the module docstring. `run` returns when the run has ended as it should.

    placement: where its processes run; as the configuration and this machine have it when it is left out. on_step: called with
    the record of each step; what it raises ends the run. max_deaths: lives in a row in which a role did
    not work, after which it is given up. done: there is nothing left to do, and no process is started. Raises what ended the
    run otherwise: StalledError, WorkerLostError, RefusedToTrainError, RewardError, ConfigError, DamagedError,
    InterruptedRunError.
    """

    def __init__(
        self,
        config: Config,
        run: RunDir,
        launcher: Launcher,
        progress: Progress | None = None,
        *,
        placement: Placement | None = None,
        on_step: Callable[[dict[str, Any]], object] | None = None,
        max_deaths: int = MAX_DEATHS,
        done: bool = False,
    ) -> None:
        self._config, self._run = config, run
        self._progress = progress or Progress()
        self.events = Events(config, run, self._progress.event)
        self._on_step, self._max_deaths, self._done = on_step, max_deaths, done
        self.agents = launcher.agents
        self._num_signals = 0
        self._draining, self._plateau = False, ""
        self._step = self._highest = 0
        self.num_records = 0
        """Steps recorded since the start, those that were done again included."""
        self._spent = Spent()
        self._tail, self._samples = Tail(run.metrics), Tail(run.samples)
        self._now = SupervisedTime()
        self._last_step_at = self._now()
        self._children: dict[str, Child] = {}
        self._sockets, self._address = Path(), ""
        self._connect = connector(config.security.directory)
        self._placement = placement or placement_of(config)
        self._launcher, self._meeting = launcher, meeting_address(config, self._placement)
        self._evaluator = Evaluator(config, run, launcher, self._placement, self._progress, self.events, self._now)
        self._look_at_lock = Every(_LOCK_S, self._now)
        self._operator_wait = OperatorWait(run, self._progress.event, self._now)
        self._promise = BitsPromise(run, self._progress.event, self._now)
        self._disk = RunDisk(
            run, config.max_log_bytes, config.disk_pause_bytes, self._progress.event, self.events.disk_low, self._now
        )

    def run(self) -> bool:
        """Run to the end; True when all steps are done (or the data ended), False when it was drained before."""
        try:
            if self._done:
                with on_signals(self.interrupt), self._beside():
                    self._evaluator.finish(stop=self._is_forced)
                return True
            with on_signals(self.interrupt), self._listening(), self._beside():
                self._tail.skip()  # lines of earlier starts, which may be gigabytes
                self._samples.skip()
                last = line_of_step(self._run.metrics)
                self._spent = Spent() if last is None else Spent.until(last)
                self._step = self._highest = self._spent.steps
                self._notifier = HubNotifier(self._ask_for)
                try:
                    self._start_all()
                    self._watch()
                    self._close()
                except BaseException:  # an interrupt too: no process may be left
                    self._close(failed=True)
                    raise
                ended = self._config.budget.ended(self._spent) or self._plateau
                finished = not self._draining or bool(ended)
                if finished:
                    self._evaluator.finish(stop=self._is_forced)
                reason = ended or ("all data used" if finished else "drained")
                self._record_end(RunEnd(code=0, reason=reason, finished=finished))
                return finished
        except BaseException as error:
            self._record_end(RunEnd(code=exit_code(error), reason=str(error) or type(error).__name__, finished=False))
            raise
        finally:
            self._launcher.close()
            self.events.close(at_once=self._is_forced())
            self._run.retire()

    def _record_end(self, end: RunEnd) -> None:
        self._run.record_end(end)
        self.events.ended(end)

    def drain(self) -> None:
        """Drain like a first signal; may be called by any thread."""
        self._num_signals = self._num_signals or 1

    def interrupt(self, *_: object) -> None:
        """Act like a signal: the first drains, the second ends at once."""
        self._num_signals += 1

    def processes(self) -> dict[str, Process]:
        """The running processes by name."""
        running = {name: child.process for name, child in self._children.items()}
        return {name: process for name, process in running.items() if process is not None and process.poll() is None}

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """A private directory for the sockets of this machine's processes, and its name in the run directory."""
        check_free(self._config.address)
        with ExitStack() as stack:
            with _refused_when_full():
                self._sockets = stack.enter_context(socket_directory())
                self._run.announce(self._sockets)
            self._address = hub_address(self._sockets)
            yield

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """The evaluator and the tracker, which end after everything else."""
        try:
            yield
        finally:
            self._evaluator.close()
            self._run.withdraw()
            self._finish_tracking()

    def _is_forced(self) -> bool:
        return self._num_signals > 1

    def _ask_for(self, timeout_s: float) -> AbstractContextManager[Control]:
        return control(self._address, timeout_s=timeout_s, connect=self._connect)

    def _start_all(self) -> None:
        nodes = nodes_of(self._config, self._placement, self._run, self._sockets)
        self._children = {node.name: Child(node, has_worked=self._step > 0) for node in nodes}
        with _refused_when_full():
            self._run.keep_placement(self._placement)
            self._report_beginning()  # the first role waits for the fork server's imports
            for child in self._children.values():
                self._start(child)
        for node in tracker_nodes(self._config, self._run):
            self._children[node.name] = Child(node, optional=True)
            self._attempt(self._children[node.name])
        self._evaluator.judge()

    def _start(self, child: Child) -> None:
        node, ranks, run = child.node, self._config.learner.ranks, self._run
        if node.role == "learner" and ranks > 1:
            process = start_ranks(self._launcher, run.path, node, ranks, self._meeting, self._placement.placed, run.log)
        else:
            process = self._launcher.start(run.path, node)
        child.started(process, self._now())

    def _attempt(self, child: Child) -> bool:
        """Start a role; an error of the machine counts as a death."""
        try:
            self._start(child)
        except OSError as error:
            self._died(child, f"before it began: {error}")
            return False
        return True

    # -- watching ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Watch until the learner has ended well."""
        while self._children["learner"].wanted:
            time.sleep(_LOOK_S)
            self._report_steps()
            self._report_beginning()
            for child in self._children.values():
                self._look_after(child)
            for watched in (self._evaluator, self._disk, self._promise, self.events):
                watched.look()
            if last_error := self._notifier.last_error():
                self._progress.event(f"the hub did not answer: {last_error}")
            if not self._draining and (self._num_signals or self._evaluator.plateau):
                self._draining, self._plateau = True, self._evaluator.plateau
                why = f"{self._plateau}; " if self._plateau else ""
                self._progress.event(f"{why}draining: no new work, finishing what has begun (again to force)")
                self._notifier.drain()
            if self._look_at_lock() and self._run.is_lost():
                for process in self.processes().values():
                    process.kill()
                raise InterruptedRunError(
                    f"{holder(self._run.lock_file)} has taken {self._run.path}, and this process leaves it"
                )
            if self._is_forced():
                raise InterruptedRunError(f"forced to end at step {self._step}; continue with --resume")
            if self._operator_wait.waits():
                self._last_step_at = self._now()
            if self._now() - self._last_step_at > self._config.stall_timeout_s:
                raise StalledError(self._stall_report())

    def _look_after(self, child: Child) -> None:
        """Notice that a process has ended or is frozen; start it again when it should be running and its time has come."""
        now, name, role = self._now(), child.node.name, child.node.role
        if child.process is not None:
            if (end := child.end()) is not None:
                self._ended(child, *end)
            elif beats := child.beats(now):
                self._worked(role, PROGRESS in beats)
            elif child.silent_s(now) > self._config.watchdog_s:
                self._progress.event(f"{name} is frozen: no beat for {child.silent_s(now):.0f} s (watchdog_s); ending it")
                child.kill()
        elif child.wanted and now >= child.start_at and not (role == "actor" and self._notifier.is_unconfirmed(name)):
            if child.ended_well and not self._notifier.hub_goes_on:
                child.wanted = False  # the hub has stopped it
            elif child.ended_well:
                self._died(child, "with code 0, and the run goes on")
            elif self._attempt(child):
                self._run.count_restart(role)
                if role == "hub" and self._draining:
                    self._notifier.drain()

    def _worked(self, role: str, progressed: bool = True) -> None:
        for each in self._children.values():
            each.has_worked |= progressed and each.node.role == role

    def _ended(self, child: Child, code: int, reason: str) -> None:
        role = child.node.role
        if role in ("learner", "tracker") and code == 0:  # the tracker does when the run has ended
            child.process, child.wanted = None, False
            return
        error = reason if code > 0 else ""
        if code in FATAL and not child.optional:
            raise FATAL[code](error or f"{child.node.name} ended with code {code}; see {child.node.log}")
        if role == "actor":
            self._notifier.gone(child.node.name)
        if code == HOST_LOST:
            self._lost(child, reason)
        elif role == "actor" and code == 0:
            child.ends_well(self._now())  # perhaps at the hub's request: its state shows
        else:
            self._died(child, ending(code, reason), error)

    def _died(self, child: Child, how: str, error: str = "") -> None:
        name, pause_s = child.node.name, child.died(self._now(), _PAUSE_S, error)
        if child.given_up(self._max_deaths):
            lost = (
                f"{name} ended {child.deaths} times without having worked in between: the last time {how}; see {child.node.log}"
            )
            if not child.optional:
                raise WorkerLostError(lost)
            child.wanted = False
            self._progress.event(f"{lost}. It is given up; the files of the run have everything")
            return
        self._progress.event(f"{name} ended {how}; starting it again in {pause_s:.1f} s")

    def _lost(self, child: Child, reason: str) -> None:
        pause_s, is_news = child.lost(self._now(), _PAUSE_S, reason)
        if is_news:
            self._progress.event(f"{child.node.name} is lost: {reason}; it is tried again from {pause_s:.1f} s on")

    def _report_steps(self) -> None:
        for record in filter(is_step, self._tail.read()):
            self.num_records += 1
            self._last_step_at = self._now()
            self._step, self._spent = record["step"], Spent.until(record)
            if self._step > self._highest:  # a step that is done again is no progress
                self._highest = self._step
                for name in ("hub", "learner"):
                    self._children[name].progressed()
                    self._worked(name)
            self._progress.step(record, self._config.budget.num_steps(self._spent))
            self.events.step(record)
            if (call := self._on_step) is not None:
                self._on_step = None  # when it raises, the run ends, and it is not called again
                call(record)
                self._on_step = call
        for sample in self._samples.read():
            self._progress.sample(sample)

    def _report_beginning(self) -> None:
        if self.num_records == 0:
            with suppress(DamagedError):
                self._progress.waiting(self._run.read_ledger(), self._config.groups_per_batch)

    def _stall_report(self) -> str:
        """A message that says why no step was finished, and what the learner waits for."""
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

    # -- ending ------------------------------------------------------------------------------------------------------

    def _close(self, *, failed: bool = False) -> None:
        """The hub halts. Of a run that has ended well actors have it from the hub and end by themselves; the rest is
        killed."""
        self._notifier.close()  # first: no error here may leave its thread, which the interpreter would wait for
        with suppress(DamagedError):
            self._report_steps()
        hub = self._children.get("hub")
        if hub is not None and hub.process is not None and hub.process.poll() is None:
            with suppress(AsyncRLHFError), self._ask_for(5.0) as hub_control:  # a silent hub is killed below
                hub_control.halt()
        deadline = self._now() + (_CLOSE_S if self._num_signals < 2 else 0.0)
        for child in self._children.values():
            if child.optional:
                continue
            # A scorer and a relay only ever answer; of a run that has failed only the hub was sent a request to end.
            ends_itself = child.node.role == "hub" if failed else child.node.role not in ("scorer", "relay")
            while ends_itself and child.process is not None and child.process.poll() is None and self._now() < deadline:
                time.sleep(_LOOK_S)
            child.kill()
        self._promise.look(is_last=True)

    def _finish_tracking(self) -> None:
        """Wait until trackers have sent everything and ended, `_TRACKING_S` at most; then they are killed. What was not sent is
        sent when the run is continued."""
        trackers = [child for child in self._children.values() if child.node.role == "tracker"]
        deadline = self._now() + _TRACKING_S
        while any(tracker.process is not None or tracker.wanted for tracker in trackers) and self._now() < deadline:
            if self._is_forced() or self._run.is_lost():
                break
            for tracker in trackers:
                self._look_after(tracker)
            time.sleep(_LOOK_S)
        for tracker in trackers:
            tracker.kill()
            if tracker.process is not None and self._now() >= deadline:
                node = tracker.node
                self._progress.event(f"{node.name} was not ready {_TRACKING_S:.0f} s after the end; see {node.log}")


@contextmanager
def _refused_when_full() -> Iterator[None]:
    """Turn an OSError before the run has begun (no room, no permission) into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"the run cannot be started: {error}") from error
