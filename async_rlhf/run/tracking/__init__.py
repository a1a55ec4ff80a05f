"""Tracking services, one file each, named as TRL's `report_to` names them. A library is imported where its tracker is made.

What a tracker raises ends the process that sends (`run.processes.tracking`), never the run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast, get_args

from async_rlhf.run.config_keys import without_secrets
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.watching import TrackerKind

KINDS: tuple[TrackerKind, ...] = get_args(TrackerKind)

Row = Mapping[str, str | float]


class Tracked(NamedTuple):
    """What a service is given of a run."""

    directory: Path
    """The run directory."""
    name: str
    id: str
    """The same for all lives of a run, another for every other, and for what follows when a run is set back."""
    branch: int
    """How often it was set back behind what had been sent."""
    config: dict[str, Any]
    """With asterisks for what may be secret."""


class Tracker(Protocol):
    """One service. After `flush` what was logged is not lost when the process dies."""

    def log(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """at: seconds since the epoch. Steps of evaluations come after later ones."""

    def table(self, name: str, step: int, at: float, rows: Sequence[Row]) -> None:
        """Rows with the same columns, one at least; ignored where a service has no tables."""

    def flush(self) -> None: ...

    def close(self) -> None: ...


def opened(kind: TrackerKind, run: RunDir, branch: int) -> Tracker:
    """The tracker of this kind, which continues what it has of the run. Raises what its library raises."""
    begun = (run.path / "manifest.json").read_bytes() + str(run.path.resolve()).encode() + f"-{branch}".encode() * bool(branch)
    tracked = Tracked(
        directory=run.path,
        name=run.path.resolve().name + f"-{branch + 1}" * bool(branch),
        id=hashlib.blake2b(begun, digest_size=8).hexdigest(),
        branch=branch,
        config=without_secrets(json.loads(run.config().model_dump_json())),
    )
    return cast(Tracker, import_module(f"{__name__}.to_{kind}").open_tracker(tracked))
