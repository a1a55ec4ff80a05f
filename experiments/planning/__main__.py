"""`python -m async_rlhf.experiments.planning`: the models of `async_rlhf/plan` held against what is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.validation import fused, table

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


@app.callback()
def group() -> None:
    """Commands stand beside each other."""


@app.command()
def validate(
    only: Annotated[list[str] | None, typer.Option(help="Rows, V1 to V17; else all.")] = None,
    output: Annotated[Path | None, typer.Option(help="All figures as JSON.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Published against predicted, as PNG.")] = None,
    document: Annotated[bool, typer.Option("--document", help="Write the tables of docs/planning.md.")] = False,
    search: Annotated[bool, typer.Option("--search", help="Search the schedules of V1 again first; minutes.")] = False,
) -> None:
    """Published figures of other systems beside what the models predict, with a verdict for each row."""
    if document and only:
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
    if document:
        table.DOCUMENT.write_text(table.document(rows, table.DOCUMENT.read_text()))
    for text in table.tables(rows).values():
        typer.echo(text)


if __name__ == "__main__":
    app()
