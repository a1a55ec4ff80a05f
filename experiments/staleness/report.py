"""What a sweep found, for people: results.csv, two pictures, and one page as Markdown and as HTML with the pictures inside.

From an archive alone. Formats numbers, never computes one; the tables below the result are those of `measures`. Called by
`sweep` and by `async-rlhf report`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rlhf.experiments.page import by_group, difference, write_csv, write_page
from async_rlhf.experiments.staleness import measures
from async_rlhf.experiments.staleness.archive import Archive
from async_rlhf.experiments.staleness.cells import CellResult
from async_rlhf.experiments.staleness.checks import checks, listed
from async_rlhf.experiments.staleness.outcomes import area, by_setting, compared, final_reward, paired_difference
from async_rlhf.experiments.statistics import MIN_SEEDS, estimate, worded

_PLAIN_COLUMNS = (
    "reward_last_quarter", "reward_area", "staleness_mean", "staleness_max", "staleness_violations", "is_ess_mean",
    "is_ratio_max", "kl_behaviour_mean", "clip_ratio_mean", "kl_reference_end", "generated_tokens", "trained_tokens", "wall_s",
    "samples_per_s",
)  # fmt: skip

# Cells without a result that are named one by one.
_MOST_NAMED = 6


def write(archive: Archive, directory: Path, say: Callable[[str], None]) -> list[Path]:
    """Into the directory, which exists. What was written, the pages last. Raises OSError."""
    write_csv([row(result) for result in archive.results], directory / "results.csv")

    def draw() -> dict[str, Any]:
        from async_rlhf.experiments.staleness.plot import picture
        from async_rlhf.experiments.staleness.trade_offs import picture as trade_offs

        given = archive.results, archive.sweep, archive.command
        return {"results": picture(*given), "trade_offs": trade_offs(*given)}

    def page(drawn: Mapping[str, str]) -> str:
        return render(archive, drawn.get("results"), drawn.get("trade_offs"))

    return [directory / "results.csv", *write_page(directory, page, draw, say)]


def row(result: CellResult) -> dict[str, Any]:
    """The numbers of a cell by the columns of results.csv, to 6 digits behind the point."""
    numbers = {
        "cell": result.cell,
        **dict(result.setting),
        "seed": result.seed,
        "steps": result.steps,
        "trained_samples": result.trained_samples,
        "held_out_reward_start": result.held_out_start.reward,
        "held_out_reward_end": result.held_out_end.reward,
        "held_out_accuracy_start": result.held_out_start.accuracy,
        "held_out_accuracy_end": result.held_out_end.accuracy,
        "held_out_length_end": result.held_out_end.length,
        **{f"held_out_{name}_end": result.held_out_end.scores.get(name) for name in result.scores},
        **{column: getattr(result, column) for column in _PLAIN_COLUMNS},
    }
    return {key: round(value, 6) + 0.0 if isinstance(value, float) else value for key, value in numbers.items()}


def render(archive: Archive, picture: str | None, trade_offs: str | None = None) -> str:
    """The page. `picture` and `trade_offs` are files beside it."""
    sweep, results, missing = archive.sweep, archive.results, archive.missing
    first, seeds = results[0], [len(cells) for cells in by_setting(results).values()]
    overrides = ", ".join(f"`{key} = {value}`" for key, value in sweep.overrides.items()) or "none"
    base = f" Base: `{Path(sweep.base).name}`, with {overrides}."
    named = "; ".join([*missing[:_MOST_NAMED], *(["..."] if len(missing) > _MOST_NAMED else [])])
    left = f" **{len(missing)} of {len(missing) + len(results)} cells have no result: {named}.**" if missing else ""
    budget = f" Budget: {sweep.samples:,} samples trained on per run." if sweep.samples else ""
    parts = [
        f"# {sweep.question}",
        f"    {archive.command}",
        f"Sweep `{sweep.name}`: {sweep.grid}. Seeds: {', '.join(map(str, sweep.seeds))}.{base}{budget} "
        f"Settings {first.fingerprint}; {', '.join(first.code)}.{left}",
        "## Result",
        _legend(max(seeds), min(seeds)),
        table(results),
        _start(results),
        *([f"![Reward over steps and seconds, held-out reward and staleness by setting]({picture})"] if picture else []),
        *measures.sections(results, archive.alone),
        *(
            [f"![Reward over samples and tokens, corrections, divergences and the cost of a target]({trade_offs})"]
            if trade_offs
            else []
        ),
        "## Checks",
        listed(checks(results)),
        "## What may be concluded, and what not",
        conclusions(results, max(seeds)),
    ]
    return "\n\n".join(parts) + "\n"


def table(results: Sequence[CellResult]) -> str:
    """One row a setting."""
    groups = by_setting(results)
    reference = next(iter(groups.values()))
    columns: dict[str, Callable[[list[CellResult]], str]] = {
        "seeds": lambda cells: str(len(cells)),
        "held-out reward, end": measures.mean_of(final_reward),
        f"minus that of {reference[0].label}": lambda cells: (
            "" if cells is reference else difference(paired_difference(cells, reference))
        ),
        "held-out accuracy, end": measures.mean_of(lambda cell: cell.held_out_end.accuracy),
        "length": measures.mean_of(lambda cell: cell.held_out_end.length, 1),
        "reward, last quarter": measures.mean_of(lambda cell: cell.reward_last_quarter),
        "area under the reward": measures.mean_of(area),
        "staleness, mean (max)": _staleness,
        "ESS": measures.mean_of(lambda cell: cell.is_ess_mean),
        "largest ratio": lambda cells: _highest(cell.is_ratio_max for cell in cells),
        "samples/s": measures.mean_of(lambda cell: cell.samples_per_s, 0),
    }
    if all(cell.held_out_end.accuracy is None for cells in groups.values() for cell in cells):
        del columns["held-out accuracy, end"]
    return by_group(groups, columns)


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
    base, *others = by_setting(results)
    found = compared(results)
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


def _start(results: Sequence[CellResult]) -> str:
    before = estimate(result.held_out_start.reward for result in results)
    return f"Held-out reward before training: {'not measured' if before is None else f'{before.mean:.3f}'}."


def _seeds(count: int) -> str:
    return f"{count} seed{'s' if count > 1 else ''}"


def _staleness(cells: Sequence[CellResult]) -> str:
    mean = sum(cell.staleness_mean for cell in cells) / len(cells)
    return f"{mean:.2f} ({max(cell.staleness_max for cell in cells)})"


def _highest(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{max(known):.2f}" if known else "-"
