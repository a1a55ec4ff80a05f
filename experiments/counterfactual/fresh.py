"""Fresh groups of a run's prompts, sampled from the weights of a checkpoint and judged by the run's own rewards.

What an actor does without hub, credit or journal: the run's prompts in its order, its settings of sampling, its rewards. The
group numbers lie far beyond those of any run, so no completion repeats one that was trained on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from async_rlhf.actors.engine import Completion, Request, RolloutKey, load_engine
from async_rlhf.actors.prompts import Work
from async_rlhf.actors.scoring.pool import Place, Scored, ScoringPool, fields_of
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
    try:
        gathering = _Gathering(work, range(first, first + count))
        engine.submit(gathering.requests)
        heard = time.monotonic()
        while gathering.num_judged < gathering.num_wanted:
            for completion in engine.step():
                scoring.submit(completion.key, gathering.fields(completion), gathering.place(completion.key))
            if scored := scoring.poll():
                for each in scored:
                    gathering.judged(each)
                progress(gathering.num_judged, gathering.num_wanted)
            if scored or engine.num_unfinished:
                heard = time.monotonic()
            elif time.monotonic() - heard > _PATIENCE_S:
                raise DeadlineError(
                    f"waited {_PATIENCE_S:.0f} s for scores of {gathering.num_wanted - gathering.num_judged} fresh completions"
                )
            else:
                time.sleep(0.001)  # a worker process is judging; nothing to do here meanwhile
    finally:
        scoring.close()
        engine.close()
    return gathering.groups()


class _Gathering:
    """Completions and their scores, on the way to groups."""

    def __init__(self, work: Work, numbers: range) -> None:
        self._work = work
        self.num_wanted, self.num_judged = len(numbers) * work.generation.group_size, 0
        self._begun = {number: work.requests(number, 0) for number in numbers}
        self._completions: dict[RolloutKey, tuple[Completion, str]] = {}
        self._rollouts: dict[RolloutKey, Rollout] = {}

    @property
    def requests(self) -> list[Request]:
        return [request for _, _, own in self._begun.values() for request in own]

    def fields(self, completion: Completion) -> dict[str, object]:
        """What its judges get."""
        row, _, requests = self._begun[completion.key.group]
        text = self._work.decode(completion.token_ids.tolist())
        self._completions[completion.key] = completion, text
        return fields_of(row, requests[0].prompt_ids, completion, text, self._work.template)

    def place(self, key: RolloutKey) -> Place:
        return Place(key[:2], key.member, self._work.generation.group_size)

    def judged(self, scored: Scored[RolloutKey]) -> None:
        completion, text = self._completions.pop(scored.key)
        self.num_judged += 1
        self._rollouts[scored.key] = Rollout(
            completion_ids=completion.token_ids,
            logprobs=completion.logprobs,
            spans=completion.spans,
            finish_reason=completion.finish_reason,
            scores=scored.scores,
            text=text,
            sampling_mask=completion.sampling_mask,
            reference=scored.reference,
        )

    def groups(self) -> list[Group]:
        members = range(self._work.generation.group_size)
        return [
            Group(
                number=number,
                attempt=0,
                prompt_ids=np.array(requests[0].prompt_ids, np.int32),
                rollouts=tuple(self._rollouts[RolloutKey(number, 0, member)] for member in members),
                sampling=self._work.generation.sampling,
                prompt=prompt,
                columns=row.columns,
            )
            for number, (row, prompt, requests) in self._begun.items()
        ]
