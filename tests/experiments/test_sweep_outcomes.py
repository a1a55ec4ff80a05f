"""What a target cost, what areas differ by, and how small a difference shows: exactly, from results made by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from async_rlhf.experiments.staleness.cells import CellResult, HeldOut, kept
from async_rlhf.experiments.staleness.config import SweepConfig
from async_rlhf.experiments.staleness.outcomes import at_equal_kl, at_equal_time, compared, contrasts, reached, target
from async_rlhf.experiments.staleness.plot import pictures, settings_of
from async_rlhf.experiments.staleness.report import sections
from async_rlhf.experiments.staleness.table import BLOCK, Series, Table
from async_rlhf.experiments.statistics import holm, paired
from tests.conftest import REPOSITORY

CELLS = REPOSITORY / "experiments" / "staleness" / "rates" / "cells"


@pytest.fixture
def result() -> CellResult:
    """Ten steps of 128 samples and 50 tokens, a second each, with rewards from 0.1 to 1."""
    found = kept(next(iter(sorted(CELLS.glob("*.json")))))
    assert found is not None
    return replace(
        found, setting=(("loss.kind", "a"),), rewards=tuple(i / 10 for i in range(1, 11)),
        seconds=tuple(float(i) for i in range(1, 11)), staleness_tokens=((1, 250), (2, 250)),
        curves={"samples": (128.0,) * 10, "num_tokens": (50.0,) * 10, "clip_ratio/region_mean": (0.1, None, *(0.3,) * 8)},
    )  # fmt: skip


def other(result: CellResult, kind: str, seed: int = 0, **more: object) -> CellResult:
    return replace(result, setting=(("loss.kind", kind),), seed=seed, **more)  # type: ignore[arg-type]


def final(table: Table) -> Series:
    return table.cells["held_out_reward_end"]


def test_the_target_is_nine_tenths_of_what_the_first_setting_learned(result: CellResult) -> None:
    goal = target(Table([result, other(result, "b", rewards=(5.0,) * 10)]))
    assert goal is not None
    assert (goal.start, goal.end, goal.reference) == (0.1, pytest.approx(0.9), "loss.kind = a")
    assert goal.value == pytest.approx(0.1 + 0.9 * 0.8)
    lower = replace(result, rewards=tuple(each - 5 for each in result.rewards if each is not None))
    below = target(Table([lower]))
    assert below is not None and below.value == pytest.approx(goal.value - 5), "whatever a reward's zero is"
    assert target(Table([replace(result, rewards=(0.1,) * 10)])) is None, "nothing was learned"


def test_a_target_is_reached_by_the_mean_of_640_completions_and_by_no_single_batch(result: CellResult) -> None:
    def first(value: float, run: CellResult = result) -> list[float]:
        return list(reached(Table([run]), value)[["steps", "samples", "tokens", "seconds"]].loc[0])

    assert first(0.49) == [7, 896.0, 350.0, 7.0]
    assert all(math.isnan(each) for each in first(0.81))
    assert first(0.59, replace(result, rewards=(None, None, 0.5, 0.7, *(None,) * 6)))[0] == 5, "gaps are left out of the mean"
    early = replace(result, rewards=(1.0, *(0.0,) * 9))
    assert math.isnan(first(0.5, early)[0]), "four steps are not there to be averaged"
    large = replace(result, curves={**result.curves, "samples": (640.0,) * 10})
    assert first(0.49, large)[0] == 5, "a large batch is enough by itself"


def test_areas_are_compared_within_a_seed_and_corrected_together(result: CellResult) -> None:
    results = [
        other(result, kind, seed, rewards=(0.5 + 0.01 * seed + gap * (1 + 0.1 * seed),) * 10)
        for kind, gap, seeds in (("a", 0.0, (0, 1, 2)), ("b", 0.1, (2, 1, 0)), ("c", 0.001, (1, 2, 0)))
        for seed in seeds
    ]
    table = Table([*results, other(result, "b", 9)])  # with a seed that no other setting has
    found = compared(table, table.cells["reward_area"])
    alone = [paired([0.5 + 0.01 * s + gap * (1 + 0.1 * s) for s in range(3)], [0.5 + 0.01 * s for s in range(3)])
             for gap in (0.1, 0.001)]  # fmt: skip
    assert list(found) == ["loss.kind = b", "loss.kind = c"]
    assert [each.mean for each in found.values()] == pytest.approx([0.11, 0.0011])
    assert [each.adjusted for each in found.values()] == pytest.approx(holm([each.p or 0.0 for each in alone]))
    blind = Table([replace(each, held_out_end=HeldOut(None, None)) for each in results])
    assert compared(blind, final(blind)) == {}, "nothing was measured"


def test_settings_are_compared_with_the_one_that_differs_in_a_single_key(result: CellResult) -> None:
    table = Table([
        replace(
            result, setting=(("loss.kind", kind), ("queue.max_staleness", age)), seed=seed,
            held_out_end=HeldOut(0.5 + 0.01 * seed - (0.01 + 0.001 * seed) * age * (kind == "a"), None),
        )
        for seed in range(3) for kind in ("a", "b") for age in (0, 4, 16)
    ])  # fmt: skip
    by_age = contrasts(table, "queue.max_staleness", final(table))
    assert [(label, round(each.mean, 6)) for label, each in by_age.items()] == [
        ("loss.kind = a, queue.max_staleness = 4", -0.044), ("loss.kind = a, queue.max_staleness = 16", -0.176),
        ("loss.kind = b, queue.max_staleness = 4", 0.0), ("loss.kind = b, queue.max_staleness = 16", 0.0),
    ]  # fmt: skip
    by_kind = contrasts(table, "loss.kind", final(table))
    assert [round(each.mean, 6) for each in by_kind.values()] == [0.0, 0.044, 0.176]
    alone = [each.p for each in by_age.values() if each.p is not None]
    assert [each.adjusted for each in by_age.values() if each.p is not None] == holm(alone), "one family"


def test_rewards_are_compared_at_the_second_in_which_the_faster_run_of_a_seed_had_ended(result: CellResult) -> None:
    slow = other(result, "b", seconds=tuple(2.0 * i for i in range(1, 11)))
    quick_seed = [replace(each, seed=1, seconds=tuple(s / 2 for s in each.seconds)) for each in (result, slow)]
    mine, others, *quick = at_equal_time(Table([result, slow, *quick_seed]), "loss.kind")
    assert mine == pytest.approx(0.8), "the mean of its last five steps"
    assert [others, quick[1]] == pytest.approx([0.3, 0.3]), "after five steps, whatever another seed took"
    page = "\n".join(sections(Table([result, slow]), alone=True))
    assert "| loss.kind = b | 2.00 | - | -0.500 | - |" in page, "one seed has no range"


def test_scores_are_compared_at_the_divergence_that_all_runs_of_a_seed_reach(result: CellResult) -> None:
    spent = {"samples": (float(BLOCK),) * 4, "num_tokens": (1.0,) * 4}

    def run(kind: str, scores: tuple[float, ...], kls: tuple[float, ...]) -> CellResult:
        curves = {**spent, "rewards/gold/mean": scores, "kl/reference": kls}
        return other(result, kind, rewards=scores, seconds=(1.0, 2.0, 3.0, 4.0), curves=curves)

    far, near = run("a", (0.0, 1.0, 2.0, 3.0), (0.0, 2.0, 4.0, 6.0)), run("b", (0.0, 0.5, 1.0, 1.0), (0.0, 1.0, 3.0, 2.0))
    both = at_equal_kl(Table([far, near]), "loss.kind", "gold")
    assert list(both) == pytest.approx([1.5, 1.0]), "at 3 nats, between two points of the first"
    lacking = at_equal_kl(Table([replace(far, curves=spent), near]), "loss.kind", "gold")
    assert lacking.isna().all(), "one run has no divergence"


def titles(results: list[CellResult], sweep: SweepConfig) -> list[str]:
    """The first lines of the panels' titles."""
    return [axes.get_title().partition("\n")[0] for axes in pictures(Table(results), sweep)["trade_offs"].axes]


