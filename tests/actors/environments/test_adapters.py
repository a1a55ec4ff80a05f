"""What holds for the environments of every other system, with its real package: one is loaded by name, the model reads and
writes, the end has a score; what raises, hangs or dies is failed and counted, never 0; closing leaves no process; what is not
there is refused before any work."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rlhf.actors.data.config import DataConfig
from async_rlhf.actors.data.rows import load_rows
from async_rlhf.actors.environments import EnvironmentConfig, from_harbor
from async_rlhf.actors.environments.yields import EpisodeEnd
from async_rlhf.actors.rewards.builtins.gym import reasoning_gym
from async_rlhf.buffers.errors import ConfigError
from tests.actors.environments.played import Bench, call, walk
from tests.actors.environments.test_environment_server import Server
from tests.conftest import kept_port, wait_for

MISBEHAVES = """
import os, time

def misbehave(how):
    if how == "raise": raise ValueError("no luck")
    if how == "hang": time.sleep(3600)
    if how == "die": os._exit(3)
"""
OURS = (
    MISBEHAVES
    + """
from async_rlhf import Score

def game(prompt, answer):
    text = yield prompt + "Guess."
    while text != answer:
        misbehave(text)
        text = yield "no"
    yield Score(1.0)
"""
)
TRL = (
    MISBEHAVES
    + '''
class Game:
    how = ""
    def reset(self, answer, **row):
        self.answer, self.right = answer, False
        return "Guess."

    def guess(self, number: str) -> str:
        """Guesses.

        Args:
            number: which
        """
        self.how, self.right = number, number == self.answer
        return "yes" if self.right else "no"

    def get_reward(self):
        misbehave(self.how)
        return float(self.right)
'''
)
OPENENV = (
    MISBEHAVES
    + """
import sys, uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

class Guess(Action):
    text: str

class Seen(Observation):
    said: str = ""

class Game(Environment[Guess, Seen, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, answer="", **row):
        self.answer = answer
        return Seen(said="Guess.")

    def step(self, action, **more):
        misbehave(action.text)
        right = action.text == self.answer
        return Seen(said="yes" if right else "no", reward=float(right), done=right)

    def close(self):
        open("closed", "a").write("x")

app = create_app(Game, Guess, Seen, env_name="game", max_concurrent_envs=2)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""
)


@dataclass(frozen=True)
class Case:
    """serve: what must run meanwhile; gives the target. absent: a target that is not there, and the error. turn: how the model
    writes what it says. ends: what it says at last, where the environment does not end by itself. leaves: a file that the
    environment's own closing writes."""

    package: str
    serve: Callable[[Path, pytest.FixtureRequest], AbstractContextManager[str]]
    absent: tuple[str, str]
    turn: Callable[[str], str] = str
    ends: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    leaves: str = ""


def written(name: str, source: str, target: str) -> Callable[[Path, pytest.FixtureRequest], AbstractContextManager[str]]:
    @contextmanager
    def serve(folder: Path, request: pytest.FixtureRequest) -> Iterator[str]:
        (folder / name).write_text(source)
        yield target

    return serve


