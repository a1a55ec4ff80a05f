"""The report of a sweep: results.csv, two pictures, and one page as Markdown and as HTML with the pictures inside.

From an archive alone. Formats numbers, never computes one; a table for which no cell kept a number is left out. Called by
`sweep` and by `async-rlhf report`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from async_rlhf.experiments.page import by_group, comparison, difference, number, p_value, table, write_page
from async_rlhf.experiments.staleness.archive import Archive
from async_rlhf.experiments.staleness.checks import checks, listed
from async_rlhf.experiments.staleness.outcomes import (
    TARGET_SHARE,
    at_equal_kl,
    at_equal_time,
    compared,
    contrasts,
    reached,
    target,
)
from async_rlhf.experiments.staleness.table import SMOOTHED, SPENT, Series, Table
from async_rlhf.experiments.statistics import MIN_SEEDS, Mean, estimate, seeds_needed, worded

Column = Callable[[list[int]], str]
"""The text of a row's cell, made of the row's runs."""
# Cells without a result that are named one by one.
_MOST_NAMED = 6
# How an attempt to make a group may have ended, in the words of docs/metrics.md.
_ENDS = ("trained", "stale", "filtered", "failed", "quarantined")


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


def mean_of(values: Series, digits: int = 3) -> Column:
    """The mean over a setting's runs, with its interval."""
    return lambda runs: number(estimate(values[runs]), digits=digits)


def sections(cells: Table, alone: bool = False) -> Iterator[str]:
    """Headings and paragraphs below the result. alone: one cell ran at a time, so that seconds are compared."""
    yield from _areas(cells)
    yield from _contrasts(cells)
    if alone:
        yield from _times(cells)
    if cells.scores:
        yield "## Scores apart"
        yield "Mean score by each reward function, before weights, on the held-out prompts at the end."
        yield by_group(cells.settings, {name: mean_of(cells.cells[f"held_out_{name}_end"]) for name in cells.scores})
    yield from _at_equal_kl(cells)
    yield from _costs(cells)
    yield from _corrections(cells)
    yield from _ends(cells)
    yield from _powers(cells)


def _areas(cells: Table) -> Iterator[str]:
    final, area = cells.cells["held_out_reward_end"], cells.cells["reward_area"]
    ends, areas = compared(cells, final), compared(cells, area)
    if not areas:
        return
    base, *others = cells.settings
    yield "## Final reward and area under the curve"
    yield (
        f"Differences are to {base}, within a seed; p is Holm's over all settings that are compared ({len(others)}), for "
        "either outcome on its own. The area is the mean height of the training reward: it says how fast a setting learned, "
        "and lags by its staleness."
    )
    rows = [["setting", "held-out reward, end", "difference", "p", "area under the reward", "difference", "p"]]
    for label, runs in cells.settings.items():
        rows.append([label, mean_of(final)(runs), *comparison(ends.get(label)),
                     mean_of(area)(runs), *comparison(areas.get(label))])  # fmt: skip
    yield table(rows)


def _contrasts(cells: Table) -> Iterator[str]:
    outcomes = {f"{name}, end": cells.cells[f"held_out_{name}_end"] for name in cells.scores}
    outcomes = outcomes or {"held-out reward, end": cells.cells["held_out_reward_end"]}
    axes = cells.results[0].setting
    for axis, first in axes if len(axes) > 1 else ():
        found = {what: contrasts(cells, axis, values) for what, values in outcomes.items()}
        if any(found.values()):
            yield f"## Against {axis} = {first}, all else equal"
            yield (
                f"Differences within a seed to the setting that has {axis} = {first} and is the same otherwise; p is Holm's "
                "over all comparisons of a column."
            )
            yield _side_by_side(cells, found)
            yield " ".join(_seen(what, each) for what, each in found.items() if each)


def _seen(what: str, found: Mapping[str, Mean]) -> str:
    """Power, in a sentence; empty where there is a single seed."""
    known = [(each.count, size) for each in found.values() if (size := each.detectable) is not None]
    if not known:
        return ""
    sizes = [size for _, size in known]
    return (
        f"{what}: with {known[0][0]} seeds a difference of {median(sizes):.3f} can be seen four times in five, looked at "
        f"alone (depending on the comparison {min(sizes):.3f} to {max(sizes):.3f})."
    )


def _at_equal_kl(cells: Table) -> Iterator[str]:
    names = cells.scores or [""]
    for axis, first in cells.results[0].setting:
        found = {name or "reward": contrasts(cells, axis, at_equal_kl(cells, axis, name)) for name in names}
        if any(found.values()):
            yield f"## At equal divergence from the reference, against {axis} = {first}"
            yield (
                "The score in training where the divergence first is what all the runs reach that differ only in this key: "
                "what a nat buys, however long it took. Differences within a seed; p is Holm's over a column."
            )
            yield _side_by_side(cells, found)


def _side_by_side(cells: Table, found: Mapping[str, Mapping[str, Mean]]) -> str:
    """found: by outcome, the comparison of each setting."""
    labels = [label for label in cells.settings if any(label in each for each in found.values())]
    head = ["setting", *(word for what in found for word in (f"{what}: difference", "p"))]
    rows = ([label, *(text for each in found.values() for text in comparison(each.get(label)))] for label in labels)
    return table([head, *rows])


