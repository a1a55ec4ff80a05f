"""Code of users, whatever runs it and whatever it does: a table of mechanisms and misbehaviours.

Each cell fails for the stated reason and for no other, and what is asked next of the same mechanism is answered. A mechanism is
started once and takes all of its cells: what one of them breaks must be whole for the next.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.actors.config import ScoringConfig
from async_rlhf.actors.environments import EnvironmentConfig
from async_rlhf.actors.environments.server import EnvironmentServer
from async_rlhf.actors.rewards import resolve
from async_rlhf.actors.scoring.server import ScoringServer
from async_rlhf.buffers.failures import FailureKind
from async_rlhf.buffers.score import Score
from async_rlhf.buffers.user_files import import_file
from async_rlhf.inspect.episodes import configuration
from async_rlhf.run.caller import served
from async_rlhf.run.loading import load
from tests.actors.environments.played import Bench as Episodes
from tests.actors.scored import Bench as Completions
from tests.actors.served import running

TIMEOUT_S = 3.0
MEMORY_MB = 512
USERS = """
import asyncio, os, re, time
from async_rlhf import Score

def act(what):
    if what == "raise": raise ValueError("no number")
    if what == "quit": raise SystemExit("enough")
    if what == "text": return 3j
    if what == "no name": return undefined
    if what == "surrogate": raise ValueError("half \\ud800")
    if what == "declined": return Score(failure="the judge declined")
    if what == "exit": os._exit(3)
    if what == "abort": os.abort()
    if what == "memory": return len(bytearray(2 << 30))
    if what == "interpreter":  # keeps its lock
        re.match("(a+)+$", "a" * 60 + "b")
    if what == "hang":  # and swallows what would end it
        while True:
            try: time.sleep(1000)
            except BaseException: pass
    return Score(1.0)

async def act_async(what):
    if what == "wait": await asyncio.sleep(1000)
    while what == "refuse":
        try: await asyncio.sleep(1000)
        except asyncio.CancelledError: pass
    return act(what)

def plain(completion): return act(completion)
async def asynchronous(completion): return await act_async(completion)

def episodes(prompt):
    yield act((yield prompt))

async def asynchronous_episodes(prompt):
    text = yield prompt
    yield await act_async(text)