@contextmanager
def verifiers_game(folder: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    from tests.actors.agents.test_agent_verifiers import GUESS

    broken = 'if said.last_reply == "break":\n                        raise OSError("the table fell")'
    assert broken in GUESS
    (folder / "guess.py").write_text(MISBEHAVES + GUESS.replace(broken, "misbehave(said.last_reply)"))
    yield "verifiers:guess.py:Numbers"


@contextmanager
def served_game(folder: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    server = Server(folder, OURS, "game")
    server.start()
    try:
        yield f"remote:{server.address}"
    finally:
        server.stop()


@contextmanager
def openenv_game(folder: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """By a server in an environment of its own: OpenEnv's requirements and the pinned versions exclude each other."""
    (folder / "game_server.py").write_text(OPENENV)
    with kept_port() as port:
        command = [request.getfixturevalue("openenv_python"), "game_server.py", str(port)]
        with subprocess.Popen(command, cwd=folder, env={"PATH": os.environ["PATH"], "HOME": str(folder)}) as server:
            try:
                wait_for(partial(_listens, server, port), "the server of OpenEnv")
                yield f"openenv:http://127.0.0.1:{port}"
            finally:
                server.kill()


def _listens(server: subprocess.Popen[bytes], port: int) -> bool:
    assert server.poll() is None
    return any(each.laddr.port == port and each.status == "LISTEN" for each in psutil.Process(server.pid).net_connections())


TESTS = """
if [ "$(cat said)" = hang ]; then sleep 3600; elif [ "$(cat said)" != 4 ]; then echo no luck; exit 1; fi
echo '{"reward": 1, "style": 0.5}' > /logs/verifier/reward.json
"""


def harbor_tasks(runner: str) -> Callable[[Path, pytest.FixtureRequest], AbstractContextManager[str]]:
    """A task whose tests misbehave as the model asks for."""

    @contextmanager
    def serve(folder: Path, request: pytest.FixtureRequest) -> Iterator[str]:
        for name, text in {
            "task.toml": 'schema_version = "1.4"\n[environment]\nworkdir = "/work"\n[verifier]\ntimeout_sec = 60.0\n',
            "instruction.md": "<!-- canary -->\n\nGuess.\n",
            "environment/Dockerfile": "FROM scratch\nWORKDIR /work\n",
            "tests/test.sh": TESTS,
        }.items():
            (file := folder / "tasks" / "one" / name).parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        ((row,), _) = load_rows(DataConfig(source=str(folder / "tasks"), held_out=0))
        assert (row.prompt, row.columns) == ("Guess.", {"task": "one"})
        yield f"harbor:tasks:{runner}"

    return serve


@contextmanager
def container_tasks(folder: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """With a stand-in for docker, whose containers are namespaces."""
    begins = shlex.join(from_harbor._holder("process", {"workdir": "/work"}, "", network=False))
    enters = shlex.join(["nsenter", "--preserve-credentials", *from_harbor._SPACES])
    (folder / "bin").mkdir()
    (folder / "bin" / "docker").write_text(
        f"""#!/bin/bash
echo "$1" "${{@: -1}}" >> {folder}/asked
case "$1" in
  build) echo sha256:12 ;;
  run) [[ "$*" == "run --rm --interactive "*" --memory=4096m --network=none --entrypoint=cat sha256:12" ]] || exit 9
    echo $$ > {folder}/"${{4#--name=}}"; exec {begins} ;;
  exec) exec {enters} --target=$(pgrep -P $(cat {folder}/"$3")) "${{@:4}}" ;;
  rm) rm {folder}/"$3" ;;
esac
"""
    )
    (folder / "bin" / "docker").chmod(0o700)
    request.getfixturevalue("monkeypatch").setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    with harbor_tasks("docker")(folder, request) as target:
        yield target
    assert not [*folder.glob("async-rlhf-*")], "a container was left"


@pytest.fixture(scope="module")
def openenv_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment that has the package."""
    place = tmp_path_factory.mktemp("openenv")
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    python = str(place / "bin" / "python")
    if subprocess.run([python, "-m", "pip", "install", "-q", "openenv==0.10.*"], stdin=subprocess.DEVNULL).returncode != 0:
        pytest.skip("there is no package index")
    return python


def reply_of(text: str) -> Any:
    from tests.actors.agents.by_hand import reply

    return reply(text)


def bash(text: str) -> str:
    return call("bash", command=f"echo {text} > said; [ {text} = 4 ] && echo yes || echo no")


CASES = {
    "trl": Case(
        "trl", written("game.py", TRL, "trl:game.py:Game"), ("trl:game.py:Gam", "no 'Gam' at the top level .*'Game'"),
        turn=lambda text: call("guess", number=text), ends=("Done.",),
    ),
    "verifiers": Case(
        "verifiers", verifiers_game, ("verifiers:guess.py:Numberz", "no 'Numberz' at the top level .*'Number'"), turn=reply_of,
        options={"agent": {"runtime": {"type": "subprocess"}}},
    ),
    "remote": Case("zmq", served_game, ("remote:nowhere:1", "is no address")),
    "openenv": Case(
        "websockets", openenv_game, ("openenv:http://127.0.0.1:9", "no server of OpenEnv answers at http://127.0.0.1:9"),
        options={"action": "text", "observation": "said"}, leaves="closed",
    ),
    "harbor": Case(
        "psutil", harbor_tasks("process"), ("harbor:none:process", "none has no task of Harbor"), turn=bash, ends=("Done.",),
    ),
    "harbor-docker": Case(
        "psutil", container_tasks, ("harbor:tasks:dokker", "'dokker' runs no task; did you mean 'docker'"), turn=bash,
        ends=("Done.",),
    ),
}  # fmt: skip


@pytest.fixture(
    params=[
        "trl",
        "verifiers",
        "remote",
        *(pytest.param(name, marks=pytest.mark.rest) for name in ("harbor", "harbor-docker", "openenv")),
    ]
)
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    found = CASES[request.param]
    pytest.importorskip(found.package)
    if "harbor" in request.param and subprocess.run(["unshare", "--user", "--mount", "true"]).returncode:
        pytest.skip("the kernel gives no namespaces")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LD_PRELOAD", raising=False)  # of this environment: what a sandbox does not have
    return found


@pytest.fixture
def bench(case: Case, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Bench]]:
    """Plays it as an actor does, in processes."""
    with case.serve(tmp_path, request) as target:
        yield lambda **settings: Bench(tmp_path, target, options=case.options, **settings)
    wait_for(lambda: not workers(), "the end of every process that played")


def workers() -> list[psutil.Process]:
    running = [each for each in psutil.Process().children(recursive=True) if is_running(each)]
    return [each for each in running if any("guard.py" in word for word in each.as_dict(["cmdline"])["cmdline"] or ())]


def is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def contents(read: Any) -> str:
    return read if isinstance(read, str) else " ".join(message["content"] for message in read)


def test_it_is_loaded_by_name_and_played_to_a_score_and_what_raises_is_failed_and_counted(
    case: Case, bench: Callable[..., Bench], tmp_path: Path
) -> None:
    with bench() as played:
        *read, end = played.play(*map(case.turn, ("3", "4")), *case.ends, prompt="Guess.")
        assert workers() and played.pool.counters.episodes == {"scored": 1} and not played.pool.counters.failed
        failed = played.play(case.turn("raise"), *case.ends, prompt="Guess.")[-1]
        assert sum(played.pool.counters.failed.values()) == 1
    assert "Guess." in contents(read[0]) and "no" in contents(read[1])
    assert isinstance(end, EpisodeEnd) and end.reason == "scored" and end.score is not None and (end.score.value or 0) > 0
    assert failed.reason == "failed" and failed.score.value is None and "no luck" in failed.score.failure
    if case.leaves:
        wait_for((tmp_path / case.leaves).exists, "its own end of the episode")


@pytest.mark.rest
@pytest.mark.parametrize("how", ["hang", "die"])
def test_what_hangs_or_dies_is_failed_and_counted(case: Case, bench: Callable[..., Bench], how: str) -> None:
    with bench(timeout_s=5.0 if how == "hang" else 60.0) as played:
        end = played.play(case.turn(how), *case.ends, *map(case.turn, (how, how)), prompt="Guess.")[-1]
        assert isinstance(end, EpisodeEnd) and end.reason == "failed" and end.score is not None, end
        assert end.score.value is None and end.score.failure
        assert sum(played.pool.counters.failed.values()) == 1


def test_what_is_not_there_is_refused_before_any_work(case: Case, bench: Callable[..., Bench], tmp_path: Path) -> None:
    target, message = case.absent
    with pytest.raises(ConfigError, match=message):
        EnvironmentConfig(function=target).spec(tmp_path)
    assert not [each for each in workers() if case.package != "zmq"]


def test_a_task_of_reasoning_gym_has_a_prompt_and_a_score_and_one_of_no_name_is_refused() -> None:
    rows, _ = load_rows(DataConfig(source="reasoning_gym:chain_sum", size=4, held_out=0))
    entry = rows[0].columns["entry"]
    assert rows[0].prompt == entry["question"]
    assert (reasoning_gym(entry["answer"], entry), reasoning_gym("none", entry)) == (1.0, 0.0)
    with pytest.raises(KeyError, match="source_dataset"):  # which the pool of rewards counts as failed
        reasoning_gym("1", {**entry, "metadata": {}})
    with pytest.raises(ConfigError, match="unknown reasoning-gym task 'chain_sun'; did you mean 'chain_sum'"):
        load_rows(DataConfig(source="reasoning_gym:chain_sun", size=4, held_out=0))


@pytest.mark.parametrize(
    ("toml", "missing", "runner", "message"),
    [
        ("[[steps]]\nname = 'a'", "", "process", "sets steps"),
        ("[environment.env]\nKEY = '${KEY}'", "", "process", "sets environment.env"),
        ("[verifier]\nenvironment_mode = 'separate'", "", "process", "sets verifier.environment_mode"),
        ("", "tests/test.sh", "process", "has no tests/test.sh"),
        ("", "environment/Dockerfile", "docker", "has neither environment.docker_image nor environment/Dockerfile"),
        ("", "", "docker", "docker does not run here .*; others: docker, podman, process"),
        ("environment = 3", "", "process", "cannot be read as a task of Harbor"),
    ],
)
def test_a_task_that_cannot_be_played_as_it_says_is_refused_before_any_work(
    tmp_path: Path, request: pytest.FixtureRequest, toml: str, missing: str, runner: str, message: str
) -> None:
    with harbor_tasks(runner)(tmp_path, request) as target:
        (tmp_path / "tasks" / "one" / "task.toml").write_text(toml)
        if missing:
            (tmp_path / "tasks" / "one" / missing).unlink()
        request.getfixturevalue("monkeypatch").setenv("PATH", str(tmp_path))
        with pytest.raises(ConfigError, match=message):
            EnvironmentConfig(function=target).spec(tmp_path)


@pytest.mark.rest
async def test_what_runs_in_a_sandbox_has_neither_files_nor_secrets_nor_the_network_of_the_machine(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "of-this-machine")
    tries = (
        f"cat {Path(__file__)}", "touch /usr/left", "mount -o remount,bind,rw /usr && touch /usr/left", "cat /proc/1/environ",
        "echo > /dev/tcp/127.0.0.1/22", "nsenter --target=1 --mount true", "cat /etc/shadow", "ls /proc/1/root",
        "echo 1 > /proc/sys/vm/drop_caches",
        "unshare -rmpf sh -c 'mount -t proc proc /proc && echo 1 > /proc/sys/vm/drop_caches'",
    )  # fmt: skip
    with harbor_tasks("process")(tmp_path, request) as target:
        spec = EnvironmentConfig(function=target).spec(tmp_path)
        commands = [call("bash", command=f"({each}) > /dev/null 2>&1 && echo done") for each in tries]
        read, score = await walk(
            spec, "".join(commands), call("bash", command="env; echo 4 > said"), "Done.", prompt="", task="one"
        )
    assert [message["content"].strip().rstrip("0123456789)") for message in read[1]] == ["(exit code "] * len(tries)
    assert "of-this-machine" not in read[2][0]["content"] and not Path("/usr/left").exists()
    assert (score.value, score.metrics["style"]) == (1.0, 0.5)
