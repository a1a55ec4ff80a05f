"""A spool under kills, power cuts, full disks, other file systems and other runs: every good row is bound once, for good."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from itertools import product
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rlhf.buffers.errors import DamagedError
from async_rlhf.buffers.spool import claims
from async_rlhf.buffers.spool.claims import RejectedLine, Spool
from async_rlhf.buffers.spool.deposit import END
from async_rlhf.buffers.spool.stream import PromptStream
from tests.simulation.disk import HubKilledError, MemoryDisk

SPOOL = Path("/spool")


def check(lines: Sequence[bytes]) -> list[str | RejectedLine]:
    return [line.decode() if line.startswith(b"{") else RejectedLine("it is no object") for line in lines]


class Run:
    """One run's hub over its lives, and what it has given credits for."""

    def __init__(self, disk: MemoryDisk, name: str, repeat: int) -> None:
        self.disk, self.directory, self.repeat = disk, Path(f"/{name}/data/spool"), repeat
        self.promised: list[str] = []
        self.ended = False
        self.spool: Spool | None = None

    def turn(self) -> bool:
        """One of a living hub, which is started when there is none. Raises HubKilledError where the fuse ends it."""
        if self.spool is None:
            stream = PromptStream(self.directory, self.repeat, self.disk)
            self.spool = Spool(SPOOL, self.directory, stream, check, self.disk)
        more = self.spool.turn()
        stream = self.spool.stream
        rows = [stream.row(number) for number in range(stream.num_numbers)]
        assert rows == [row for row in rows[:: self.repeat] for _ in range(self.repeat)], "each row has its numbers, in order"
        assert rows[:: self.repeat][: len(self.promised)] == self.promised, "what was credited stays as it was"
        assert not self.ended or rows[:: self.repeat] == self.promised, "behind the end nothing comes"
        self.promised, self.ended = rows[:: self.repeat], stream.ended
        return more

    def rejected(self) -> Iterator[str]:
        for name in self.disk.names(self.directory / "rejected"):
            if not name.startswith("."):
                lines = self.disk.read(self.directory / "rejected" / name).decode().splitlines()
                yield from (json.loads(line)["row"] for line in lines)


def drop(disk: MemoryDisk, name: str, lines: Sequence[str]) -> None:
    disk.deposit(SPOOL / name, "\n".join(lines).encode())


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("drop"), st.lists(st.booleans(), max_size=5)),
        st.tuples(st.just("kill"), st.integers(0, 25)),
        st.tuples(st.just("power"), st.integers(0, 25)),
        st.tuples(st.just("full"), st.integers(1, 3)),
        st.tuples(st.just("turn"), st.integers(1, 3)),
    ),
    max_size=14,
)


@settings(max_examples=400)
@given(EVENTS, st.integers(1, 2), st.integers(1, 3), st.integers(0, 1 << 30))
def test_whatever_dies_when_every_good_row_is_bound_once_and_stays(
    events: list[tuple[str, int | list[bool]]], num_runs: int, repeat: int, seed: int
) -> None:
    disk = MemoryDisk(Random(seed))
    runs = [Run(disk, f"run-{number}", repeat) for number in range(num_runs)]
    rng, good, bad, files = Random(seed), list[str](), list[str](), 0

    def turn(power: bool = False) -> None:
        run = rng.choice(runs)
        try:
            run.turn()
        except HubKilledError:
            run.spool = None
            disk.fuse = None
            if power:
                disk.crash()
                for each in runs:
                    each.spool = None

    with patch.object(claims, "_PIECE", 24), patch.object(claims, "_CLAIMS", 2), patch.object(claims, "_SHOWN_BYTES", 100):
        for kind, amount in events:
            if isinstance(amount, list):
                lines = [f'{{"n":{len(good) + len(bad) + place}}}' if fine else f"bad {files} {place}"
                         for place, fine in enumerate(amount)]  # fmt: skip
                good += [line for line in lines if line.startswith("{")]
                bad += [line for line in lines if not line.startswith("{")]
                files += 1
                drop(disk, f"{files:03d}.jsonl", lines)
            elif kind == "turn":
                for _ in range(amount):
                    turn()
            elif kind == "full":
                disk.full = True
                with suppress(OSError):
                    turn()
                    turn()
                disk.full = False
            else:
                disk.fuse = amount
                for _ in range(4):
                    turn(kind == "power")
                disk.fuse = None
        finish(disk, runs, good, bad)


@pytest.mark.parametrize("power", [False, True])
def test_a_claim_may_be_cut_at_every_operation_on_files_and_once_more_behind_it(power: bool) -> None:
    good, bad = ['{"n":0}', '{"n":1}', '{"n":2}'], ["bad 0"]
    for first, second in product(range(50), (None, *range(0, 24, 2))):
        disk = MemoryDisk(Random(first))
        run = Run(disk, "run", 1)
        drop(disk, "a.jsonl", ["bad 0", '{"n":0}', '{"n":1}'])
        drop(disk, "b.jsonl", ['{"n":2}'])
        for fuse in (first, second):
            disk.fuse = fuse
            try:
                run.turn()
                run.turn()
            except HubKilledError:
                run.spool = None
                if power or fuse == second:
                    disk.crash()
            disk.fuse = None
        finish(disk, [run], good, bad)


def finish(disk: MemoryDisk, runs: Sequence[Run], good: Sequence[str], bad: Sequence[str]) -> None:
    """Nothing fails any more, and the spool ends: every promise is kept."""
    drop(disk, END, [])
    for run in runs:
        for _ in range(200):
            if not run.turn() and run.ended:
                break
    bound = [row for run in runs for row in run.promised]
    assert sorted(bound) == sorted(good), "each good row is bound once, by one run"
    for run in runs:
        assert run.promised == sorted(run.promised, key=lambda row: json.loads(row)["n"]), "in the order of their files"
        assert run.spool is not None and run.ended and not run.spool.problem
    assert sorted({row for run in runs for row in run.rejected()}) == sorted(bad)
    assert disk.names(SPOOL) == [END]


def test_a_row_behind_the_end_of_a_damaged_stream_is_not_taken_for_another(tmp_path: Path) -> None:
    stream = PromptStream(tmp_path)
    stream.append([((1, line), f'{{"n":{line}}}') for line in range(1, 4)])
    stream.close()
    path = tmp_path / "stream.jsonl"
    whole = path.read_bytes()
    for torn in (whole[:-3], whole + b'{"claim":1,"line":4,"row":', whole[:-10] + bytes(10)):
        path.write_bytes(torn)
        with closing(PromptStream(tmp_path)) as again:
            assert again.num_rows == (3 if torn.startswith(whole) else 2) and again.tail == (1, again.num_rows)
        assert path.read_bytes() == whole[: path.stat().st_size]
    path.write_bytes(whole)
    with closing(PromptStream(tmp_path)) as again:
        path.write_bytes(whole.replace(b'"n":2', b'"n" 2'))
        with pytest.raises(DamagedError, match=r"bytes 35 to 70 are no row"):
            again.row(1)
