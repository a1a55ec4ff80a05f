"""How a configuration becomes a learner: its backend, alone or one of several ranks, and its loop."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from async_rlhf.launch.ranks import rank_nodes, start_all
from async_rlhf.launch.sockets import LOOPBACK, free_port, interface_towards
from async_rlhf.run.config import Config
from async_rlhf.run.loading import changed
from async_rlhf.run.run_dir import RunDir

if TYPE_CHECKING:
    from async_rlhf.learner.loop.source import BatchSource
    from async_rlhf.learner.loop.trainer import Trainer, TrainerConfig
    from async_rlhf.learner.step.controller import Controller
    from async_rlhf.learner.step.ranks import Ranks

_log = logging.getLogger(__name__)


def make_trainer(run: RunDir, config: Config, feed: BatchSource, backend: Controller) -> Trainer:
    """The learner's loop of this configuration, fed by a hub or by an archive."""
    from async_rlhf.learner.loop.trainer import Trainer

    limit, usual = config.engine.mismatch_limit or config.usual_mismatch, config.usual_mismatch
    if limit > usual:
        _log.warning("engine.mismatch_limit = %g: rounding makes at most %g, more is another policy", limit, usual)
    return Trainer(feed, backend, run.path, lambda values: _settings(changed(config, values)))


def _settings(config: Config) -> TrainerConfig:
    from async_rlhf.learner.loop.trainer import TrainerConfig

    return TrainerConfig(
        learner=config.learner,
        loss=config.loss,
        checkpoint=config.checkpoint,
        budget=config.budget,
        max_staleness=config.queue.max_staleness,
        exact=config.queue.exact,
        composition=config.rewards.composition,
        max_failed_ratio=config.rewards.max_failed_ratio,
        sampled_groups=config.sampled_groups,
        max_log_bytes=config.max_log_bytes,
        advantage=config.advantage,
        guard=config.guard,
        lowest_staleness=config.bound(config.data.size).lowest_staleness,
        evaluate_every=config.evaluation.every or 0,
        mismatch_limit=config.engine.mismatch_limit or config.usual_mismatch,
    )


@contextmanager
def backend_of(run: RunDir, config: Config, meeting: str) -> Iterator[Controller]:
    """The backend that the learner's loop calls. meeting: IP:PORT, where a learner of several ranks meets the others, which end
    with the block.

    Raises ConfigError, before a model is loaded, for a loss or an estimator that a step could not use.
    """
    from async_rlhf.learner.objective.estimation import check_estimator
    from async_rlhf.learner.objective.trial import check_loss

    check_estimator(config.advantage)
    check_loss(config.loss)
    ranks = _join(config, 0, meeting)
    controller = _make_backend(run, config, ranks)
    yield controller
    controller.close()
    ranks.close()


@contextmanager
def ranks_beside(run: RunDir, config: Config) -> Iterator[str]:
    """Start the other ranks, on this machine, of a learner that no supervisor has started; gives their meeting address."""
    meeting = f"{LOOPBACK}:{free_port(LOOPBACK)}"
    others = start_all(run.launcher, run.path, rank_nodes(config.learner.ranks, meeting, run.log))
    try:
        yield meeting
    finally:
        for process in others:
            process.kill()


def run_rank(run: RunDir, config: Config, rank: int, meeting: str) -> None:
    """A rank above 0 of the learner: executes the commands of rank 0."""
    ranks = _join(config, rank, meeting)
    _make_backend(run, config, ranks).work()
    ranks.close()


def _join(config: Config, rank: int, meeting: str) -> Ranks:
    from async_rlhf.learner.step.ranks import Ranks

    if config.learner.ranks == 1:
        return Ranks()
    size, interface = config.learner.ranks, interface_towards(meeting.rpartition(":")[0])
    _log.info("rank %d of %d, which meet at %s; over %s", rank, size, meeting, interface)
    # A worker rank gets no command while a run stands still, and then for as long as the supervisor takes to see it.
    idle_s = config.stall_timeout_s + config.learner.rank_timeout_s
    return Ranks.join(
        rank,
        size,
        meeting,
        timeout_s=config.learner.rank_timeout_s,
        idle_timeout_s=idle_s,
        device=config.learner.device,
        interface=interface,
    )


def _make_backend(run: RunDir, config: Config, ranks: Ranks) -> Controller:
    from async_rlhf.learner.step.controller import make_backend

    return make_backend(
        Path(config.model),
        config.learner,
        config.loss,
        publish_dtype=config.engine.dtype,
        ranks=ranks,
        reference=Path(config.held_reference) if config.held_reference else None,
        max_steps=config.max_steps,
        longest=config.generation.longest_completion,
        images=run.images.directory if config.data.images or any(True for _ in run.images) else None,
    )
