"""The run directory: who writes what where, and what a reader may expect of it.

config.toml      the resolved configuration            manifest.json   versions, seed, commit
run.json         address and process of a live run     ledger.json     the hub's status, twice a second
metrics.jsonl    one object a step (learner)           rollouts.jsonl  a sample of groups (learner)
evaluations.jsonl                                      logs/<role>.log
spans/<actor>.jsonl  idle stretches and adopted weights (actors)
checkpoints/step_NNNNNN/{model/,optimizer.safetensors,state.json}, checkpoints/latest
queue/, weights/ the hub's own memory
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import psutil

from async_rlhf.config import Config, differences, dump, validated
from buffers.errors import ConfigError

# What may differ when a run is resumed: how far it goes, how it is watched, how many work on it.
_MAY_CHANGE = (
    "max_steps",
    "stall_timeout_s",
    "sampled_groups",
    "address",
    "security.",
    "output_dir",
    "actors.",
    "checkpoint.",
    "evaluation.",
)
_PACKAGES = ("async-rlhf", "torch", "transformers", "numpy", "pyzmq", "msgpack", "reasoning-gym", "pebble")


class RunDir:
    """Paths and small files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.ledger = path / "ledger.json"
        self.evaluations = path / "evaluations.jsonl"
        self.latest = path / "checkpoints" / "latest"
        self._config, self._run = path / "config.toml", path / "run.json"

    @classmethod
    def create(cls, config: Config) -> RunDir:
        """A new directory for a new run. Raises ConfigError when it exists or cannot be written."""
        run = cls(config.run_dir)
        if run._config.exists():
            raise ConfigError(
                f"run directory {str(run.path)!r} exists. Continue it with --resume, or choose another with --set name=NAME"
            )
        try:
            (run.path / "logs").mkdir(parents=True, exist_ok=True)
            run._config.write_text(dump(config))
            run._write_json(run.path / "manifest.json", _manifest(config))
        except OSError as error:
            raise ConfigError(f"run directory {str(run.path)!r} cannot be written: {error}") from error
        return run

    @classmethod
    def reopen(cls, config: Config) -> RunDir:
        """The directory of a run to continue. Raises ConfigError when it is none, alive, or of another configuration."""
        run = cls.existing(config.run_dir)
        if run.is_alive():
            raise ConfigError(f"run {str(run.path)!r} is running (process {run.live()['pid']}); stop it first")
        changed = [line for line in differences(run.config(), config) if not line.startswith(_MAY_CHANGE)]
        if changed:
            raise ConfigError(
                f"run directory {str(run.path)!r} belongs to another configuration: {'; '.join(changed[:5])}. "
                "Resume with the same values, or start a new run with --set name=NAME"
            )
        run._config.write_text(dump(config))
        return run

    @classmethod
    def existing(cls, path: str | Path) -> RunDir:
        """A directory that holds a run; raises ConfigError for any other."""
        run = cls(Path(path))
        if not run._config.is_file():
            raise ConfigError(f"{str(path)!r} is no run directory (it has no config.toml)")
        return run

    def config(self) -> Config:
        return validated(tomllib.loads(self._config.read_text()))

    def log(self, role: str) -> Path:
        return self.path / "logs" / f"{role}.log"

    def spans(self, actor: str) -> Path:
        return self.path / "spans" / f"{actor}.jsonl"

    def announce(self, address: str, scorer: str = "") -> None:
        """Say where the live run's hub listens, and its scorer where there is one."""
        created = psutil.Process().create_time()
        self._write_json(self._run, {"pid": os.getpid(), "created": created, "address": address, "scorer": scorer})

    def retire(self) -> None:
        self._run.unlink(missing_ok=True)

    def live(self) -> dict[str, Any]:
        """`pid`, `address` and `scorer` of the live run, or nothing."""
        return _read_json(self._run)

    def is_alive(self) -> bool:
        """Whether the process that announced itself still runs (not another that was given its number)."""
        live = self.live()
        try:
            process = psutil.Process(live["pid"])
            return bool(process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - live["created"]) < 1.0)
        except (KeyError, psutil.NoSuchProcess):
            return False

    def read_metrics(self) -> list[dict[str, Any]]:
        return _read_jsonl(self.metrics)

    def read_evaluations(self) -> list[dict[str, Any]]:
        return _read_jsonl(self.evaluations)

    def read_ledger(self) -> dict[str, Any]:
        """The hub's last written status, or nothing before there was one."""
        return _read_json(self.ledger)

    def _write_json(self, path: Path, value: dict[str, Any]) -> None:
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(value, indent=1) + "\n")
        temporary.replace(path)


class Tail:
    """The whole lines that were added to a JSONL file since the last `read`; follows a file that is cut shorter."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            self._offset = min(self._offset, size)
            file.seek(self._offset)
            data = file.read(size - self._offset)
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return found


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Whole lines only: the last one may be being written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _manifest(config: Config) -> dict[str, Any]:
    here = Path(__file__).resolve().parent
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
        timeout=10,
        stdin=subprocess.DEVNULL,
    )
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seed": config.seed,
        "git_commit": commit.stdout.strip() or None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
    }
