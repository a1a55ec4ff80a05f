"""Evaluation: greedy completions of held-out prompts by one pinned weight set, judged by the run's rewards."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from async_rlhf.actors.engine import Engine, Request, RolloutKey
from async_rlhf.actors.prompts import Row
from async_rlhf.actors.scoring.pool import ScoringPool, fields_of
from async_rlhf.buffers.composition import Composition
from async_rlhf.buffers.errors import DeadlineError
from async_rlhf.buffers.record import Score
from async_rlhf.buffers.sampling import GREEDY

_NUM_SAMPLES = 8


@dataclass(frozen=True)
class EvaluationResult:
    """Means over the held-out prompts that could be judged; `failed` counts those that could not.

    accuracy: share of the judged ones whose reward reached `solved_at`. samples: of the first prompts the `prompt` as the model
    saw it, its `completion` and its `reward` (None: not judged), so that a person can read what became of the model.
    """

    mean_reward: float | None
    accuracy: float | None
    rewards: Mapping[str, float | None]
    num_prompts: int
    failed: int
    mean_length: float
    samples: Sequence[Mapping[str, str | float | None]]


def evaluate(
    engine: Engine,
    scoring: ScoringPool[RolloutKey],
    rows: Sequence[Row],
    encode: Callable[[Row], tuple[str, list[int]]],
    decode: Callable[[Sequence[int]], str],
    *,
    max_completion_length: int,
    stop: tuple[str, ...] = (),
    composition: Composition,
    solved_at: float = 1.0,
    patience_s: float = 120.0,
) -> EvaluationResult:
    """Generate one greedy completion a prompt and score it.

    Raises DeadlineError when no score arrives for `patience_s` after generation has ended.
    """
    asked = [encode(row) for row in rows]
    prompts = [tuple(ids) for _, ids in asked]
    engine.submit([Request(RolloutKey(i, 0, 0), ids, max_completion_length, GREEDY, 0, stop) for i, ids in enumerate(prompts)])
    lengths: list[int] = []
    answers: dict[int, str] = {}
    scores: dict[int, Mapping[str, Score]] = {}
    heard = time.monotonic()
    while len(scores) < len(rows):
        for completion in engine.step():
            lengths.append(len(completion.token_ids))
            number = completion.key.group
            answers[number] = decode(completion.token_ids.tolist())
            scoring.submit(completion.key, fields_of(rows[number], prompts[number], completion, answers[number]))
        scored = scoring.poll()
        scores.update({result.key.group: result.scores for result in scored})
        if scored or engine.num_unfinished:
            heard = time.monotonic()
        elif time.monotonic() - heard > patience_s:
            raise DeadlineError(f"waited {patience_s:.0f} s for scores of {len(rows) - len(scores)} held-out completions")
        else:
            time.sleep(0.001)  # a worker process is judging; nothing to do here meanwhile
    # Without running statistics: a held-out reward must mean the same at the start and at the end of a run.
    totals = [composition.reward(scores[number]) for number in range(len(rows))]
    judged = [total for total in totals if total is not None]
    names = list(next(iter(scores.values()))) if scores else []
    return EvaluationResult(
        mean_reward=_mean(judged),
        accuracy=_mean([float(total >= solved_at) for total in judged]),
        rewards={name: _mean([s[name].value for s in scores.values() if s[name].value is not None]) for name in names},
        num_prompts=len(rows),
        failed=len(totals) - len(judged),
        mean_length=_mean(lengths) or 0.0,
        samples=[
            {"prompt": text, "completion": answers[number], "reward": totals[number]}
            for number, (text, _) in enumerate(asked[:_NUM_SAMPLES])
        ],
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
