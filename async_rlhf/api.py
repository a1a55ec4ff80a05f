"""The Python API: train a model, with rewards given as functions.

result = train("quick", rewards=[my_reward])            # to its end

with start("quick", rewards=[my_reward]) as run:        # the same, while this process goes on
    for record in run:                                  # each step as it is recorded
        if record["reward"] > 0.9:
            run.stop()
model = run.model()
"""

from __future__ import annotations

import atexit
import logging
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from async_rlhf.actors.data.config import CALLER_ROWS
from async_rlhf.actors.rewards import spec_of
from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError, RewardError
from async_rlhf.launch.local import warm
from async_rlhf.preparation import prepare, rows_of
from async_rlhf.run.caller import served, split, target_of
from async_rlhf.run.config import Config
from async_rlhf.run.display import Progress
from async_rlhf.run.display.console import Display
from async_rlhf.run.display.notebook import NotebookDisplay, in_notebook
from async_rlhf.run.loading import load
from async_rlhf.run.run_data import Rows
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.run_files import line_of_step
from async_rlhf.run.supervision.supervisor import Supervisor

Record = dict[str, Any]
"""The metrics of a step, as in `metrics.jsonl`. A step that is done again after a kill comes again."""


_log = logging.getLogger(__name__)
_ARGUMENTS = {
    r"async-rlhf train (\S+) --": r"train, config='\1', --",
    r"(--resume|--overwrite|--from-step \d+) --": r"\1, --",
    r"--(resume|overwrite)\b": r"\1=True",
    r"--from-step (\d+)": r"from_step=\1",
    r"--from-step": "from_step=STEP",
    r"--set '?([\w.]+)=([^\s,;']+)'?": r"overrides={'\1': '\2'}",
}


