"""The hub that tests of this room talk to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.queue.bound import Bound
from tests.buffers.hub.place import Place


@pytest.fixture
def place(tmp_path: Path, socket_dir: Path) -> Iterator[Callable[..., Place]]:
    """`place(Bound(...), lease_s=1)`: a hub that runs until the test ends."""
    places: list[Place] = []

    def make(bound: Bound, **config: Any) -> Place:
        places.append(Place(tmp_path / f"run{len(places)}", f"ipc://{socket_dir}/hub{len(places)}", bound, **config))
        places[-1].begin()
        return places[-1]

    yield make
    for each in places:
        each.close()
