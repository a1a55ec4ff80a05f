"""What a soak found: slopes with verdicts, what was done to the run, what its books say; as JSON, a page and a picture."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from async_rlhf.experiments.page import plain, table
from async_rlhf.experiments.soak.sampling import GROWING, MEASURES
from async_rlhf.experiments.soak.slopes import Slope, slope
from async_rlhf.experiments.soak.soak import Books, Plan, Seen

# Growth per 1,000 steps that would go unnoticed: after a million steps 100 MiB, 100 descriptors.
LIMITS = {"memory": 0.1, "descriptors": 0.1, "threads": 0.1, "disk": 0.1, "files": 0.1, "processes": 0.1}
# Of a life, in seconds: what libraries load when they are first used, and buffers of the newest so many lines that fill.
_WARM_UP_S = 120.0
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#888888")
_SHOWN = ("memory", "descriptors", "threads", "disk")


@dataclass(frozen=True)
class Line:
    """A measure of a process. Slopes are None where too little was seen of it. last: its newest value."""

    process: str
    measure: str
    last: float
    per_1000_steps: Slope | None
    per_hour: Slope | None

    @property
    def verdict(self) -> str:
        return self.per_1000_steps.verdict(LIMITS[self.measure]) if self.per_1000_steps is not None else "too short"


@dataclass(frozen=True)
class Report:
    """bytes_per_step: of the parts that keep everything. done: how often what was done to the run."""

    hours: float
    lines: list[Line]
    bytes_per_step: dict[str, float]
    done: dict[str, int]
    books: Books
    exit_code: int | None

    @classmethod
    def of(cls, plan: Plan, seen: Seen, books: Books) -> Report:
        warm_up_h = min(_WARM_UP_S, plan.seconds / 4) / 3600
        lines = []
        for (process, measure), samples in sorted(seen.samples.items()):
            over = {axis: slope(samples, axis, warm_up_h=warm_up_h) for axis in ("steps", "hours")}
            lines.append(Line(process, measure, samples[-1].value, over["steps"], over["hours"]))
        done = {
            "kills": len(seen.blows),
            "live changes that took effect": books.changes,
            "files that began anew": len(seen.rotations),
            "answers of the page": seen.views["answered"],
            "requests that failed": seen.views["failed"],
        }
        kept = {part: seen.parts[part] / max(1, books.steps) for part in GROWING if part in seen.parts}
        return cls(seen.hours, lines, kept, done, books, seen.exit_code)

    @property
    def is_good(self) -> bool:
        """Nothing is shown to grow, the books are right, and the run has ended well."""
        return self.exit_code == 0 and not self.books.wrong and all(line.verdict != "grows" for line in self.lines)


def write(report: Report, seen: Seen, out: Path) -> None:
    """report.json, report.md, soak.png, and all samples as samples.jsonl."""
    verdicts = [{**asdict(line), "verdict": line.verdict} for line in report.lines]
    (out / "report.json").write_text(json.dumps({**asdict(report), "lines": verdicts, "good": report.is_good}, indent=1) + "\n")
    (out / "report.md").write_text(markdown(report))
    with (out / "samples.jsonl").open("w") as file:
        for (process, measure), samples in seen.samples.items():
            for each in samples:
                file.write(json.dumps({"process": process, "measure": measure, **asdict(each)}) + "\n")
    draw(seen).savefig(out / "soak.png", dpi=110)


def markdown(report: Report) -> str:
    rows = [("process", "measure", "last", "per 1,000 steps (95 %)", "per hour (95 %)", "verdict")]
    for line in report.lines:
        unit = f" {MEASURES[line.measure]}".rstrip()
        slopes = _written(line.per_1000_steps), _written(line.per_hour)
        rows.append((line.process, line.measure, f"{line.last:.4g}{unit}", *slopes, line.verdict))
    kept = ", ".join(f"{part} {num_bytes:.0f}" for part, num_bytes in report.bytes_per_step.items())
    books, limits = report.books, ", ".join(f"{name} {limit} {MEASURES[name]}".rstrip() for name, limit in LIMITS.items())
    parts = [
        "# A soak",
        f"{books.steps:,} steps in {report.hours * 60:.1f} minutes; {books.rows:,} rows; exit code {report.exit_code}; "
        + ", ".join(f"{count:,} {what}" for what, count in report.done.items())
        + ".",
        "**The books**: "
        + ("; ".join(plain(each) for each in books.wrong) if books.wrong else "the ledger closes, no group is lost or trained ")
        + ("" if books.wrong else f"twice, every row was used as often as promised ({books.quarantined} groups quarantined)")
        + ".",
        table(rows),
        f"Flat: the whole interval lies below the limit, per 1,000 steps: {limits}. Slopes lie within the lives of a process, "
        "behind the first two minutes of each.",
        f"Kept by design, bytes a step: {kept}.",
        "![Memory, descriptors, threads and disk over the steps](soak.png)",
    ]
    return "\n\n".join(parts) + "\n"


def _written(found: Slope | None) -> str:
    return "" if found is None else f"{found.mean:+.3g} ({found.low:+.3g} to {found.high:+.3g})"


def draw(seen: Seen) -> Figure:
    """A panel a measure, a line a process; kills are marked below."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    panels: Any = figure.subplots(2, 2, sharex=True)
    names = sorted({process for process, _ in seen.samples if process != "all processes"})
    colours = dict(zip(names, cycle(_COLOURS), strict=False))
    for axes, measure in zip(panels.flat, _SHOWN, strict=True):
        for (process, shown), samples in sorted(seen.samples.items()):
            if shown != measure:
                continue
            for life in dict.fromkeys(each.life for each in samples):
                points = [each for each in samples if each.life == life]
                xs, ys = [each.steps for each in points], [each.value for each in points]
                axes.plot(xs, ys, color=colours[process], linewidth=1.2)
        for blow in seen.blows:
            axes.axvline(blow.step / 1000, color="#999999", linewidth=0.6, linestyle=":")
        axes.set_title(f"{measure} ({MEASURES[measure]})" if MEASURES[measure] else measure, fontsize="medium")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[-1]:
        axes.set_xlabel("thousand steps (dotted: a process was killed)")
    handles = [panels.flat[0].plot([], [], color=colours[name], label=name)[0] for name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(names), frameon=False, fontsize="small")
    return figure
