"""A run's rollouts after the fact: shown, exported, or learned from again by a learner alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from async_rlhf.buffers.errors import ConfigError, DamagedError
from async_rlhf.buffers.queue.recovery import read_batches
from async_rlhf.buffers.record import Group
from async_rlhf.launch.run_lock import RunLock
from async_rlhf.run.config import Config
from async_rlhf.run.run_dir import RunDir


def records(run: RunDir, *, step: int | None = None, group: int | None = None) -> Iterator[dict[str, Any]]:
    """One plain object a group, in the order of training; only those of `step` (from 1) or `group` where given.

    Raises ConfigError for a run that has begun no journal, DamagedError for a journal that is not as it was written.
    """
    if not (run.path / "queue").is_dir():
        raise ConfigError(f"run {str(run.path)!r} has no journal: nothing was generated yet")
    for path in (run.path / "queue").glob("*.log"):
        if not path.is_file():  # a pipe would be waited for
            raise DamagedError(f"{path} is no regular file")
    for batch in read_batches(run.path / "queue"):
        if step is not None and batch.step + 1 != step:
            continue
        for each in batch.groups:
            if group is None or each.number == group:
                yield _record(batch.step + 1, each)


def export(run: RunDir, file: Path) -> int:
    """Write all groups as JSONL; returns how many."""
    count = 0
    with file.open("w") as out:
        for record in records(run):
            out.write(json.dumps(record) + "\n")
            count += 1
    return count


def quarantine(run: RunDir, config: Config, group: int, reason: str) -> None:
    """Take a group back: it is not trained on. Of a live run its hub does it, else it is written into the journal.

    Raises RefusedError when the group was trained on, DeadlineError when a live hub does not answer, ConfigError while the run
    starts or ends.
    """
    from async_rlhf.actors.prompts import load_rows, prompt_number
    from async_rlhf.buffers.clients.control import control
    from async_rlhf.buffers.queue.recovery import take_back
    from async_rlhf.buffers.transport.link import connector
    from async_rlhf.launch.sockets import hub_address
    from async_rlhf.learner.checkpoint.resuming import newest

    if (sockets := run.sockets()) is not None:
        with control(hub_address(sockets), connect=connector(config.security.directory)) as hub:
            hub.quarantine(group, reason)
        return
    lock = RunLock.take(run.lock_file)
    try:
        rows, _ = load_rows(config.data)
        checkpoint = newest(run.path, contents=False)
        take_back(
            run.path,
            config.queue,
            config.bound(len(rows)),
            group,
            reason,
            steps_done=0 if checkpoint is None else checkpoint[1]["step"],
            prompt_of=lambda number: prompt_number(config.seed, number, len(rows)),
        )
    finally:
        lock.release()


def replay(source: RunDir, config: Config) -> RunDir:
    """Train on the batches of an earlier run, bit for bit, with a learner alone; returns the new run's directory.

    With the same configuration the result is bit-equal on CPU; with another loss it is an ablation on identical data.
    Raises ConfigError when the journal does not reach back to the first step.
    """
    from async_rlhf.learner.loop.source import ArchiveSource
    from async_rlhf.run.learning import backend_of, make_trainer

    first = next(read_batches(source.path / "queue"), None)
    if first is None or first.step != 0:
        raise ConfigError(
            f"the journal of {str(source.path)!r} begins at {'its end' if first is None else f'step {first.step + 1}'}: "
            "only a run with queue.keep_rollouts = true keeps what was trained on"
        )
    run = RunDir.create(config)
    try:
        with backend_of(run, config) as backend:
            make_trainer(run, config, ArchiveSource(source.path / "queue"), backend).run()
    finally:
        run.retire()
    return run


def _record(step: int, group: Group) -> dict[str, Any]:
    return {
        "step": step,
        "group": group.number,
        "attempt": group.attempt,
        "actor": group.actor,
        "prompt": group.prompt,
        "prompt_ids": group.prompt_ids.tolist(),
        **group.sampling.model_dump(),
        "columns": dict(group.columns),
        "rollouts": [
            {
                "text": rollout.text,
                "completion_ids": rollout.completion_ids.tolist(),
                "logprobs": [float(value) for value in rollout.logprobs],
                "reference": None if rollout.reference is None else [float(value) for value in rollout.reference],
                "spans": [[span.version, span.num_tokens] for span in rollout.spans],
                "finish_reason": rollout.finish_reason,
                "scores": {name: vars(score) for name, score in rollout.scores.items()},
                "timings": dict(rollout.timings),
            }
            for rollout in group.rollouts
        ],
    }
