"""A run's rollouts after the fact: read, taken back, or learned from again by a learner alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, repeat, takewhile
from typing import Any

from async_rlhf.buffers.errors import ConfigError, DamagedError
from async_rlhf.buffers.queue.recovery import read_batches
from async_rlhf.buffers.record import Group
from async_rlhf.launch.run_lock import RunLock
from async_rlhf.learner.loop.metrics import group_record
from async_rlhf.run.config import Config
from async_rlhf.run.live import inherit
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_data import RunData
from async_rlhf.run.run_dir import RunDir

# The step (from 1), the group's number, its record.
_Found = tuple[int, int, Callable[[], dict[str, Any]]]


def records(reading: Reading, *, step: int | None = None, group: int | None = None) -> Iterator[dict[str, Any]]:
    """Groups as plain objects in the order of training, only those of `step` (from 1) or `group` where given.

    From the journal, and of the steps that it does not hold those that were sampled into `rollouts.jsonl`: `sampled` tells them
    apart. `quarantined`: why a group was taken back, else None. `images`, of a prompt and of a rollout that has some behind it:
    of each its digest, its file, and its size where that is there. Raises ConfigError when there is none, DamagedError for a
    file that is not as it was written.
    """
    reasons = {line.get("group"): line.get("reasons") for line in reading.quarantined.whole()}
    archived, is_none = _archived(reading.run), True
    first = next(archived, None)  # the journal ends with the newest step
    kept = () if first is None else chain([first], archived)
    samples: Iterator[_Found] = ((line["step"], line["group"], partial(_of_sample, line)) for line in reading.groups())
    before = takewhile(lambda each: first is None or each[0] < first[0], samples)
    for is_sample, (at, number, made) in chain(zip(repeat(True), before), zip(repeat(False), kept)):
        if step in (None, at) and group in (None, number):
            is_none = False
            record = _with_images(reading.run, made())
            rollouts = [_with_images(reading.run, rollout) for rollout in record["rollouts"]]
            yield {**record, "rollouts": rollouts, "sampled": is_sample, "quarantined": reasons.get(number)}
    if is_none:
        which = "".join(f" {name} {value}" for name, value in (("step", step), ("group", group)) if value is not None)
        raise ConfigError(
            f"run {str(reading.run.path)!r} has recorded no group{' of' * bool(which)}{which}. Its journal has groups after "
            "the oldest checkpoint (all with queue.keep_rollouts = true), rollouts.jsonl sampled_groups of each step"
        )


def _with_images(run: RunDir, of: Mapping[str, Any]) -> dict[str, Any]:
    return {**of, **({"images": [_image(run, digest) for digest in of["images"]]} if of.get("images") else {})}


def _image(run: RunDir, digest: Any) -> dict[str, Any]:
    size = None
    with suppress(DamagedError):
        size = run.images.size(str(digest))
    return {"digest": digest, "size": size, "file": str(run.images.directory / str(digest))}


def _archived(run: RunDir) -> Iterator[_Found]:
    """The groups in the journal."""
    parts = list((run.path / "queue").glob("[0-9]*.log"))
    for path in parts:
        if not path.is_file():  # a pipe would be waited for
            raise DamagedError(f"{path} is no regular file")
    for batch in read_batches(run.path / "queue") if parts else ():
        for group in batch.groups:
            yield batch.step + 1, group.number, partial(_record, batch.step + 1, group)


def quarantine(run: RunDir, config: Config, group: int, reason: str) -> None:
    """Take a group back: it is not trained on. Of a live run its hub does it, else it is written into the journal.

    Raises RefusedError when the group was trained on, DeadlineError when a live hub does not answer, ConfigError while the run
    starts or ends.
    """
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
        data = RunData(run.path, config.data)
        order, bound = data.open_order(), config.bound(data.num_prompts)
        if order is not None:
            order.close()
            bound = replace(bound, numbers=order.num_numbers)
        checkpoint = newest(run.path, contents=False)
        take_back(
            run.path,
            config.queue,
            bound,
            group,
            reason,
            steps_done=0 if checkpoint is None else checkpoint[1]["step"],
            prompt_of=partial(data.prompt_of, config.seed, order),
        )
    finally:
        lock.release()


def replay(source: RunDir, config: Config) -> RunDir:
    """Train on the batches of an earlier run, bit for bit, with a learner alone; returns the new run's directory.

    With the same configuration the result is bit-equal on CPU; with another loss it is an ablation on identical data.
    Raises ConfigError when the journal does not reach back to the first step.
    """
    from async_rlhf.learner.loop.source import ArchiveSource
    from async_rlhf.run.processes.learner import backend_of, make_trainer, ranks_beside

    first = next(read_batches(source.path / "queue"), None)
    if first is None or first.step != 0:
        raise ConfigError(
            f"the journal of {str(source.path)!r} begins at {'its end' if first is None else f'step {first.step + 1}'}: "
            "only a run with queue.keep_rollouts = true keeps the groups that it trained on"
        )
    run = RunDir.create(config)
    try:
        inherit(run, source, config)
        run.images.take(source.images, source.images)
        with ranks_beside(run, config) as meeting, backend_of(run, config, meeting) as backend:
            make_trainer(run, config, ArchiveSource(source.path / "queue"), backend).run()
    finally:
        run.retire()
    return run


def _record(step: int, group: Group) -> dict[str, Any]:
    rollouts = [
        {
            "completion_ids": rollout.completion_ids.tolist(),
            "logprobs": rollout.logprobs.tolist(),
            "reference": None if rollout.reference is None else rollout.reference.tolist(),
            "scores": {name: vars(score) for name, score in rollout.scores.items()},
        }
        for rollout in group.rollouts
    ]
    return {**group_record(group, step, rollouts), "prompt_ids": group.prompt_ids.tolist(), **group.sampling.model_dump()}


def _of_sample(line: dict[str, Any]) -> dict[str, Any]:
    """A line of `rollouts.jsonl` in the form of a record; it has neither token log-probabilities nor the prompt's tokens."""
    try:
        rollouts = [
            {
                **rollout,
                "scores": {
                    name: {"value": None, "failure": score} if isinstance(score, str) else {"value": score, "failure": None}
                    for name, score in rollout["scores"].items()
                },
            }
            for rollout in line["rollouts"]
        ]
        return {**{name: line[name] for name in ("attempt", "actor", "prompt")}, **line, "rollouts": rollouts}
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"a line of rollouts.jsonl is no sample of a group: {error!r}") from error
