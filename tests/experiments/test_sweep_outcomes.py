"""What a target cost, what areas differ by, and how small a difference shows: exactly, from results made by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from async_rlhf.experiments.staleness.cells import CellResult, HeldOut, kept
from async_rlhf.experiments.staleness.config import SweepConfig
from async_rlhf.experiments.staleness.measures import sections
from async_rlhf.experiments.staleness.outcomes import (
    BLOCK,
    Reached,
    area,
    at_equal_kl,
    at_equal_time,
    compared,
    contrasts,
    log_seconds,
    reached,
    scores_apart,
    target,
)
from async_rlhf.experiments.staleness.plot import settings_of
from async_rlhf.experiments.staleness.trade_offs import picture
from async_rlhf.experiments.statistics import holm, paired
from tests.conftest import REPOSITORY

CELLS = REPOSITORY / "experiments" / "staleness" / "rates" / "cells"


@pytest.fixture
def result() -> CellResult:
    """Ten steps of 128 samples and 50 tokens, a second each, with rewards from 0.1 to 1."""
    found = kept(next(iter(sorted(CELLS.glob("*.json")))))
    assert found is not None
    return replace(
        found, setting=(("loss.kind", "a"),), steps=10, trained_samples=1280, rewards=tuple(i / 10 for i in range(1, 11)),
        seconds=tuple(float(i) for i in range(1, 11)), reward_last_quarter=0.9, reward_area=0.55, staleness_mean=1.5,
        curves={"samples": (128.0,) * 10, "num_tokens": (50.0,) * 10, "clip_ratio/region_mean": (0.1, None, *(0.3,) * 8)},
    )  # fmt: skip


def other(result: CellResult, kind: str, seed: int = 0, **more: object) -> CellResult:
    return replace(result, setting=(("loss.kind", kind),), seed=seed, **more)  # type: ignore[arg-type]


def test_the_target_is_nine_tenths_of_what_the_first_setting_learned(result: CellResult) -> None:
    goal = target([result, other(result, "b", reward_last_quarter=5.0)])
    assert goal is not None
    assert (goal.start, goal.end, goal.reference) == (0.1, 0.9, "loss.kind = a")
    assert goal.value == pytest.approx(0.1 + 0.9 * 0.8)
    lower = replace(result, rewards=tuple(each - 5 for each in result.rewards if each is not None), reward_last_quarter=-4.1)
    below = target([lower])
    assert below is not None and below.value == pytest.approx(goal.value - 5), "whatever a reward's zero is"
    assert target([replace(result, reward_last_quarter=0.1)]) is None, "nothing was learned"


def test_a_target_is_reached_by_the_mean_of_640_completions_and_by_no_single_batch(result: CellResult) -> None:
    assert reached(result, 0.49) == Reached(steps=7, samples=896.0, tokens=350.0, seconds=7.0)
    assert reached(result, 0.81) is None
    gaps = reached(replace(result, rewards=(None, None, 0.5, 0.7, *(None,) * 6)), 0.59)
    assert gaps is not None and gaps.steps == 5, "steps without a reward are left out of the mean"
    assert reached(replace(result, rewards=(1.0, *(0.0,) * 9)), 0.5) is None, "four steps are not there to be averaged"
    large = replace(result, trained_samples=6400, curves={"samples": (640.0,) * 10})
    at_once = reached(large, 0.49)
    assert at_once is not None and at_once.steps == 5, "a large batch is enough by itself"
    old = reached(replace(result, curves={}), 0.49)
    assert old is not None and (old.samples, old.tokens) == (896.0, None), "equally many samples a step, tokens unknown"


def test_areas_are_compared_within_a_seed_and_corrected_together(result: CellResult) -> None:
    results = [
        other(result, kind, seed, reward_area=0.5 + 0.01 * seed + gap * (1 + 0.1 * seed))
        for seed in range(3)
        for kind, gap in (("a", 0.0), ("b", 0.1), ("c", 0.001))
    ]
    found = compared(results, area)
    alone = [paired([0.5 + 0.01 * s + gap * (1 + 0.1 * s) for s in range(3)], [0.5 + 0.01 * s for s in range(3)])
             for gap in (0.1, 0.001)]  # fmt: skip
    assert list(found) == ["loss.kind = b", "loss.kind = c"]
    assert [each.mean for each in found.values()] == pytest.approx([0.11, 0.0011])
    assert [each.adjusted for each in found.values()] == pytest.approx(holm([each.p or 0.0 for each in alone]))
    blind = [replace(each, held_out_end=HeldOut(None, None)) for each in results]
    assert compared(blind) == {}, "nothing was measured"


def test_settings_are_compared_with_the_one_that_differs_in_a_single_key(result: CellResult) -> None:
    results = [
        replace(
            result, setting=(("loss.kind", kind), ("queue.max_staleness", age)), seed=seed,
            held_out_end=HeldOut(0.5 + 0.01 * seed - (0.01 + 0.001 * seed) * age * (kind == "a"), None),
        )
        for seed in range(3) for kind in ("a", "b") for age in (0, 4, 16)
    ]  # fmt: skip
    by_age = contrasts(results, "queue.max_staleness")
    assert [(label, round(each.mean, 6)) for label, each in by_age.items()] == [
        ("loss.kind = a, queue.max_staleness = 4", -0.044), ("loss.kind = a, queue.max_staleness = 16", -0.176),
        ("loss.kind = b, queue.max_staleness = 4", 0.0), ("loss.kind = b, queue.max_staleness = 16", 0.0),
    ]  # fmt: skip
    by_kind = contrasts(results, "loss.kind")
    assert [round(each.mean, 6) for each in by_kind.values()] == [0.0, 0.044, 0.176]
    alone = [each.p for each in by_age.values() if each.p is not None]
    assert [each.adjusted for each in by_age.values() if each.p is not None] == holm(alone), "one family"


def test_rewards_are_compared_at_the_second_in_which_the_faster_run_of_a_seed_had_ended(result: CellResult) -> None:
    slow = other(result, "b", seconds=tuple(2.0 * i for i in range(1, 11)))
    quick_seed = [replace(each, seed=1, seconds=tuple(s / 2 for s in each.seconds)) for each in (result, slow)]
    number = at_equal_time([result, slow, *quick_seed], "loss.kind")
    assert number(result) == pytest.approx(0.8), "the mean of its last five steps"
    assert [number(slow), number(quick_seed[1])] == pytest.approx([0.3, 0.3]), "after five steps, whatever another seed took"
    longer = contrasts([result, slow], "loss.kind", log_seconds)["loss.kind = b"]
    assert longer.mean == pytest.approx(math.log(2))
    page = "\n".join(sections([result, slow], alone=True))
    assert "| loss.kind = b | 2.00 | - | -0.500 | - |" in page, "one seed has no range"


def test_scores_that_tell_no_run_from_another_are_not_looked_at_on_their_own(result: CellResult) -> None:
    def cells(*golds: float) -> list[CellResult]:
        return [judged(result, {"gold": gold, "proxy": 0.1 * seed, "wait": 0.0}) for seed, gold in enumerate(golds)]

    assert scores_apart(cells(0.1, 0.2)) == ["gold", "proxy"]
    assert scores_apart(cells(0.1, 0.1)) == [], "the one that is left is the reward"


def judged(result: CellResult, scores: dict[str, float]) -> CellResult:
    curves = {f"rewards/{name}/mean": (0.5,) * 10 for name in scores}
    return replace(result, curves=curves, held_out_end=HeldOut(0.5, None, scores=scores))


def test_scores_are_compared_at_the_divergence_that_all_runs_of_a_seed_reach(result: CellResult) -> None:
    def run(kind: str, scores: tuple[float, ...], kls: tuple[float, ...]) -> CellResult:
        curves = {"rewards/gold/mean": scores, "kl/reference": kls}
        return other(result, kind, steps=4, trained_samples=4 * BLOCK, curves=curves)

    far, near = run("a", (0.0, 1.0, 2.0, 3.0), (0.0, 2.0, 4.0, 6.0)), run("b", (0.0, 0.5, 1.0, 1.0), (0.0, 1.0, 3.0, 2.0))
    number = at_equal_kl([far, near], "loss.kind", "gold")
    assert [number(far), number(near)] == pytest.approx([1.5, 1.0]), "at 3 nats, between two points of the first"
    assert at_equal_kl([replace(far, curves={}), near], "loss.kind", "gold")(near) is None, "one run has no divergence"


def titles(results: list[CellResult], sweep: SweepConfig) -> list[str]:
    """The first lines of the panels' titles."""
    return [axes.get_title().partition("\n")[0] for axes in picture(results, sweep).axes]


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
    results[0] = replace(result, reward_last_quarter=0.8)
    assert titles(results, sweep) == [*whole, "Samples to the target of 0.730", "Seconds to the target of 0.730"]
    bare = [replace(each, curves={}, kl_behaviour_mean=None, is_ess_mean=None) for each in results]
    assert titles(bare, sweep)[:2] == [whole[0], whole[2]] and len(titles(bare, sweep)) == 4


