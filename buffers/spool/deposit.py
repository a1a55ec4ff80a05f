"""Adding rows to a spool: a file is written beside it, then renamed into it, so that a reader sees it whole or not at all.

A spool is a directory of JSONL files, made anywhere by anything. Names that begin with "." or end in ".tmp" are being
written; the file `END` says that no further row will come. Independent of runs: what a row must have to be of use to one
is looked at when that claims it (`claims`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from async_rlhf.buffers.errors import ConfigError, SpoolError
from async_rlhf.buffers.files import DISK, Disk
from async_rlhf.buffers.parsing import json_value

END = "END"
"""The file that ends a spool."""
# A credit carries its row in a header of 4 MiB at most, and a finished group carries it back beside its texts.
MAX_ROW_BYTES = 1 << 20
# One rename brings all rows in, so larger data must be put in parts.
MAX_PUT_BYTES = 256 << 20


@dataclass(frozen=True)
class Deposited:
    """The result of one `put`."""

    rows: int
    num_bytes: int
    file: str
    """Its name in the spool, empty when there was no row."""


def is_ready(name: str) -> bool:
    """Whether a file of this name is to be claimed."""
    return not name.startswith(".") and not name.endswith(".tmp") and name != END


def put(
    directory: Path,
    lines: Iterable[bytes],
    *,
    max_row_bytes: int = MAX_ROW_BYTES,
    max_bytes: int = MAX_PUT_BYTES,
    files: Disk = DISK,
) -> Deposited:
    """Bring rows into a spool: all of them or none; durable when it returns. Empty lines are left out.

    lines: one JSON object each. Raises ConfigError for a line that is none, limits that are passed, a spool that has ended or
    is not there, and SpoolError for one that cannot be written now.
    """
    check_open(directory, files)
    name = f"{time.time_ns():020d}-{secrets.token_hex(4)}.jsonl"  # names are claimed in their order
    temporary = directory / f".{name}.tmp"
    rows = num_bytes = 0
    try:
        file = files.create(temporary)
        try:
            for number, line in enumerate(lines, 1):
                if not (row := line.strip()):
                    continue
                _check_row(number, row, max_row_bytes)
                rows, num_bytes = rows + 1, num_bytes + len(row) + 1
                if num_bytes > max_bytes:
                    raise ConfigError(f"the rows to line {number} have {num_bytes} bytes, the limit is {max_bytes}; split them")
                file.write(row + b"\n")
            file.flush()
            files.sync(file)
        finally:
            file.close()
        if rows:
            files.replace(temporary, directory / name)
            files.sync_path(directory)
            if END in files.names(directory):  # since it was looked for: who claims may have looked for the last time
                with suppress(FileNotFoundError):  # it has been claimed
                    files.replace(directory / name, temporary)
                    check_open(directory, files)
    except OSError as error:
        raise SpoolError(f"spool {str(directory)!r} cannot be written: {error}; nothing was put into it") from error
    finally:
        with suppress(OSError):
            files.unlink(temporary)
    return Deposited(rows, num_bytes, name if rows else "")


def end(directory: Path) -> None:
    """End the spool: its run ends when it has used all rows. Raises ConfigError."""
    _check_directory(directory)
    try:
        DISK.create(directory / END).close()
        DISK.sync_path(directory)
    except OSError as error:
        raise ConfigError(f"spool {str(directory)!r} cannot be ended: {error}") from error


def _check_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise ConfigError(f"spool {str(directory)!r} is no directory; a run makes its own when it starts, or make it yourself")
    if (directory / "manifest.json").exists():
        raise ConfigError(f"{str(directory)!r} is a run directory, no spool: a run reads the one that its data.source names")


def check_open(directory: Path, files: Disk = DISK) -> None:
    """Raises ConfigError for a spool that is not there, cannot be read or has ended."""
    _check_directory(directory)
    try:
        ended = END in files.names(directory)
    except OSError as error:
        raise ConfigError(f"spool {str(directory)!r} cannot be read: {error}") from error
    if ended:
        raise ConfigError(f"spool {str(directory)!r} has ended: it holds a file {END}; use another directory")


def _check_row(number: int, row: bytes, max_row_bytes: int) -> None:
    if len(row) > max_row_bytes:
        raise ConfigError(f"line {number} has {len(row)} bytes, the limit of a row is {max_row_bytes}; shorten it")
    try:
        value = json_value(row)
    except ValueError as error:
        raise ConfigError(f"line {number} is not JSON: {error}; write one object a line. Nothing was put") from error
    if not isinstance(value, dict):
        raise ConfigError(f"line {number} is a {type(value).__name__}, not an object; write one object a line. Nothing was put")
