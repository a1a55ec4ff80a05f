"""`async-rlhf plan` and `try machine`, called by the command line through the entry points in pyproject.toml.

Each gives the text to print. All refusals are ConfigError, before anything is searched or measured.
"""

from __future__ import annotations

import json
from pathlib import Path

from async_rlhf.buffers.errors import ConfigError

_MEASURED_S = 2.0  # for each of three peaks


def list_devices() -> str:
    from async_rlhf.experiments.planning.model.stages import catalogue

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
    settings: Path | None,
    as_json: bool,
) -> str:
    """simulate: steps. settings: file to write."""
    if spec is None and from_run is None:
        raise ConfigError("plan needs a SPEC.toml, --from-run RUN, or --devices")
    given = {"--settings": settings, "--simulate": simulate}
    if spec is None and (unused := next((name for name, value in given.items() if value is not None), None)):
        raise ConfigError(f"{unused} is of a plan: give a SPEC.toml beside --from-run")
    if settings is not None and not settings.resolve().parent.is_dir():
        raise ConfigError(f"--settings {str(settings)!r}: its folder does not exist")
    if spec is None:
        assert from_run is not None
        return _what_if(from_run, as_json=as_json)
    from async_rlhf.buffers.files import write_whole
    from async_rlhf.experiments.planning.placement import on_virtual_time, report
    from async_rlhf.experiments.planning.placement.search import search
    from async_rlhf.experiments.planning.placement.settings import as_toml
    from async_rlhf.experiments.planning.placement.spec import read
    from async_rlhf.run.shipped import named_file, plans

    question = read(named_file("plan", spec, plans()))
    if from_run is not None:
        from async_rlhf.experiments.planning.calibration.of_run import costs_of_run, reached
        from async_rlhf.run.run_dir import RunDir

        run = RunDir.existing(from_run)
        question = question.model_copy(update={"efficiency": reached(question, run.config(), costs_of_run(run))})
    found = search(question)
    simulated = None
    if simulate is not None:
        simulated = on_virtual_time.simulate_plan(found.plan, found.roles, steps=simulate, queued_groups=found.queued_groups)
    if settings is not None:
        if not found.settings:
            raise ConfigError(f"no settings to write: {found.refusal}")
        write_whole(settings, as_toml(found.settings).encode())
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


def calibrate(*, device: str, dtype: str, threads: int) -> str:
    """Sections of a spec, with the device that this machine is."""
    from async_rlhf.experiments.planning.calibration.machine import measure
    from async_rlhf.experiments.planning.placement.settings import as_toml

    own = measure(device, dtype, threads, _MEASURED_S).model_dump()
    return as_toml({"cluster": {"device": "own"}, "cluster.own": own})
