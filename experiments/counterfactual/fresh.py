"""Fresh groups of a run's prompts, sampled from the weights of a checkpoint and judged by the run's own rewards.

What an actor does without hub, credit or journal: the run's prompts in its order, its settings of sampling, its rewards. The
group numbers lie far beyond those of any run, so no completion repeats one that was trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from async_rlhf.actors.engine import RolloutKey, load_engine
from async_rlhf.actors.engine_config import EngineConfig
from async_rlhf.actors.loop.evaluation import judge
from async_rlhf.actors.scoring.pool import GroupMember, ScoringPool
from async_rlhf.actors.torch_engine.settings import TorchEngineConfig
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.model_directory import from_pretrained
from async_rlhf.buffers.record import Group
from async_rlhf.run.config import Config
from async_rlhf.run.processes.roles import run_context
from async_rlhf.run.run_data import RunData
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.scoring import stage_specs

# Groups of a run are numbered from 0: so many numbers are left to it, and to each of its steps.
_NUMBERS = 1 << 32


def fresh_groups(
    run: RunDir, config: Config, checkpoint: Path, step: int, count: int, progress: Callable[[int, int], None]
) -> list[Group]:
    """`count` groups from the built-in engine with the weights of `checkpoint`, which is of `step`; the same ones each time.

    progress: completions that were judged, and of how many. Raises ConfigError for a model or a reward that cannot be loaded,
    DeadlineError when no score arrives for two minutes after generation has ended.
    """
    from transformers import AutoTokenizer

    if config.environment.all:
        raise ConfigError("fresh completions of a run with an environment are not made; take a run whose rewards judge alone")
    model = str(checkpoint / "model")
    context = run_context(config, RunData(run.path, config.data).epoch(), from_pretrained(AutoTokenizer, Path(model)))
    scoring = ScoringPool[RolloutKey](stage_specs(config), config.scoring, by_source=config.rewards.by_source)
    own = config.served_engine.plain
    if not isinstance(own, TorchEngineConfig):
        shared = own.model_dump(include=EngineConfig.model_fields.keys() - {"kind"})
        own = TorchEngineConfig(**shared, batch_invariant=False)
    engine = load_engine(model, own, version=step)
    first, size = _NUMBERS * (step + 1), config.generation.group_size
    begun = {number: context.requests(number, 0) for number in range(first, first + count)}
    try:
        judged = judge(engine, scoring, context, begun, lambda key: GroupMember(key[:2], key.member, size), progress)
    finally:
        scoring.close()
        engine.close()
    return [
        Group(
            number=number,
            attempt=0,
            prompt_ids=np.array(requests[0].prompt_ids, np.int32),
            rollouts=tuple(judged[request.key].rollout for request in requests),
            sampling=config.generation.sampling,
            prompt=prompt,
            columns=row.columns,
        )
        for number, (row, prompt, requests) in begun.items()
    ]
