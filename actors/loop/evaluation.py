"""Evaluation: completions of held-out prompts by one pinned weight set, judged by the run's rewards.

Greedy, one a prompt; and where it is wanted several sampled ones, whose share of solved prompts is pass@k.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from async_rlhf.actors.engine import Engine, Request, RolloutKey
from async_rlhf.actors.loop.episodes import Episodes, Play
from async_rlhf.actors.prompts import PLAIN, Row, Template, environment_seed, rollout_seed
from async_rlhf.actors.scoring.pool import Place, ScoringPool, fields_of
from async_rlhf.buffers.composition import Composition
from async_rlhf.buffers.errors import DeadlineError
from async_rlhf.buffers.record import Score
from async_rlhf.buffers.sampling import GREEDY, Sampling

_NUM_SHOWN = 8


@dataclass(frozen=True)
class Judging:
    """What is asked of every prompt, and what counts as solved.

    num_sampled: completions a prompt beside the greedy one, drawn with `sampling`; their random numbers follow from `seed`, the
    prompt's place and the member alone, so that two weight sets are given the same. composition: without running statistics, so
    that a reward means the same at the start and at the end of a run.
    """

    max_completion_length: int
    composition: Composition
    stop: tuple[str, ...] = ()
    solved_at: float = 1.0
    num_sampled: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0

    def requests(self, number: int, prompt_ids: tuple[int, ...]) -> list[Request]:
        """Of a prompt its greedy completion (member 0), and the sampled ones."""
        return [
            Request(
                RolloutKey(number, 0, member),
                prompt_ids,
                self.max_completion_length,
                self.sampling if member else GREEDY,
                rollout_seed(self.seed, number, member) if member else 0,
                self.stop,
            )
            for member in range(1 + self.num_sampled)
        ]

    def place(self, key: RolloutKey) -> Place:
        """Sampled completions of a prompt are a group, the greedy one is a group of its own."""
        if key.member == 0:
            return Place((key.group, "greedy"), 0, 1)
        return Place((key.group, "sampled"), key.member - 1, self.num_sampled)


@dataclass(frozen=True)
class EvaluationResult:
    """Means over the held-out prompts whose greedy completion could be judged; `failed` counts the others.

    accuracy: share of the judged ones whose reward reached `solved_at`. samples: of the first prompts the `prompt` as the model
    saw it, its `completion` and its `reward` (None: not judged), so that a person can read what became of the model. sampled:
    what `summary_of_samples` makes of the sampled completions; None where there are none.
    """

    mean_reward: float | None
    accuracy: float | None
    rewards: Mapping[str, float | None]
    num_prompts: int
    failed: int
    mean_length: float
    samples: Sequence[Mapping[str, str | float | None]]
    sampled: Mapping[str, Any] | None = None


def evaluate(
    engine: Engine,
    scoring: ScoringPool[RolloutKey],
    rows: Sequence[Row],
    encode: Callable[[Row], tuple[str, list[int]]],
    decode: Callable[[Sequence[int]], str],
    judging: Judging,
    progress: Callable[[int, int], None] = lambda done, of: None,
    patience_s: float = 120.0,
    play: Play | None = None,
    template: Template = PLAIN,
) -> EvaluationResult:
    """Generate and score. progress: called when completions have been scored: how many, and of how many. play: the environment,
    where episodes have one. template: that `encode` fills.

    Raises DeadlineError when neither a score nor an environment's answer arrives for `patience_s` after generation has ended.
    """
    asked = [encode(row) for row in rows]
    requests = [judging.requests(number, tuple(ids)) for number, (_, ids) in enumerate(asked)]
    num_requests = sum(map(len, requests))
    episodes = Episodes(engine, decode, play)
    seeds = (environment_seed(judging.seed, number) for number in range(len(rows)))
    episodes.begin(zip(rows, seeds, requests, strict=True))
    lengths: dict[RolloutKey, int] = {}
    answers: dict[int, str] = {}
    scores: dict[RolloutKey, Mapping[str, Score]] = {}
    heard = time.monotonic()
    given: dict[RolloutKey, dict[str, Score]] = {}  # by environments
    while len(scores) < num_requests:
        ended = episodes.step()
        for played in ended:
            completion, key = played.completion, played.completion.key
            lengths[key] = len(completion.logprobs)
            if key.member == 0:
                answers[key.group] = played.text
            given[key] = {} if play is None else {play.name: played.score or Score()}
            fields = fields_of(rows[key.group], played.prompt_ids, completion, played.turns[-1], template)
            scoring.submit(key, fields | played.fields, judging.place(key))
        if scored := scoring.poll():
            scores.update({result.key: {**result.scores, **given.pop(result.key)} for result in scored})
            progress(len(scores), num_requests)
        if scored or ended or engine.num_unfinished:
            heard = time.monotonic()
        elif time.monotonic() - heard > patience_s:
            raise DeadlineError(f"waited {patience_s:.0f} s for scores of {num_requests - len(scores)} held-out completions")
        else:
            time.sleep(0.001)  # a worker process is judging; nothing to do here meanwhile
    totals = {key: judging.composition.of(rows[key.group].columns).reward(scores[key]) for key in scores}
    greedy = [key for key in scores if key.member == 0]
    judged = [total for key in greedy if (total := totals[key]) is not None]
    names = list(scores[greedy[0]]) if greedy else []
    members = range(1, 1 + judging.num_sampled)
    drawn = [[totals[RolloutKey(i, 0, member)] for member in members] for i in range(len(rows))]
    return EvaluationResult(
        mean_reward=_mean(judged),
        accuracy=_mean([float(total >= judging.solved_at) for total in judged]),
        rewards={name: _mean([scores[key][name].value for key in greedy]) for name in names},
        num_prompts=len(rows),
        failed=len(greedy) - len(judged),
        mean_length=_mean([lengths[key] for key in greedy]) or 0.0,
        samples=[
            {"prompt": text, "completion": answers[number], "reward": totals[RolloutKey(number, 0, 0)]}
            for number, (text, _) in enumerate(asked[:_NUM_SHOWN])
        ],
        sampled=summary_of_samples(drawn, judging) if judging.num_sampled else None,
    )


def summary_of_samples(drawn: Sequence[Sequence[float | None]], judging: Judging) -> dict[str, Any]:
    """`drawn`: of each prompt the rewards of its sampled completions, None where one could not be judged.

    `mean_reward` of those that were judged; `failed` counts the others. `pass_at`: for k = 1, 2, 4, ... and all of them, the
    mean of `pass_at` over the prompts of which k could be judged (None: there is no such prompt).
    """
    judged = [[reward for reward in rewards if reward is not None] for rewards in drawn]
    ks = [*(1 << i for i in range((judging.num_sampled - 1).bit_length())), judging.num_sampled]
    return {
        "num_samples": judging.num_sampled,
        "temperature": judging.sampling.temperature,
        "mean_reward": _mean([reward for rewards in judged for reward in rewards]),
        "failed": sum(map(len, drawn)) - sum(map(len, judged)),
        "pass_at": {
            str(k): _mean(
                [
                    pass_at(k, len(rewards), sum(reward >= judging.solved_at for reward in rewards))
                    for rewards in judged
                    if len(rewards) >= k
                ]
            )
            for k in ks
        },
    }


def pass_at(k: int, num_samples: int, num_solved: int) -> float:
    """The probability that one of k completions solves the prompt, estimated without bias from `num_samples` >= k of them.

    1 - C(n - c, k) / C(n, k): the share of the subsets of k completions that hold a solved one. Chen et al. 2021, Evaluating
    Large Language Models Trained on Code, arXiv 2107.03374, eq. 1.
    """
    assert 1 <= k <= num_samples
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
