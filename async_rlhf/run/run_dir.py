"""The run directory: who writes what where, and what a reader may expect of it.

config.toml      the resolved configuration            manifest.json   format, versions, seed, sources, commit, origin
run.json         where a live run's sockets are        ledger.json     the hub's status, twice a second; then `ended`
placement.json   the host, devices and CPUs of each process
data/            the rows of the run, and their images (`run_data`)
metrics.jsonl    one object a step (learner)           rollouts.jsonl  a sample of groups (learner)
evaluations.jsonl  (evaluations, one at a time)        logs/<role>.log
changes.jsonl    what was changed while it went on, and from which step on (`learner.loop.changes`)
events.jsonl     what may need a person (supervisor)
restarts.json    how often each role was started again (supervisor)
tracking.KIND.json   how far a tracker has come     tensorboard/, wandb/  what it wrote
spans/<actor>.jsonl  idle stretches and adopted weights (actors)
checkpoints/step_NNNNNN/{model/,optimizer-NNNNN.safetensors,state.json}, checkpoints/latest, checkpoints/best
queue/, weights/ the hub's own memory                  lock            held while any process of the run lives
keys/            of a run with actors elsewhere

Small files are replaced whole: a full disk or a crash leaves the old one. `rollouts.jsonl`, spans and logs that have grown to
`max_log_bytes` begin anew, and what was in them lies beside them (`NAME.1`). Who shows a run trusts none of
them (`reading`).
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from async_rlhf.buffers.config import REVEALED
from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError, DamagedError
from async_rlhf.buffers.files import RUN, write_whole
from async_rlhf.buffers.parsing import toml_table
from async_rlhf.buffers.spool.claims import has_claimed
from async_rlhf.launch.local import LocalLauncher
from async_rlhf.launch.placement import Placement
from async_rlhf.launch.program import Launcher
from async_rlhf.launch.run_lock import RunLock, holder, is_held
from async_rlhf.launch.sockets import LONGEST, is_private, remove_left
from async_rlhf.learner.checkpoint.evaluated import without_links
from async_rlhf.run.config import Config
from async_rlhf.run.config_keys import known
from async_rlhf.run.loading import differences, dump, validated
from async_rlhf.run.manifest import RecordedBits, continued, manifest
from async_rlhf.run.run_data import Rows, RunData, kept_images
from async_rlhf.run.run_files import read_lines, read_object, read_small

_SHOWN = 5
"""Runs that are named where the directory of them was given in place of one."""
# What may differ when a run is resumed: how far it goes, how it is watched, how many work on it and on what.
_MAY_CHANGE = (
    "max_steps",
    "max_trained_tokens",
    "max_seconds",
    "stall_timeout_s",
    "watchdog_s",
    "sampled_groups",
    "max_log_bytes",
    "disk_pause_bytes",
    "address",
    "security.",
    "output_dir",
    "actors.",
    "placement.",
    "checkpoint.",
    "evaluation.",
    "tracking.",
    "hooks.",
    "launch.",
    *(
        f"learner.{name}:"
        for name in (
            "ranks", "sequence_parallel", "tensor_parallel", "backend", "zero_stage", "deepspeed_config", "rank_timeout_s",
            "device", "threads", "compile", "gradient_checkpointing", "micro_batch_tokens", "row_tokens",
        )
    ),
)  # fmt: skip


class RunEnd(BaseModel):
    """How a run ended, by its supervisor's account; a run that was killed has none."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    code: int
    """As in `exit_codes`."""
    reason: str
    """The error's message, or how it ended well."""
    finished: bool
    """Whether there was nothing left to train on."""


