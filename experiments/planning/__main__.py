"""`python -m async_rlhf.experiments.planning measure`: runs of this machine, and predictions beside them."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError
from async_rlhf.experiments.planning.measured import results

app = typer.Typer(add_completion=False)
_START_S = 12.0
"""That a run takes besides its training: the start of its processes and their end."""


@app.callback()
def main() -> None:
    """Models of `async_rlhf/plan` held against measurements."""


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
    predictions: Annotated[Path, typer.Argument(help="CSV with the columns cell and samples_per_s.")],
    results_file: Annotated[Path, typer.Option("--results", help="The table of measurements.")] = Path(
        "runs/planning/results.csv"
    ),
) -> None:
    """Predictions beside measurements: the error of each cell beside the spread of its runs, and the order of pairs."""
    with _errors():
        _show(results_file, _predicted(predictions))


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


def _predicted(path: Path) -> dict[str, float]:
    try:
        with path.open(newline="") as file:
            return {row["cell"]: float(row["samples_per_s"]) for row in csv.DictReader(file)}
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{path}: no CSV with the columns cell and samples_per_s: {error}") from error


if __name__ == "__main__":
    app()
