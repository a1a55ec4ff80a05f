"""The validation: each row holds or says why not, and the documents show what the commands give."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments import page
from async_rlhf.experiments.planning.__main__ import DOCUMENT, RESULTS, app
from async_rlhf.experiments.planning.model.devices import device
from async_rlhf.experiments.planning.model.generation import generation_ends_s
from async_rlhf.experiments.planning.model.model_costs import read
from async_rlhf.experiments.planning.model.stages import Place, decode_step_s, prefill_s
from async_rlhf.experiments.planning.validation import calls, measured, table
from async_rlhf.experiments.planning.validation.fused import Fusion, Pipeline, greedy, makespan_s
from async_rlhf.experiments.planning.validation.measured import CELLS
from async_rlhf.experiments.planning.validation.rlhfuse import consolidated_s
from async_rlhf.experiments.planning.validation.rows import Figure, Row, rank_correlation, within
from async_rlhf.experiments.planning.validation.windows import window_s
from tests.planning.specs import LLAMA_1B

HOLD = {"V1", "V2", "V3", "V4", "V6", "V9", "V13", "V16"}
SPANNED = {"V4", "V6", "V7", *(f"V{number}" for number in range(8, 18))}
LONG = {"V6", "V7", "V10", "V17"}
NAMES = [f"V{number}" for number in range(1, 18)]


@cache
def made(name: str) -> Row:
    (row,) = table.made([name])
    return row


def shown(parts: dict[str, str]) -> bool:
    """Each part in the document that has a place for it."""
    texts = [path.read_text() for path in (DOCUMENT, RESULTS)]
    places = [(text, name, part) for name, part in parts.items() for text in texts if f"<!-- planning: {name} -->" in text]
    assert {name for _, name, _ in places} == parts.keys()
    return all(page.filled(text, "planning", {name: part}) == text for text, name, part in places)


@pytest.mark.rest
def test_the_documents_show_what_the_command_gives() -> None:
    assert list(table.ROWS) == NAMES
    assert shown(table.tables([made(name) for name in NAMES])), (
        "run python -m async_rlhf.experiments.planning validate --document"
    )


def test_the_documents_show_predictions_beside_the_runs_that_were_measured() -> None:
    assert shown(measured.tables(*measured.kept())), "run python -m async_rlhf.experiments.planning predict --document"


@pytest.mark.rest
def test_the_twelve_configurations_are_predicted_as_the_kept_files_say_and_half_of_them_are_not_looked_at() -> None:
    predicted, factors = measured.kept()
    found = measured.predict()
    assert found.refitted.factors == pytest.approx(factors)
    assert found.samples_per_s == pytest.approx(predicted, rel=1e-5)
    assert [cell.use for cell in CELLS].count("fit") == 6 == len(CELLS) - 6


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.rest) if name in LONG else name for name in NAMES])
def test_a_row_holds_or_says_why_not_and_predicts_within_its_assumptions_also_what_gave_no_constant(name: str) -> None:
    row = made(name)
    assert row.holds == (name in HOLD)
    assert row.holds or len(row.reason) > 20, "it misses without a reason"
    kinds = {figure.how for figure in row.figures}
    assert "fitted" not in kinds or ("held out" in kinds and row.fitted)
    assert bool([figure for figure in row.figures if figure.span]) == (name in SPANNED)
    for figure in row.figures:
        assert 0 < figure.predicted < math.inf
        if figure.span:
            assert min(figure.span) <= figure.predicted * 1.0000001, figure
            assert figure.predicted <= max(figure.span) * 1.0000001, figure


def test_exact_rows_are_equal_to_the_last_digit() -> None:
    exact = [figure for name in ("V1", "V2") for figure in made(name).figures if figure.how == "exact"]
    assert len(exact) == 39
    assert all(figure.predicted == figure.published for figure in exact if figure.group != "makespan found")


def test_a_row_alone_is_written_as_json(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["validate", "--only", "V16", "--output", str(tmp_path / "v16.json")])
    assert done.exit_code == 0, done.output
    (written,) = json.loads((tmp_path / "v16.json").read_text())
    assert written["verdict"] == "holds" and written["figures"][1]["published"] == 190.4
    assert "| V16 |" in done.output and "| V15 |" not in done.output


def test_an_unknown_row_is_refused_with_the_nearest() -> None:
    done = CliRunner().invoke(app, ["validate", "--only", "V18"])
    assert done.exit_code == 2 and "did you mean" in done.output
    with pytest.raises(ConfigError, match="row 'W3'"):
        table.made(["W3"])


def test_a_document_without_its_marker_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no <!-- planning: summary -->"):
        page.filled("# Planning\n", "planning", table.tables([made("V2")]))


def figure(published: float, predicted: float) -> Figure:
    return Figure("step", "", "s", published, predicted)


def test_within_is_a_share_of_what_was_published() -> None:
    assert within([figure(10, 8.6), figure(10, 11.4)], 0.15)
    assert not within([figure(10, 8.4)], 0.15)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=12))
def test_a_rank_correlation_knows_no_scale_and_changes_sign_with_the_order(pairs: list[tuple[int, int]]) -> None:
    if len({a for a, _ in pairs}) == 1 or len({b for _, b in pairs}) == 1:
        return
    found = rank_correlation(pairs)
    assert -1.0000001 <= found <= 1.0000001
    assert rank_correlation([(math.exp(a), b) for a, b in pairs]) == pytest.approx(found)
    assert rank_correlation([(-a, b) for a, b in pairs]) == pytest.approx(-found)


def test_constants_are_found_where_they_lie_and_stay_within_their_bounds() -> None:
    assert calls.fit(lambda trial: [(3 * trial[0] + trial[1]) / 5, trial[1] / 2], [(0.01, 10), (0.01, 10)]) == pytest.approx(
        (1, 2), rel=0.02
    )
    assert calls.fit(lambda trial: [trial[0] / 50], [(0.1, 1.0)]) == (1.0,)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 12))
def test_rows_of_one_length_take_what_following_each_of_them_gives(count: int, length: int, slots: int) -> None:
    place = Place(model=read(LLAMA_1B), device=device("H100"))
    followed = generation_ends_s(
        [length] * count,
        prompt_tokens=16,
        slots=slots,
        room_tokens=10_000,
        longest=length,
        step_s=lambda alive, context: decode_step_s(place, alive, context),
        prefill_s=lambda alive: prefill_s(place, alive, 16),
    )
    assert calls.generation_s(place, [length] * count, 16, slots=slots) == pytest.approx(max(followed))


def window(completions: list[int], **changes: Any) -> float:
    given_: dict[str, Any] = {
        "group": 1,
        "threshold": 0.0,
        "most_alive": 1000,
        "update_s": 40.0,
        "step_s": lambda alive, produced: 1.0,
    }
    return window_s(completions, **{**given_, **changes})


def test_without_staleness_a_window_takes_its_longest_row_and_the_last_part_of_training() -> None:
    assert window([10] * 99 + [200]) == pytest.approx(200 + 10)
    assert window([10] * 100) == pytest.approx(10 + 40)


def test_a_prompt_ends_with_the_longest_of_its_rows() -> None:
    # Four prompts of two rows: each part of training waits for the longer one, and all of them end at 50.
    assert window([10, 50] * 4, group=2) == pytest.approx(50 + 40)
    assert window([10] * 4 + [50] * 4, group=2) == pytest.approx(50 + 20)


def test_with_staleness_the_longest_row_no_longer_binds_and_training_does() -> None:
    assert window([10] * 99 + [60], threshold=0.5) == pytest.approx(40)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=8, max_size=40), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_a_window_takes_at_least_its_training_and_at_most_generation_and_training(lengths: list[int], threshold: float) -> None:
    found = window(lengths, threshold=threshold)
    assert 40 - 1e-6 <= found <= max(lengths) + 40 + 1e-6


def test_a_window_without_a_row_for_each_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 prompts in 4 parts"):
        window([1, 2, 3])


rows = st.lists(st.integers(1, 50), min_size=1, max_size=30)


@given(rows, st.integers(1, 8))
def test_the_most_loaded_rank_has_between_the_even_share_and_that_with_one_row_more(costs: list[int], ranks: int) -> None:
    bound = max(math.ceil(sum(costs) / ranks), max(costs))
    assert bound <= calls.most_loaded(costs, ranks) <= max(costs) + sum(costs) / ranks


def consolidated(lengths: list[int], **changes: Any) -> float:
    given_: dict[str, Any] = {"replicas": 4, "threshold": 0.2, "most_rows": 16, "score_s": 100.0}
    return consolidated_s(lengths, **{**given_, "step_s": lambda alive, produced: 1.0, **changes})


def test_the_tail_of_generation_hides_the_scoring_of_what_has_ended() -> None:
    assert consolidated([10, 20, 300], threshold=0.0) == 400
    # 8 of 10 rows end at 10; from then on 3 of 4 replicas score their 80 of 680 tokens, while the others take 290 more.
    assert consolidated([10] * 8 + [300] * 2) == pytest.approx(400 - 80 / 680 * 100)
    assert consolidated([10] * 8 + [12] * 2) == pytest.approx(112 - 2 * 3 / 4), "free replicas score no faster than their share"
    assert consolidated([10] * 8 + [300] * 2, move_s=5.0) == pytest.approx(405 - 80 / 680 * 100)


@given(rows, st.sampled_from([0.0, 0.1, 0.3, 1.0]))
def test_moving_the_tail_never_takes_longer_where_a_step_takes_the_same(lengths: list[int], threshold: float) -> None:
    assert consolidated(lengths, threshold=threshold) <= consolidated(lengths, threshold=0.0) + 1e-9


pipelines = st.builds(
    lambda depths, counts, forwards: Fusion(*(Pipeline(*each) for each in zip(depths, counts, forwards, strict=True))),
    st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (2, 4), (3, 3)]),
    st.tuples(st.integers(0, 4), st.integers(0, 4)),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
)


@settings(max_examples=60)
@given(pipelines, st.floats(0.5, 2), st.floats(0, 1))
def test_a_fused_schedule_is_never_below_the_bound(fusion: Fusion, ratio: float, wait: float) -> None:
    assert fusion.bound_s <= makespan_s(fusion, greedy(fusion, ratio, wait)) + 1e-9


def test_one_pipeline_alone_takes_its_1f1b_time() -> None:
    idle = Pipeline(4, 0, 1.0)
    for alone in (Fusion(Pipeline(4, 6, 2.0), idle), Fusion(idle, Pipeline(2, 3, 5.0))):
        assert makespan_s(alone, greedy(alone)) == alone.serial_s == alone.bound_s


def test_what_is_no_fusion_or_no_order_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 and 8 stages"):
        Fusion(Pipeline(8, 1, 1.0), Pipeline(3, 1, 1.0))
    fusion = Fusion(Pipeline(2, 1, 1.0), Pipeline(2, 0, 1.0))
    for orders, message in (
        (((1, 0), (1, 0)), r"stages \[0, 1\] wait for each other in a circle"),
        (((0, 1), (0, 0, 1)), "stage 1 has 2 tasks of kind 0, 1 belong"),
        (((0, 1),), "1 orders are given, the fusion has 2 stages"),
    ):
        with pytest.raises(ConfigError, match=message):
            makespan_s(fusion, orders)
