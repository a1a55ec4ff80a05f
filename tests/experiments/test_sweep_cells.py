"""Numbers of a sweep, exactly, from run directories made by hand."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.staleness import report
from async_rlhf.experiments.staleness.cells import CellResult, HeldOut, fingerprint, keep, kept, read_cell
from async_rlhf.experiments.staleness.checks import checks
from async_rlhf.experiments.staleness.config import Cell, SweepConfig
from async_rlhf.experiments.staleness.plot import pictures
from async_rlhf.experiments.staleness.report import conclusions
from async_rlhf.experiments.staleness.table import Table
from async_rlhf.learner.loop.budget import Budget
from async_rlhf.run.run_dir import RunDir
from tests.experiments.written import ended_run

SETTING = {"queue.max_staleness": 2}
STEPS: list[dict[str, Any]] = [
    {"reward": 0.2, "staleness/histogram": {"0": 40}, "step_time": 5.0, "is/ess": 1.0, "is/ratio_max": 1.0},
    {"reward": 0.4, "staleness/histogram": {"1": 60}, "step_time": 1.0, "is/ess": 0.9, "is/ratio_max": 3.0},
    {"reward": None, "staleness/histogram": {"1": 30, "2": 30}, "step_time": 2.0, "kl/behaviour": 0.1},
    {"reward": 0.8, "staleness/histogram": {"2": 40}, "step_time": 1.0, "is/ess": 0.8, "kl/behaviour": 0.3},
]
END = {"label": "end", "mean_reward": 0.9, "accuracy": 0.85}
Write = Callable[..., RunDir]


def read(run: RunDir) -> CellResult:
    return read_cell(Cell(run.config(), SETTING, frozenset(SETTING)))


@pytest.fixture
def write(small: Any) -> Write:
    """A run directory of 4 steps with 4 groups of 4 each, bound 2."""

    def make(
        steps: list[dict[str, Any]] = STEPS, evaluations: tuple[dict[str, Any], ...] = (END,), ledger: bool = True, **more: Any
    ) -> RunDir:
        every = {"groups": [0, 1, 2, 3], "staleness/violations": 0}
        lines = [
            {"step": i, "num_tokens": sum(s["staleness/histogram"].values()), **every, **s} for i, s in enumerate(steps, 1)
        ]
        closed = {"tokens_put": 210, "closes": True} if ledger else None
        return ended_run(small(**{"queue.max_staleness": 2, **more}), lines, evaluations, closed)

    return make


@pytest.fixture
def result(write: Write) -> CellResult:
    start = {"label": "start", "mean_reward": 0.3}
    return read(write(evaluations=(start, {**END, "mean_reward": 0.1}, END)))


def test_a_run_directory_becomes_its_numbers(result: CellResult, write: Write) -> None:
    table = Table([result])
    cell, steps = table.cells.loc[0], table.steps.loc[0]
    assert result.setting == (("queue.max_staleness", 2),) and result.label == "queue.max_staleness = 2"
    assert (result.seed, result.bound, result.exact, cell["steps"]) == (0, 2, False, 4)
    assert cell["trained_samples"] == 4 * 4 * 4 and list(steps["samples"]) == [16, 32, 48, 64]
    assert result.staleness_tokens == ((0, 40), (1, 90), (2, 70))
    assert cell["staleness_mean"] == pytest.approx((90 + 140) / 200)
    assert (cell["staleness_max"], result.staleness_violations) == (2, 0)
    assert result.is_ess_mean == pytest.approx(0.9) and result.is_ratio_max == 3.0
    assert result.kl_behaviour_mean == pytest.approx(0.2)
    assert (cell["generated_tokens"], cell["trained_tokens"], result.ledger_closes) == (210, 200, True)
    assert result.seconds == (5.0, 6.0, 8.0, 9.0) and cell["wall_s"] == 9.0
    assert cell["samples_per_s"] == pytest.approx(48 / 4), "the first step waits for processes to start"
    assert result.rewards == (0.2, 0.4, None, 0.8) and cell["reward_last_quarter"] == 0.8
    assert cell["reward_area"] == pytest.approx((0.3 * 1 + 0.6 * 2) / 3), "bridged where a step has no reward"
    assert result.held_out_start == HeldOut(0.3, None), "an accuracy that is missing is missing"
    assert result.held_out_end == HeldOut(0.9, 0.85), "the last evaluation of a label counts"
    planned = [{**step, "staleness/histogram": {str(age): 10}} for step, age in zip(STEPS, (0, 1, 2, 2), strict=True)]
    assert read(write(planned, name="planned")).exact_kept and not result.exact_kept


def test_what_a_run_lacks_is_missing_in_its_numbers_and_a_run_without_a_step_has_none(write: Write) -> None:
    scores = {"exact": 0.0, "brief": 0.9}
    judged = read(write(evaluations=({**END, "rewards": scores},)))
    assert judged.held_out_end == HeldOut(0.9, None, scores=scores), "none of several rewards says what is solved"
    bare = read(write(evaluations=(), ledger=False, name="bare"))
    cell = Table([bare]).cells.loc[0]
    assert bare.held_out_end == HeldOut(None, None) and cell.isna()["generated_tokens"] and not bare.ledger_closes
    assert cell["trained_tokens"] == 200
    single = Table([read(write(STEPS[:1], name="single"))]).cells.loc[0]
    assert (single["reward_area"], single["reward_last_quarter"]) == (0.2, 0.2) and single.isna()["samples_per_s"]
    with pytest.raises(ConfigError, match="has no finished step to analyse"):
        read(write([], name="empty"))


def test_a_fingerprint_knows_every_key_but_those_left_out(small: Any) -> None:
    one, two = small(seed=1), small(seed=2)
    assert fingerprint(one) != fingerprint(two)
    assert fingerprint(one, ("seed",)) == fingerprint(two, ("seed",))
    assert fingerprint(one, ("loss.is_cap",)) == fingerprint(small(seed=1, **{"loss.is_cap": 3.0}), ("loss.is_cap",))


def broken(results: list[CellResult]) -> list[str]:
    return [check.claim for check in checks(Table(results)) if not check.holds]


def test_a_sound_sweep_passes_every_check(result: CellResult) -> None:
    on_policy = replace(result, bound=0, staleness_tokens=((0, 200),))
    exact = replace(result, exact=True, exact_kept=True)
    assert broken([result, on_policy, exact]) == []
    assert len(checks(Table([result, on_policy, exact]))) == 8
    assert len(checks(Table([result]))) == 6, "nothing is said about bound 0 or exact mode when neither was run"


BREAKS: dict[str, dict[str, Any]] = {
    "keeps the bound": {"staleness_tokens": ((3, 200),)},
    "no violation": {"staleness_violations": 1},
    "bound 0 is staleness 0": {"bound": 0, "staleness_tokens": ((1, 200),)},
    "exact mode": {"exact": True, "exact_kept": False},
    "same number of samples": {"curves": {"samples": (15.0,) * 4, "num_tokens": (50.0,) * 4}},
    "ledger closes": {"ledger_closes": False},
    "every setting that is not swept": {"fingerprint": "0" * 12},
    "same code": {"code": ("commit f00",)},
    "no file": {"files": {"/judge.py": ("aa", "bb")}},
}


@pytest.mark.parametrize("claim", BREAKS)
def test_a_broken_claim_is_found(claim: str, result: CellResult) -> None:
    assert any(claim in each for each in broken([result, replace(result, **BREAKS[claim])]))


def test_a_reward_that_changes_between_two_cells_or_before_one_goes_on_is_seen_and_other_code_too(
    write: Write, tmp_path: Path
) -> None:
    judge = tmp_path / "judge.py"
    judge.write_text("import near\n\ndef exact(completion): return near.ONE\n")
    near = tmp_path / "near.py"
    near.write_text("ONE = 1.0\n")
    named = {"rewards.functions": [f"own={judge}:exact"]}
    one, two = write(name="one", **named), write(name="two", **named)
    assert broken([read(one), read(two)]) == [], "the same file"
    near.write_text("ONE = 2.0\n")
    later = read(write(name="later", **named))
    (claim,) = broken([read(one), later])
    assert "no file" in claim and broken([later]) == []
    for _ in range(2):  # the second time nothing is new
        RunDir.reopen(two.config()).retire()
    seen = read(two).files
    assert broken([read(two)]) == [claim] and {str(judge): 1, str(near): 2} == {file: len(each) for file, each in seen.items()}
    assert seen[str(near)] == (*read(one).files[str(near)], *later.files[str(near)])
    manifest = two.path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"sources": "', '"sources": "0', 1))
    assert broken([read(two)]) == ["all cells ran the same code", claim], "it went on with other code"


LIMITED: dict[str, tuple[Budget, str]] = {
    # the fixture's steps have 40, 60, 60 and 40 tokens, and end after 5, 6, 8 and 9 seconds
    "tokens": (Budget(99, 170), "a budget of 170 tokens trained on"),
    "seconds": (Budget(99, None, 8.5), "a budget of 8.5 seconds of training"),
}


@pytest.mark.parametrize("what", LIMITED)
def test_cells_with_a_limit_used_it_up_in_their_last_step_or_the_check_fails(what: str, write: Write, tmp_path: Path) -> None:
    budget, claim = LIMITED[what]
    result = replace(read(write()), budget=budget)
    keep(result, tmp_path / "kept.json")
    assert kept(tmp_path / "kept.json") == result
    other = replace(result, curves={**result.curves, "samples": (4.0,) * 4}, budget=replace(budget, max_steps=5))
    assert broken([result, other]) == [], "with other steps and samples"
    (check,) = (check for check in checks(Table([result])) if claim in check.claim)
    assert check.detail == ("200 to 200" if what == "tokens" else "9.0 to 9.0")
    for wrong in (Budget(99, 201, None), Budget(99, 160, None), Budget(99, None, 9.5), Budget(99, None, 8.0)):
        assert any("used up a budget" in claim for claim in broken([replace(result, budget=wrong)]))
    assert any("same number of samples" in claim for claim in broken([result, replace(other, budget=None)]))
    limits = [read(write(name=name, **own)).budget for name, own in (("own", {"max_trained_tokens": 70}), ("free", {}))]
    assert limits == [Budget(4, 70), None]


def test_what_was_not_measured_is_a_dash_an_empty_field_and_no_conclusion(result: CellResult, tmp_path: Path) -> None:
    bare = replace(result, held_out_end=HeldOut(None, None), is_ratio_max=None)
    settings = [((("queue.max_staleness", bound),), seed) for bound in (0, 2) for seed in range(3)]
    blind = Table([replace(bare, setting=setting, seed=seed) for setting, seed in settings])
    assert "too few held-out evaluations to say anything" in conclusions(blind)
    assert "| queue.max_staleness = 0 | 3 | - |" in report.result(blind) and "| - | 12 " in report.result(blind)
    report.write_csv(blind, tmp_path / "results.csv")
    (row, *_) = csv.DictReader((tmp_path / "results.csv").read_text().splitlines())
    assert row["held_out_reward_end"] == "" and row["generated_tokens"] == "210", "a whole number"


def test_settings_are_drawn_over_steps_and_over_seconds_and_named_whole_in_legend_and_rows(result: CellResult) -> None:
    """Of two swept keys, with a column for each value of the first."""
    for values in (
        {"queue.max_staleness": [0, 1, 2, 3, 4, 6, 8, 12]},
        {"queue.max_staleness": [0, 4], "loss.kind": ["a", "b", "c"]},
    ):
        settings = [tuple(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
        runs = [replace(result, setting=setting, seed=seed, seconds=tuple((1 + seed) * s for s in result.seconds))
                for setting in settings for seed in (0, 1)]  # fmt: skip
        figure = pictures(Table(runs), SweepConfig(name="s", base="b.toml", seeds=(0, 1), values=values))["results"]
        *learning, outcome, _ = figure.axes
        assert "; too few seeds for an interval" in outcome.get_title() and "bar:" not in outcome.get_title()
        columns = len(learning) // 2
        for steps, seconds in zip(learning[:columns], learning[columns:], strict=True):
            assert list(steps.lines[0].get_xdata()) == [1, 2, 4], "the third step has no reward"
            assert list(seconds.lines[0].get_xdata()) == [7.5, 9.0, 13.5], "means of the seeds"
            assert [list(line.get_ydata()) for line in seconds.lines] == [list(line.get_ydata()) for line in steps.lines]
        last = list(dict.fromkeys(f"{setting[-1][0]} = {setting[-1][1]}" for setting in settings))
        assert [each.get_text() for each in figure.subfigs[0].legends[0].get_texts()] == last
        rows = ["\n".join(f"{key} = {value}" for key, value in setting) for setting in settings]
        assert [each.get_text() for each in outcome.get_yticklabels()] == rows
    assert [axes.get_title() for axes in learning[:2]] == ["queue.max_staleness = 0", "queue.max_staleness = 4"]
