"""A process that is killed or stopped in the middle of a broadcast: none waits for it beyond the deadline, all that live adopt
the version, which is whole, and they are broadcast to again."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.buffers.device.peers import Peer

KILL, STOP, GO_ON = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
ENDS = [(point, number) for point in ("group", "bucket", "set") for number in (KILL, STOP)]


def at(*chosen: object) -> Any:
    """Where the victim is, and how it ends; one of all is enough for most runs."""
    cases = [
        pytest.param(*each, marks=() if each == chosen else pytest.mark.rest, id=f"{each[0]}-{each[1].name}") for each in ENDS
    ]
    return pytest.mark.parametrize(("point", "number"), cases)


class Run:
    """The processes of one hub. Each publication has a content of its own."""

    def __init__(self, folder: Path, address: str, stack: ExitStack) -> None:
        self._folder, self._address, self._stack = folder, address, stack
        self.contents = itertools.count(1)
        self.hub = self.start("hub", str(folder))

    def start(self, role: str, *arguments: str, stops: str = "") -> Peer:
        peer = Peer(role, self._address, *arguments, stops=stops)
        self._stack.callback(peer.close)
        return peer

    def begin_again(self) -> None:
        self.hub.close()
        self.hub = self.start("hub", str(self._folder))

    def publish(self, learner: Peer, *engines: Peer) -> list[str]:
        """Returns when the engines have adopted it, and how it came to each."""
        content = next(self.contents)
        learner.send(str(content))
        learner.until(published=content)
        return [engine.until(adopted=content)["came"] for engine in engines]

    def broadcast(self, learner: Peer, *engines: Peer) -> None:
        """Publish until a version has come to each by a broadcast: an engine that left an epoch must report that first."""
        for _ in range(20):
            if set(self.publish(learner, *engines)) == {"broadcast"}:
                return
        pytest.fail("20 versions were published, and none was broadcast to all")

    def interrupt(self, learner: Peer, victim: Peer, point: str) -> int:
        """A publication in which the victim has come to this point. Returns its content."""
        content = next(self.contents)
        victim.arm()
        learner.send(str(content))
        victim.until(at=point)
        return content


@pytest.fixture
def run(tmp_path: Path, socket_dir: Path) -> Iterator[Run]:
    with ExitStack() as stack:
        yield Run(tmp_path / "run", f"ipc://{socket_dir}/hub", stack)


@at("bucket", STOP)
def test_no_process_waits_long_for_an_engine_that_is_killed_or_stopped(run: Run, point: str, number: int) -> None:
    learner, anna, victim = run.start("learner"), run.start("engine", "anna"), run.start("engine", "victim", stops=point)
    run.broadcast(learner, anna, victim)
    content = run.interrupt(learner, victim, point)
    victim.signal(number)
    learner.until(published=content)
    anna.until(adopted=content)
    run.broadcast(learner, anna)
    if number == STOP:
        victim.signal(GO_ON)
        victim.send()
        run.broadcast(learner, anna, victim)


@at("bucket", KILL)
def test_a_learner_that_is_killed_or_stopped_is_followed_by_another(run: Run, point: str, number: int) -> None:
    first, anna, bert = run.start("learner", stops=point), run.start("engine", "anna"), run.start("engine", "bert")
    run.broadcast(first, anna, bert)
    run.interrupt(first, first, point)
    first.signal(number)
    run.broadcast(run.start("learner"), anna, bert)


@at("set", KILL)
def test_a_hub_that_is_killed_or_stopped_has_the_version_in_the_end(run: Run, point: str, number: int) -> None:
    learner, anna = run.start("learner", stops=point), run.start("engine", "anna")
    run.broadcast(learner, anna)
    content = run.interrupt(learner, learner, point)
    run.hub.signal(number)
    learner.send()
    if number == STOP:
        run.hub.signal(GO_ON)
    else:
        run.begin_again()
    learner.until(published=content)
    anna.until(adopted=content)
    run.broadcast(learner, anna)
