"""How a run directory was made: the format of its files, the code, the packages, the model, what came from the Hub."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from async_rlhf.actors.data.config import HUB_PREFIX
from async_rlhf.buffers.files import RUN, content_digest
from async_rlhf.launch.machine import sources
from async_rlhf.launch.processor import processor
from async_rlhf.learner.checkpoint.store import complete, step_of
from async_rlhf.run.config import Config
from async_rlhf.run.own_code import own_code
from async_rlhf.run.tables import flat

_PACKAGES = ("async-rlhf", "torch", "transformers", "numpy", "pyzmq", "msgpack", "reasoning-gym")
_SNAPSHOT = re.compile(r"/(?:models|datasets)--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})(/.+)?")


class RecordedBits(NamedTuple):
    """Whether completions are reproducible bit for bit. Both are empty before an actor has joined."""

    digest: str = ""
    """Digest of the actors' computation."""
    obstacle: str = ""
    """Why this is no longer guaranteed."""


def manifest(config: Config) -> dict[str, Any]:
    """The manifest of a new run."""
    bits = {"bits": RecordedBits(obstacle=config.bits_obstacle)._asdict()} if config.asks_for_bits else {}
    return {
        "format": RUN.newest,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seed": config.seed,
        "origin": _origin(Path(config.model)),
        "published": [each._asdict() for each in map(published, places(config)) if each.commit],
        "git_commit": _commit(),
        "platform": platform.platform(),
        **bits,
        **_code(config),
    }


def continued(known: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """That of a run that goes on: of the newest format; `later` lists other code and processors that it has gone on with
    since."""
    later, code = known.get("later", []), _code(config)
    changed = any((later or [known])[-1].get(key) != value for key, value in code.items())
    since = {"since": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **code}
    return {**known, "format": RUN.newest, **_bits(known, config), **({"later": [*later, since]} if changed else {})}


def _bits(known: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Once withdrawn, a promise stays so."""
    before, now = known.get("processor"), processor()
    obstacle = config.bits_obstacle or (f"the run went on with {now}, after {before}" if before not in (None, now) else "")
    if "bits" not in known or known["bits"].get("obstacle") or not obstacle:
        return {}
    return {"bits": RecordedBits(obstacle=obstacle)._asdict()}


def _code(config: Config) -> dict[str, Any]:
    """The code that computes the run, so that runs of the same code can be recognized."""
    return {
        "sources": sources(),
        "python": platform.python_version(),
        "processor": processor(),
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "files": _files(config),
    }


def _files(config: Config) -> dict[str, str]:
    """Digests of the user's own code, and of the files that settings name: prompts, a judge's words, a model in one file."""
    values = (*places(config), *dict(flat(config.model_dump())).values())
    named = (value for value in values if isinstance(value, str) and os.path.isabs(value))
    files = {*filter(os.path.isfile, named), *map(str, own_code(config))}
    return {file: content_digest(Path(file)) for file in sorted(files)}


class Published(NamedTuple):
    """A repository of the Hugging Face Hub at a commit, and a file in it; what lies here alone has none, and its own name."""

    name: str
    commit: str = ""
    file: str = ""

    def __str__(self) -> str:
        """As a configuration names it."""
        return f"{HUB_PREFIX if self.file else ''}{self.name}@{self.commit}{self.file}" if self.commit else self.name


def published(path: str) -> Published:
    """The published source of a path into the Hub's cache."""
    found = _SNAPSHOT.search(path)
    return Published(path) if found is None else Published(f"{found[1]}/{found[2]}", found[3], found[4] or "")


def places(config: Config) -> list[str]:
    """The paths of a configuration that may come from the Hub."""
    data = [each.source for each in (config.data, *config.data.sources)]
    return [config.model, *config.scoring.reference.directories, *data, config.evaluation.source or ""]


def _origin(model: Path) -> dict[str, Any] | None:
    """The run and the step whose checkpoint a run begins with, where it is one."""
    checkpoint = model.resolve().parent
    run = checkpoint.parent.parent
    if not (run / "config.toml").exists() or checkpoint not in complete(checkpoint.parent):
        return None
    return {"run": str(run), "step": step_of(checkpoint)}


def _commit() -> str | None:
    """The commit of this code, where it is a checkout and there is git."""
    here = Path(__file__).resolve().parent
    with suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=here,
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
            stdin=subprocess.DEVNULL,
        )
        return found.stdout.strip() or None
    return None
