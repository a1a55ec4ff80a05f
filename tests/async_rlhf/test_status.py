"""Where a run stands, when it ends while it is asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from async_rlhf.inspect.status import lines, read
from async_rlhf.launch.sockets import hub_address, socket_directory
from async_rlhf.run.display import line
from async_rlhf.run.run_dir import RunDir


@pytest.fixture
def sockets() -> Iterator[Path]:
    with socket_directory() as directory:
        yield directory


def test_a_run_that_ends_while_it_is_asked_is_told_of_as_far_as_it_went(small: Callable[..., Any], sockets: Path) -> None:
    run = RunDir.create(small())
    run.announce(sockets)

    def ends() -> None:
        """A hub that is gone before it answers, and the run with it."""
        with zmq.Context() as context, context.socket(zmq.ROUTER) as hub:
            hub.bind(hub_address(sockets))
            if hub.poll(60_000):
                run.retire()

    ending = threading.Thread(target=ends)
    ending.start()
    found = read(run)
    ending.join(60)
    assert not run.is_alive() and "the hub does not answer" in found["state"]
    assert lines(run, found)[0].endswith("step 0 of 4")


def test_the_line_of_a_step_says_when_scores_failed() -> None:
    counts = ("reward", "staleness/mean", "staleness/max", "tokens_per_second", "idle/learner", "idle/actor")
    record = dict.fromkeys(counts, 0)
    assert "failed" not in line(record) and "failed" not in line({**record, "rewards/failed_ratio": 0.0})
    assert line({**record, "rewards/failed_ratio": 0.25}).endswith("failed scores: 25.0%")
