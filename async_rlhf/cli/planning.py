"""Commands about hardware that need not be there: plan, and try machine, which measures what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from async_rlhf.cli.app import AsJson, app, command, experiment, say
from async_rlhf.cli.trying import trying


@command(app)
def plan(
    spec: Annotated[
        Path | None,
        typer.Argument(
            metavar="SPEC.toml",
            help="Models, cluster, lengths, batch, loss, reward: docs/planning.md. Or the name of a shipped one: qwen3-8b.",
        ),
    ] = None,
    as_json: AsJson = False,
    settings: Annotated[Path | None, typer.Option(help="TOML file to write: sections of a configuration for train.")] = None,
    simulate: Annotated[
        int | None, typer.Option(min=4, metavar="STEPS", help="Run the plan on virtual time, with the queue's own admission.")
    ] = None,
    from_run: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="A finished run. With a SPEC.toml: the shares of peaks are those that it reached. Alone: what it would "
            "do with other bounds of staleness.",
        ),
    ] = None,
    devices: Annotated[bool, typer.Option("--devices", help="List the catalogue of devices, and end.")] = False,
) -> None:
    """Which role goes on which devices, and what a step takes. Before anything is rented; also how far ahead to generate."""
    if devices:
        say(experiment("devices")())
        return
    found = experiment("plan")(
        spec,
        from_run,
        simulate=simulate,
        settings=settings,
        as_json=as_json,
    )
    say(found)


@command(trying, "machine")
def try_machine(
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the matrix product.")] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Measure this machine for `plan`: arithmetic and memory, as the section cluster.own of a spec."""
    say(experiment("calibrate")(device=device, dtype=dtype, threads=threads))
