"""`async-rlhf plan` and `try machine`, called by the command line through the entry points in pyproject.toml.

Each gives the text to print. All refusals are ConfigError, before anything is searched or measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.model.devices import catalogue

Progress = Callable[[str, int, int], object]


def list_devices() -> str:
    return "\n".join(
        f"{name:10} {device.peak_flops / 1e12:6.0f} TFLOP/s {device.memory_bytes / 1e9:4.0f} GB "
        f"{device.memory_bytes_per_s / 1e9:5.0f} GB/s, link {device.link_bytes_per_s / 1e9:4.0f} GB/s, network "
        f"{device.network_bytes_per_s / 1e9:3.0f} GB/s"
        for name, device in catalogue().items()
    )


def plan(
    spec: Path | None,
    from_run: Path | None,
    *,
    simulate: int | None,
    lose_actor: float | None,
    join_actor: float | None,
    settings: Path | None,
    picture: Path | None,
    as_json: bool,
    progress: Progress,
) -> str:
    """simulate: steps; lose_actor, join_actor: seconds after the simulated run began. settings, picture: files to write.

    progress: the strategy that is looked at, and how many are done of how many.
    """
    if spec is None and from_run is None:
        raise ConfigError("plan needs a SPEC.toml, --from-run RUN, or --devices")
    comings = {"--lose-actor": lose_actor, "--join-actor": join_actor}
    given = {"--settings": settings, "--picture": picture, "--simulate": simulate, **comings}
    if spec is None and (unused := next((name for name, value in given.items() if value is not None), None)):
        raise ConfigError(f"{unused} is of a plan: give a SPEC.toml beside --from-run")
    if simulate is None and (unused := next((name for name, value in comings.items() if value is not None), None)):
        raise ConfigError(f"{unused} is of a simulation: give --simulate STEPS, too")
    if picture is not None:
        from async_rlhf.experiments.planning.placement.picture import check_format

        check_format(picture)
    for name, path in (("--settings", settings), ("--picture", picture)):
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError(f"{name} {str(path)!r}: its folder does not exist")
    if spec is None:
        assert from_run is not None
        return _what_if(from_run, as_json=as_json)
    return _plan(spec, from_run, simulate, lose_actor, join_actor, settings, picture, as_json, progress)


def _plan(
    path: Path, from_run: Path | None, steps: int | None, lose_actor: float | None, join_actor: float | None,
    settings: Path | None, picture: Path | None, as_json: bool, progress: Progress,
) -> str:  # fmt: skip
    from async_rlhf.buffers.files import write_whole
    from async_rlhf.experiments.planning.calibration.of_run import costs_of_run
    from async_rlhf.experiments.planning.calibration.reached import reached
    from async_rlhf.experiments.planning.placement import on_virtual_time, report
    from async_rlhf.experiments.planning.placement.picture import draw
    from async_rlhf.experiments.planning.placement.search import search
    from async_rlhf.experiments.planning.placement.settings import as_toml
    from async_rlhf.experiments.planning.placement.spec import read
    from async_rlhf.experiments.planning.simulation.workload import ActorJoined, ActorLost
    from async_rlhf.run.run_dir import RunDir
    from async_rlhf.run.shipped import named_file, plans

    spec = read(named_file("plan", path, plans()))
    if from_run is not None:
        run = RunDir.existing(from_run)
        spec = spec.model_copy(update={"efficiency": reached(spec, run.config(), costs_of_run(run))})
    found = search(spec, progress=progress)
    simulated = None
    if steps is not None:
        lost = [] if lose_actor is None else [ActorLost(lose_actor, "actor-0")]
        joined = [] if join_actor is None else [ActorJoined(join_actor, "actor-new")]
        simulated = on_virtual_time.simulate_plan(
            found.plan, found.roles, steps=steps, queued_groups=found.queued_groups, events=[*lost, *joined]
        )
    if settings is not None:
        if not found.settings:
            raise ConfigError(f"no settings to write: {found.refusal}")
        write_whole(settings, as_toml(found.settings).encode())
    if picture is not None:
        draw(found, picture)
    if as_json:
        return json.dumps(report.as_json(found, simulated), indent=1)
    return "\n".join([*report.lines(found), *([] if simulated is None else on_virtual_time.lines(found.plan, simulated))])


def _what_if(path: Path, *, as_json: bool) -> str:
    """What a run would do with other bounds."""
    from async_rlhf.experiments.planning.calibration import what_if
    from async_rlhf.experiments.planning.calibration.of_run import costs_of_run
    from async_rlhf.run.run_dir import RunDir

    found = what_if.what_if(costs_of_run(RunDir.existing(path)))
    return json.dumps(what_if.as_json(found), indent=1) if as_json else "\n".join(what_if.lines(found))


def calibrate(
    model: str,
    out: Path,
    *,
    device: str,
    dtype: str,
    threads: int,
    slots: int,
    seconds: float,
    as_json: bool,
    report: Callable[[str], object],
) -> str:
    """model: a directory, or the name of a shipped one. report: a line for each stage that was measured."""
    if not out.resolve().parent.is_dir():
        raise ConfigError(f"--out {str(out)!r}: its folder does not exist")
    from async_rlhf.experiments.planning.calibration.machine import measure
    from async_rlhf.experiments.planning.model.calibration import save
    from async_rlhf.run import shipped

    directory = shipped.model_directory(model) or Path(model).expanduser()
    found = measure(directory, device=device, dtype=dtype, threads=threads, slots=slots, seconds=seconds, report=report)
    save(found, out)
    return found.model_dump_json(indent=1) if as_json else f"{out}: measured in {found.seconds:.0f} s"
