"""Commands about hardware that need not be there: plan, and try machine, which measures what it needs."""

from __future__ import annotations

import sys
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
    picture: Annotated[Path | None, typer.Option(help="PNG or SVG to write: time line, speed against staleness.")] = None,
    settings: Annotated[Path | None, typer.Option(help="TOML file to write: sections of a configuration for train.")] = None,
    simulate: Annotated[
        int | None, typer.Option(min=4, metavar="STEPS", help="Run the plan on virtual time, with the queue's own admission.")
    ] = None,
    lose_actor: Annotated[float | None, typer.Option(metavar="SECONDS", help="With --simulate: an actor is lost then.")] = None,
    join_actor: Annotated[float | None, typer.Option(metavar="SECONDS", help="With --simulate: one joins then.")] = None,
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
        lose_actor=lose_actor,
        join_actor=join_actor,
        settings=settings,
        picture=picture,
        as_json=as_json,
        progress=_progress,
    )
    say(found)


@command(trying, "machine")
def try_machine(
    model: Annotated[
        str, typer.Option(help="Directory, or name of a shipped model: its stages are measured.")
    ] = "tiny-speller",
    device: Annotated[str, typer.Option(help="Torch device of engine and learner.")] = "cpu",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the engine's weights.")] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of the engine, and of the learner.")] = 1,
    slots: Annotated[int, typer.Option(min=1, help="Most rows that are decoded together.")] = 64,
    seconds: Annotated[float, typer.Option(min=1, max=170, help="What measuring may take, about; loading comes on top.")] = 60,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("calibration.json"),
    as_json: AsJson = False,
) -> None:
    """Measure this machine for `plan`: arithmetic, memory, links, and what each stage of a run of one model costs."""
    measured = experiment("calibrate")(
        model,
        out,
        device=device,
        dtype=dtype,
        threads=threads,
        slots=slots,
        seconds=seconds,
        as_json=as_json,
        report=lambda line: say(line, err=True),
    )
    say(measured)


def _progress(name: str, done: int, of: int) -> None:
    """One line that is written over, where there is a terminal."""
    if sys.stderr.isatty():
        text = f"{done} of {of} strategies: {name}" if name else ""
        typer.echo(f"\r\033[K{text}", nl=False, err=True)
