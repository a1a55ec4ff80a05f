"""`python -m async_rlhf.experiments.tabular [--only NAME] [--seeds N] [--out DIR]`: rows, pictures and one report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from async_rlhf.experiments.tabular.picture import draw
from async_rlhf.experiments.tabular.questions import QUESTIONS
from async_rlhf.experiments.tabular.report import read_csv, render, write_csv

app = typer.Typer(add_completion=False)


@app.command()
def main(
    only: Annotated[list[str] | None, typer.Option(help="A question, by name; again for another. All of them without.")] = None,
    seeds: Annotated[int, typer.Option(min=5, help="Paired seeds, from 0.")] = 20,
    out: Annotated[Path, typer.Option(help="Directory, made.")] = Path("runs/tabular"),
) -> None:
    """Train the tabular twin: NAME.csv, NAME.png and NAME.svg for every question, and report.md of all that are in DIR."""
    known = [question.name for question in QUESTIONS]
    for name in only or []:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is no question; the questions are {', '.join(known)}")
    torch.set_num_threads(1)  # tensors are tiny: a second thread only waits
    out.mkdir(parents=True, exist_ok=True)
    for question in QUESTIONS:
        if not only or question.name in only:
            path = out / f"{question.name}.csv"
            write_csv(question.rows(range(seeds)), path)
            draw(question, read_csv(path), out)
            typer.echo(f"{question.name}: {len(read_csv(path))} rows", err=True)
    there = [(question, out / f"{question.name}.csv") for question in QUESTIONS]
    (out / "report.md").write_text(render([(question, read_csv(path)) for question, path in there if path.exists()]))
    typer.echo(str(out / "report.md"))


if __name__ == "__main__":
    app()
