"""The file of quarantined groups, for a person to read: `quarantine.jsonl`, one JSON object a line.

    {"group": 17, "prompt": 5, "attempts": 3, "reasons": ["attempt 0: actor-1 was silent for 15 s", ...]}

prompt: the row of the data set. reasons: of the newest attempts. The journal decides what is quarantined; the file is written
before the journal has it, as a whole, under another name first. So after a crash it has a line for every quarantined group,
perhaps one too many, which is taken out when the hub begins.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from async_rlhf.buffers.files import DISK, Files, write_whole

_LOST = "the file with the reason was lost"


class Quarantine:
    """Owns the file. Raises OSError when it cannot be written."""

    def __init__(
        self, path: Path, prompt_of: Callable[[int], int] | None, quarantined: Iterable[int], files: Files = DISK
    ) -> None:
        self._path, self._prompt_of, self._files = path, prompt_of, files
        found = self._read()
        self._records = {number: found.get(number) or self._record(number, None, [_LOST]) for number in sorted(quarantined)}
        if found.keys() != self._records.keys():
            self._write()

    def write(self, quarantined: Mapping[int, tuple[int, tuple[str, ...]]]) -> None:
        """Add these groups, number -> attempts and reasons; durable when it returns."""
        missing = [number for number in quarantined if number not in self._records]
        for number in missing:
            self._records[number] = self._record(number, *quarantined[number])
        try:
            if missing:
                self._write()
        except OSError:
            for number in missing:
                del self._records[number]
            raise

    def _record(self, number: int, attempts: int | None, reasons: Iterable[str]) -> dict[str, Any]:
        prompt = None if self._prompt_of is None else self._prompt_of(number)
        return {"group": number, "prompt": prompt, "attempts": attempts, "reasons": list(reasons)}

    def _read(self) -> dict[int, dict[str, Any]]:
        if self._path.name not in self._files.names(self._path.parent):
            return {}
        try:
            records = [json.loads(line) for line in self._files.read(self._path).decode().splitlines()]
            return {record["group"]: record for record in records}
        except (ValueError, KeyError, TypeError):
            return {}  # edited by hand; the journal has the numbers

    def _write(self) -> None:
        write_whole(self._path, *(json.dumps(record) + "\n" for record in self._records.values()), files=self._files)
