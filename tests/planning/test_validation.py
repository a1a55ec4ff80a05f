"""The validation: the model still gives what is in its tables for published figures, and for runs that were measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import async_rlhf.experiments.planning.__main__ as command
from async_rlhf.experiments.planning.validation import figures, measured

RESULTS = (Path(command.__file__).with_name("validation") / "README.md").read_text()


@pytest.mark.parametrize("figure", figures.figures(), ids=lambda figure: figure.name)
def test_stages_give_the_figures_of_other_systems_as_in_the_tables(figure: figures.Figure) -> None:
    assert figure.now == pytest.approx(figure.predicted, rel=1e-4)
    row = figure.name.partition(":")[0]
    assert [line for line in RESULTS.splitlines() if line.startswith(f"| {row} |") and f"{figure.predicted:.3g}" in line]


def test_the_command_shows_them() -> None:
    shown = CliRunner().invoke(command.app, ["validate"])
    assert shown.exit_code == 0 and "| V13: gain of a step ahead, 8B on 7 + 1 H100 | 1.62 | 1.61 | 1.61 |" in shown.output


def test_the_tables_show_predictions_beside_the_runs_that_were_measured() -> None:
    assert measured.table(measured.kept()["predicted"]) in RESULTS


@pytest.mark.rest
def test_the_twelve_configurations_are_predicted_as_in_the_kept_file_and_half_of_them_are_not_looked_at() -> None:
    found, predicted = measured.predict()
    assert found.factors == pytest.approx(measured.kept()["factors"])
    assert predicted == pytest.approx(measured.kept()["predicted"], rel=1e-5)
    assert [cell["use"] for cell in measured.cells()].count("fit") == 6 == len(measured.cells()) - 6
