"""Tracking services, one file each, named as TRL's `report_to` names them. A library is imported where its service is opened.

What a service raises ends the process that sends (`run.processes.tracking`), never the run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast, get_args

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.run.config_keys import without_secrets
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.watching import TrackerKind

KINDS: tuple[TrackerKind, ...] = get_args(TrackerKind)
PROJECT = "async-rlhf"
"""The project, unless the environment names another."""
Row = Mapping[str, str | int]


class Tracked(NamedTuple):
    """A run, as a service is given it."""

    directory: Path
    name: str
    id: str
    """The same for all lives of a run, another for every other and for each branch."""
    branch: str
    """Empty; `-2`, `-3`... after a run was set back behind the sent steps."""
    config: dict[str, Any]
    """The configuration with asterisks for secrets."""


class Tracker(Protocol):
    """One service. After `flush` the logged data survive the death of the process."""

    def log(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """at: seconds since the epoch. Steps of evaluations come after later ones."""

    def table(self, name: str, step: int, at: float, rows: Sequence[Row]) -> None:
        """Rows with the same columns, one at least; ignored where a service has no tables."""

    def images(self, name: str, step: int, at: float, shown: Mapping[str, Any]) -> None:
        """Small images (Pillow's) by digest, one at least."""

    def flush(self) -> None: ...

    def close(self) -> None: ...


def check_place(kind: TrackerKind) -> None:
    """Raises ConfigError for a service that has nowhere to write, or no key. Without its library, which takes seconds."""
    if kind == "wandb" and os.environ.get("WANDB_MODE", "online") == "online" and not _may_have_key():
        raise ConfigError(
            "the tracker wandb has no key: run wandb login, set WANDB_API_KEY, or WANDB_MODE=offline (and wandb sync later)"
        )
    if kind == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI") and find_spec("sqlalchemy") is None:
        raise ConfigError(
            "the tracker mlflow writes to a server only, with this package, mlflow-skinny: set MLFLOW_TRACKING_URI "
            "(http://HOST:PORT)"
        )


def _may_have_key() -> bool:
    """Whether one of the places exists where Weights & Biases looks for a key."""
    own = os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")
    files = (os.environ.get("NETRC", "~/.netrc"), "~/_netrc", f"{own}/settings", "wandb/settings")
    named = any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"))
    return named or any(os.path.exists(os.path.expanduser(file)) for file in files)


def opened(kind: TrackerKind, run: RunDir, branch: int) -> Tracker:
    """The service, continuing its data of the run. branch: from 1. Raises ConfigError, and its library's errors."""
    path, behind = run.path.resolve(), f"-{branch}" if branch > 1 else ""
    identity = hashlib.blake2b(f"{run.started}{path}{behind}".encode(), digest_size=8).hexdigest()
    config = without_secrets(json.loads(run.config().model_dump_json()))
    check_place(kind)
    service = import_module(f"{__name__}.to_{kind}").Service
    return cast(Tracker, service(Tracked(run.path, f"{path.name}{behind}", identity, behind, config)))
