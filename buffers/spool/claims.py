"""From files in a spool to rows with group numbers: each file is claimed once, each good row bound once, whatever dies when.

    owns        `rejected/`, the claims in the spool and, through the stream, the rows of one run
    waits for   nothing: the hub calls `turn` twice a second, and again at once while there is more to do
    on close    nothing: it may end between any two operations on files, and goes on from what it finds

    1. claim    a file is renamed within the spool to `.claimed-RUN-NUMBER-NAME.jsonl`, RUN being a random name of this run
    2. look     its lines are checked; those that are of no use to the run go with the reason to `rejected/NUMBER-NAME.jsonl`,
                which is on disk before the last rows of its file are bound
    3. bind     the others are appended to the stream with their place, (claim, line), and have their groups from then on
    4. remove   the claimed file

A writer of the spool is not trusted. Only regular files are opened, links are not followed, a
turn reads `_PIECE` bytes and goes on in the next, and of a line no more than a row may have is kept. What cannot be read so is
set aside: a line with its number and the reason; a line of more than `_MAX_LINE_BYTES` with all behind it; what turns out to be
no file (it may be replaced until it is renamed) under a name that is not claimed.

Why each row is bound once. Of two runs that share a spool one renames the file. Claims are bound in their order and lines in
theirs, so what is bound is what is not behind the newest place in the stream: a claim that is looked at again after a crash
goes on behind it. A number of a claim is never given twice: it is above all that are in `rejected/`, in the stream, or in the
spool under this run's name. When power fails a rename is there whole or not at all, which is what file
systems that keep a journal promise; and it is on disk before a row of its file is bound.

What the disk refuses (a full one, a spool that is read-only or gone) is named in the status and tried again with the next
turn; the rows that are bound already are there meanwhile.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rlhf.buffers.files import DISK, Disk, File, write_whole
from async_rlhf.buffers.spool.deposit import END, MAX_ROW_BYTES, is_ready
from async_rlhf.buffers.spool.stream import Place, PromptStream

_log = logging.getLogger(__name__)
_PIECE = 1 << 16  # of a file that is looked at, and bound, at a time
_MAX_LINE_BYTES = 256 << 20  # behind which the rest of a file is not looked at: it may be a hole without an end
_CLAIMS = 256  # files that are claimed at a time, with one sync of the spool
_SHOWN_BYTES = 2000  # of a line in `rejected/`
_IDENTITY = "id"
_NAME_BYTES = 120  # of a file's own name in that of its claim


@dataclass(frozen=True)
class RejectedLine:
    """Why the run cannot use a line."""

    reason: str


Check = Callable[[Sequence[bytes]], Sequence[str | RejectedLine]]
"""Lines of a file to rows, JSON objects as they are credited, or the reason why a line is none."""


def has_claimed(directory: Path) -> bool:
    """Whether a run's own directory holds rows that came out of a spool, or the name under which it has claimed them there.
    Raises OSError."""
    stream = directory / "stream.jsonl"
    return (directory / _IDENTITY).exists() or (stream.exists() and stream.stat().st_size > 0)


class Spool:
    """See the module docstring. source: the spool. directory: the run's own, where its stream is too."""

    def __init__(self, source: Path, directory: Path, stream: PromptStream, check: Check, files: Disk = DISK) -> None:
        self.stream, self._source, self._check, self._files = stream, source, check, files
        self._directory, self._rejected = directory, directory / "rejected"
        self._prefix = ""  # of the names in the spool that are this run's, once it has claimed one
        self._seen: list[str] = []  # names in the spool to be claimed, as of the last look, in descending order
        self._waiting: list[Path] | None = None  # claims that are not bound whole; None: to be looked up
        self._claim: _Claim | None = None  # the first of them
        self._next = 1
        self._num_rejected: dict[str, int] = {}  # by the name of the claim
        self.problem = ""
        """Why nothing more can be claimed or bound now."""

    def turn(self) -> bool:
        """Do a part of the work; returns whether there is more to do at once."""
        try:
            if self._waiting is None:
                self._waiting = self._begin()
            if not self._waiting and not self.stream.ended:
                self._collect(self._waiting)
            self._bind(self._waiting)
        except OSError as error:
            if self._claim is not None:
                self._claim.close()
            self._waiting, self._claim, self._seen = None, None, []
            if self.problem != (problem := f"the spool {self._source} cannot be used: {error}"):
                _log.error("%s; it is tried again", problem)
            self.problem = problem
            return False
        if self.problem:
            _log.warning("the spool %s can be used again", self._source)
        self.problem = ""
        return bool(self._waiting or self._seen)

    def status(self) -> dict[str, Any]:
        """For an operator: bound rows, rejected lines, whether the spool has ended, and its problem."""
        num_rejected = sum(self._num_rejected.values()) + (0 if self._claim is None else self._claim.num_rejected)
        return {"rows": self.stream.num_rows, "rejected": num_rejected, "ended": self.stream.ended, "problem": self.problem}

    # -- claiming ----------------------------------------------------------------------------------------------------

    def _begin(self) -> list[Path]:
        """The claims that are not bound whole, in order."""
        self._files.make(self._rejected)
        rejected = [name for name in self._files.names(self._rejected) if is_ready(name)]
        if not self._num_rejected:
            self._num_rejected = {name: self._num_lines(self._rejected / name) for name in rejected}
        claims: dict[int, Path] = {}
        with suppress(FileNotFoundError):  # a claimed file must not come back after a power failure
            self._files.sync_path(self._source)
            if _IDENTITY in self._files.names(self._directory):
                self._name()
                claims = {
                    _number(name.removeprefix(self._prefix)): self._source / name
                    for name in self._files.names(self._source)
                    if name.startswith(self._prefix)
                }
        self._next = max(self._next, 1 + max([*claims, self.stream.tail[0], *map(_number, rejected)]))
        for number in [number for number in claims if number < self.stream.tail[0]]:
            self._files.unlink(claims.pop(number))
        return [path for _, path in sorted(claims.items())]

    def _name(self) -> None:
        """Name this run in its spool, which several may use."""
        path = self._directory / _IDENTITY
        if path.name not in self._files.names(self._directory):
            write_whole(path, secrets.token_hex(8), files=self._files)
        self._files.sync_path(self._directory)  # a hub that was killed while it wrote it may have left that undone
        self._prefix = f".claimed-{self._files.read(path).decode()}-"

    def _num_lines(self, path: Path) -> int:
        reader = self._files.reader(path)
        try:
            pieces = (self._files.read_at(reader, 1 << 20, offset) for offset in range(0, self._files.size(path), 1 << 20))
            return sum(piece.count(b"\n") for piece in pieces)
        finally:
            reader.close()

    def _collect(self, waiting: list[Path]) -> None:
        """Claim the next waiting file. When none waits and the spool has ended, end the stream."""
        is_last, num_taken = False, 0
        if not self._seen:
            is_last = self._look()
        while self._seen and num_taken < _CLAIMS:
            path = self._source / self._seen.pop()
            if self._files.is_readable(path):
                self._take(path, waiting)
                num_taken += 1
        if num_taken:
            self._files.sync_path(self._source)
        elif is_last:
            self.stream.end()

    def _look(self) -> bool:
        """Note the files to be claimed; returns whether the spool has ended."""
        names = self._files.names(self._source)
        ended = END in names
        if ended:
            names = self._files.names(self._source)  # files from before the end exist by now
        self._seen = sorted(filter(is_ready, names), reverse=True)
        return ended

    def _take(self, path: Path, waiting: list[Path]) -> None:
        if not self._prefix:
            self._name()
        claim = f"{self._next:09d}-{os.fsdecode(os.fsencode(path.name.removesuffix('.jsonl'))[:_NAME_BYTES])}.jsonl"
        target = self._source / f"{self._prefix}{claim}"
        with suppress(FileNotFoundError):  # another run has it
            self._files.replace(path, target)
            self._next += 1
            waiting.append(target)

    # -- binding -----------------------------------------------------------------------------------------------------

    def _bind(self, waiting: list[Path]) -> None:
        """Read a piece of a claimed file, or several small files, and bind the good rows."""
        lines: list[tuple[_Claim, int, bytes]] = []
        done: list[_Claim] = []
        num_bytes = 0
        while num_bytes < _PIECE and len(done) < len(waiting):
            if self._claim is None:
                path = waiting[len(done)]
                self._claim = _Claim(self._files, path, path.name.removeprefix(self._prefix), self._rejected)
            claim, read = self._claim, self._claim.read()
            if read is None:
                self._claim = None
                done.append(claim)
            else:
                lines += [(claim, number, line) for number, line in read]
                num_bytes += claim.num_read
        rows = [row for row in self._good(lines) if row[0] > self.stream.tail]
        for claim in done:
            if num_rejected := claim.finish():
                self._num_rejected[claim.name] = num_rejected
                _log.warning("%s: %d set aside, with the reasons, in %s", claim.name, num_rejected, self._rejected)
        if rows:
            self.stream.append(rows)
        self._files.unlink_all([claim.path for claim in done])
        del waiting[: len(done)]

    def _good(self, lines: Sequence[tuple[_Claim, int, bytes]]) -> list[tuple[Place, str]]:
        """Rows with their places; the other lines are set aside."""
        checked = iter(self._check([line for *_, line in lines if len(line) <= MAX_ROW_BYTES]))
        rows: list[tuple[Place, str]] = []
        for claim, number, line in lines:
            row = next(checked) if len(line) <= MAX_ROW_BYTES else RejectedLine(f"it is longer than {MAX_ROW_BYTES} bytes")
            if isinstance(row, str) and len(row.encode()) > MAX_ROW_BYTES:
                row = RejectedLine(f"as JSON it is longer than {MAX_ROW_BYTES} bytes")
            if isinstance(row, RejectedLine):
                claim.reject(number, line, row.reason)
            else:
                rows.append(((claim.number, number), row))
        return rows