def test_as_many_settings_of_one_colour_as_an_experiment_has_corrections_are_told_apart_without_it(result: CellResult) -> None:
    kinds, ages = list("abcdef"), [0, 4]
    sweep = SweepConfig(name="s", base="b", seeds=(0,), values={"loss.kind": kinds, "queue.max_staleness": ages})
    kl = {**result.curves, "kl/reference": (0.5,) * 10}
    results = [
        replace(result, setting=(("loss.kind", kind), ("queue.max_staleness", age)), curves=kl)
        for kind in kinds
        for age in ages
    ]
    figure = picture(results, sweep)
    entries = figure.legends[0].legend_handles
    assert len({(line.get_color(), str(line._unscaled_dash_pattern)) for line in entries}) == 12
    assert len({(line.get_color(), line.get_marker()) for line in entries}) == 12
    assert len({line.get_color() for line in entries}) == 2
    assert figure.legends[0].get_texts()[0].get_text() == "loss.kind = a\nqueue.max_staleness = 0"
    of_reference = [axes for axes in figure.axes if "over KL to the reference" in axes.get_title()]
    assert [axes.get_title().partition("\n")[2].partition(";")[0] for axes in of_reference] == [
        f"loss.kind = {k}" for k in kinds
    ]
    assert [len(axes.get_lines()) for axes in of_reference] == [2] * 6


def test_a_key_with_one_value_among_the_results_takes_no_colour_from_the_others(result: CellResult) -> None:
    results = [replace(result, setting=(("loss.kind", kind), ("queue.max_staleness", 16))) for kind in ("a", "b", "c")]
    settings = settings_of(results)
    assert [each.curve for each in settings] == ["loss.kind = a", "loss.kind = b", "loss.kind = c"]
    assert len({str(each.colour) for each in settings}) == 3 and {each.column for each in settings} == {""}
