"""The choice of the checkpoint to resume from. Only `go_back` writes. No torch, so that it is made before any process starts.

A run can go on from every whole checkpoint that the queue still has the groups after: those not older than what was committed
to it, which are the `keep_last` newest at least. The start of the run (step 0) counts as one. A damaged newest checkpoint is
refused and not passed over: the steps since the one before it would be lost in silence.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from async_rlhf.buffers.errors import ConfigError, DamagedError
from async_rlhf.buffers.queue.recovery import committed_step
from async_rlhf.learner.checkpoint.store import CheckpointError, Checkpoints, complete, step_of, verified


def newest(run: Path, *, contents: bool = True) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint of a run directory and its state, verified, or None. contents: as in `verified`.

    Raises DamagedError with the command that goes on from another, and CheckpointError.
    """
    paths = complete(run / "checkpoints")
    if not paths:
        return None
    try:
        return paths[-1], verified(paths[-1], contents=contents)
    except DamagedError as error:
        raise DamagedError(f"{error}. {_way_out(run, step_of(paths[-1]))}") from error


def check_step(run: Path, step: int) -> None:
    """Check, by digests, that the run can go on from the checkpoint of `step` steps. Raises ConfigError, DamagedError."""
    path = run / "checkpoints" / f"step_{step:06d}"
    committed, can = committed_step(run / "queue"), resumable(run)
    if step < committed:
        raise ConfigError(
            f"--from-step {step}: the queue has given up the groups before step {committed}, which are needed. "
            f"{_choices(can)}. Start a new run: {_new_run(run, path if path.exists() else None)}"
        )
    if step > 0 and not path.exists():
        raise ConfigError(f"--from-step {step}: there is no checkpoint of that step. {_choices(can)}")
    try:
        if step > 0:
            verified(path)
    except DamagedError as error:
        others = [each for each in can if each != step]
        raise DamagedError(f"{error}. {_choices(others) if others else _way_out(run, step)}") from error


def go_back(run: Path, step: int) -> None:
    """Make the checkpoint of `step` steps the newest; those after it are set aside until the next one is durable."""
    Checkpoints(run / "checkpoints", keep_last=1).set_aside(step)


def resumable(run: Path) -> list[int]:
    """The steps that the run can go on from, ascending, as far as the sizes of files tell."""
    committed = committed_step(run / "queue")
    steps = [step_of(path) for path in complete(run / "checkpoints") if _is_whole(path)]
    return [step for step in ([0, *steps]) if step >= committed]


def _way_out(run: Path, damaged: int) -> str:
    """The command that goes on when the checkpoint of `damaged` steps is damaged."""
    if can := [step for step in resumable(run) if step < damaged]:
        return f"Go on from step {can[-1]}: {_train(run)} --resume --from-step {can[-1]}"
    whole = [path for path in complete(run / "checkpoints") if step_of(path) != damaged and _is_whole(path)]
    why = "The queue has given up the groups after every other" if whole else "There is no other to go on from"
    return f"{why}: start a new run with {_new_run(run, whole[-1] if whole else None)}"


def _is_whole(path: Path) -> bool:
    try:
        verified(path, contents=False)
    except (DamagedError, CheckpointError):
        return False
    return True


def _train(run: Path) -> str:
    return f"async-rlhf train {shlex.quote(str(run / 'config.toml'))}"


def _new_run(run: Path, checkpoint: Path | None) -> str:
    model = f" --set {shlex.quote(f'model={checkpoint}/model')}" if checkpoint else ""
    return f"{_train(run)}{model} --set name=NAME"


def _choices(steps: list[int]) -> str:
    which = f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}" if steps else "no checkpoint"
    return f"This run can go on from {which}"
