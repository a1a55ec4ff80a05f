"""The hub that tests of this room talk to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.buffers.weights.fleet import Fleet


@pytest.fixture
def fleet(tmp_path: Path, socket_dir: Path, stack: ExitStack) -> Callable[..., Fleet]:
    def make(*weights: Any, **settings: Any) -> Fleet:
        made = Fleet(tmp_path / "run", f"ipc://{socket_dir}/hub", *weights, **settings)
        stack.callback(made.close)
        return made

    return make
