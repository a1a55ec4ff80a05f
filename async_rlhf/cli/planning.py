"""Commands about hardware that need not be there: plan."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.cli.app import AsJson, app, errors, say


@app.command()
def plan(
    spec: Annotated[
        Path | None,
        typer.Argument(metavar="SPEC.toml", help="Models, cluster, lengths, batch, loss, reward: docs/planning.md."),
    ] = None,
    as_json: AsJson = False,
    picture: Annotated[Path | None, typer.Option(help="PNG or SVG to write: time line, speed against staleness.")] = None,
    settings: Annotated[Path | None, typer.Option(help="TOML file to write: sections of a configuration for train.")] = None,
    simulate: Annotated[
        int | None, typer.Option(min=4, metavar="STEPS", help="Run the plan on virtual time, with the queue's own admission.")
    ] = None,
    lose_actor: Annotated[float | None, typer.Option(metavar="SECONDS", help="With --simulate: an actor is lost then.")] = None,
    join_actor: Annotated[float | None, typer.Option(metavar="SECONDS", help="With --simulate: one joins then.")] = None,
    devices: Annotated[bool, typer.Option("--devices", help="List the catalogue of devices, and end.")] = False,
) -> None:
    """Which role goes on which devices, how far generation may run ahead, and what a step takes: before anything is rented."""
    with errors():
        from async_rlhf.buffers.files import write_whole
        from async_rlhf.plan import telling
        from async_rlhf.plan.devices import catalogue
        from async_rlhf.plan.search import search
        from async_rlhf.plan.settings import as_toml
        from async_rlhf.plan.spec import read

        if devices:
            for name, device in catalogue().items():
                typer.echo(
                    f"{name:10} {device.peak_flops / 1e12:6.0f} TFLOP/s {device.memory_bytes / 1e9:4.0f} GB "
                    f"{device.memory_bytes_per_s / 1e9:5.0f} GB/s, link {device.link_bytes_per_s / 1e9:4.0f} GB/s, network "
                    f"{device.network_bytes_per_s / 1e9:3.0f} GB/s"
                )
            return
        if spec is None:
            raise ConfigError("plan needs a SPEC.toml, or --devices")
        found = search(read(spec), progress=_progress)
        simulated = None
        if simulate is not None:
            from async_rlhf.plan.simulated_plan import lines, simulate_plan
            from async_rlhf.plan.workload import ActorJoined, ActorLost

            lost = [] if lose_actor is None else [ActorLost(lose_actor, "actor-0")]
            joined = [] if join_actor is None else [ActorJoined(join_actor, "actor-new")]
            chosen = found.best or found.fastest
            simulated = simulate_plan(
                chosen, found.roles, steps=simulate, queued_groups=found.queued_groups, events=[*lost, *joined]
            )
        if as_json:
            typer.echo(json.dumps(telling.as_json(found, simulated), indent=1))
        else:
            say("\n".join(telling.lines(found)))
            if simulated is not None:
                say("\n".join(lines(chosen, simulated)))
        if settings is not None:
            if not found.settings:
                raise ConfigError(f"no settings to write: {found.refusal}")
            write_whole(settings, as_toml(found.settings).encode())
        if picture is not None:
            from async_rlhf.plan.picture import draw

            draw(found, picture)


def _progress(name: str, done: int, of: int) -> None:
    """One line that is written over, where there is a terminal."""
    if sys.stderr.isatty():
        text = f"{done} of {of} strategies: {name}" if name else ""
        typer.echo(f"\r\033[K{text}", nl=False, err=True)
