"""The tables of a sweep's page below its result: area and final reward, a target's cost, corrections, ends of groups, power.

A table for which no cell kept a number is left out. Formats numbers, never computes one. Called by `report`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median

from async_rlhf.experiments.page import by_group, comparison, number, p_value, table
from async_rlhf.experiments.staleness.cells import CellResult
from async_rlhf.experiments.staleness.outcomes import (
    SMOOTHED,
    TARGET_SHARE,
    Number,
    area,
    at_equal_kl,
    at_equal_time,
    by_setting,
    compared,
    contrasts,
    final_reward,
    log_seconds,
    reached,
    scores_apart,
    target,
)
from async_rlhf.experiments.statistics import Mean, estimate, seeds_needed

Column = Callable[[list[CellResult]], str]
# How an attempt to make a group may have ended, in the words of docs/metrics.md.
_ENDS = ("trained", "stale", "filtered", "failed", "quarantined")


def mean_of(number_of: Number, digits: int = 3) -> Column:
    """The mean over a setting's cells, with its interval."""
    return lambda cells: number(estimate(map(number_of, cells)), digits=digits)


def sections(results: Sequence[CellResult], alone: bool = False) -> list[str]:
    """Headings and paragraphs. alone: one ran at a time, so that seconds are compared."""
    return [
        *_areas(results),
        *_contrasts(results),
        *(_times(results) if alone else ()),
        *_scores(results),
        *_at_equal_kl(results),
        *_costs(results),
        *_corrections(results),
        *_ends(results),
        *_powers(results),
    ]


def _areas(results: Sequence[CellResult]) -> Iterator[str]:
    groups = by_setting(results)
    base = next(iter(groups))
    ends, areas = compared(results), compared(results, area)
    if not areas:
        return
    yield "## Final reward and area under the curve"
    yield (
        f"Differences are to {base}, within a seed; p is Holm's over all settings that are compared ({len(groups) - 1}), for "
        "either outcome on its own. The area is the mean height of the training reward: it says how fast a setting learned, "
        "and lags by its staleness."
    )
    rows = [["setting", "held-out reward, end", "difference", "p", "area under the reward", "difference", "p"]]
    for label, cells in groups.items():
        rows.append([label, number(estimate(map(final_reward, cells))), *comparison(ends.get(label)),
                     number(estimate(map(area, cells))), *comparison(areas.get(label))])  # fmt: skip
    yield table(rows)


def _contrasts(results: Sequence[CellResult]) -> Iterator[str]:
    axes = results[0].setting
    outcomes: dict[str, Number] = {f"{name}, end": partial(_score, name=name) for name in scores_apart(results)}
    outcomes = outcomes or {"held-out reward, end": final_reward}
    for axis, first in axes if len(axes) > 1 else ():
        found = {what: contrasts(results, axis, number) for what, number in outcomes.items()}
        if not any(found.values()):
            continue
        yield f"## Against {axis} = {first}, all else equal"
        yield (
            f"Differences within a seed to the setting that has {axis} = {first} and is the same otherwise; p is Holm's over "
            "all comparisons of a column."
        )
        yield _side_by_side(results, found)
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


def _at_equal_kl(results: Sequence[CellResult]) -> Iterator[str]:
    names = scores_apart(results) or [""]
    for axis, first in results[0].setting:
        found = {name or "reward": contrasts(results, axis, at_equal_kl(results, axis, name)) for name in names}
        if not any(found.values()):
            continue
        yield f"## At equal divergence from the reference, against {axis} = {first}"
        yield (
            "The score in training where the divergence first is what all the runs reach that differ only in this key: what a "
            "nat buys, however long it took. Differences within a seed; p is Holm's over a column."
        )
        yield _side_by_side(results, found)


def _side_by_side(results: Sequence[CellResult], found: Mapping[str, Mapping[str, Mean]]) -> str:
    """found: by outcome, the comparison of each setting."""
    labels = [label for label in by_setting(results) if any(label in each for each in found.values())]
    head = ["setting", *(word for what in found for word in (f"{what}: difference", "p"))]
    rows = ([label, *(text for each in found.values() for text in comparison(each.get(label)))] for label in labels)
    return table([head, *rows])


def _times(results: Sequence[CellResult]) -> Iterator[str]:
    for axis, first in results[0].setting:
        longer, sooner = contrasts(results, axis, log_seconds), contrasts(results, axis, at_equal_time(results, axis))
        if not longer:
            continue
        yield f"## Time, against {axis} = {first}"
        yield (
            "Cells ran one at a time. Seconds are those of all steps, as a ratio within a seed; rewards are those of training "
            f"({SMOOTHED} completions together) when the first of the compared runs had ended, within a seed. p is Holm's."
        )
        rows = [["setting", "seconds, ratio", "p", "reward at equal time: difference", "p"]]
        for label, each in longer.items():
            mean, low, high = (math.exp(log) for log in (each.mean, each.low, each.high))
            ratio = f"{mean:.2f}" if each.count == 1 else f"{mean:.2f} ({low:.2f} to {high:.2f})"
            rows.append([label, ratio, p_value(each), *comparison(sooner.get(label))])
        yield table(rows)


