"""Fresh groups of a run's prompts, sampled from the weights of a checkpoint and judged by the run's own rewards.

What an actor does without hub, credit or journal: the run's prompts in its order, its settings of sampling, its rewards. The
group numbers lie far beyond those of any run, so no completion repeats one that was trained on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from async_rlhf.actors.engine import RolloutKey, load_engine
from async_rlhf.actors.loop.episodes import Episodes, Played
from async_rlhf.actors.loop.worker import rollout_of
from async_rlhf.actors.scoring.pool import Place, ScoringPool, fields_of
from async_rlhf.buffers.errors import ConfigError, DeadlineError
from async_rlhf.buffers.model_directory import from_pretrained
from async_rlhf.buffers.record import Group, Rollout
from async_rlhf.run.config import Config
from async_rlhf.run.processes.roles import make_work
from async_rlhf.run.run_data import RunData
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.scoring import stage_specs

_PATIENCE_S = 120.0
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

    if config.environment.function:
        raise ConfigError("fresh completions of a run with an environment are not made; take a run whose rewards judge alone")
    model = str(checkpoint / "model")
    work = make_work(config, RunData(run.path, config.data).epoch(), from_pretrained(AutoTokenizer, Path(model)))
    scoring = ScoringPool[RolloutKey](stage_specs(config), config.scoring, by_source=config.rewards.by_source)
    engine = load_engine(model, config.served_engine.model_copy(update={"kind": "torch", "kv_policy": "full"}), version=step)
    first = _NUMBERS * (step + 1)
    begun = {number: work.requests(number, 0) for number in range(first, first + count)}
    played, rollouts = dict[RolloutKey, Played](), dict[RolloutKey, Rollout]()
    try:
        episodes = Episodes(engine, work.decode)
        episodes.begin((row, 0, requests) for row, _, requests in begun.values())
        last_event = time.monotonic()
        while len(rollouts) < count * work.group_size:
            for each in episodes.step():
                key = each.completion.key
                played[key] = each
                fields = fields_of(begun[key.group][0], each.prompt_ids, each.completion, each.turns[-1], work.template)
                scoring.submit(key, fields, Place(key[:2], key.member, work.group_size))
            if scored := scoring.poll():
                rollouts |= {each.key: rollout_of(played.pop(each.key), each, None, {}) for each in scored}
                progress(len(rollouts), count * work.group_size)
            if scored or engine.num_unfinished:
                last_event = time.monotonic()
            elif time.monotonic() - last_event > _PATIENCE_S:
                raise DeadlineError(f"waited {_PATIENCE_S:.0f} s for scores of {len(played)} fresh completions")
            else:
                time.sleep(0.001)  # a worker process is judging; nothing to do here meanwhile
    finally:
        scoring.close()
        engine.close()
    return [
        Group(
            number=number,
            attempt=0,
            prompt_ids=np.array(requests[0].prompt_ids, np.int32),
            rollouts=tuple(rollouts[request.key] for request in requests),
            sampling=work.sampling,
            prompt=prompt,
            columns=row.columns,
        )
        for number, (row, prompt, requests) in begun.items()
    ]
