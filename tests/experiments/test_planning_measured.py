"""The table of cells, what is read of a run whose times are known, and what a table of measurements says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.stages import StageTime
from async_rlhf.experiments import page
from async_rlhf.experiments.planning import DOCUMENT
from async_rlhf.experiments.planning.__main__ import app
from async_rlhf.experiments.planning.measured import document, facts, results
from async_rlhf.experiments.planning.measured import picture as drawing
from async_rlhf.experiments.planning.measured.cells import CELLS, cell
from async_rlhf.experiments.planning.measured.results import Speed, judged, missing
from async_rlhf.experiments.planning.measured.rewards import work
from async_rlhf.launch.placement import Host
from async_rlhf.run.config import Config, load
from async_rlhf.run.hosts.placement import placement_of
from async_rlhf.run.run_dir import RunDir
from tests.experiments.written import ended_run


def test_twelve_cells_have_six_to_fit_on_and_six_held_out_and_apps_comparison_is_whole() -> None:
    assert len({each.name for each in CELLS}) == 12 and Counter(each.use for each in CELLS) == {"fit": 6, "held out": 6}
    placed = [(each.load, each.strategy) for each in CELLS if each.strategy]
    assert sorted(placed) == [
        (load, strategy)
        for load in ("heavy scoring", "long tails")
        for strategy in ("flattening", "interleaving", "separation")
    ]
    assert {each.max_staleness for each in CELLS} == {0, 1, 2, 4, 8} and {each.actors for each in CELLS} == {1, 2, 3}


@pytest.mark.parametrize("name", [each.name for each in CELLS])
def test_every_cell_is_a_configuration_that_can_be_placed_on_two_cpus(name: str) -> None:
    config = load("quick", cell(name).settings)
    found = placement_of(config, (Host(cpus=2),))
    assert found.num_actors == cell(name).actors
    assert {slot.cpus is None for slot in found.slots.values()} == ({True, False} if cell(name).strategy else {True})


spans = st.tuples(st.integers(0, 50), st.integers(1, 50)).map(lambda each: StageTime(each[0], each[0] + each[1]))


@given(st.lists(spans, min_size=1, max_size=12))
def test_alive_rows_are_those_of_a_count_at_every_moment(times: list[StageTime]) -> None:
    counts = [sum(each.began <= second < each.ended for each in times) for second in range(120)]
    slow = [np.mean(counts[int(each.began) : int(each.ended)]) for each in times]
    assert facts.alive_rows(times) == pytest.approx(slow)


@given(st.floats(0, 5), st.floats(0, 5), st.lists(st.floats(1, 100), min_size=2, max_size=20, unique=True))
def test_a_line_through_points_of_a_line_is_that_line(step: float, row: float, rows: list[float]) -> None:
    x = np.array(rows)
    intercept, slope = facts.line(x, step + row * x, np.ones_like(x))
    assert intercept + slope * x == pytest.approx(step + row * x, rel=1e-3, abs=1e-3) and min(intercept, slope) >= 0


STEP_S, ROW_S, LEARNER_S, WAIT_S, SCORE_S = 0.002, 0.0001, 0.4, 0.1, 0.01
REWARD = work.__name__  # of the cells' configurations
NUM_STEPS, LENGTHS = 40, [4] * 24 + [8] * 24 + [16] * 12 + [64] * 4


def written(config: Config) -> RunDir:
    """A run of synchronous steps: generation by a known decode step, one scorer that takes a completion at a time, training."""
    now, records, samples = 1000.0, list[dict[str, Any]](), list[dict[str, Any]]()
    for step in range(1, NUM_STEPS + 1):
        at, ends = now, dict[int, float]()
        for token in range(1, max(LENGTHS) + 1):
            at += STEP_S + ROW_S * sum(length >= token for length in LENGTHS)
            ends[token] = at
        rollouts, free = list[dict[str, Any]](), now
        for length in LENGTHS:
            free = max(free, ends[length]) + SCORE_S
            timings = {"generation.began": now, "generation.ended": ends[length]}
            timings |= {f"{REWARD}.began": free - SCORE_S, f"{REWARD}.ended": free}
            rollouts.append({"spans": [[step, length]], "timings": timings})
        samples += [{"step": step, "group": step, "actor": "actor-0", "prompt": "a prompt", "rollouts": rollouts}]
        waited, now = free - now, free + LEARNER_S + WAIT_S
        took = waited + LEARNER_S + WAIT_S
        records.append(
            {"step": step, "time": now, "step_time": took, "samples_per_second": 64 / took, "idle/learner": waited / took,
             "idle/actor": 0.5, "staleness/mean": 0.0, "broadcast/seconds": WAIT_S, "num_tokens": sum(LENGTHS),
             "stages/exposed_ratio": 1.0, f"rewards/{REWARD}/seconds": SCORE_S}
        )  # fmt: skip
    return ended_run(config, records, rollouts=samples)


def test_of_a_run_whose_times_are_known_they_are_read(small: Callable[..., Any]) -> None:
    run = written(small())
    found = facts.read(run, 1)
    took = found["seconds"] / found["steps"]
    assert found["samples_per_s"] == pytest.approx(64 / took) and found["steps"] == NUM_STEPS - 3
    assert found["learner_step_s"] == pytest.approx(LEARNER_S) and found["publish_s"] == pytest.approx(WAIT_S)
    assert found["idle_learner"] == pytest.approx(1 - (LEARNER_S + WAIT_S) / took)
    assert found["decode_step_s"] == pytest.approx(STEP_S, rel=0.02)
    assert found["decode_row_s"] == pytest.approx(ROW_S, rel=0.02)
    assert (found["length_p50"], found["length_max"]) == (8, 64) and found["length_mean"] == np.mean(LENGTHS)
    assert found["score_s"] == pytest.approx(SCORE_S) == found["reward_s"] and found["scored_s"] > 10 * SCORE_S
    assert found["tokens_per_step"] == sum(LENGTHS) and found["prompt_characters"] == len("a prompt")
    with pytest.raises(facts.TooShortError, match=r"3 of 40 steps .* needs 8"):
        facts.read(run, NUM_STEPS - 5)


def test_work_takes_as_long_as_its_rounds_and_scores_the_same_text_alike() -> None:
    short, long = (min(work("text", rounds).metrics["seconds"] for _ in range(3)) for rounds in (10, 10_000))
    assert long > 10 * short and work("text", 10).value == work("text", 20).value != work("other", 10).value


FACTS = {"samples_per_s": 10.0, "foreign": 0.0}


def test_a_table_that_was_interrupted_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    todo = missing(results.read(path), 2)
    assert len(todo) == 24 and todo[0] == (CELLS[0], 0) and todo[12] == (CELLS[-1], 1) and todo[-1] == (CELLS[0], 1)
    for each, turn in todo[:5]:
        results.append(path, results.row_of(each, turn, FACTS))
    assert missing(results.read(path), 2) == todo[5:]
    assert missing(results.read(path), 2, [CELLS[0].name]) == [(CELLS[0], 1)]
    with pytest.raises(ConfigError, match=r"'tails' is no cell; there are tails-flattening, "):
        missing([], 1, ["tails"])
    with pytest.raises(ConfigError, match="other columns"):
        results.append(path, results.row_of(CELLS[0], 9, {**FACTS, "more": 1.0}))
    (tmp_path / "else.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="no table of measurements"):
        results.read(tmp_path / "else.csv")


def test_predictions_are_judged_by_their_error_and_by_pairs_that_the_spread_tells_apart() -> None:
    slow, like, fast = (
        Speed(each, "fit", speed, speed - 1, speed + 1, 3, 0.0) for each, speed in zip("abc", (10, 11, 20), strict=True)
    )
    found = judged([fast, slow, like], {"a": 11.0, "b": 9.9, "c": 10.0})
    assert found.errors == pytest.approx({"a": 0.1, "b": -0.1, "c": -0.5})
    assert (found.pairs, found.right) == (2, 1), "a and b overlap; c is above b, and not above a"
    assert judged([slow], {}).pairs == 0
    assert slow.spread == pytest.approx(0.2) and "used 20%" in replace(slow, foreign=0.2).note


def test_the_document_shows_what_the_kept_files_say() -> None:
    text = DOCUMENT.read_text()
    assert page.filled(text, "planning", document.kept()) == text, (
        "run python -m async_rlhf.experiments.planning compare --document"
    )


def test_the_parts_of_the_document_say_errors_beside_spreads_and_the_order_of_strategies(tmp_path: Path) -> None:
    speeds = [Speed(each.name, each.use, 100.0 + at, 99.0 + at, 101.0 + at, 3, 0.0) for at, each in enumerate(CELLS)]
    predicted = {each.cell: each.median * (1.01 if each.use == "fit" else 1.1) for each in speeds}
    parts = document.parts(speeds, predicted, {"generation": 1.25})
    assert "median error 10%, largest 10%; 0 of 6 errors are no larger than the spread" in parts["measured-verdict"]
    assert "median error 1%, largest 1%; 6 of 6 errors" in parts["measured-verdict"]
    assert "decoding and prefill 1.25" in parts["measured-verdict"]
    assert "| long tails | separation 102, interleaving 101, flattening 100 | interleaving 111," in parts["measured-strategies"]
    assert parts["measured"].count("| yes |") == 6 == parts["measured"].count("| no |")
    drawing.write(tmp_path / "measured.png", speeds, predicted)
    assert (tmp_path / "measured.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "constants.json").write_text("{}")
    with pytest.raises(ConfigError, match="no constants that `predict` has written"):
        document.read_factors(tmp_path / "constants.json")


def test_the_command_compares_a_table_with_predictions(tmp_path: Path) -> None:
    table, predictions = tmp_path / "results.csv", tmp_path / "predicted.csv"
    for turn, speed in enumerate((9.0, 10.0, 11.0)):
        results.append(table, results.row_of(CELLS[0], turn, {"samples_per_s": speed, "foreign": 0.3}))
    predictions.write_text(f"cell,samples_per_s\n{CELLS[0].name},12\n")
    found = CliRunner().invoke(app, ["compare", str(predictions), "--results", str(table)])
    line = next(line for line in found.stdout.splitlines() if line.startswith(CELLS[0].name))
    assert line.split()[:7] == [CELLS[0].name, "fit", "10.0", "20.0%", "3", "12.0", "+20.0%"] and "not quiet" in line
    predictions.write_text("cell\nx\n")
    bad = CliRunner().invoke(app, ["compare", str(predictions), "--results", str(table)])
    assert bad.exit_code == 1 and "no CSV with the columns cell and samples_per_s" in bad.output
    again = CliRunner().invoke(app, ["measure", "--only", CELLS[0].name, "--results", str(table)])
    assert again.exit_code == 0 and again.stdout.startswith("0 runs, about 0 minutes")
