"""A directory for a queue, whose runs end with the test: they outlive their daemon."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.launch.run_lock import signal_holder


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "rl"
    for lock in (tmp_path / "rl" / "runs").glob("*/lock"):
        with suppress(ConfigError):  # most have ended
            signal_holder(lock, signal.SIGKILL)