def _times(cells: Table) -> Iterator[str]:
    # differences of logarithms are ratios of times
    log_seconds = cells.cells["wall_s"].map(math.log)
    for axis, first in cells.results[0].setting:
        longer, sooner = contrasts(cells, axis, log_seconds), contrasts(cells, axis, at_equal_time(cells, axis))
        if not longer:
            continue
        yield f"## Time, against {axis} = {first}"
        yield (
            "Cells ran one at a time. Seconds are those of all steps, as a ratio within a seed; rewards are those of training "
            f"({SMOOTHED} completions together) when the first of the compared runs had ended, within a seed. p is Holm's."
        )
        rows = [["setting", "seconds, ratio", "p", "reward at equal time: difference", "p"]]
        for label, longest in longer.items():
            mean, low, high = (math.exp(log) for log in (longest.mean, longest.low, longest.high))
            ratio = f"{mean:.2f}" if longest.count == 1 else f"{mean:.2f} ({low:.2f} to {high:.2f})"
            rows.append([label, ratio, p_value(longest), *comparison(sooner.get(label))])
        yield table(rows)


def _costs(cells: Table) -> Iterator[str]:
    if (goal := target(cells)) is None:
        return
    yield "## What a target cost"
    yield (
        f"The target is a training reward of {goal.value:.3f}: {TARGET_SHARE * 100:.0f} % of the way from {goal.start:.3f}, "
        f"the reward of the first step, to {goal.end:.3f}, that of the last quarter, both of {goal.reference}. It is reached "
        f"when the mean of {SMOOTHED} completions is not below it. Means are over the seeds, and given where all reached it."
    )
    costs = reached(cells, goal.value)

    def cost(name: str) -> Column:
        shown = mean_of(costs[name], 1 if name == "seconds" else 0)
        return lambda runs: shown(runs) if costs[name][runs].notna().all() else "-"

    counted: dict[str, Column] = {"seeds that reached it": lambda runs: f"{costs['steps'][runs].count()} of {len(runs)}"}
    yield by_group(cells.settings, {**counted, **{name: cost(name) for name in ("steps", *SPENT)}})


def _corrections(cells: Table) -> Iterator[str]:
    known = cells.cells
    columns = {
        "staleness, mean": mean_of(known["staleness_mean"], 2),
        "ESS, share of tokens": mean_of(known["is_ess_mean"]),
        "clipped, share of tokens": mean_of(known["clip_ratio_mean"]),
        "KL to the sampling policy": mean_of(known["kl_behaviour_mean"], 4),
        "KL to the reference, last quarter": mean_of(known["kl_reference_end"], 4),
    }
    if "grad_norm" in cells.steps:
        columns["gradient norm, mean of the steps"] = mean_of(cells.mean_of("grad_norm"), 2)
    yield "## How far from the policy that sampled"
    yield "Divergences are estimates in nats a token. What was not measured, or not kept, is a dash."
    yield by_group(cells.settings, columns)


def _ends(cells: Table) -> Iterator[str]:
    if cells.ledger.empty:
        return

    def ended(word: str) -> Column:
        known = cells.ledger.reindex(columns=[word])[word]
        return lambda runs: f"{known[runs].sum():,.0f}" if known[runs].notna().any() else "-"

    columns = {
        **{f"groups {word}": ended(word) for word in _ENDS},
        "tokens stale": ended("tokens_stale"),
        "tokens filtered": ended("tokens_filtered"),
        "mean length, trained": mean_of(cells.cells["trained_tokens"] / cells.cells["trained_samples"], 1),
        "cut off, share": mean_of(cells.mean_of("completions/clipped_ratio")),
        "scores that failed, share": mean_of(cells.mean_of("rewards/failed_ratio")),
    }
    yield "## What became of the groups"
    yield (
        "Attempts to make a group by how they ended, sums over the seeds. Tokens are those of groups that had reached the "
        "queue: of attempts that were lost before, no length is known. Lengths (in tokens) and shares are of the completions "
        "that were trained on."
    )
    yield by_group(cells.settings, columns)


def _powers(cells: Table) -> Iterator[str]:
    outcomes = {"held-out reward, end": "held_out_reward_end", "area": "reward_area"}
    compares = {what: compared(cells, cells.cells[column]) for what, column in outcomes.items()}
    gains = [(label, what, gain) for what, by_label in compares.items() for label, gain in by_label.items()]
    if not gains:
        return
    yield "## What so many seeds can show"
    known = [(label, what, gain, size) for label, what, gain in gains if (size := gain.detectable) is not None]
    if not known:
        yield "With one seed a setting no difference of any size can be told from chance, and none is."
        return
    yield (
        "From the deviation of the differences between seeds: the smallest true difference that so many seeds show four times "
        "in five (two-sided, 0.05, looked at alone), and how many seeds show half of it."
    )
    rows = [["setting", "outcome", "deviation of the difference", "seeds", "they show", "seeds for half of it"]]
    for label, what, gain, size in known:
        # seeds that did not differ at all show any difference
        for_half = str(seeds_needed(gain.deviation, size / 2)) if size else "-"
        rows.append([label, what, f"{gain.deviation:.3f}", str(gain.count), f"{size:.3f}", for_half])
    yield table(rows)


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
    differences = compared(cells, cells.cells["held_out_reward_end"])
    judged = {label: gain for label, gain in differences.items() if gain.adjusted is not None}
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