class RunDir:
    """Paths and small files of one run. Who makes or reopens one holds its lock until `retire`."""

    def __init__(self, path: Path, lock: RunLock | None = None) -> None:
        self.path, self.lock = path, lock
        self.variables: dict[str, str] = {}
        """Those of its processes on this machine alone: where they find what only the calling process has."""
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "rollouts.jsonl"
        self.ledger = path / "ledger.json"
        self.evaluations = path / "evaluations.jsonl"
        self.events = path / "events.jsonl"
        self.images = kept_images(path)
        self.restarts = path / "restarts.json"
        self.lock_file = path / "lock"
        self.config_file, self._manifest = path / "config.toml", path / "manifest.json"
        self._run, self._placement = path / "run.json", path / "placement.json"

    @property
    def launcher(self) -> Launcher:
        """Starts the processes of this run on this machine."""
        return LocalLauncher(self.lock, self.variables)

    @classmethod
    def create(cls, config: Config, rows: Rows | None = None, dropped: int = 0, *, overwrite: bool = False) -> RunDir:
        """A new directory for a new run. overwrite: also where there is a run that has ended; it is removed.

        rows: what the run trains on and is evaluated with, kept in it (`RunData`). dropped: how many prompts were left out.
        A run that failed before its first step is always removed, unless it has claimed rows of a spool. Raises ConfigError
        when the directory exists, is in use or cannot be written.
        """
        run = cls(config.run_dir)
        run._make_room(overwrite)
        run._check_new()
        made = cls(run.path.with_name(f".{run.path.name}.new-{os.getpid()}"))  # it gets its name when it is whole
        try:
            (made.path / "logs").mkdir(parents=True)
            run.lock = RunLock.take(made.lock_file)
            if rows is not None:
                RunData(made.path, config.data).keep(rows, dropped)
            write_whole(made._manifest, json.dumps(manifest(config), indent=1) + "\n")
            keep_config(config, made.config_file)
            made.path.rename(run.path)
        except OSError as error:
            run._release()
            shutil.rmtree(made.path, ignore_errors=True)
            run._check_new()  # another was quicker
            raise ConfigError(f"run directory {str(run.path)!r} cannot be written: {error}") from error
        return run

    @classmethod
    def reopen(cls, config: Config) -> RunDir:
        """The directory of a run to continue. Raises ConfigError when it is none, alive, or of another configuration."""
        run = cls.existing(config.run_dir)
        try:
            run.lock = RunLock.take(run.lock_file)
            run.check_same(config)
            write_whole(run._manifest, json.dumps(continued(run._read_manifest(), config), indent=1) + "\n")
            keep_config(config, run.config_file)
            with suppress(DamagedError):  # it only names what a killed supervisor left
                if (left := run._announced()) is not None:
                    remove_left(left)
            run._run.unlink(missing_ok=True)
        except OSError as error:
            run._release()
            raise ConfigError(f"run directory {str(run.path)!r} cannot be written: {error}") from error
        except AsyncRLHFError:
            run._release()
            raise
        return run

    @classmethod
    def existing(cls, path: str | Path, lock: RunLock | None = None) -> RunDir:
        """A directory that holds a run; raises ConfigError for any other, FormatError for one that another version has made.

        lock: where this process holds or inherited it.
        """
        run = cls(Path(path), lock)
        if not run.exists:
            raise ConfigError(no_run(run.path))
        run._check_format()
        return run

    @property
    def latest(self) -> Path:
        """The newest checkpoint, where there is one."""
        return without_links(self.path / "checkpoints" / "latest")

    @property
    def exists(self) -> bool:
        """Whether a run has begun here."""
        return self.config_file.exists()

    @property
    def started(self) -> str:
        """When the run began; empty where its manifest cannot be read."""
        return str(self._read_manifest().get("started", ""))

    def bits(self) -> RecordedBits | None:
        """The guarantee on the bits of completions; None where the run does not ask for it."""
        found = self._read_manifest().get("bits")
        return RecordedBits(*(str(found.get(name, "")) for name in RecordedBits._fields)) if isinstance(found, dict) else None

    def keep_bits(self, bits: RecordedBits) -> None:
        """Raises OSError."""
        write_whole(self._manifest, json.dumps({**self._read_manifest(), "bits": bits._asdict()}, indent=1) + "\n")

    def config(self) -> Config:
        """As it was written, without the keys that are none any more. Raises ConfigError, DamagedError for what is no TOML."""
        try:
            values = toml_table(read_small(self.config_file))
        except ValueError as error:
            raise DamagedError(f"{self.config_file} is damaged: {error}") from error
        return validated(known(values, Config))

    def check_same(self, config: Config) -> None:
        """Raises ConfigError when a run of this configuration would be another run than the one that is here."""
        changed = [line for line in differences(self.config(), config) if not line.startswith(_MAY_CHANGE)]
        if changed:
            raise ConfigError(
                f"run directory {str(self.path)!r} belongs to another configuration: {'; '.join(changed[:5])}. "
                "Resume with the same values, or start a new run with --set name=NAME. What may change once it has begun: "
                f"async-rlhf set {self.path}"
            )

    def log(self, role: str) -> Path:
        return self.path / "logs" / f"{role}.log"

    def tracked(self, kind: str) -> Path:
        return self.path / f"tracking.{kind}.json"

    def spans(self, actor: str) -> Path:
        return self.path / "spans" / f"{actor}.jsonl"

    def announce(self, sockets: Path) -> None:
        """Say in which private directory the live run's hub listens, and its scorer. Raises OSError."""
        write_whole(self._run, json.dumps({"sockets": str(sockets)}, indent=1) + "\n")

    def keep_placement(self, placement: Placement) -> None:
        """For readers. Raises OSError."""
        write_whole(self._placement, TypeAdapter(Placement).dump_json(placement, indent=1).decode() + "\n")

    def is_announced(self) -> bool:
        """Whether the run's roles are at work: from `announce` to `withdraw`."""
        return self._run.exists()

    def record_end(self, end: RunEnd) -> None:
        """Keep it in `ledger.json`, beside the hub's last status. On a full disk it is lost."""
        if self.is_lost():
            return
        ledger: dict[str, Any] = {}
        with suppress(DamagedError):
            ledger = self.read_ledger()
        with suppress(OSError):
            write_whole(self.ledger, json.dumps({**ledger, "ended": end.model_dump()}, indent=1) + "\n")

    def end(self) -> RunEnd | None:
        """How the run ended; None while it lives, and for one that was killed."""
        try:
            ended = self.read_ledger().get("ended")
            return None if ended is None or self.is_alive() else RunEnd.model_validate(ended)
        except (DamagedError, ValidationError):
            return None

    def forget_end(self) -> None:
        """The run is to go on: what is read as its end from now on is the next one. Raises OSError, DamagedError."""
        ledger = self.read_ledger()
        if ledger.pop("ended", None) is not None:
            write_whole(self.ledger, json.dumps(ledger, indent=1) + "\n")

    def withdraw(self) -> None:
        """Nothing listens any more."""
        if not self.is_lost():
            self._run.unlink(missing_ok=True)

    def is_lost(self) -> bool:
        """Whether this process had the run directory and another has it now."""
        return self.lock is not None and self.lock.is_lost(self.lock_file)

    def retire(self) -> None:
        """The run has ended, and another may begin here."""
        self.withdraw()
        self._release()

    def sockets(self) -> Path | None:
        """The directory of the live run's sockets; None when there is no live run, or it does not listen yet.

        Raises DamagedError for one that no run of this user has made: it could answer anything.
        """
        if not self.is_alive() or (directory := self._announced()) is None:
            return None
        if not is_private(directory):
            if not self.is_alive():
                return None  # it has ended meanwhile
            raise DamagedError(f"{self._run} names {str(directory)!r}, which is no socket directory of a run of this user")
        return directory

    def is_alive(self) -> bool:
        """Whether any process of the run lives: its lock is held."""
        try:
            return is_held(self.lock_file)
        except OSError as error:
            raise DamagedError(f"{self.lock_file} cannot be read: {error.strerror}") from error

    def read_metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.metrics, all_good=True)

    def read_evaluations(self) -> list[dict[str, Any]]:
        return read_lines(self.evaluations, all_good=True)

    def read_ledger(self) -> dict[str, Any]:
        """The hub's last written status, or nothing before there was one. Raises DamagedError."""
        return read_object(self.ledger)

    def count_restart(self, role: str) -> None:
        """One of its processes was started again. On a full disk it is lost."""
        counts: dict[str, int] = {}
        with suppress(DamagedError):
            counts = self.read_restarts()
        with suppress(OSError):
            write_whole(self.restarts, json.dumps({**counts, role: counts.get(role, 0) + 1}) + "\n")

    def read_restarts(self) -> dict[str, int]:
        """How often each role was started again, over all starts of the run. Raises DamagedError."""
        found = read_object(self.restarts)
        if not all(type(count) is int and count >= 0 for count in found.values()):
            raise DamagedError(f"{self.restarts} is damaged: it holds other things than counts. Remove it")
        return found

    def _announced(self) -> Path | None:
        found = read_object(self._run).get("sockets")
        if found is not None and not (isinstance(found, str) and 0 < len(found) <= LONGEST):
            raise DamagedError(f"{self._run} is damaged: it names no directory of sockets")
        return None if found is None else Path(found)

    def _make_room(self, overwrite: bool) -> None:
        """Remove the run that is here, if it may be."""
        if not self.exists:
            return
        if not overwrite:
            self._check_format()
        end = self.end()
        failed_to_start = end is not None and end.code != 0 and not self.metrics.exists()
        failed_to_start = failed_to_start and not has_claimed(self.path / "data" / "spool")
        if not overwrite and not failed_to_start:
            return
        lock = RunLock.take(self.lock_file)
        try:
            removed = self.path.with_name(f".{self.path.name}.removed-{os.getpid()}")
            self.path.rename(removed)
            shutil.rmtree(removed)
        except OSError as error:
            raise ConfigError(f"run directory {str(self.path)!r} cannot be removed: {error}") from error
        finally:
            lock.release()

    def _check_new(self) -> None:
        if self.exists:
            self._release()
            if self.is_alive():
                raise ConfigError(
                    f"run directory {str(self.path)!r} belongs to a running run ({holder(self.lock_file)}); choose "
                    f"another with --set name=NAME, or stop it: async-rlhf stop {self.path}"
                )
            raise ConfigError(
                f"run directory {str(self.path)!r} exists. Continue it with --resume, remove it with --overwrite, or choose "
                "another with --set name=NAME"
            )

    def _check_format(self) -> None:
        """Raises FormatError."""
        RUN.check(self._read_manifest().get("format", 1), self.path)

    def _read_manifest(self) -> dict[str, Any]:
        """The manifest; empty where it is not readable, and then taken for one of the first format."""
        with suppress(DamagedError):
            return read_object(self._manifest)
        return {}

    def _release(self) -> None:
        if self.lock is not None:
            self.lock.release()
            self.lock = None


def keep_config(config: Config, path: Path) -> None:
    """Write it down; what holds secrets can be read by this user alone. Raises OSError."""
    has_secrets = config.model_dump(mode="json") != config.model_dump(mode="json", context=REVEALED)
    write_whole(path, dump(config), private=has_secrets)


def no_run(path: Path) -> str:
    """Why this is no run directory, and where runs are if it holds some or is that of a queue."""
    if (path / "queue").is_dir() and (path / "runs").is_dir():
        return f"{str(path)!r} is no run directory (it has no config.toml): it is a queue of runs, which are in {path / 'runs'}"
    found = sorted(repr(each.parent.name) for each in path.glob("*/config.toml"))
    within = f"; runs in it: {', '.join(found[:_SHOWN])}{', ...' * (len(found) > _SHOWN)}" if found else ""
    return f"{str(path)!r} is no run directory (it has no config.toml{within})"
