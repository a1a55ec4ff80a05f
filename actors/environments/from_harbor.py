"""Task directories of Harbor: `harbor:DIR:RUNNER`, for the rows of `data.source = "DIR"`, whose column `task` names one.

    docker, podman   a container of the task's image: `docker_image`, or environment/Dockerfile, built when an episode begins
    process          in place of the image this machine's programs, read-only, in namespaces of the kernel (`unshare`)

Nothing of a task or of the model runs outside of that, and it has no network but with `options.network`. The model has a tool,
`bash`; a turn without a call ends the episode, and tests/test.sh writes the score. Source: Harbor 0.25, `harbor.models.task`
and `harbor.verifier`; the package is not needed.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import secrets
import shlex
import signal
import subprocess
import tarfile
import tomllib
import uuid
from asyncio.subprocess import PIPE, STDOUT, create_subprocess_exec
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from async_rlhf.actors.data.files import task_files
from async_rlhf.actors.environments.from_trl import answers
from async_rlhf.actors.environments.loading import MAX_TURNS, Adapted
from async_rlhf.actors.environments.rendering import as_messages
from async_rlhf.actors.environments.settings import Content, EnvironmentDeclaration, Message, counted
from async_rlhf.actors.environments.tool_calls import read_turn, schema_of
from async_rlhf.buffers.errors import ConfigError, EpisodeError, did_you_mean
from async_rlhf.buffers.score import Score

Run = Callable[..., Awaitable[tuple[int, str]]]
"""Runs a command of bash, given its input and a limit in seconds: its exit code, and the beginning of what it prints."""

_RUNNERS = ("docker", "podman", "process")
_COMMAND_S, _TEST_S, _BEGIN_S, _MAX_OUTPUT = 60.0, 600.0, 30.0, 1 << 14
# Keys of a task.toml that are heeded, or that only describe; others are refused, but for values that ask for nothing.
_KNOWN = {
    "": {"schema_version", "task", "metadata", "source", "solution", "artifacts"},
    "agent": {"timeout_sec"},
    "verifier": {"timeout_sec"},
    "environment": {"docker_image", "workdir", "memory_mb", "cpus", "storage_mb", "build_timeout_sec", "network_mode",
                    "allow_internet"},
}  # fmt: skip
_NOTHING: tuple[Any, ...] = (None, [], {}, 0, "", "linux", "shared")
_CLEAN = ("env", "-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8")
# Root of the namespaces is the user who makes them, and that of the machine could write the kernel's settings from there. So
# each sandbox that root begins is of a user of its own, beyond those of accounts, who has a limit of processes.
_FIRST_USER, _NUM_USERS, _MOST_PROCESSES = 1 << 30, 1 << 29, 1024
_SPACES = ("--user", "--mount", "--pid", "--ipc", "--uts", "--net")
# A root with what programs need of this machine. It stays until standard input ends.
_ROOT = """set -e; mount -t tmpfs -o size=1g,mode=755 tmpfs /tmp; cd /tmp
mkdir -m 1777 tmp; mkdir -p proc dev root etc old logs/verifier tests "./$0"
for each in bin sbin lib lib64 usr etc/alternatives etc/ld.so.cache etc/passwd etc/group etc/ssl; do
  if [ -L "/$each" ]; then cp -P "/$each" "$each"; continue; fi
  if [ -d "/$each" ]; then mkdir -p "$each"; elif [ -f "/$each" ]; then : > "$each"; else continue; fi
  mount --rbind "/$each" "$each"; mount -o remount,bind,ro "$each"
