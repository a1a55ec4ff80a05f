"""Fixtures shared by all rooms: the shipped model, and configurations of small real runs."""

from __future__ import annotations

import atexit
import errno
import fcntl
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

# Workers run side by side, and the models of tests are tiny: more threads only wait for each other. Libraries read it when they
# are imported.
os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")

import psutil
import pytest
from hypothesis import settings
from typer.testing import CliRunner

from async_rlhf.launch.local import begin
from async_rlhf.launch.processor import processor
from async_rlhf.launch.program import role_of
from async_rlhf.run.config import Config
from async_rlhf.run.loading import load
from async_rlhf.run.run_dir import RunDir
from tests.workers import Scheduling, place

REPOSITORY = Path(__file__).resolve().parent.parent
QUICK = REPOSITORY / "configs" / "quick.toml"
SPELLER = QUICK.parent / "models" / "tiny-speller"

# The same examples in every run, so that a red test is about the change; HYPOTHESIS=explore looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS", "repeatable"))

# A run that exercises everything in seconds: 4 groups of 4 a step.
SMALL: dict[str, Any] = {
    "max_steps": 4, "data.size": 64, "data.held_out": 8, "generation.group_size": 4, "engine.slots": 16,
    "learner.batch_size": 16, "checkpoint.save_every": 2, "evaluation.at_start": False, "evaluation.at_end": False,
    "stall_timeout_s": 240.0, "queue.lease_s": 5.0,
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place(item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """What is collected stays to the end: the garbage collector looks at it neither meanwhile nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_report_header() -> str:
    return f"processor: {processor()}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if terminalreporter.stats.keys() & {"failed", "error"}:
        terminalreporter.write_line(f"processor: {processor()}")


def kernels() -> str:
    """What torch chose, where this process has imported it."""
    if (torch := sys.modules.get("torch")) is None:
        return ""
    return f"; torch: {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[Any]:
    """A failure names the processor. A worker can send only text that can be encoded: half a surrogate pair that a test has
    logged is shown by its number."""
    report = yield
    if report.failed:
        report.sections.append(("processor", processor() + kernels()))
    report.sections = [(title, text.encode(errors="backslashreplace").decode()) for title, text in report.sections]
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return Scheduling(config, log)


@pytest.fixture
def small(tmp_path: Path) -> Any:
    """`small(**{"queue.max_staleness": 0})`: a checked configuration of a run under this test's folder."""

    def make(**overrides: Any) -> Config:
        return load(QUICK, {**SMALL, "output_dir": str(tmp_path / "runs"), **overrides})

    return make


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A short path: a unix socket's may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="rlhf-") as directory:
        yield Path(directory)


@pytest.fixture
def network_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """flock(2): there an exclusive lock needs a file that is open for writing, and a shared one a file that can be read."""
    honest = fcntl.flock

    def flock(file: Any, operation: int) -> None:
        mode = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
        if mode == (os.O_RDONLY if operation & fcntl.LOCK_EX else os.O_WRONLY):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        honest(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)


def toml(value: Any) -> str:
    """A value as it is written after `--set key=`."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return repr(value) if isinstance(value, float) else json.dumps(value)  # JSON has other words for nan and inf


_HOLD = """
import subprocess, sys
from pathlib import Path
from async_rlhf.launch.run_lock import RunLock
lock = RunLock.take(Path(sys.argv[1]))
print("held", flush=True)
"""
Hold = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def hold() -> Iterator[Hold]:
    """`hold(path, then)`: another process that has taken the lock and written its name there, runs `then`, and waits."""
    with ExitStack() as started:

        def start(path: Path, then: str = "") -> subprocess.Popen[str]:
            command = [sys.executable, "-c", f"{_HOLD}{then}\nsys.stdin.read()", str(path)]
            process = started.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            started.callback(process.kill)
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            return process

        yield start


# Reads numbers of processes, those that have ended below 0; at the end of its input it kills the others.
_REAPER = """
import os, sys
left = set()
for number in map(int, sys.stdin):
    (left.add if number > 0 else left.discard)(abs(number))
for number in left:
    os.kill(number, 9)
"""


@cache
def _reaper() -> subprocess.Popen[str]:
    """When this process is killed, what it has started ends too."""
    made = subprocess.Popen([sys.executable, "-c", _REAPER], stdin=subprocess.PIPE, text=True, start_new_session=True)
    atexit.register(made.communicate)
    return made


class Started:
    """A program in a session of its own, whose output is read from a pipe; its roles are forked from what this process has
    imported for them once."""

    def __init__(self, command: list[str], cwd: Path) -> None:
        reads, writes = os.pipe()
        with open(os.devnull, "rb") as nothing, os.fdopen(writes, "wb") as output:
            given = (nothing.fileno(), output.fileno(), output.fileno())
            self._child = begin(command, dict(os.environ), given, str(cwd))
        self.stdout = os.fdopen(reads, encoding="utf-8")
        self.pid, self.poll, self.kill = self._child.pid, self._child.poll, self._child.kill
        self._tell(self.pid)

    @property
    def returncode(self) -> int | None:
        return self._child.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, None]:
        """What it prints until its end, for which it has so many seconds."""
        if self.stdout.closed:
            return "", None
        printed: list[str] = []
        reader = threading.Thread(target=lambda: printed.append(self.stdout.read()), daemon=True)
        reader.start()
        reader.join(timeout)
        if reader.is_alive():
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        self.stdout.close()
        self._child.wait(timeout)
        self._tell(-self.pid)
        return "".join(printed), None

    @staticmethod
    def _tell(number: int) -> None:
        print(number, file=_reaper().stdin, flush=True)


class Command:
    """A real process, with its children in sight: `async-rlhf`, a script of a user, or of another interpreter."""

    def __init__(self, arguments: list[str], cwd: Path, *, program: bool = False, interpreter: str = "") -> None:
        ours = [] if program or interpreter else ["-m", "async_rlhf"]
        self.process = Started([interpreter or sys.executable, *ours, *arguments], cwd)

    def finish(self) -> tuple[int, str]:
        """Exit code and everything it printed."""
        output, _ = self.process.communicate(timeout=900)
        return self.process.returncode, output

    def ends_with(self, code: int, *said: str) -> str:
        """It ends by itself with this code, and has said this; everything it printed."""
        found, output = self.finish()
        assert found == code and all(each in output for each in said), output
        return output

    def close(self) -> None:
        """End it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()  # its children end with it
        self.process.communicate(timeout=300)

    def child(self, role: str) -> psutil.Process:
        """The child process of this role; waits until there is one."""
        return wait_for(lambda: next(iter(self._children(role)), None), f"a {role} process")

    def end(self, role: str) -> None:
        """Kill the child process of this role, and wait until it has ended."""
        victim = self.child(role)
        victim.kill()
        wait_for(lambda: has_ended(victim), f"the end of {role}")

    def family(self) -> list[psutil.Process]:
        """Every process below this one."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def _children(self, role: str) -> list[psutil.Process]:
        if self.process.poll() is not None:
            pytest.fail(f"it ended with code {self.process.returncode}; there is no {role} process to look for")
        found = []
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.NoSuchProcess):
                found += [child] if role_of(child.cmdline()) == role else []
        return found


Start = Callable[..., Command]


class Training(Command):
    """The small run, by `async-rlhf train`."""

    run: RunDir

    def reach(self, step: int) -> None:
        wait_for(lambda: steps(self.run.path) >= step, f"step {step}")

    def go_on(self) -> None:
        """Two steps more: the first may have been made already."""
        self.reach(steps(self.run.path) + 2)

    def drain(self, *said: str) -> str:
        """By SIGTERM; everything it printed."""
        self.process.send_signal(signal.SIGTERM)
        return self.ends_with(0, *said)


def steps(run: Path) -> int:
    """Steps recorded so far."""
    return len(RunDir(run).read_metrics())


def trained_groups(run: Path) -> list[int]:
    return [number for record in RunDir(run).read_metrics() for number in record["groups"]]


def assert_whole(run: Path, num_steps: int) -> None:
    """Every step once and in order, every group once, the bound kept, the ledger closed."""
    metrics, num_groups = RunDir(run).read_metrics(), 4 * num_steps  # four in each batch
    assert [record["step"] for record in metrics] == list(range(1, num_steps + 1))
    assert sorted(trained_groups(run)) == list(range(num_groups))
    assert all(record["staleness/violations"] == 0 for record in metrics)
    ledger = RunDir(run).read_ledger()["ledger"]
    assert ledger["closes"] and ledger["trained"] == ledger["committed"] == num_groups


def assert_no_orphans(family: list[psutil.Process]) -> None:
    """They end by themselves when their supervisor is gone."""
    _, alive = psutil.wait_procs(family, timeout=300)
    assert not alive, f"orphans: {alive}"


class Clock:
    """Stands still until it is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


T = TypeVar("T")


def wait_for(look: Callable[[], T | None], what: str, timeout_s: float = 300.0) -> T:
    """Look until there is something to see; fails naming what was waited for."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.02)
    pytest.fail(f"waited {timeout_s:.0f} s for {what}")


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond this: a disk that is full for everybody in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def kept_port() -> Iterator[int]:
    """A port of this machine that is given to no other process while the block runs; a listener of ours may share it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def has_ended(process: psutil.Process) -> bool:
    """Also of one that nothing has reaped yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def gone(pid: int) -> bool:
    """Whether the process of this number has ended, reaped or not."""
    try:
        return has_ended(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Start]:
    """`command("train", "run.toml")` starts the real program; whatever is left of it is ended with the test."""
    started: list[Command] = []

    def start(*arguments: str, program: bool = False, kind: type[Command] = Command) -> Command:
        started.append(kind(list(arguments), tmp_path, program=program))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def small_arguments(tmp_path: Path) -> Callable[..., list[str]]:
    """Arguments of `train` for the same small run as `small`, with overrides."""

    return partial(train_arguments, tmp_path / "runs")


Train = Callable[..., Training]


@pytest.fixture
def training(command: Callable[..., Any], small_arguments: Callable[..., list[str]], tmp_path: Path) -> Train:
    """`training("--resume", **{"queue.max_staleness": 0})` starts the same small run by `train`, with words and overrides."""

    def start(*words: str, **overrides: Any) -> Training:
        started: Training = command(*small_arguments(**overrides), *words, kind=Training)
        started.run = RunDir(tmp_path / "runs" / overrides.get("name", "quick"))
        return started

    return start


def _ran(*words: object, **given: Any) -> Any:
    from async_rlhf.cli.commands import app

    return CliRunner().invoke(app, [str(word) for word in words], **given)


def invoke(*words: object, **given: Any) -> tuple[int, str]:
    """Exit code and output of a command, in this process. given: its `input`, and other options of typer's runner."""
    result = _ran(*words, **given)
    return result.exit_code, result.output


def stdout_of(*words: object, **given: Any) -> str:
    """What a command that ends well writes there, in this process."""
    result = _ran(*words, **given)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def output_of(code: int, *words: object, **given: Any) -> str:
    """What a command that ends with this code prints, in this process."""
    found, output = invoke(*words, **given)
    assert found == code, output
    return output


def python(*words: object, cwd: Path = REPOSITORY, **options: Any) -> subprocess.CompletedProcess[str]:
    """An interpreter of its own with these arguments, that has ended; what it wrote is text."""
    command, captured = [sys.executable, *map(str, words)], {"capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, **captured | options)


def sets(settings: dict[str, Any]) -> list[str]:
    """As words of a command."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={toml(value)}")]


def train_arguments(folder: Path, /, **overrides: Any) -> list[str]:
    """Arguments of `train` for the small run, whose directory comes into this folder."""
    return ["train", str(QUICK), *sets({**SMALL, "output_dir": str(folder), **overrides})]
