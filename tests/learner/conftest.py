"""Fixtures of this room: a tiny model on disk, and lives of a learner that trains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.record import Group
from tests.learner.lives import Life, Live, ScriptedHub, make_batches
from tests.learner.making import make_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(path)
    return path


@pytest.fixture
def live(tmp_path: Path, model_dir: Path) -> Live:
    """`live(batches, faults, name="life", **settings)`: a learner on the run directory of this name, whose hub offers these
    batches and fails in these ways; or the one that is given as `hub`."""

    def make(
        batches: Sequence[Sequence[Group]] | None = None,
        faults: Mapping[tuple[str, int], str] | None = None,
        *,
        hub: ScriptedHub | None = None,
        name: str = "life",
        **settings: Any,
    ) -> Life:
        hub = hub or ScriptedHub(make_batches() if batches is None else batches, faults)
        return Life(tmp_path / name, model_dir, hub, **settings)

    return make


@pytest.fixture
def undisturbed(live: Live) -> dict[str, bytes]:
    """The weights after the same batches, when nothing happens on the way."""
    return live(name="undisturbed").ran().weights
