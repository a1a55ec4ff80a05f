"""`python -m async_rlhf.experiments.planning`: the models of `async_rlhf/plan` held against what is published and measured."""

from __future__ import annotations

import csv
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError
from async_rlhf.experiments import page
from async_rlhf.experiments.planning import DOCUMENT
from async_rlhf.experiments.planning.measured import document, results
from async_rlhf.experiments.planning.validation import fused, table
from async_rlhf.launch.forked import adopt_orphans

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
_START_S = 12.0
"""That a run takes besides its training: the start of its processes and their end."""


@app.callback()
def group() -> None:
    """Commands stand beside each other."""


@app.command()
def measure(
    only: Annotated[list[str] | None, typer.Option(help="A cell, by name; again for another. All of them without.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each cell.")] = 3,
    seconds: Annotated[float, typer.Option(min=5, help="Of training, the start of the actors included.")] = 26.0,
    results_file: Annotated[Path, typer.Option("--results", help="The table; what is in it is not measured again.")] = Path(
        "runs/planning/results.csv"
    ),
) -> None:
    """Measure what is not in the table yet, one run after the other: each has the machine for itself."""
    from async_rlhf.experiments.planning.measured import runs

    began, failed = time.monotonic(), 0
    with _errors():
        todo = results.missing(results.read(results_file), repeats, only or [])
        typer.echo(f"{len(todo)} runs, about {len(todo) * (seconds + _START_S) / 60:.0f} minutes")
        for number, (cell, repeat) in enumerate(todo, 1):
            label = f"{number}/{len(todo)} {cell.name}, run {repeat + 1}"
            try:
                row = results.row_of(cell, repeat, runs.measure(cell, seconds))
            except AsyncRLHFError as error:  # the others are measured all the same
                typer.echo(f"{label} failed: {error}", err=True)
                failed += 1
                continue
            results.append(results_file, row)
            shown = f"{float(row['samples_per_s']):.1f} samples/s, other programs {float(row['foreign'] or 0):.0%}"
            typer.echo(f"{label}: {shown}, {float(row['wall_s']):.0f} s")
        _show(results_file, {})
    typer.echo(f"{results_file}: in {(time.monotonic() - began) / 60:.1f} minutes")
    if failed:
        typer.echo(f"{failed} runs failed; the same command makes them again", err=True)
        raise typer.Exit(1)


@app.command()
def compare(
    predictions: Annotated[Path, typer.Argument(help="CSV with the columns cell and samples_per_s.")] = document.PREDICTIONS,
    results_file: Annotated[Path, typer.Option("--results", help="The table of measurements.")] = document.RESULTS,
    picture: Annotated[Path | None, typer.Option(help="Predicted against measured, as PNG.")] = None,
    write: Annotated[bool, typer.Option("--document", help="Write docs/planning.md, from the files that are kept.")] = False,
) -> None:
    """Predictions beside measurements: the error of each cell beside the spread of its runs, and the order of pairs."""
    with _errors():
        predicted = results.read_predictions(predictions)
        _show(results_file, predicted)
        if picture is not None:
            from async_rlhf.experiments.planning.measured import picture as drawing

            drawing.write(picture, results.speeds(results.read(results_file)), predicted)
        if write:
            _write(document.kept())


@app.command()
def predict(
    calibration: Annotated[Path, typer.Argument(help="What async-rlhf calibrate has written on this machine.")],
    results_file: Annotated[Path, typer.Option("--results", help="The table of measurements.")] = Path(
        "runs/planning/results.csv"
    ),
    out: Annotated[Path, typer.Option(help="Predictions, for `compare`; fitted constants beside it.")] = Path(
        "runs/planning/predictions.csv"
    ),
) -> None:
    """Refit the constants on the cells for fitting, simulate all twelve, and show predictions beside measurements."""
    from async_rlhf.experiments.planning.measured import predictions
    from async_rlhf.plan.calibration import load

    with _errors():
        rewards_s = predictions.measure_rewards()
        found = predictions.predict(
            results.read(results_file), load(calibration).costs, num_cpus=os.cpu_count() or 1, rewards_s=rewards_s
        )
        with out.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows(
                [("cell", "samples_per_s"), *((name, f"{each:.6g}") for name, each in found.samples_per_s.items())]
            )
        constants = {
            "factors": found.refitted.factors,
            "costs": found.refitted.costs.model_dump(mode="json"),
            "rewards_s": {str(rounds): seconds for rounds, seconds in rewards_s.items()},
        }
        out.with_name("constants.json").write_text(json.dumps(constants, indent=1) + "\n")
        typer.echo("factors: " + ", ".join(f"{kind} {factor:.2f}" for kind, factor in found.refitted.factors.items()))
        _show(results_file, dict(found.samples_per_s))


@app.command()
def validate(
    only: Annotated[list[str] | None, typer.Option(help="Rows, V1 to V17; else all.")] = None,
    output: Annotated[Path | None, typer.Option(help="All figures as JSON.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Published against predicted, as PNG.")] = None,
    write: Annotated[bool, typer.Option("--document", help="Write the tables of docs/planning.md.")] = False,
    search: Annotated[bool, typer.Option("--search", help="Search the schedules of V1 again first; minutes.")] = False,
) -> None:
    """Published figures of other systems beside what the models predict, with a verdict for each row."""
    if write and only:
        raise typer.BadParameter("--document writes all rows: leave --only out")
    if search:
        fused.search_again()
    try:
        rows = table.made(only or ())
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    if output is not None:
        output.write_text(json.dumps([table.as_data(row) for row in rows], indent=1) + "\n")
    if picture is not None:
        from async_rlhf.experiments.planning.validation import picture as drawing

        drawing.write(picture, rows)
    if write:
        _write(table.tables(rows))
    for text in table.tables(rows).values():
        typer.echo(text)


@app.command()
def sensitivity(
    write: Annotated[bool, typer.Option("--document", help="Write the table of docs/planning.md.")] = False,
) -> None:
    """The shipped plan with one of its assumptions changed at a time."""
    from async_rlhf.experiments.planning.sensitivity import part

    with _errors():
        found = part()
        typer.echo(found["sensitivity"])
        if write:
            _write(found)


@app.command()
def speed(devices: Annotated[list[int] | None, typer.Option(help="Numbers of devices, multiples of 8.")] = None) -> None:
    """How long `async-rlhf plan` takes."""
    from async_rlhf.experiments.planning.speed import LIMITS_S, lines

    with _errors():
        for line in lines(devices or list(LIMITS_S)):
            typer.echo(line)


def _write(parts: Mapping[str, str]) -> None:
    DOCUMENT.write_text(page.filled(DOCUMENT.read_text(), "planning", parts))


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except AsyncRLHFError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def _show(path: Path, predicted: dict[str, float]) -> None:
    for line in results.table(results.speeds(results.read(path)), predicted):
        typer.echo(line)


if __name__ == "__main__":
    adopt_orphans()
    app()
