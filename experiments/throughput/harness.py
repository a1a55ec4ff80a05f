"""What every benchmark shares: sides in turns, rows of results, the note about other work, options and output.

A part is a generator function `part(bench, **options)` in a module of its own. It yields one `Row` for each load; its sides
run alternately, so that a slow moment of the machine falls on all of them. `command` makes a command line of it. Nothing
here decides whether a ratio is good enough: a row carries its goal, and the reader compares.
"""

from __future__ import annotations

import inspect
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, TypeVar

import psutil
import typer
from rich.console import Console
from rich.table import Table

T = TypeVar("T")
# Share of all cores' time that other programs may use: above it, they are measured too.
QUIET = 0.05
# Exit code of a part whose package is not installed.
MISSING = 3
_QUIET_LIMIT_S = 30.0
# Processor times are counted in hundredths of a second.
_SHORTEST_S = 1.0


class MissingError(Exception):
    """A part needs what is not installed; the message names it."""


@dataclass(frozen=True)
class Bench:
    """Options common to all parts. turns: None for as many as the part takes by itself. small: that it works, not how fast."""

    turns: int | None = None
    small: bool = False

    def size(self, usual: T, small: T) -> T:
        """A load's size."""
        return small if self.small else usual

    def num_turns(self, usual: int) -> int:
        """Timed turns of each side."""
        return self.turns or self.size(usual, 1)


@dataclass(frozen=True)
class Row:
    """One load. sides: median over the turns by the side's name, in `unit`.

    ratio: median of the turns' ratios, first side over second; lowest and highest of them. figures: what else was measured, by
    a name that ends in its unit. foreign: share of all cores' time that programs outside the benchmark used. None: unknown.
    """

    load: str
    sides: Mapping[str, float | None]
    unit: str
    ratio: float | None
    lowest: float | None
    highest: float | None
    turns: int | None
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
        counted: bool = False,
        turns: int | None = None,
        figures: Mapping[str, float] | None = None,
    ) -> Row:
        """values: one number a turn for each side; the turns' ratios are of the first side over the second.

        counted: bytes or steps, which other work does not change; such a row has no turns.
        turns: where several values come from each turn.
        """
        first, *others = values.values()
        ratios = [a / b for a, b in zip(first, others[0], strict=True)] if others else []
        median, low, high = (rounded(f(ratios)) if ratios else None for f in (statistics.median, min, max))
        return cls(
            load,
            {name: rounded(statistics.median(each)) for name, each in values.items()},
            unit,
            median,
            low,
            high,
            None if counted else turns or len(first),
            at_least,
            at_most,
            {name: rounded(value) for name, value in (figures or {}).items()},
        )

    @property
    def goal(self) -> str:
        """The bound on the ratio, and whether it holds; empty where there is none."""
        for word, bound, holds in (
            ("at least", self.at_least, self.ratio is not None and self.ratio >= (self.at_least or 0.0)),
            ("at most", self.at_most, self.ratio is not None and self.ratio <= (self.at_most or 0.0)),
        ):
            if bound is not None:
                return f"{word} {bound:g}, {'reached' if holds else 'missed'}"
        return ""

    @property
    def note(self) -> str:
        """Empty on a quiet machine."""
        loud = self.turns is not None and self.foreign is not None and self.foreign > QUIET
        return f"not quiet: other programs used {self.foreign:.0%}, measure again" if loud else ""


def rounded(value: float) -> float:
    """Four significant digits; whole numbers as they are."""
    return value if isinstance(value, int) else float(f"{value:.4g}")


def alternate(sides: Mapping[str, Callable[[], T]], turns: int, warm_up: int = 1) -> dict[str, list[T]]:
    """What the sides return, a list each of `turns`. The order is reversed every other turn; `warm_up` turns come before."""
    found: dict[str, list[T]] = {name: [] for name in sides}
    for turn in range(warm_up + turns):
        for name in list(sides) if turn % 2 == 0 else reversed(list(sides)):
            value = sides[name]()
            if turn >= warm_up:
                found[name].append(value)
    return found


def timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Callable[[], float]:
    """A side that returns its seconds by `clock`."""

    def run() -> float:
        began = clock()
        work()
        return clock() - began

    return run


