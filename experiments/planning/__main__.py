"""`python -m async_rlhf.experiments.planning`: the model of performance beside what is published and what was measured."""

from __future__ import annotations

import typer

from async_rlhf.experiments.planning.validation import figures, measured

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


@app.command()
def validate() -> None:
    """Published figures of other systems that are sums of stages, beside what was predicted and what the model gives now."""
    typer.echo(figures.table())


@app.command()
def predict() -> None:
    """Simulate the twelve configurations by constants that are refitted on six of them, beside the runs that were measured."""
    found, speeds = measured.predict()
    typer.echo(measured.table(speeds))
    typer.echo("factors: " + ", ".join(f"{kind} {factor:.2f}" for kind, factor in found.factors.items()))


if __name__ == "__main__":
    app()
