"""The best checkpoint by evaluations, and the checkpoints that may not be removed because of them.

Decided from `evaluations.jsonl` alone, by one reading of it, so that the learner, which removes checkpoints, and the
supervisor, which evaluates them and sets the link, need not agree on anything else: what becomes the best later is the best
of now, or has no line yet. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from pathlib import Path

from async_rlhf.buffers.lines import Line, read_lines
from async_rlhf.learner.checkpoint.store import complete, lead, step_of


def best_step(records: Iterable[Line], among: Iterable[int] | None = None) -> int | None:
    """The step whose evaluation has the highest mean reward, the earliest of several; None without any.

    among: only these steps. The initial model, of step 0, has no checkpoint and does not count.
    """
    rewards = _rewards(records)
    return _best(rewards if among is None else {step: rewards[step] for step in among if step in rewards})


def num_since_best(records: Iterable[Line]) -> int:
    """The number of evaluations after the best one."""
    rewards = _rewards(records)
    best = _best(rewards)
    return 0 if best is None else sum(step > best for step in rewards)


def _rewards(records: Iterable[Line]) -> dict[int, float]:
    """Mean reward of each step with a checkpoint, over the newest evaluations of one kind: greedy, or groups of one size."""
    judged = [
        (record["step"], record.get("group_size"), reward)
        for record in records
        if isinstance(reward := record.get("mean_reward"), int | float) and is_evaluation(record) and record["step"] > 0
    ]
    newest = [*takewhile(lambda each: each[1] == judged[-1][1], reversed(judged))]
    return {step: reward for step, _, reward in reversed(newest)}


def _best(rewards: Mapping[int, float]) -> int | None:
    return min(rewards, key=lambda step: (-rewards[step], step), default=None)


def is_due(step: int, every: int) -> bool:
    """Whether a step is to be evaluated. every: steps between two evaluations; 0: none is made."""
    return every > 0 and step % every == 0


def needed(evaluations: Path, every: int) -> Callable[[int], bool]:
    """Whether the checkpoint of a step may not be removed: it is the best, or is to be evaluated and is not yet.

    evaluations: the file of that name. every: as in `is_due`.
    """
    kept = ("step", "mean_reward", "group_size")  # not the answers that a line quotes: a run of weeks has many
    lines = (line for line in read_lines(evaluations) if is_evaluation(line))
    records = [{key: line[key] for key in kept if key in line} for line in lines]
    best, done = best_step(records), {record["step"] for record in records}
    return lambda step: step == best or (is_due(step, every) and step not in done)


def link_best(checkpoints: Path, records: Iterable[Line]) -> None:
    """Link `checkpoints/best` to the best existing checkpoint; without one remove the link. Raises OSError."""
    if checkpoints.is_dir():
        best = _best_of(checkpoints, records)
        lead(checkpoints / "best", None if best is None else best.name)


def without_links(path: Path) -> Path:
    """A path through `checkpoints/latest` or `checkpoints/best`, resolved without the link where the disk has none; any other
    path unchanged."""
    for link in (path, *path.parents):
        if link.name not in ("latest", "best") or link.parent.name != "checkpoints" or (link.is_symlink() and link.exists()):
            continue
        made = complete(link.parent)
        newest, records = made[-1] if made else None, read_lines(link.parent.parent / "evaluations.jsonl")
        there = newest if link.name == "latest" else _best_of(link.parent, records)
        return path if there is None else there / path.relative_to(link)
    return path


def _best_of(checkpoints: Path, records: Iterable[Line]) -> Path | None:
    best = best_step(records, map(step_of, complete(checkpoints)))
    return None if best is None else checkpoints / f"step_{best:06d}"


def is_evaluation(record: Line) -> bool:
    """Whether a line has a step, as all lines of a run have."""
    return type(record.get("step")) is int
