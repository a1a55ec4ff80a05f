"""What tests of these rooms start, and what ends it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.queue.bound import Bound
from tests.buffers.hub.place import Begun, Place
from tests.buffers.weights.fleet import Fleet


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What is entered into it ends with the test, the last one first."""
    with ExitStack() as entered:
        yield entered


@pytest.fixture
def place(tmp_path: Path, socket_dir: Path, stack: ExitStack) -> Callable[..., Place]:
    """`place(Bound(...), lease_s=1)`: a hub that runs until the test ends."""
    numbers = itertools.count()

    def make(bound: Bound, address: str = "", **config: Any) -> Place:
        number = next(numbers)
        made = Place(tmp_path / f"run{number}", address or f"ipc://{socket_dir}/hub{number}", bound, **config)
        stack.callback(made.close)
        made.begin()
        return made

    return make


@pytest.fixture
def begun(place: Callable[..., Place]) -> Callable[..., Begun]:
    """`hub, anna, learner = begun(Bound(...))`: as `place`, with an actor and a learner."""

    def make(bound: Bound, *arguments: Any, **options: Any) -> Begun:
        hub = place(bound, *arguments, **options)
        return hub, hub.actor(), hub.learner()

    return make


@pytest.fixture
def fleet(tmp_path: Path, socket_dir: Path, stack: ExitStack) -> Callable[..., Fleet]:
    """The hub that tests of the weight channel use."""

    def make(*weights: Any, **settings: Any) -> Fleet:
        made = Fleet(tmp_path / "run", f"ipc://{socket_dir}/hub", *weights, **settings)
        stack.callback(made.close)
        return made

    return make
