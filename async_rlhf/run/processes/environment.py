"""The environment in a process that plays episodes: an actor, an evaluation, a trial."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from async_rlhf.actors.engine import RolloutKey
from async_rlhf.actors.loop.episodes import Play
from async_rlhf.run.checks.model import longest_prompt
from async_rlhf.run.config import Config
from async_rlhf.run.scoring import environment_spec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@contextmanager
def environment_of(
    config: Config, tokenizer: PreTrainedTokenizerBase, wake: Callable[[], None] = lambda: None
) -> Iterator[Play | None]:
    """Its processes run until the end of the block; None where completions have one turn. wake: called from another thread when
    it has answered."""
    from async_rlhf.actors.environments.pool import EpisodePool
    from async_rlhf.actors.environments.rendering import Renderer

    if (spec := environment_spec(config)) is None:
        yield None
        return
    pool = EpisodePool[RolloutKey](spec, config.environment, wake)
    try:
        yield Play(
            spec,
            pool,
            Renderer(tokenizer, config.data.chat, config.environment.render, spec.tools, config.data.chat_template_kwargs),
            max_prompt_length=longest_prompt(config)[0],
            max_length=config.generation.longest_completion,
        )
    finally:
        pool.close()