done
for each in null zero random urandom; do : > "dev/$each"; mount --bind "/dev/$each" "dev/$each"; done
mount -t proc proc proc; mount --bind proc/sys proc/sys; mount -o remount,bind,ro proc/sys
pivot_root . old; cd /; umount -l old; exec cat"""


def bash(command: str) -> str:
    """Runs a command of bash and returns what it prints.

    Args:
        command: the command
    """
    raise NotImplementedError


def from_harbor(named: str, options: Mapping[str, Any]) -> Adapted:
    """options: `network`, whether there is one.

    Raises EpisodeError for a runner that this machine does not have and for a directory without tasks, ConfigError for what is
    not played.
    """
    place, _, runner = named.rpartition(":")
    if runner not in _RUNNERS:
        raise ConfigError(f"environment 'harbor:{named}': {runner!r} runs no task; {did_you_mean(runner, _RUNNERS)}")
    if options.keys() - {"network"} or not isinstance(network := options.get("network", False), bool):
        raise ConfigError(f"environment.options = {dict(options)}: of Harbor's tasks there is network, true or false")
    tasks = {file.parent.relative_to(place).as_posix(): _task(file, runner) for file in task_files(Path(place))}
    if not tasks:
        raise EpisodeError(f"{place} has no task of Harbor, a directory with a task.toml")
    tried = _holder(runner, {}, "", network=False, account=_account()) if runner == "process" else [runner, "version"]
    try:
        subprocess.run(tried, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_BEGIN_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(getattr(error, "stderr", None) or error).strip()
        raise EpisodeError(f"'harbor:{named}': {runner} does not run here ({reason}); others: {', '.join(_RUNNERS)}") from error
    longest = max(task["test_s"] for task in tasks.values()) + _COMMAND_S
    settings = EnvironmentDeclaration(name=Path(place).name, max_turns=MAX_TURNS, timeout_s=longest)
    return Adapted(partial(_played, tasks, runner, network), settings, ("task",), (schema_of(bash),))


def _task(file: Path, runner: str) -> dict[str, Any]:
    """`environment` of a task.toml, and beside it `folder` and `test_s`. Raises ConfigError for what is not played."""
    folder = file.parent
    try:
        toml = tomllib.loads(file.read_text())
        tables = {part: toml.get(part, {}) for part in _KNOWN if part} | {
            "": {k: v for k, v in toml.items() if k not in _KNOWN}
        }
        keys = [f"{part}.{key}".lstrip(".") for part, table in tables.items() for key, value in table.items()
                if key not in _KNOWN[part] and value not in _NOTHING]  # fmt: skip
        test_s = float(tables["verifier"].get("timeout_sec", _TEST_S))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read as a task of Harbor: {error}") from error
    made = {**tables["environment"], "folder": folder, "test_s": test_s}
    problems = [f"sets {key}" for key in keys]
    problems += [f"has no {name}" for name in ("instruction.md", "tests/test.sh") if not (folder / name).is_file()]
    problems += ["has a docker-compose.yaml"] * (folder / "environment" / "docker-compose.yaml").exists()
    if runner != "process" and not made.get("docker_image") and not (folder / "environment" / "Dockerfile").is_file():
        problems.append(f"has neither environment.docker_image nor environment/Dockerfile, of which {runner} needs one")
    if problems:
        raise ConfigError(f"the task {folder} {problems[0]}, and is not played here; leave it out of the directory")
    return made


async def _played(
    tasks: Mapping[str, Any], runner: str, network: bool, /, prompt: Content, task: str, **row: Any
) -> AsyncGenerator[list[Message] | Score, str]:
    if task not in tasks:
        raise EpisodeError(f"there is no task {task!r}; {did_you_mean(task, tasks)}")
    async with _box(runner, tasks[task], network) as run:

        async def called(command: str) -> str:
            code, said = await run(command)
            return f"{said}\n(exit code {code})" if code else said

        counts = Counter({"tool_calls": 0, "tool_failures": 0, "unparsed_turns": 0})
        observed = as_messages(prompt)
        while observed:
            turn = read_turn((yield observed), [schema_of(bash)])
            counts["unparsed_turns"] += turn.is_unparsed
            observed = await answers(turn, {"bash": called}, counts)
        rewards = await _judged(run, tasks[task])
    yield counted(Score(rewards.pop("reward"), metrics=rewards), counts)


async def _judged(run: Run, task: Mapping[str, Any]) -> dict[str, float]:
    """`reward`, and others by name, as the task's tests wrote them. Raises EpisodeError where they did not."""
    await run("rm -rf /tests/* /tests/.[!.]* /logs/verifier; mkdir -p /logs/verifier")
    await _put(run, task["folder"] / "tests", "/tests")
    code, said = await run("bash /tests/test.sh", limit_s=task["test_s"])
    _, wrote = await run("cd /logs/verifier && if [ -e reward.json ]; then cat reward.json; else cat reward.txt; fi")
    try:
        found = json.loads(wrote)
        rewards = {name: float(value) for name, value in (found if isinstance(found, dict) else {"reward": found}).items()}
        return {**rewards, "reward": rewards["reward"] if len(rewards) != 1 else next(iter(rewards.values()))}
    except (ValueError, TypeError, LookupError) as error:
        raise EpisodeError(
            f"its tests/test.sh ended with {code} and wrote no reward ({wrote[:200]!r}): {said[-500:]}"
        ) from error