def _scores(results: Sequence[CellResult]) -> Iterator[str]:
    if not (names := scores_apart(results)):
        return
    yield "## Scores apart"
    yield "Mean score by each reward function, before weights, on the held-out prompts at the end."
    rows = [["setting", *names]]
    for label, cells in by_setting(results).items():
        rows.append([label, *(number(estimate(_score(cell, name) for cell in cells)) for name in names)])
    yield table(rows)


def _score(cell: CellResult, name: str) -> float | None:
    return cell.held_out_end.scores.get(name)


def _costs(results: Sequence[CellResult]) -> Iterator[str]:
    if (goal := target(results)) is None:
        return
    yield "## What a target cost"
    yield (
        f"The target is a training reward of {goal.value:.3f}: {TARGET_SHARE * 100:.0f} % of the way from {goal.start:.3f}, "
        f"the reward of the first step, to {goal.end:.3f}, that of the last quarter, both of {goal.reference}. It is reached "
        f"when the mean of {SMOOTHED} completions is not below it. Means are over the seeds, and given where all reached it."
    )
    found = {label: [reached(cell, goal.value) for cell in cells] for label, cells in by_setting(results).items()}
    rows = [["setting", "seeds that reached it", "steps", "samples", "tokens", "seconds"]]
    for label, runs in found.items():
        whole = [run for run in runs if run is not None]
        # each cost, where all runs reached the target
        costs = zip(*((run.steps, run.samples, run.tokens, run.seconds) for run in whole), strict=True)
        shown = [number(estimate(each), digits=digits) for each, digits in zip(costs, (0, 0, 0, 1), strict=False)]
        rows.append([label, f"{len(whole)} of {len(runs)}", *(shown if len(whole) == len(runs) else ["-"] * 4)])
    yield table(rows)


def _corrections(results: Sequence[CellResult]) -> Iterator[str]:
    columns: dict[str, Column] = {
        "staleness, mean": mean_of(lambda cell: cell.staleness_mean, 2),
        "ESS, share of tokens": mean_of(lambda cell: cell.is_ess_mean),
        "clipped, share of tokens": mean_of(lambda cell: cell.clip_ratio_mean),
        "KL to the sampling policy": mean_of(lambda cell: cell.kl_behaviour_mean, 4),
        "KL to the reference, last quarter": mean_of(lambda cell: cell.kl_reference_end, 4),
    }
    if any("grad_norm" in cell.curves for cell in results):
        columns["gradient norm, mean of the steps"] = mean_of(lambda cell: cell.mean_of("grad_norm"), 2)
    yield "## How far from the policy that sampled"
    yield "Divergences are estimates in nats a token. What was not measured, or not kept, is a dash."
    yield by_group(by_setting(results), columns)


def _ends(results: Sequence[CellResult]) -> Iterator[str]:
    if not any(cell.ledger for cell in results):
        return
    columns: dict[str, Column] = {
        **{f"groups {word}": _ended(word) for word in _ENDS},
        "tokens stale": _ended("tokens_stale"),
        "tokens filtered": _ended("tokens_filtered"),
        "mean length, trained": mean_of(lambda cell: cell.trained_tokens / cell.trained_samples, 1),
        "cut off, share": mean_of(lambda cell: cell.mean_of("completions/clipped_ratio")),
        "scores that failed, share": mean_of(lambda cell: cell.mean_of("rewards/failed_ratio")),
    }
    yield "## What became of the groups"
    yield (
        "Attempts to make a group by how they ended, sums over the seeds. Tokens are those of groups that had reached the "
        "queue: of attempts that were lost before, no length is known. Lengths (in tokens) and shares are of the completions "
        "that were trained on."
    )
    yield by_group(by_setting(results), columns)


def _ended(word: str) -> Column:
    def shown(cells: list[CellResult]) -> str:
        known = [cell.ledger[word] for cell in cells if word in cell.ledger]
        return f"{sum(known):,}" if known else "-"

    return shown


def _powers(results: Sequence[CellResult]) -> Iterator[str]:
    outcomes = (("held-out reward, end", compared(results)), ("area", compared(results, area)))
    found = [(label, what, each) for what, by_label in outcomes for label, each in by_label.items()]
    if not found:
        return
    yield "## What so many seeds can show"
    known = [(label, what, each, size) for label, what, each in found if (size := each.detectable) is not None]
    if not known:
        yield "With one seed a setting no difference of any size can be told from chance, and none is."
        return
    yield (
        "From the deviation of the differences between seeds: the smallest true difference that so many seeds show four times "
        "in five (two-sided, 0.05, looked at alone), and how many seeds show half of it."
    )
    rows = [["setting", "outcome", "deviation of the difference", "seeds", "they show", "seeds for half of it"]]
    for label, what, each, size in known:
        # seeds that did not differ at all show any difference
        for_half = str(seeds_needed(each.deviation, size / 2)) if size else "-"
        rows.append([label, what, f"{each.deviation:.3f}", str(each.count), f"{size:.3f}", for_half])
    yield table(rows)
