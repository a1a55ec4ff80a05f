"""Commands about hardware that need not be there: plan."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.cli.app import AsJson, app, errors, say

if TYPE_CHECKING:
    from async_rlhf.plan.devices import Device
    from async_rlhf.plan.search import Found
    from async_rlhf.plan.simulated import Simulated
    from async_rlhf.plan.spec import Spec


@app.command()
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
    """Which role goes on which devices, how far generation may run ahead, and what a step takes: before anything is rented."""
    with errors():
        from async_rlhf.plan.devices import catalogue

        if devices:
            _list(catalogue())
            return
        if spec is None and from_run is None:
            raise ConfigError("plan needs a SPEC.toml, --from-run RUN, or --devices")
        _check_outputs(spec, simulate, {"--lose-actor": lose_actor, "--join-actor": join_actor}, settings, picture)
        if spec is None:
            assert from_run is not None
            _again(from_run, as_json=as_json)
            return
        found = _found(spec, from_run)
        simulated = None if simulate is None else _simulated(found, simulate, lose_actor, join_actor)
        _say(found, simulated, as_json=as_json)
        _write(found, settings, picture)


def _check_outputs(
    spec: Path | None, simulate: int | None, comings: Mapping[str, float | None], settings: Path | None, picture: Path | None
) -> None:
    """Before anything is searched. Raises ConfigError for what could not be written, or would be left out."""
    given = {"--settings": settings, "--picture": picture, "--simulate": simulate, **comings}
    if spec is None and (unused := next((name for name, value in given.items() if value is not None), None)):
        raise ConfigError(f"{unused} is of a plan: give a SPEC.toml beside --from-run")
    if simulate is None and (unused := next((name for name, value in comings.items() if value is not None), None)):
        raise ConfigError(f"{unused} is of a simulation: give --simulate STEPS, too")
    if picture is not None:
        from async_rlhf.plan.picture import check_format

        check_format(picture)
    for name, path in (("--settings", settings), ("--picture", picture)):
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError(f"{name} {str(path)!r}: its folder does not exist")


def _found(spec: Path, run: Path | None) -> Found:
    from async_rlhf.plan.search import search
    from async_rlhf.plan.spec import read
    from async_rlhf.run.shipped import named_file, plans

    asked = read(named_file("plan", spec, plans()))
    return search(asked if run is None else _as_reached(asked, run), progress=_progress)


def _simulated(found: Found, steps: int, lose_actor: float | None, join_actor: float | None) -> Simulated:
    from async_rlhf.plan.simulated_plan import simulate_plan
    from async_rlhf.plan.workload import ActorJoined, ActorLost

    lost = [] if lose_actor is None else [ActorLost(lose_actor, "actor-0")]
    joined = [] if join_actor is None else [ActorJoined(join_actor, "actor-new")]
    return simulate_plan(
        found.best or found.fastest, found.roles, steps=steps, queued_groups=found.queued_groups, events=[*lost, *joined]
    )


def _say(found: Found, simulated: Simulated | None, *, as_json: bool) -> None:
    from async_rlhf.plan import telling
    from async_rlhf.plan.simulated_plan import lines

    if as_json:
        typer.echo(json.dumps(telling.as_json(found, simulated), indent=1))
        return
    say("\n".join(telling.lines(found)))
    if simulated is not None:
        say("\n".join(lines(found.best or found.fastest, simulated)))


def _write(found: Found, settings: Path | None, picture: Path | None) -> None:
    if settings is not None:
        from async_rlhf.buffers.files import write_whole
        from async_rlhf.plan.settings import as_toml

        if not found.settings:
            raise ConfigError(f"no settings to write: {found.refusal}")
        write_whole(settings, as_toml(found.settings).encode())
    if picture is not None:
        from async_rlhf.plan.picture import draw

        draw(found, picture)


def _list(devices: Mapping[str, Device]) -> None:
    for name, device in devices.items():
        typer.echo(
            f"{name:10} {device.peak_flops / 1e12:6.0f} TFLOP/s {device.memory_bytes / 1e9:4.0f} GB "
            f"{device.memory_bytes_per_s / 1e9:5.0f} GB/s, link {device.link_bytes_per_s / 1e9:4.0f} GB/s, network "
            f"{device.network_bytes_per_s / 1e9:3.0f} GB/s"
        )


def _again(run: Path, *, as_json: bool) -> None:
    """What the run would do with other bounds."""
    from async_rlhf.calibrate import again
    from async_rlhf.calibrate.of_run import costs_of_run
    from async_rlhf.run.run_dir import RunDir

    found = again.again(costs_of_run(RunDir.existing(run)))
    if as_json:
        typer.echo(json.dumps(again.as_json(found), indent=1))
    else:
        say("\n".join(again.lines(found)))


def _as_reached(spec: Spec, run: Path) -> Spec:
    """With the efficiencies of the run."""
    from async_rlhf.calibrate.of_run import costs_of_run
    from async_rlhf.calibrate.reached import reached
    from async_rlhf.run.run_dir import RunDir

    finished = RunDir.existing(run)
    return spec.model_copy(update={"efficiency": reached(spec, finished.config(), costs_of_run(finished))})


def _progress(name: str, done: int, of: int) -> None:
    """One line that is written over, where there is a terminal."""
    if sys.stderr.isatty():
        text = f"{done} of {of} strategies: {name}" if name else ""
        typer.echo(f"\r\033[K{text}", nl=False, err=True)