"""

Ask = Callable[[str], tuple[float | None, str, str]]
"""What became of one completion, or of one turn: its value, why it failed, and as which kind that is counted."""


def counting(ask: Callable[[str], Score], failed: Counter[FailureKind]) -> Ask:
    def counted(what: str) -> tuple[float | None, str, str]:
        before = failed.copy()
        score = ask(what)
        return score.value, score.failure or "", " ".join((failed - before).elements())

    return counted


def scores(bench: Completions) -> Ask:
    (counters,) = bench.pool.counters.values()
    return counting(bench.one, counters.failed)


def ends(bench: Episodes) -> Ask:
    # An episode whose process was lost begins again.
    return counting(lambda what: bench.play(what, what, what)[-1].score, bench.pool.counters.failed)


SCORING: dict[str, Any] = {"timeout_s": TIMEOUT_S, "worker_memory_mb": MEMORY_MB}
PLAYING: dict[str, Any] = {"timeout_s": TIMEOUT_S, "worker_memory_mb": MEMORY_MB + 512}


@contextmanager
def reward(directory: Path, name: str, how: str = "here") -> Iterator[Ask]:
    """A reward in the processes of its actor, of a server, or in the calling process."""
    specs = resolve([f"{directory / 'users.py'}:{name}"], directory)
    with ExitStack() as made:
        if how == "here":
            yield scores(made.enter_context(Completions(specs, **SCORING)))
        elif how == "server":
            server = ScoringServer(specs, ScoringConfig(**SCORING), "tcp://127.0.0.1:*")
            yield scores(asking(made, directory, {"address": made.enter_context(running(server)).address}))
        else:
            own = {name: getattr(import_file(directory / "users.py"), name)}
            given = {"rewards.functions": [f"{name}=remote"], "scoring": SCORING}
            config = load({"model": "tiny-speller", "data": {"source": str(directory / "data.jsonl")}}, given)
            resolved, variables = made.enter_context(served(own, None, config, None))
            patch = made.enter_context(pytest.MonkeyPatch.context())
            for variable, value in variables.items():
                patch.setenv(variable, value)
            yield scores(asking(made, directory, resolved.rewards.options[name]))


def asking(made: ExitStack, directory: Path, options: dict[str, Any]) -> Completions:
    specs = resolve(["remote"], directory, {"remote": options}, {"remote": {"timeout_s": 60.0}})
    return made.enter_context(Completions(specs))


@contextmanager
def environment(directory: Path, name: str, how: str = "here") -> Iterator[Ask]:
    """An environment in the processes of its actor, of a server, or in the calling process."""
    target = f"{directory / 'users.py'}:{name}"
    with ExitStack() as made:
        if how == "here":
            yield ends(made.enter_context(Episodes(directory / "users.py", name, **PLAYING)))
        elif how == "server":
            config = EnvironmentConfig(function=target, **PLAYING)
            spec = config.spec(directory)
            assert spec is not None
            address = made.enter_context(running(EnvironmentServer(spec, config, "tcp://127.0.0.1:*"))).address
            yield ends(made.enter_context(Episodes(directory, f"remote:{address}")))
        else:
            function = getattr(import_file(directory / "users.py"), name)
            target = f"{name}=remote:caller/environment"
            settings = {"environment.timeout_s": TIMEOUT_S}
            config_of_run = configuration(target, str(directory / "data.jsonl"), None, settings)
            resolved, variables = made.enter_context(served({}, function, config_of_run, None))
            patch = made.enter_context(pytest.MonkeyPatch.context())
            for variable, value in variables.items():
                patch.setenv(variable, value)
            limits = {"max_turns": resolved.environment.max_turns, "timeout_s": resolved.environment.timeout_s}
            yield ends(made.enter_context(Episodes(directory, target, **limits)))


MECHANISMS: dict[str, tuple[Any, ...]] = {
    "reward": (reward, "plain"),
    "async reward": (reward, "asynchronous"),
    "reward, server": (reward, "plain", "server"),
    "async reward, server": (reward, "asynchronous", "server"),
    "reward, caller": (reward, "plain", "caller"),
    "async reward, caller": (reward, "asynchronous", "caller"),
    "environment": (environment, "episodes"),
    "async environment": (environment, "asynchronous_episodes"),
    "environment, server": (environment, "episodes", "server"),
    "async environment, server": (environment, "asynchronous_episodes", "server"),
    "environment, caller": (environment, "episodes", "caller"),
    "async environment, caller": (environment, "asynchronous_episodes", "caller"),
}

SECONDS = f"{TIMEOUT_S:g} s"
LATE = rf"timed out after {SECONDS} \((scoring\.)?timeout_s\)"
BLOCKED = f"timed out: it blocked the event loop for more than {SECONDS}.*"
SILENT = f"its process did not answer for more than {SECONDS}.*"
EXITED = r"its worker process ended with exit code 3"
ABORTED = r"its worker process ended with exit code -6, perhaps out of memory: limit (512|1024) MB \(.*\)"
TWICE = "its process ended twice while it was in a step: "
# The client begins a lost episode again, as another one of the server.
LOST_THERE = "its server began anew, or lost the process that ran it"
# What it does -> how that ends in a plain `def`, and in an `async def`.
ENDS: dict[str, tuple[str | None, str]] = {
    "raise": ("ValueError: no number",) * 2,
    "quit": ("SystemExit: enough",) * 2,
    "no name": ("NameError: name 'undefined' is not defined",) * 2,
    "text": ("(returned complex 3j; a number, a Score or None was expected|yielded complex 3j; text, .*)",) * 2,
    "declined": ("the judge declined",) * 2,
    "surrogate": ("ValueError: half \ud800",) * 2,
    "hang": (LATE, BLOCKED),
    "wait": (None, LATE),
    "refuse": (None, LATE),
    "interpreter": (LATE, BLOCKED),
    "exit": (EXITED, EXITED),
    "abort": (ABORTED, ABORTED),
    "memory": (r"out of memory: limit (512|1024) MB \(.*\)",) * 2,
}
KINDS = dict.fromkeys(ENDS, FailureKind.RAISED)
KINDS |= {"text": FailureKind.UNREADABLE, "declined": FailureKind.REPORTED}
KINDS |= dict.fromkeys(("hang", "wait", "refuse", "interpreter"), FailureKind.TIMED_OUT)
KINDS |= dict.fromkeys(("exit", "abort", "memory"), FailureKind.DIED)
# In threads of one process it is not known whose step ends it.
IN_THREADS = {"interpreter": TWICE + SILENT, "exit": TWICE + EXITED, "abort": TWICE + ABORTED}
# What the calling process cannot survive, and what its threads alone cannot be stopped in.
NOT_IN_THE_CALLER = frozenset({"exit", "abort", "memory", "interpreter", "refuse"})


# A server runs what its actor would: of each way in which an answer travels one cell, the others in `make test-all`.
THROUGH_A_SERVER = frozenset({"raise", "surrogate", "declined", "hang", "exit"})


def end_of(mechanism: str, what: str) -> str | None:
    """The reason, as a regular expression; None where there is no such cell."""
    if "caller" in mechanism and what in NOT_IN_THE_CALLER:
        return None
    if mechanism.startswith("environment") and what in IN_THREADS:
        return LOST_THERE if "server" in mechanism else IN_THREADS[what]
    return ENDS[what]["async" in mechanism]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Ask]]:
    """The mechanism by its name; the last one is kept until another is asked for."""
    directory = tmp_path_factory.mktemp("users")
    (directory / "users.py").write_text(USERS)
    (directory / "data.jsonl").write_text('{"prompt": "?", "answer": "4"}\n')
    kept: dict[str, tuple[Ask, ExitStack]] = {}

    def mechanism(name: str) -> Ask:
        if name not in kept:
            while kept:
                kept.popitem()[1][1].close()
            made = ExitStack()
            start, *arguments = MECHANISMS[name]
            kept[name] = made.enter_context(start(directory, *arguments)), made
        return kept[name][0]

    yield mechanism
    for _, made in kept.values():
        made.close()


@pytest.mark.parametrize(
    ("mechanism", "what"),
    [
        pytest.param(
            mechanism, what, marks=[pytest.mark.rest] if "server" in mechanism and what not in THROUGH_A_SERVER else []
        )
        for mechanism in MECHANISMS
        for what in ENDS
        if end_of(mechanism, what) is not None
    ],
)
def test_whatever_it_does_it_fails_with_the_reason_and_the_next_is_answered(
    asked: Callable[[str], Ask], mechanism: str, what: str
) -> None:
    ask, reason = asked(mechanism), end_of(mechanism, what)
    value, failure, kind = ask(what)
    assert value is None and re.fullmatch(str(reason), failure, re.DOTALL), failure
    expected = FailureKind.LOST if reason == LOST_THERE else FailureKind.DIED if str(reason).startswith(TWICE) else KINDS[what]
    assert kind == expected
    assert ask("well") == (1.0, "", "")
