"""`python -m async_rlhf.experiments.planning`: the model of performance beside what is published and what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError
from async_rlhf.experiments import page
from async_rlhf.experiments.planning.validation import measured, table

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "planning.md"
RESULTS = Path(__file__).with_name("validation") / "README.md"
"""Their tables are made, in places of the kind `planning` (`experiments.page`)."""
Write = Annotated[bool, typer.Option("--document", help="Write the tables into the documents.")]

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


@app.command()
def validate(
    only: Annotated[list[str] | None, typer.Option(help="Rows, V1 to V17; else all.")] = None,
    output: Annotated[Path | None, typer.Option(help="All figures as JSON.")] = None,
    write: Write = False,
) -> None:
    """Published figures of other systems beside what the model predicts, with a verdict for each row."""
    if write and only:
        raise typer.BadParameter("--document writes all rows: leave --only out")
    try:
        rows = table.made(only or ())
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    if output is not None:
        output.write_text(json.dumps([table.as_data(row) for row in rows], indent=1) + "\n")
    _show(table.tables(rows), write=write)


@app.command()
def predict(write: Write = False) -> None:
    """Simulate the twelve configurations by constants that are refitted on six of them, beside the runs that were measured."""
    with _errors():
        found = measured.predict()
        _show(measured.tables(found.samples_per_s, found.refitted.factors), write=write)


def _show(parts: Mapping[str, str], *, write: bool) -> None:
    for text in parts.values():
        typer.echo(text)
    for path in (DOCUMENT, RESULTS) if write else ():
        text = path.read_text()
        own = {name: part for name, part in parts.items() if f"<!-- planning: {name} -->" in text}
        path.write_text(page.filled(text, "planning", own))


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except AsyncRLHFError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    app()
