"""The parts that all benchmarks share: sides in turns, rows of results, and the share of the machine that other programs used.

A part is a generator function `part(bench)`. It yields one `BenchmarkRow` for each load; its sides run alternately, so that
a slow moment of the machine falls on all of them. Nothing here decides whether a ratio is good enough: a row carries its goal,
and the reader compares.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil
import zmq

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "configs" / "models" / "tiny-speller"
"""The model of both systems where no other is named."""
# Share of all cores' time that other programs may use: above it, they are measured too.
QUIET = 0.05
# Processor times are counted in hundredths of a second.
_SHORTEST_S = 1.0
_RAW_LIMIT_S = 300.0
SPAWN = multiprocessing.get_context("spawn")
DType = Literal["float32", "bfloat16"]
Device = Literal["cpu", "cuda"]
Part = Callable[["Bench"], Iterator["BenchmarkRow"]]


class MissingError(Exception):
    """A part needs what is not installed; the message names it."""


@dataclass(frozen=True)
class Bench:
    """Options. turns: None for as many as the part takes by itself. small: that it works, not how fast. load: what the names of
    loads have in them. model, dtype, slots: of engines; None for the tiny one, and for as many as suit the model. device: of
    both sides of `asynchronous`."""

    turns: int | None = None
    small: bool = False
    load: str = ""
    model: Path | None = None
    dtype: DType = "float32"
    slots: int | None = None
    device: Device = "cpu"

    def size(self, usual: T, small: T) -> T:
        return small if self.small else usual

    def num_turns(self, usual: int) -> int:
        """Timed turns of each side."""
        return self.turns or self.size(usual, 1)


@dataclass(frozen=True)
class BenchmarkRow:
    """One load. sides: median over the turns by the side's name, in `unit`.

    ratio: median of the turns' ratios, first side over second; lowest and highest of them. at_least, at_most: the goal.
    figures: what else was measured, by a name that ends in its unit. foreign: share of all cores' time that programs outside
    the benchmark used. None: unknown.
    """

    load: str
    sides: Mapping[str, float | None]
    unit: str
    ratio: float | None
    lowest: float | None
    highest: float | None
    turns: int
    at_least: float | None = None
    at_most: float | None = None
    figures: Mapping[str, float | None] = field(default_factory=dict)
    part: str = ""
    foreign: float | None = None
    load_average: float | None = None

    @classmethod
    def of(
        cls,
        load: str,
        values: Mapping[str, Sequence[float]],
        unit: str,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        figures: Mapping[str, float] | None = None,
    ) -> BenchmarkRow:
        """values: one number a turn for each side; the turns' ratios are of the first side over the second."""
        first, *others = values.values()
        ratios = [a / b for a, b in zip(first, others[0], strict=True)] if others else []
        median, low, high = (rounded(f(ratios)) if ratios else None for f in (statistics.median, min, max))
        sides = {name: rounded(statistics.median(each)) for name, each in values.items()}
        further = {name: rounded(value) for name, value in (figures or {}).items()}
        return cls(load, sides, unit, median, low, high, len(first), at_least, at_most, further)

    def __str__(self) -> str:
        """Load, sides, ratio with its range, turns, goal, everything else, and whether the machine was quiet, in a line."""
        sides = "  ".join(f"{name} {shown(value)} {self.unit}" for name, value in self.sides.items())
        ratio, goal, note = "", "", ""
        if self.ratio is not None:
            spread = f" ({self.lowest:.3g} to {self.highest:.3g})" if self.lowest != self.highest else ""
            ratio = f"ratio {self.ratio:.3g}{spread}"
            for words, bound, sign in (("at least", self.at_least, 1), ("at most", self.at_most, -1)):
                if bound is not None:
                    goal = f"goal {words} {bound:g}, {'reached' if sign * self.ratio >= sign * bound else 'missed'}"
        if self.foreign is not None and self.foreign > QUIET:
            note = f"not quiet: other programs used {self.foreign:.0%}, measure again"
        figures = "  ".join(f"{name} {shown(value)}" for name, value in self.figures.items())
        return f"{self.load}: {'; '.join(filter(None, (sides, ratio, f'turns {self.turns}', goal, figures, note)))}"


def rounded(value: float) -> float:
    """Four significant digits; whole numbers as they are."""
    return value if isinstance(value, int) else float(f"{value:.4g}")


def shown(value: float | None) -> str:
    """A number for readers: whole from 100 on, three significant digits below."""
    return "unknown" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def alternate(sides: Mapping[str, Callable[[], T]], turns: int, warm_up: int = 1) -> dict[str, list[T]]:
    """The values of the sides, a list each of `turns`. The order is reversed every other turn; `warm_up` turns come before."""
    found: dict[str, list[T]] = {name: [] for name in sides}
    for turn in range(warm_up + turns):
        for name in list(sides) if turn % 2 == 0 else reversed(list(sides)):
            value = sides[name]()
            if turn >= warm_up:
                found[name].append(value)
    return found


def timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Callable[[], float]:
    """A side that returns its seconds, by this clock."""

    def run() -> float:
        began = clock()
        work()
        return clock() - began

    return run


def beside(
    load: str, sides: Mapping[str, Callable[[], float]], turns: int, unit: str, work: float | None = None, **goal: Any
) -> BenchmarkRow:
    """The row of sides that return seconds, in turns: as they are, or as `work` a second. goal: for `BenchmarkRow.of`."""
    seconds = alternate(sides, turns)
    return BenchmarkRow.of(load, seconds if work is None else rates(work, seconds), unit, **goal)


def rates(work: float, seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """`work` a second, for each turn of each side."""
    return {name: [work / taken for taken in values] for name, values in seconds.items()}


@contextmanager
def running(*processes: BaseProcess) -> Iterator[None]:
    """Started at the beginning of the block, killed at its end."""
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


@contextmanager
def talking(target: Callable[..., None], *arguments: object, daemon: bool = True) -> Iterator[Connection]:
    """Our end of a pipe to a process of this function, whose last argument is the other end. `recv` raises EOFError when the
    process has ended. daemon: it starts no processes of its own."""
    ours, theirs = SPAWN.Pipe()
    with running(SPAWN.Process(target=target, args=(*arguments, theirs), daemon=daemon)):
        theirs.close()
        yield ours


def raw_seconds(address: str, message_bytes: int, count: int, pushers: int) -> float:
    """Seconds from the first message to the last by ZeroMQ alone, PUSH to PULL: no hub, nothing checked, nothing kept."""
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, _waiting(message_bytes))
    socket.setsockopt(zmq.RCVTIMEO, int(_RAW_LIMIT_S * 1000))
    socket.bind(address)
    arguments = (address, message_bytes, count // pushers)
    try:
        with running(*(SPAWN.Process(target=_push, args=arguments, daemon=True) for _ in range(pushers))):
            for _ in range(pushers):
                socket.recv()
            began = time.perf_counter()
            for _ in range(count // pushers * pushers - pushers):
                socket.recv()
            return time.perf_counter() - began
    finally:
        context.destroy(linger=0)


def _push(address: str, message_bytes: int, count: int) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, _waiting(message_bytes))
    socket.connect(address)
    message = memoryview(bytes(message_bytes))
    for _ in range(count):
        socket.send(message)
    socket.close()
    context.term()


def _waiting(message_bytes: int) -> int:
    """Messages that may wait: of large ones few, for they lie in memory."""
    return 16 if message_bytes >= 1 << 20 else 1000


class Watch:
    """How much of the machine other programs use, between two calls of `lap`.

    A run ends its workers after the process that started them: where orphans are not adopted (`adopt_orphans`) they count as
    foreign.
    """

    def __init__(self) -> None:
        self._foreign: float | None = None
        self._last = self._now()

    def lap(self) -> dict[str, float | None]:
        """`foreign` since the last call, or as before when that was less than a second ago; the load average of a minute."""
        now = self._now()
        seconds, busy, own = (after - before for after, before in zip(now, self._last, strict=True))
        if seconds >= _SHORTEST_S:
            self._foreign = round(max(0.0, busy - own) / ((psutil.cpu_count() or 1) * seconds), 3)
            self._last = now
        return {"foreign": self._foreign, "load_average": round(os.getloadavg()[0], 1)}

    def _now(self) -> tuple[float, float, float]:
        """Seconds of the clock, of all cores that were busy, and of what is ours."""
        times = psutil.cpu_times()
        busy = float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))
        return time.monotonic(), busy, own_cpu_s()


def own_cpu_s() -> float:
    """Processor seconds of this process and of all below it, those that have ended among them."""
    process = psutil.Process()
    return sum(map(cpu_s, [process, *process.children(recursive=True)]))


def cpu_s(process: psutil.Process) -> float:
    """Seconds of a process and of its children that have ended; 0 where it has ended itself."""
    try:
        return float(sum(process.cpu_times()[:4]))
    except psutil.NoSuchProcess:
        return 0.0


def await_quiet(limit_s: float = 30.0) -> None:
    """Wait until the machine does little else, at most so long; what it does all the same is in the row."""
    deadline = time.monotonic() + limit_s
    while psutil.cpu_percent(interval=1.0) > 100 * QUIET and time.monotonic() < deadline:
        pass
