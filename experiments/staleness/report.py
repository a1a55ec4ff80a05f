"""What a sweep found, for people: results.csv and one page of Markdown. Formats numbers, never computes one.

Called by `sweep`.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from async_rlhf.experiments.staleness.analyze import CellResult, by_setting, checks, finished, paired_difference
from async_rlhf.experiments.staleness.config import SweepConfig
from async_rlhf.experiments.statistics import MIN_SEEDS, Difference, Estimate, estimate, holm, worded

_PLAIN_COLUMNS = (
    "reward_last_quarter",
    "reward_area",
    "staleness_mean",
    "staleness_max",
    "staleness_violations",
    "is_ess_mean",
    "is_ratio_max",
    "kl_behaviour_mean",
    "generated_tokens",
    "trained_tokens",
    "wall_s",
    "samples_per_s",
)


def write_csv(results: Sequence[CellResult], path: Path) -> None:
    """One row a cell; a number that was not measured is an empty field."""
    rows = [_row(result) for result in results]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _row(result: CellResult) -> dict[str, Any]:
    row = {
        "cell": result.cell,
        **dict(result.setting),
        "seed": result.seed,
        "failure": result.failure,
        "steps": result.steps,
        "trained_samples": result.trained_samples,
        "held_out_reward_start": result.held_out_start.reward,
        "held_out_reward_end": result.held_out_end.reward,
        "held_out_accuracy_start": result.held_out_start.accuracy,
        "held_out_accuracy_end": result.held_out_end.accuracy,
        **{column: getattr(result, column) for column in _PLAIN_COLUMNS},
    }
    return {key: round(value, 6) + 0.0 if isinstance(value, float) else value for key, value in row.items()}


def render(sweep: SweepConfig, command: str, results: Sequence[CellResult], picture: str | None) -> str:
    """The page. `command` is what the sweep was started with, `picture` a file beside the page."""
    first = results[0]
    overrides = ", ".join(f"`{key} = {value}`" for key, value in sweep.overrides.items()) or "none"
    parts = [
        f"# {sweep.question}",
        f"    {command}",
        f"Sweep `{sweep.name}`: {sweep.grid}. Seeds: {', '.join(map(str, sweep.seeds))}. "
        f"Base: `{Path(sweep.base).name}`, with {overrides}. Settings {first.fingerprint}; {', '.join(first.code)}.",
        "## Result",
        _legend(len(sweep.seeds)),
        table(results),
        _start(results),
        *([f"![Reward over steps and seconds, held-out reward and staleness by setting]({picture})"] if picture else []),
        *_failures(results),
        "## Checks",
        "\n".join(f"- {'holds' if check.holds else '**FAILS**'}: {check.claim} ({check.detail})" for check in checks(results)),
        "## What may be concluded, and what not",
        conclusions(results, len(sweep.seeds)),
    ]
    return "\n\n".join(parts) + "\n"


def _failures(results: Sequence[CellResult]) -> Iterable[str]:
    if failed := [result for result in results if result.failure]:
        yield "## Cells that failed\n\nThey are in results.csv, and in no mean."
        yield "\n".join(
            f"- {result.label}, seed {result.seed}, after {result.steps} steps: {result.failure}" for result in failed
        )


def table(results: Sequence[CellResult]) -> str:
    """One row a setting."""
    groups = by_setting(finished(results))
    failed = Counter(result.label for result in results if result.failure)
    reference = next(iter(groups.values()))
    columns: dict[str, Callable[[list[CellResult]], str]] = {
        "seeds": lambda cells: str(len(cells)) + (f" ({failed[cells[0].label]} failed)" if failed[cells[0].label] else ""),
        "held-out reward, end": lambda cells: _number(estimate(c.held_out_end.reward for c in cells)),
        f"minus that of {reference[0].label}": lambda cells: (
            "" if cells is reference else _difference(paired_difference(cells, reference))
        ),
        "held-out accuracy, end": lambda cells: _number(estimate(c.held_out_end.accuracy for c in cells)),
        "reward, last quarter": lambda cells: _number(estimate(c.reward_last_quarter for c in cells)),
        "area under the reward": lambda cells: _number(estimate(c.reward_area for c in cells)),
        "staleness, mean (max)": lambda cells: _staleness(cells),
        "ESS": lambda cells: _number(estimate(c.is_ess_mean for c in cells)),
        "largest ratio": lambda cells: f"{_highest(c.is_ratio_max for c in cells)}",
        "samples/s": lambda cells: _number(estimate(c.samples_per_s for c in cells), digits=0),
    }
    lines = [["setting", *columns], ["---"] * (1 + len(columns))]
    lines += [[label, *(shown(cells) for shown in columns.values())] for label, cells in groups.items()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def conclusions(results: Sequence[CellResult], num_seeds: int) -> str:
    """Only what the numbers carry."""
    never = (
        "- Not from this page: anything about larger models, longer answers, other tasks, or settings that were not swept; "
        "and nothing about speed beyond this machine, which other work may have shared."
    )
    if num_seeds < MIN_SEEDS:
        return "\n".join(
            [
                f"- **This is a demonstration.** With {_seeds(num_seeds)} no interval is trustworthy: it shows that the sweep "
                "runs and that the bound holds, not what a setting does to learning. Differences between settings may be "
                "chance, in either direction.",
                "- May be concluded: what the checks above say about staleness, cell by cell.",
                never,
            ]
        )
    groups = by_setting(finished(results))
    (base, reference), *others = groups.items()
    found = {label: paired_difference(cells, reference) for label, cells in others}
    judged = {label: (each, each.p) for label, each in found.items() if each is not None and each.p is not None}
    adjusted = dict(zip(judged, holm([p for _, p in judged.values()]), strict=True))
    lines = [
        f"- {worded(label, base, judged[label][0], adjusted[label], len(judged))}"
        if label in judged
        else f"- {label} against {base}: too few held-out evaluations to say anything."
        for label in found
    ]
    lines.append(
        f"- {len(judged)} comparisons were made, and a difference is said to be there where it stands among all of them (Holm, "
        "0.05). All seeds share one set of held-out prompts: the intervals cover chance in training, not the choice of prompts."
    )
    return "\n".join([*lines, never])


def _legend(num_seeds: int) -> str:
    if num_seeds < MIN_SEEDS:
        spread = f"mean (lowest to highest seed); with {_seeds(num_seeds)} no interval is trustworthy"
    else:
        spread = f"mean ± half-width of the 95 % t interval over {_seeds(num_seeds)}, and of differences the 95 % interval"
    return (
        f"Cells show the {spread}. Staleness is in learner steps, over trained tokens; ESS is the effective sample size of the "
        "importance weights as a share of the tokens; the largest ratio is learner / sampler of any token before truncation. "
        "The reward of a step is that of samples made `staleness` steps earlier: with older data the curve, its last quarter "
        "and its area lag by so many steps even where learning is the same. Only held-out rewards compare the models."
    )


def _start(results: Sequence[CellResult]) -> str:
    before = estimate(result.held_out_start.reward for result in results)
    return f"Held-out reward before training: {'not measured' if before is None else f'{before.mean:.3f}'}."


def _seeds(count: int) -> str:
    return f"{count} seed{'s' if count > 1 else ''}"


def _number(value: Estimate | None, *, digits: int = 3) -> str:
    if value is None:
        return "-"
    mean = f"{value.mean:.{digits}f}"
    if value.half_width is not None:
        return f"{mean} ± {value.half_width:.{digits}f}"
    if value.count == 1:
        return mean
    return f"{mean} ({value.low:.{digits}f} to {value.high:.{digits}f})"


def _difference(found: Difference | None) -> str:
    if found is None:
        return "-"
    return f"{found.mean:+.3f}" if found.count == 1 else f"{found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f})"


def _staleness(cells: Sequence[CellResult]) -> str:
    mean = sum(cell.staleness_mean for cell in cells) / len(cells)
    return f"{mean:.2f} ({max(cell.staleness_max for cell in cells)})"


def _highest(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{max(known):.2f}" if known else "-"