async def _put(run: Run, folder: Path, target: str) -> None:
    """Copies the contents of the folder into the sandbox, as files of root."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(folder, ".", filter=_as_root)
    code, said = await run(f"mkdir -p {target} && tar -xf - -C {target}", packed.getvalue())
    if code:
        raise EpisodeError(f"{folder} cannot be put to {target}: {said[-500:]}")


def _as_root(file: tarfile.TarInfo) -> tarfile.TarInfo:
    file.uid = file.gid = 0
    file.uname = file.gname = ""
    return file


def _holder(
    runner: str, task: Mapping[str, Any], image: str, network: bool, name: str = "", account: tuple[str, ...] = ()
) -> list[str]:
    """A sandbox's holder: it answers each line, and ends with its standard input, and so with the process that holds it."""
    if runner == "process":
        spaces = [each for each in _SPACES if each != "--net" or not network]
        command = ["sh", "-c", _ROOT, task.get("workdir") or "/app"]
        return [*_CLEAN, *account, "unshare", *spaces, "--map-root-user", "--fork", "--kill-child", *command]
    limits = (f"--memory={task.get('memory_mb') or 4096}m", f"--network={'bridge' if network else 'none'}")
    return [runner, "run", "--rm", "--interactive", f"--name={name}", *limits, "--entrypoint=cat", image]


def _account() -> tuple[str, ...]:
    """Before a command: of whom it is."""
    if os.geteuid():
        return ()
    user = _FIRST_USER + secrets.randbelow(_NUM_USERS)
    return ("prlimit", f"--nproc={_MOST_PROCESSES}", "setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups")


@asynccontextmanager
async def _box(runner: str, task: Mapping[str, Any], network: bool) -> AsyncIterator[Run]:
    """A sandbox with the files of the task's environment. Raises EpisodeError where it does not begin."""
    name, image, files = f"async-rlhf-{uuid.uuid4().hex}", task.get("docker_image", ""), task["folder"] / "environment"
    workdir = shlex.quote(task.get("workdir") or ("/app" if runner == "process" else "."))
    if runner != "process" and not image:
        code, said = await _ran([runner, "build", "--quiet", str(files)], limit_s=_TEST_S)
        if code or not said.split():
            raise EpisodeError(f"{files}/Dockerfile cannot be built: {said[-500:]}")
        image = said.split()[-1]
    network = network and task.get("network_mode", "public") == "public" and task.get("allow_internet") is not False
    held = await create_subprocess_exec(
        *_holder(runner, task, image, network, name, account := _account()),
        stdin=PIPE,
        stdout=PIPE,
        stderr=STDOUT,
        start_new_session=True,
    )
    assert held.stdin is not None and held.stdout is not None
    try:
        held.stdin.write(b"\n")
        if (line := await held.stdout.readline()) != b"\n":
            raise EpisodeError(f"{runner} began no sandbox: {line.decode(errors='replace')}")
        enter = [runner, "exec", "--interactive", name]
        if runner == "process":
            (inside,) = psutil.Process(held.pid).children()
            enter = [*_CLEAN, *account, "nsenter", f"--target={inside.pid}", "--preserve-credentials", *_SPACES]
            # What has made a mount may undo that it is read-only: a command gets user and mount namespaces below those.
            enter += ["unshare", "--user", "--map-root-user", "--mount"]

        async def run(command: str, given: bytes = b"", limit_s: float = _COMMAND_S) -> tuple[int, str]:
            return await _ran([*enter, "bash", "-c", f"cd {workdir} || exit\n{command}"], given, limit_s)

        if files.is_dir() and (runner == "process" or not (files / "Dockerfile").exists()):
            await _put(run, files, workdir)
        yield run
    finally:
        if held.returncode is None:
            _kill(held)
        await held.wait()
        if runner != "process":
            await _ran([runner, "rm", "--force", name])


async def _ran(argv: list[str], given: bytes = b"", limit_s: float = _COMMAND_S) -> tuple[int, str]:
    """The exit code of a program, and what it prints, cut off at `_MAX_OUTPUT` bytes. It is killed at its limit."""
    process = await create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE, stderr=STDOUT, start_new_session=True)
    assert process.stdin is not None and process.stdout is not None
    said = bytearray()
    try:
        async with asyncio.timeout(limit_s):
            process.stdin.write(given)
            process.stdin.close()
            while chunk := await process.stdout.read(1 << 16):
                said += chunk[: _MAX_OUTPUT - len(said)]
            await process.wait()
    except TimeoutError:
        said += f"\n(stopped after {limit_s:g} s)".encode()
    finally:
        if process.returncode is None:
            _kill(process)
        code = await process.wait()
    return code, said.decode(errors="replace")


def _kill(process: asyncio.subprocess.Process) -> None:
    """And what it started in its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
