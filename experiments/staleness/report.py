"""The report of a sweep: results.csv, two pictures, and one page as Markdown and as HTML with the pictures inside.

From an archive alone. Formats numbers, never computes one; the tables below the result are those of `measures`. Called by
`sweep` and by `async-rlhf report`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from async_rlhf.experiments.page import by_group, difference, write_page
from async_rlhf.experiments.staleness.archive import Archive
from async_rlhf.experiments.staleness.checks import checks, listed
from async_rlhf.experiments.staleness.measures import Column, mean_of, sections
from async_rlhf.experiments.staleness.outcomes import compared
from async_rlhf.experiments.staleness.table import Table
from async_rlhf.experiments.statistics import MIN_SEEDS, estimate, worded

# Cells without a result that are named one by one.
_MOST_NAMED = 6


def write(archive: Archive, directory: Path, say: Callable[[str], None]) -> list[Path]:
    """Into the directory, which exists. What was written, the pages last. Raises OSError."""
    write_csv(archive.table, directory / "results.csv")

    def draw() -> dict[str, Any]:
        from async_rlhf.experiments.staleness.plot import pictures

        return pictures(archive.table, archive.sweep, archive.command)

    return [directory / "results.csv", *write_page(directory, lambda drawn: render(archive, drawn), draw, say)]


def write_csv(cells: Table, path: Path) -> None:
    """A line a cell, numbers to 6 digits behind the point; an empty field was not measured."""
    # as Python rounds, and no zero has a sign
    rounded = cells.cells.select_dtypes("float64").map(lambda value: round(value, 6) + 0.0)
    cells.cells.assign(**rounded).to_csv(path, index=False, lineterminator="\n")


def render(archive: Archive, drawn: Mapping[str, str]) -> str:
    """The page. drawn: files beside it, of the pictures by their names."""
    sweep, cells, missing = archive.sweep, archive.table, archive.missing
    first, count = cells.results[0], len(cells.results)
    overrides = ", ".join(f"`{key} = {value}`" for key, value in sweep.overrides.items()) or "none"
    base = f" Base: `{Path(sweep.base).name}`, with {overrides}."
    named = "; ".join([*missing[:_MOST_NAMED], *(["..."] if len(missing) > _MOST_NAMED else [])])
    left = f" **{len(missing)} of {len(missing) + count} cells have no result: {named}.**" if missing else ""
    budget = f" Budget: {sweep.samples:,} samples trained on per run." if sweep.samples else ""
    before = estimate(cells.cells["held_out_reward_start"])
    shown = {name: [f"![{_PICTURES[name]}]({file})"] for name, file in drawn.items()}
    parts = [
        f"# {sweep.question}",
        f"    {archive.command}",
        f"Sweep `{sweep.name}`: {sweep.grid}. Seeds: {', '.join(map(str, sweep.seeds))}.{base}{budget} "
        f"Settings {first.fingerprint}; {', '.join(first.code)}.{left}",
        "## Result",
        _legend(max(cells.seeds), min(cells.seeds)),
        result(cells),
        f"Held-out reward before training: {'not measured' if before is None else f'{before.mean:.3f}'}.",
        *shown.get("results", []),
        *sections(cells, archive.alone),
        *shown.get("trade_offs", []),
        "## Checks",
        listed(checks(cells)),
        "## What may be concluded, and what not",
        conclusions(cells),
    ]
    return "\n\n".join(parts) + "\n"


_PICTURES = {
    "results": "Reward over steps and seconds, held-out reward and staleness by setting",
    "trade_offs": "Reward over samples and tokens, corrections, divergences and the cost of a target",
}


def result(cells: Table) -> str:
    """One row a setting."""
    numbers, reference = cells.cells, next(iter(cells.settings))
    found = compared(cells, numbers["held_out_reward_end"])
    columns: dict[str, Column] = {
        "seeds": lambda runs: str(len(runs)),
        "held-out reward, end": mean_of(numbers["held_out_reward_end"]),
        f"minus that of {reference}": lambda runs: (
            "" if (label := cells.labels[runs[0]]) == reference else difference(found.get(label))
        ),
        "held-out accuracy, end": mean_of(numbers["held_out_accuracy_end"]),
        "length": mean_of(numbers["held_out_length_end"], 1),
        "reward, last quarter": mean_of(numbers["reward_last_quarter"]),
        "area under the reward": mean_of(numbers["reward_area"]),
        "staleness, mean (max)": lambda runs: (
            f"{numbers['staleness_mean'][runs].mean():.2f} ({numbers['staleness_max'][runs].max()})"
        ),
        "ESS": mean_of(numbers["is_ess_mean"]),
        "largest ratio": lambda runs: (
            f"{most:.2f}" if (most := numbers["is_ratio_max"][runs].max()) == most else "-"  # NaN is no number
        ),
        "samples/s": mean_of(numbers["samples_per_s"], 0),
    }
    if numbers["held_out_accuracy_end"].isna().all():
        del columns["held-out accuracy, end"]
    return by_group(cells.settings, columns)


def conclusions(cells: Table) -> str:
    """Only what the numbers carry."""
    never = (
        "- Not from this page: anything about larger models, longer answers, other tasks, or settings that were not swept; "
        "and nothing about speed beyond this machine, which other work may have shared."
    )
    if max(cells.seeds) < MIN_SEEDS:
        return "\n".join(
            [
                f"- **This is a demonstration.** With {_seeds(max(cells.seeds))} no interval is trustworthy: it shows that the "
                "sweep runs and that the bound holds, not what a setting does to learning. Differences between settings may be "
                "chance, in either direction.",
                "- May be concluded: what the checks above say about staleness, cell by cell.",
                never,
            ]
        )
    base, *others = cells.settings
    found = compared(cells, cells.cells["held_out_reward_end"])
    judged = {label: each for label, each in found.items() if each.adjusted is not None}
    lines = [
        f"- {worded(label, base, judged[label], len(judged))}"
        if label in judged
        else f"- {label} against {base}: too few held-out evaluations to say anything."
        for label in others
    ]
    counted = "1 comparison was" if len(judged) == 1 else f"{len(judged)} comparisons were"
    lines.append(
        f"- {counted} made, and a difference is said to be there where it stands among all of them (Holm, 0.05). All seeds "
        "share one set of held-out prompts: the intervals cover chance in training, not the choice of prompts."
    )
    return "\n".join([*lines, never])


def _legend(num_seeds: int, fewest: int) -> str:
    if num_seeds < MIN_SEEDS:
        spread = f"mean (lowest to highest seed); with {_seeds(num_seeds)} no interval is trustworthy"
    else:
        spread = f"mean ± half-width of the 95 % t interval over {_seeds(num_seeds)}, and of differences the 95 % interval"
        spread += f"; of fewer than {MIN_SEEDS} seeds (lowest to highest)" if fewest < MIN_SEEDS else ""
    return (
        f"Cells show the {spread}. Staleness is in learner steps, over trained tokens; ESS is the effective sample size of the "
        "importance weights as a share of the tokens; length is that of the held-out completions, in tokens; the largest ratio "
        "is learner / sampler of any token before truncation. "
        "The reward of a step is that of samples made `staleness` steps earlier: with older data the curve, its last quarter "
        "and its area lag by so many steps even where learning is the same. Only held-out rewards compare the models."
    )


def _seeds(count: int) -> str:
    return f"{count} seed{'s' if count > 1 else ''}"