def rates(work: float, seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """`work` a second, for each turn of each side."""
    return {name: [work / each for each in values] for name, values in seconds.items()}


class Watch:
    """How much of the machine other programs use, between two calls of `lap`.

    A run ends its workers after the process that started them: where orphans are not adopted (`adopt_orphans`) they count as
    foreign.
    """

    def __init__(self) -> None:
        self._foreign: float | None = None
        self._began, self._busy, self._own = self._now()

    def lap(self) -> dict[str, float | None]:
        """`foreign` since the last call, or as before when that was less than a second ago; the load average of a minute."""
        began, busy, own = self._now()
        load_average = round(os.getloadavg()[0], 1)
        if began - self._began < _SHORTEST_S:
            return {"foreign": self._foreign, "load_average": load_average}
        available = (psutil.cpu_count() or 1) * max(began - self._began, 1e-9)
        self._foreign = round(max(0.0, (busy - self._busy) - (own - self._own)) / available, 3)
        self._began, self._busy, self._own = began, busy, own
        return {"foreign": self._foreign, "load_average": load_average}

    def _now(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        busy = float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))
        return time.monotonic(), busy, own_cpu_s()


def own_cpu_s() -> float:
    """Processor seconds of this process and of all below it, those that have ended among them."""
    process = psutil.Process()
    return sum(map(_cpu_s, [process, *process.children(recursive=True)]))


def _cpu_s(process: psutil.Process) -> float:
    """Seconds of a process and of its children that have ended."""
    try:
        return float(sum(process.cpu_times()[:4]))
    except psutil.NoSuchProcess:
        return 0.0


def await_quiet(limit_s: float = _QUIET_LIMIT_S) -> None:
    """Wait until the machine does little else; what it does all the same is in the row."""
    deadline = time.monotonic() + limit_s
    while psutil.cpu_percent(interval=1.0) > 100 * QUIET and time.monotonic() < deadline:
        pass


def command(name: str, part: Callable[..., Iterator[Row]]) -> Callable[..., None]:
    """A function for typer: the part's own options after those that all parts have. Exit code 3 when a package is missing."""

    def run(as_json: bool, turns: int | None, small: bool, **options: Any) -> None:
        watch, rows = Watch(), list[Row]()
        try:
            for row in part(Bench(turns, small), **options):
                rows.append(replace(row, part=name, **watch.lap()))  # type: ignore[arg-type]
                if as_json:
                    typer.echo(json.dumps(asdict(rows[-1])))
                elif not Console().is_terminal:
                    typer.echo(line(rows[-1]))
        except MissingError as reason:
            typer.echo(f"{name}: {reason}", err=True)
            raise typer.Exit(MISSING) from reason
        finally:
            if rows and not as_json and Console().is_terminal:
                Console().print(table(rows))

    own = list(inspect.signature(part, eval_str=True).parameters.values())[1:]
    run.__signature__ = inspect.Signature(_COMMON + [each.replace(kind=_KEYWORD) for each in own])  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in _COMMON + own}
    run.__doc__ = part.__doc__
    return run


_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_COMMON = [
    inspect.Parameter(name, _KEYWORD, default=default, annotation=annotation)
    for name, default, annotation in (
        ("as_json", False, Annotated[bool, typer.Option("--json", help="One JSON object a row instead of a table.")]),
        (
            "turns",
            None,
            Annotated[int | None, typer.Option(min=1, help="Timed turns of each side, instead of the part's own.")],
        ),
        ("small", False, Annotated[bool, typer.Option("--small", help="Small loads, one turn: that it works, not how fast.")]),
    )
]


def cells(row: Row) -> tuple[str, ...]:
    """Load, sides, ratio with its range, turns, goal, and everything else."""
    sides = "  ".join(f"{name} {shown(value)} {row.unit}" for name, value in row.sides.items())
    ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
    if row.lowest is not None and row.lowest != row.highest:
        ratio += f" ({row.lowest:.3g} to {row.highest:.3g})"
    figures = "  ".join(f"{name} {shown(value)}" for name, value in row.figures.items())
    return row.load, sides, ratio, str(row.turns or ""), row.goal, "  ".join(filter(None, (figures, row.note)))


def shown(value: float | None) -> str:
    """A number for readers: whole from 100 on, three significant digits below."""
    return "unknown" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def line(row: Row) -> str:
    """A row where stdout is no terminal."""
    load, sides, ratio, turns, goal, rest = cells(row)
    words = (sides, ratio and f"ratio {ratio}", turns and f"turns {turns}", goal and f"goal {goal}", rest)
    return f"{load}: {'; '.join(filter(None, words))}"


def table(rows: Sequence[Row]) -> Table:
    """The rows of one part, for a terminal."""
    made = Table(title=rows[0].part, title_justify="left")
    for heading in ("load", "sides (medians)", "ratio", "turns", "goal", "further"):
        made.add_column(heading)
    for row in rows:
        made.add_row(*cells(row))
    return made