def _number(claim: str) -> int:
    head = claim.partition("-")[0]
    return int(head) if head.isdecimal() else 0


class _Claim:
    """A claimed file that is read piece by piece, and the file of its lines that are set aside."""

    def __init__(self, files: Disk, path: Path, name: str, rejected: Path) -> None:
        """rejected: the directory of such files."""
        self.path, self.name, self.number = path, name, _number(name)
        self.num_rejected = self.num_read = 0
        """num_read: bytes, by the last `read`."""
        self._files, self._rejected = files, rejected
        self._reader: File | None = None
        self._writer: File | None = None
        self._size = self._offset = self._begin = self._line = 0  # _begin: of the line whose end was not read yet
        self._rest = b""  # of that line; of a longer one than may be, the beginning
        self._ended = not files.is_readable(path)
        if self._ended:
            files.replace(path, path.with_name(f".no-file-{name}"))
            self.reject(0, b"", "it is no regular file that this user may read")
        else:
            self._reader, self._size = files.reader(path), files.size(path)  # bytes that are appended from now on do not count

    def read(self) -> list[tuple[int, bytes]] | None:
        """The next lines with their numbers, without empty ones; None behind the last. One that is too long is cut."""
        if self._ended or self._reader is None:
            return None
        piece = self._files.read_at(self._reader, min(_PIECE, self._size - self._offset), self._offset)
        self.num_read = len(piece)
        self._offset += len(piece)
        self._ended = not piece
        *whole, rest = (self._rest + piece).split(b"\n")
        if whole:
            self._begin = self._offset - len(rest)
        if self._ended:
            whole.append(rest)
        elif self._offset - self._begin > _MAX_LINE_BYTES:
            self._ended = True
            reason = f"it is longer than {_MAX_LINE_BYTES} bytes: it and all behind it was left out"
            self.reject(self._line + len(whole) + 1, rest, reason)
        self._rest = rest[: MAX_ROW_BYTES + 1]
        numbered = enumerate(whole, self._line + 1)
        self._line += len(whole)
        return [(number, line) for number, line in numbered if line.strip()]

    def reject(self, line: int, raw: bytes, reason: str) -> None:
        if self._writer is None:
            self._writer = self._files.create(self._temporary, private=True)
        self.num_rejected += 1
        shown = raw[:_SHOWN_BYTES].decode(errors="backslashreplace")
        self._writer.write((json.dumps({"line": line, "reason": reason, "row": shown}) + "\n").encode())

    def finish(self) -> int:
        """Make the rejected lines durable and return how many there are. Raises OSError."""
        if self._reader is not None:
            self._reader.close()
        if self._writer is not None:
            self._writer.flush()
            self._files.sync(self._writer)
            self._writer.close()
            self._files.replace(self._temporary, self._rejected / self.name)
            self._files.sync_path(self._rejected)
        return self.num_rejected

    @property
    def _temporary(self) -> Path:
        return self._rejected / f".{self.name}.tmp"

    def close(self) -> None:
        for file in (self._reader, self._writer):
            if file is not None:
                file.close()
