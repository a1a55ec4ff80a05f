"""How fast a run claims what lies in its spool: `python tests/buffers/spool/claiming.py [FILES] [DIR]`, 10,000 of one row.

Rows are looked at as a run does it, bound and made durable; one file of as many rows is claimed for comparison. DIR: where, on
the file system that is asked about; left out, where temporary files are.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import typer

from async_rlhf.buffers.spool.claims import Spool
from async_rlhf.buffers.spool.stream import Stream
from async_rlhf.run.checks.spool import RowCheck
from async_rlhf.run.config import load


def main(count: int, place: str | None = None) -> None:
    rows = [json.dumps({"prompt": f"Spell backward: {number}", "answer": str(number)[::-1]}) for number in range(count)]
    for what, files in ((f"{count:,} files of one row", [[row] for row in rows]), (f"one file of {count:,} rows", [rows])):
        with tempfile.TemporaryDirectory(dir=place) as directory:
            took = claimed(Path(directory), files)
        typer.echo(f"{what}: {count / took:,.0f} rows a second")


def claimed(directory: Path, files: Sequence[Sequence[str]]) -> float:
    """Seconds until every row of these files is bound."""
    source, own = directory / "spool", directory / "run"
    source.mkdir()
    for number, rows in enumerate(files):
        (source / f"{number:08d}.jsonl").write_text("\n".join(rows) + "\n")
    settings = {"data.source": f"spool:{source}", "data.options": {}, "max_steps": "none", "rewards.functions": ["exact"]}
    check = RowCheck(load("quick", settings))
    with closing(Stream(own)) as stream:
        spool = Spool(source, own, stream, check)
        began = time.perf_counter()
        while spool.turn():
            pass
        took = time.perf_counter() - began
        assert stream.num_rows == sum(map(len, files)), spool.status()
    return took


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000, *sys.argv[2:3])
