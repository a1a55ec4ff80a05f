"""The directory of a queue of runs: its files, and an operator's requests, with or without a daemon.

lock                           held by the daemon                       queue/  itself locked for each change, for a moment
queue/NNNNNN-NAME/config.toml  the run's configuration, resolved        state.json  how it stands (`turns.Entry`)
queue/NNNNNN-NAME/log          what `train` printed                     lock        held while that `train` lives
runs/NAME                      the run directory

An entry comes into being under its name when it is whole, and its state is replaced whole: a full disk or a crash leaves what
was. An entry of a run that has ended may be removed by hand.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from async_rlhf.buffers.errors import ConfigError, DamagedError, FormatError, did_you_mean
from async_rlhf.buffers.files import DISK, QUEUE, lock_directory, write_whole
from async_rlhf.buffers.parsing import toml_table
from async_rlhf.launch.exit_codes import INTERRUPTED
from async_rlhf.launch.run_lock import LockHolder, RunLock, holder, is_held, signal_holder
from async_rlhf.run.config import Config
from async_rlhf.run.run_dir import RunDir, keep_config
from async_rlhf.run.run_files import line_of_step, read_object, read_small
from async_rlhf.serve.turns import AFTER, QueueEntry, RecordedEnd, Request, requested

_NAME = re.compile(r"(\d{6,})-(.+)")
_LOOK_S, _PATIENCE_S = 0.05, 10.0
_ENTRIES = TypeAdapter(QueueEntry)

_DONE = {"cancel": "cancelled", "stop": "stopped", "resume": "resumed"}


class QueueDir:
    """See the module docstring. Every method raises ConfigError for an impossible request, or an entry of another version."""

    def __init__(self, path: Path) -> None:
        if (path / "manifest.json").exists():  # a run has a `lock` and a `queue` too
            raise ConfigError(
                f"{str(path)!r} is a run directory: a queue of runs needs one of its own, for example {path}-queue"
            )
        self.path = path.absolute()
        self.runs = self.path / "runs"
        self._lock, self._queue = self.path / "lock", self.path / "queue"

    @classmethod
    def made(cls, path: Path) -> QueueDir:
        """The queue in this directory, which is made if it does not exist."""
        queue = cls(path)
        try:
            for directory in (queue._queue, queue.runs):
                directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{str(path)!r} cannot be made a queue of runs: {error}") from error
        return queue

    @classmethod
    def existing(cls, path: Path) -> QueueDir:
        found = cls(path)
        if not found._queue.is_dir():
            raise ConfigError(f"{str(path)!r} holds no queue of runs; async-rlhf queue submit {path} CONFIG makes one")
        return found

    # -- what an operator does -----------------------------------------------------------------------------------------

    def submit(self, config: Config, cwd: Path) -> QueueEntry:
        """Put a checked configuration behind the others. cwd: where the run's process is started, for import paths."""
        config = config.model_copy(update={"output_dir": str(self.runs)})
        with self.alone():
            entries = self.entries()
            self._check_name(config.name, entries)
            number = max((entry.number for entry in entries), default=0) + 1
            entry = QueueEntry(number, config.name, cwd=str(cwd.absolute()))
            made = self._queue / f".{number:06d}-{config.name}"
            try:
                shutil.rmtree(made, ignore_errors=True)  # of one that was killed here
                made.mkdir()
                keep_config(config, made / "config.toml")
                self._write(made, entry)
                made.rename(self.folder(entry))
                DISK.sync_path(self._queue)
            except OSError as error:
                shutil.rmtree(made, ignore_errors=True)
                raise ConfigError(f"{config.name!r} cannot be queued in {str(self.path)!r}: {error}") from error
        return entry

    def request(self, what: Request, name: str) -> QueueEntry:
        """Cancel, stop or resume the run of this name. The daemon acts on it within a second, or when there is one."""
        with self.alone():
            entry = self.find(name)
            changed = requested(entry, what)
            if changed is None:
                *others, last = AFTER[what]
                raise ConfigError(
                    f"{what} {name!r}: it is {entry.state}, and only runs that are {', '.join(others)} or {last} can be "
                    f"{_DONE[what]}{_way(what, entry, self)}"
                )
            try:
                self.keep(changed)
                if what == "stop" and changed.is_active and not changed.drain_sent and self.daemon() is None:
                    self.send_drain(changed)
            except OSError as error:
                raise ConfigError(f"{what} {name!r}: {error}") from error
        return changed

    def find(self, name: str) -> QueueEntry:
        """The newest entry of this name."""
        entries = self.entries()
        named = [entry for entry in entries if entry.name == name]
        if not named:
            known = {entry.name for entry in entries}
            hint = did_you_mean(name, known) if known else "it is empty"
            raise ConfigError(f"{str(self.path)!r} has no run {name!r}; {hint}")
        return named[-1]

    # -- what the daemon and readers see -------------------------------------------------------------------------------

    def entries(self) -> list[QueueEntry]:
        """Entries in the order of submission. One whose state cannot be read, or is of another version, is shown as
        failed, with the reason."""
        entries = []
        for folder in self._queue.iterdir():
            if match := _NAME.fullmatch(folder.name):
                entries.append(self._read(folder, int(match[1]), match[2]))
        return sorted(entries, key=lambda entry: entry.number)

    def keep(self, entry: QueueEntry) -> None:
        """Replace the state of an entry. Raises OSError, and FormatError for one of another version; it is then unchanged."""
        with suppress(DamagedError):
            QUEUE.check(read_object(self.folder(entry) / "state.json").get("format", 1), self.folder(entry))
        self._write(self.folder(entry), entry)

    def send_drain(self, entry: QueueEntry) -> None:
        """Signal the run of an entry to drain; one that does not hold its directory yet is signalled later. Raises OSError."""
        with suppress(ConfigError):
            signal_holder(self.run(entry).lock_file, signal.SIGTERM)
            self.keep(replace(entry, drain_sent=True))

    def folder(self, entry: QueueEntry) -> Path:
        return self._queue / f"{entry.number:06d}-{entry.name}"

    def run(self, entry: QueueEntry) -> RunDir:
        """The entry's run directory, which may not exist yet."""
        return RunDir(self.runs / entry.name)

    def is_alive(self, entry: QueueEntry) -> bool:
        """Whether a process of the run lives, or one that is about to begin it. Raises OSError, and DamagedError for a lock
        that is no file."""
        return is_held(self.folder(entry) / "lock") or is_held(self.run(entry).lock_file)

    def ended(self, entry: QueueEntry) -> RecordedEnd | None:
        """The recorded end of a run without processes; None for one that was killed."""
        end = self.run(entry).end()
        if end is None:
            return None
        return RecordedEnd(end.finished, "" if end.code in (0, INTERRUPTED) else end.reason)

    def has_begun(self, entry: QueueEntry) -> bool:
        """Whether the run directory of its name is its own: what was cancelled before it began leaves the name to others."""
        return self.run(entry).exists and (entry.state != "cancelled" or (self.folder(entry) / "log").exists())

    def steps(self, entry: QueueEntry) -> int:
        newest = None
        with suppress(DamagedError):
            newest = line_of_step(self.run(entry).metrics) if self.has_begun(entry) else None
        return 0 if newest is None else int(newest["step"])

    def max_steps(self, entry: QueueEntry) -> int | None:
        value = self._configured(entry, "max_steps")
        return value if isinstance(value, int) else None

    def check_name(self, entry: QueueEntry) -> None:
        """Raises DamagedError where the configuration has another: its run would not be found, and begun again at its end."""
        if (name := self._configured(entry, "name")) not in (None, entry.name):
            folder = self.folder(entry)
            raise DamagedError(
                f"{folder / 'config.toml'} has name = {name!r}; {folder.name!r} ends with another: give both one"
            )

    def _configured(self, entry: QueueEntry, key: str) -> Any:
        """A key of the entry's configuration; None where it cannot be read."""
        with suppress(OSError, DamagedError, ValueError):
            return toml_table(read_small(self.folder(entry) / "config.toml")).get(key)
        return None

    def rows(self) -> list[dict[str, Any]]:
        """Every entry as plain values, with its steps and where its run lies."""
        return [
            {
                **asdict(entry),
                "steps": self.steps(entry),
                "max_steps": self.max_steps(entry),
                "run": str(self.run(entry).path),
            }
            for entry in self.entries()
        ]

    def daemon(self) -> LockHolder | None:
        """The daemon that works here."""
        return holder(self._lock) if is_held(self._lock) else None

    def take(self) -> RunLock:
        """Be the daemon, as long as this is held."""
        try:
            return RunLock.take(self._lock)
        except ConfigError as error:
            raise ConfigError(f"{str(self.path)!r} has a daemon already ({holder(self._lock)}); one is enough") from error
        except OSError as error:
            raise ConfigError(f"{str(self.path)!r} cannot be written: {error}") from error

    def check_mine(self, lock: RunLock) -> None:
        """Raises ConfigError when another daemon has taken the queue from the one that holds this."""
        if lock.is_lost(self._lock):
            raise ConfigError(f"{holder(self._lock)} has taken {str(self.path)!r}: this daemon ends, and its runs go on")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While the block runs no other process changes an entry."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                lock = lock_directory(self._queue)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise ConfigError(f"another process has held {self._queue} for {_PATIENCE_S:.0f} s; end it") from error
                time.sleep(_LOOK_S)
        with closing(lock):
            yield

    # -- inside --------------------------------------------------------------------------------------------------------

    def _check_name(self, name: str, entries: list[QueueEntry]) -> None:
        taken = next((entry for entry in entries if entry.name == name and entry.state != "cancelled"), None)
        if taken is not None:
            raise ConfigError(
                f"name {name!r} is taken: run {taken.number} of {str(self.path)!r} has it and is {taken.state}; choose another "
                "with --set name=NAME"
            )
        if (self.runs / name).exists():
            raise ConfigError(f"name {name!r} is taken: {self.runs / name} exists; choose another with --set name=NAME")

    @staticmethod
    def _write(folder: Path, entry: QueueEntry) -> None:
        fields = {key: value for key, value in asdict(entry).items() if key not in ("number", "name")}
        write_whole(folder / "state.json", json.dumps({"format": QUEUE.newest, **fields}, indent=1) + "\n")

    @staticmethod
    def _read(folder: Path, number: int, name: str) -> QueueEntry:
        try:
            fields: dict[str, Any] = read_object(folder / "state.json")
            if "state" not in fields:
                raise DamagedError(f"{folder / 'state.json'} is missing, or has no state")
            QUEUE.check(fields.pop("format", 1), folder)
            return _ENTRIES.validate_python({**fields, "number": number, "name": name})
        except (DamagedError, FormatError, ValidationError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            return QueueEntry(number, name, "failed", f"its state cannot be read: {reason}")


def _way(what: Request, entry: QueueEntry, queue: QueueDir) -> str:
    """The command to use instead; empty where there is none."""
    if what == "cancel" and entry.is_active:
        return f"; stop it first: async-rlhf queue stop {queue.path} {entry.name}"
    if what == "resume" and entry.state == "finished":
        return f"; go on from its model with async-rlhf fork {queue.runs / entry.name} --name NEW"
    if what == "stop" and entry.state == "stopping":
        return f"; to force it to end: async-rlhf stop {queue.runs / entry.name}"
    return ""