def test_the_second_picture_has_a_panel_for_each_number_that_was_kept(result: CellResult) -> None:
    sweep = SweepConfig(name="s", base="b", seeds=(0,), values={"loss.kind": ["a", "b"]})
    results = [
        result,
        other(result, "b", curves={**result.curves, "kl/reference": (0.5,) * 10, "completions/mean_length": (5.0,) * 10}),
    ]
    whole = [
        "Training reward over samples", "Training reward over tokens", "Training reward over seconds",
        "Completion length over samples", "Effective and clipped tokens by staleness",
        "Held-out reward over KL to the sampling policy", "Training reward over KL to the reference",
    ]  # fmt: skip
    assert titles(results, sweep) == whole, "no run reached the target"
    results[0] = replace(result, rewards=(0.1, *(0.8,) * 9))
    assert titles(results, sweep) == [*whole, "Samples to the target of 0.730", "Seconds to the target of 0.730"]
    spent = {name: result.curves[name] for name in ("samples", "num_tokens")}
    bare = [replace(each, curves=spent, kl_behaviour_mean=None, is_ess_mean=None) for each in results]
    assert titles(bare, sweep)[:3] == whole[:3] and len(titles(bare, sweep)) == 5


def test_as_many_settings_of_one_colour_as_an_experiment_has_corrections_are_told_apart_without_it(result: CellResult) -> None:
    kinds, kl = list("abcdef"), {**result.curves, "kl/reference": (0.5,) * 10}
    grid = [(("loss.kind", kind), ("queue.max_staleness", age)) for kind in kinds for age in (0, 4)]
    table = Table([replace(result, setting=setting, curves=kl) for setting in grid])
    looks = [each.look for each in settings_of(table)]
    assert len({(look["color"], str(look["linestyle"])) for look in looks}) == 12
    assert len({(look["color"], look["marker"]) for look in looks}) == 12
    assert len({look["color"] for look in looks}) == 2
    sweep = SweepConfig(name="s", base="b", seeds=(0,), values={"loss.kind": kinds, "queue.max_staleness": [0, 4]})
    figure = pictures(table, sweep)["trade_offs"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [each.row for each in settings_of(table)]
    panels = [axes for axes in figure.axes if "over KL to the reference" in axes.get_title()]
    columns = [axes.get_title().partition("\n")[2].partition(";")[0] for axes in panels]
    assert columns == [f"loss.kind = {kind}" for kind in kinds] and [len(axes.get_lines()) for axes in panels] == [2] * 6


def test_a_key_with_one_value_among_the_results_takes_no_colour_from_the_others(result: CellResult) -> None:
    results = [replace(result, setting=(("loss.kind", kind), ("queue.max_staleness", 16))) for kind in ("a", "b", "c")]
    settings = settings_of(Table(results))
    assert [each.curve for each in settings] == ["loss.kind = a", "loss.kind = b", "loss.kind = c"]
    assert len({str(each.look["color"]) for each in settings}) == 3 and {each.column for each in settings} == {""}
