"""A new run that begins with what another one has learned: its configuration, and the model of one of its checkpoints.

The model is read where it lies, whenever the new run is started; its manifest names the run and the step (`origin`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.learner.checkpoint.evaluated import best_step
from async_rlhf.learner.checkpoint.store import complete, step_of, verified
from async_rlhf.run.config import Config, override
from async_rlhf.run.live import effective
from async_rlhf.run.run_dir import RunDir


def forked(
    source: RunDir, name: str, overrides: Mapping[str, Any], *, best: bool = False, from_step: int | None = None
) -> Config:
    """The new run's configuration: that with which the old one goes on, live changes included, and overrides.

    best: from the checkpoint that was evaluated best. from_step: from that of so many steps; else from the newest.

    Raises ConfigError for a run that lives (it replaces its checkpoints) or has no such checkpoint, DamagedError for one whose
    files are not as they were written.
    """
    if best and from_step is not None:
        raise ConfigError(f"--best and --from-step {from_step} name two checkpoints: give one of them")
    if source.is_alive():
        raise ConfigError(
            f"run {str(source.path)!r} is running and replaces its checkpoints; wait, or stop it: async-rlhf stop {source.path}"
        )
    checkpoint = _checkpoint(source, best=best, from_step=from_step)
    verified(checkpoint)
    model = {"model": str(checkpoint / "model"), "name": name, "output_dir": str(source.path.absolute().parent)}
    return override(effective(source), {**model, **overrides})


def _checkpoint(source: RunDir, *, best: bool, from_step: int | None) -> Path:
    found = {step_of(path): path.resolve() for path in complete(source.path / "checkpoints")}
    if not found:
        raise ConfigError(
            f"run {str(source.path)!r} has no checkpoint to go on from; its own model is `model` in its config.toml"
        )
    if best:
        from_step = best_step(source.read_evaluations(), found)
        if from_step is None:
            raise ConfigError(
                f"--best: no checkpoint of run {str(source.path)!r} was evaluated (evaluation.every, evaluation.at_end); leave "
                f"it out, or take one with --from-step: {', '.join(map(str, found))}"
            )
    if from_step is not None and from_step not in found:
        there = ", ".join(map(str, found))
        raise ConfigError(f"--from-step {from_step}: run {str(source.path)!r} has no checkpoint of it, but those of {there}")
    return found[from_step if from_step is not None else max(found)]