@dataclass(frozen=True, repr=False)
class TrainResult:
    """The result of a run. `checkpoint` loads with `from_pretrained`."""

    run_dir: Path
    steps: int
    """Steps done in all."""
    evaluations: list[dict[str, Any]]
    checkpoint: Path | None
    finished: bool
    """False when the run was drained before its last step; `resume=True` continues it."""

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One object a step, read when it is first asked for: a run of weeks has gigabytes of them."""
        return RunDir(self.run_dir).read_metrics()

    def __repr__(self) -> str:
        model = None if self.checkpoint is None else str(self.checkpoint)
        return f"TrainResult(run_dir={str(self.run_dir)!r}, steps={self.steps}, finished={self.finished}, checkpoint={model!r})"


def train(
    config: str | Path | Mapping[str, Any] | Config,
    *,
    data: Iterable[Any] | None = None,
    rewards: Sequence[Callable[..., Any]] | Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
    advantage: Callable[..., Any] | None = None,
    environment: Callable[..., Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    from_step: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    on_step: Callable[[Record], object] | None = None,
) -> TrainResult:
    """Run a configuration to its end: a TOML file, the name of a shipped one, its values, or a `Config`.

    data: rows instead of those of the source it names: dictionaries, or a `datasets.Dataset`. They are written into the run
    directory, so that every process and a resumed run, which needs them no more, reads the same.
    rewards: functions, or one, instead of those the file names.
    environment: a generator function (`@environment`). Of it and of rewards, what no other process can import (a lambda, a
    closure, what a notebook defines) is served by threads of this process (`run/caller.py`).
    loss, advantage: functions of your own, declared with `@loss`, `@advantage`, which must be importable.
    overrides: nested or dotted, laid upon the configuration key by key (`config.load`).
    resume: go on with its run directory, from the newest checkpoint or from that of `from_step` steps; where nothing is left
    to train on, nothing is started.
    overwrite: remove the run directory that is there.
    on_step: called with the record of each step; what it raises ends the run, which can be resumed.

    Raises ConfigError before any process starts, and what ended the run otherwise (see `async_rlhf.launch.exit_codes`).
    """
    if on_step is not None and not callable(on_step):
        raise ConfigError(f"on_step must be a function of a step's record, got {on_step!r:.80}")
    warm()
    of_run = _resolved(config, data, rewards, loss, advantage, environment, overrides, resume)
    with of_run as (resolved, rows, variables):
        return run(
            resolved,
            rows=rows,
            variables=variables,
            resume=resume,
            from_step=from_step,
            overwrite=overwrite,
            quiet=quiet,
            on_step=on_step,
        )


def start(
    config: str | Path | Mapping[str, Any] | Config,
    *,
    data: Iterable[Any] | None = None,
    rewards: Sequence[Callable[..., Any]] | Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
    advantage: Callable[..., Any] | None = None,
    environment: Callable[..., Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    from_step: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> Run:
    """Like `train`, but returns at once; only a notebook shows the run. Raises ConfigError; its handle raises later errors."""
    warm()
    with ExitStack() as stack:
        of_run = _resolved(config, data, rewards, loss, advantage, environment, overrides, resume)
        resolved, rows, variables = stack.enter_context(of_run)
        records: SimpleQueue[Record | None] = SimpleQueue()
        supervisor, directory = prepare(
            resolved,
            rows=rows,
            resume=resume,
            from_step=from_step,
            overwrite=overwrite,
            progress=stack.enter_context(NotebookDisplay()) if in_notebook() and not quiet else None,
            on_step=records.put,
            variables=variables,
        )
        return Run(supervisor, directory, records, stack.pop_all())


class Run:
    """A run beside the calling program. Iterating gives the record of each step, and ends with the run.

    owns        a thread that supervises the run's processes; they end with this process, also when it is killed
    waits for   nothing by itself: `result`, and iterating, wait for the run
    woken by    each step
    on close    the run is drained, and can be resumed: when the `with` block is left or the program ends, which wait for it;
                by Ctrl-C while the run is waited for; when the last reference to this handle is gone. A loop that is left
                by `break` or an exception drains nothing, and says so.
    """

    def __init__(self, supervisor: Supervisor, directory: RunDir, records: SimpleQueue[Record | None], held: ExitStack) -> None:
        self._directory, self._own = directory, _Supervision(supervisor, directory.path, records, held)
        self._in_block = False
        # The thread does not hold this handle, so that it can be missed.
        weakref.finalize(self, self._own.let_go, "nothing refers to it any more").atexit = False

    @property
    def run_dir(self) -> Path:
        return self._directory.path

    def __iter__(self) -> Iterator[Record]:
        """Raises, at its end, the error that ended the run."""
        try:
            while (record := self._own.records.get()) is not None:
                yield record
        except KeyboardInterrupt:
            self._own.let_go("Ctrl-C")
            raise
        except GeneratorExit:
            if not (self._own.over.is_set() or self._in_block):
                _log.warning("%s does not end because the loop over its steps was left: stop() drains it", self.run_dir)
            raise
        self._own.records.put(None)  # for the next that iterates
        self.result()

    def stop(self) -> None:
        """Drain: no new work, finish the groups in progress, write a checkpoint. Returns at once."""
        self._own.supervisor.drain()

    def model(self) -> Path | None:
        """The model directory of the newest checkpoint, which loads with `from_pretrained`; None before the first."""
        return _model(self._directory)

    def result(self, timeout_s: float | None = None) -> TrainResult:
        """Wait for the end. Raises TimeoutError, and the error that ended the run."""
        try:
            over = self._own.over.wait(timeout_s)
        except KeyboardInterrupt:
            self._own.let_go("Ctrl-C")
            raise
        if not over:
            raise TimeoutError(f"{self.run_dir} has not ended within {timeout_s} s; stop() drains it")
        if self._own.error is not None:
            raise self._own.error
        return _result(self._directory, self._own.finished)

    def __enter__(self) -> Run:
        self._in_block = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._own.let_go(f"its block was left by {type(error).__name__}")
        self._own.wait_drained()
        if error is None and self._own.error is not None:
            raise self._own.error


class _Supervision:
    """The supervisor's thread, which goes on whether or not a handle is held. error: what ended the run. over: set at its end;
    a thread whose `join` was interrupted is taken for ended."""

    def __init__(self, supervisor: Supervisor, run_dir: Path, records: SimpleQueue[Record | None], held: ExitStack) -> None:
        self.supervisor, self.records, self._run_dir, self._held = supervisor, records, run_dir, held
        self.finished, self._is_told = False, True
        self.error: BaseException | None = None
        self.over = threading.Event()
        atexit.register(self._at_exit)
        threading.Thread(target=self._run, name="supervisor", daemon=True).start()

    def let_go(self, why: str) -> None:
        """Drain; the log reports how it ends, for perhaps no handle will."""
        if self._is_told and not self.over.is_set():
            self._is_told = False
            _log.warning("%s drains (%s) and writes a checkpoint; Ctrl-C while that is waited for ends it", self._run_dir, why)
        self.supervisor.drain()

    def wait_drained(self) -> None:
        """Ctrl-C ends it at once, as a second signal does."""
        self.supervisor.drain()
        try:
            self.over.wait()
        except KeyboardInterrupt:
            self.supervisor.interrupt()
            self.over.wait()
            raise

    def _at_exit(self) -> None:
        with suppress(KeyboardInterrupt):
            self.let_go("the program ends")
            self.wait_drained()

    def _run(self) -> None:
        try:
            with self._held:
                self.finished = self.supervisor.run()
        except BaseException as error:  # noqa: BLE001  it is raised where the run is waited for
            self.error = error
        finally:
            self.records.put(None)
            atexit.unregister(self._at_exit)
            if not self._is_told:
                ended = "has ended" if self.finished else "has drained; resume=True goes on with it"
                _log.warning("%s %s", self._run_dir, ended if self.error is None else f"was ended: {self.error}")
            self.over.set()


def run(
    config: Config,
    *,
    rows: Rows | None = None,
    resume: bool = False,
    from_step: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    on_step: Callable[[Record], object] | None = None,
    variables: Mapping[str, str] | None = None,
) -> TrainResult:
    """Run a checked configuration; see `train` and `prepare`. variables: further ones of its processes on this machine."""
    shown: AbstractContextManager[Progress]
    shown = nullcontext(Progress()) if quiet else NotebookDisplay() if in_notebook() else Display()
    with shown as progress:
        supervisor, directory = prepare(
            config,
            rows=rows,
            resume=resume,
            from_step=from_step,
            overwrite=overwrite,
            progress=progress,
            on_step=on_step,
            variables=variables,
        )
        finished = supervisor.run()
    return _result(directory, finished)


def _result(directory: RunDir, finished: bool) -> TrainResult:
    last = line_of_step(directory.metrics)
    return TrainResult(
        run_dir=directory.path,
        steps=0 if last is None else last["step"],
        evaluations=directory.read_evaluations(),
        checkpoint=_model(directory),
        finished=finished,
    )


def _model(directory: RunDir) -> Path | None:
    model = directory.latest / "model"
    return model.resolve() if model.exists() else None


@contextmanager
def _resolved(
    config: str | Path | Mapping[str, Any] | Config,
    data: Iterable[Any] | None,
    rewards: Sequence[Callable[..., Any]] | Callable[..., Any] | None,
    loss: Callable[..., Any] | None,
    advantage: Callable[..., Any] | None,
    environment: Callable[..., Any] | None,
    overrides: Mapping[str, Any] | None,
    resume: bool,
) -> Iterator[tuple[Config, Rows, dict[str, str]]]:
    """The configuration, the rows and the variables of a run with these functions; those that only this process has are served
    until the block ends. Errors of the block, too, name arguments of `train` where they name flags of the command line."""
    try:
        if not isinstance(overrides, Mapping | None):
            raise ConfigError(f"overrides must be a dictionary such as {{'max_steps': 3}}, got {overrides!r:.80}")
        changed, own_rewards = dict(overrides or {}), dict[str, Callable[..., Any]]()
        if rewards is not None:
            changed["rewards.functions"], own_rewards = split(rewards)
        for section, function in (("loss", loss), ("advantage", advantage)):
            if function is not None:
                changed[f"{section}.kind"] = _importable(section, f"{section}.kind", function)
        own_environment = None
        if environment is not None:
            changed["environment.function"], own_environment = target_of(environment)
        if data is not None:
            changed |= {"data.source": CALLER_ROWS, "data.sources": [], "data.options": {}}
        loaded = load(config, changed)
        rows = rows_of(loaded, data, resume)
        known = None if loaded.data.spool is not None else [*rows[0], *rows[1]]
        with served(own_rewards, own_environment, loaded, known) as (resolved, variables):
            yield resolved, rows, variables
    except AsyncRLHFError as error:
        error.args = tuple(in_python(each) if isinstance(each, str) else each for each in error.args)
        raise


def in_python(message: str) -> str:
    """`--resume --from-step 3` is resume=True, from_step=3."""
    for flag, argument in _ARGUMENTS.items():
        message = re.sub(flag, argument, message)
    return message


def _importable(section: str, key: str, function: Callable[..., Any]) -> str:
    """The name by which another process imports it. Raises ConfigError."""
    if not callable(function):
        raise ConfigError(f"{section} must be a function, got {function!r:.80}; give a name as overrides={{'{key}': ...}}")
    try:
        return spec_of(function)
    except RewardError as error:
        raise ConfigError(
            f"{section}: {error}. In a notebook, begin its cell with '%%writefile my_{section}.py' and give "
            f"overrides={{'{key}': 'my_{section}.py:{getattr(function, '__name__', 'name')}'}}"
        ) from error
