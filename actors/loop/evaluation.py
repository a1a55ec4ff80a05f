"""Evaluation: completions of held-out prompts by one pinned weight set, judged by the run's rewards.

Greedy, one a prompt, or where a reward receives whole groups a group of each, as in training; and where it is wanted several
sampled ones, whose share of solved prompts is pass@k.
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
    """What is generated for every prompt, and what counts as solved.

    group_size: completions of a prompt that are judged together, drawn with `group_sampling`; None: one alone. solved_by: the
    score that decides what is solved, from `solved_at` on; empty: none. num_sampled: further completions a prompt, drawn with
    `sampling`; as many as fill groups. Random numbers follow from `seed`, the prompt's place and the member alone, so that two
    weight sets are given the same. composition: without running statistics, so that a reward means the same at the start and at
    the end of a run.
    """

    max_completion_length: int
    composition: Composition
    stop: tuple[str, ...] = ()
    group_size: int | None = None
    group_sampling: Sampling = GREEDY
    solved_by: str = ""
    solved_at: float = 1.0
    num_sampled: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0

    @property
    def num_judged(self) -> int:
        """Completions a prompt that all figures but those of `sampled` are of: the first members."""
        return self.group_size or 1

    def requests(self, number: int, prompt_ids: tuple[int, ...]) -> list[Request]:
        """Of a prompt the completions that are judged, and behind them the sampled ones."""
        return [
            Request(
                RolloutKey(number, 0, member),
                prompt_ids,
                self.max_completion_length,
                self.group_sampling if member < self.num_judged else self.sampling,
                rollout_seed(self.seed, number, member),
                self.stop,
            )
            for member in range(self.num_judged + self.num_sampled)
        ]

    def place(self, key: RolloutKey) -> Place:
        """The group that rewards receive: so many members, one behind the other."""
        return Place((key.group, key.member // self.num_judged), key.member % self.num_judged, self.num_judged)

    def solved(self, scores: Mapping[str, Score]) -> bool | None:
        """None where no score is named, or it has no value."""
        score = scores.get(self.solved_by)
        return None if score is None or score.value is None else score.value >= self.solved_at


@dataclass(frozen=True)
class EvaluationResult:
    """Means over the completions that could be judged; `failed` counts the others.

    group_size: completions of each prompt, judged as a group; None: one, greedy. rewards: means of the scores, before weights.
    accuracy: share of solved ones among those that `solved_by` judged; None where no score is named. samples: of the first
    prompts the `prompt` as the model saw it, its first `completion` and its `reward` (None: not judged), so that a person can
    read what became of the model. sampled: what `summary_of_samples` makes of the sampled completions, where there are some.
    """

    mean_reward: float | None
    accuracy: float | None
    rewards: Mapping[str, float | None]
    num_prompts: int
    failed: int
    mean_length: float
    samples: Sequence[Mapping[str, str | float | None]]
    sampled: Mapping[str, Any] | None = None
    solved_by: str = ""
    group_size: int | None = None


@dataclass
class _Judged:
    """A completion and its scores: those of its environment from the beginning, those of rewards when they have come."""

    text: str
    num_tokens: int
    scores: dict[str, Score]


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
    prompts = [encode(row) for row in rows]
    requests = [judging.requests(number, tuple(ids)) for number, (_, ids) in enumerate(prompts)]
    num_requests, num_scored = sum(map(len, requests)), 0
    episodes = Episodes(engine, decode, play)
    seeds = (environment_seed(judging.seed, number) for number in range(len(rows)))
    episodes.begin(zip(rows, seeds, requests, strict=True))
    judged: dict[RolloutKey, _Judged] = {}
    last_event = time.monotonic()
    while num_scored < num_requests:
        ended = episodes.step()
        for played in ended:
            completion, key = played.completion, played.completion.key
            given = {} if play is None else {play.name: played.score or Score()}
            judged[key] = _Judged(played.text, len(completion.logprobs), given)
            fields = fields_of(rows[key.group], played.prompt_ids, completion, played.turns[-1], template)
            scoring.submit(key, fields | played.fields, judging.place(key))
        if scored := scoring.poll():
            for result in scored:
                judged[result.key].scores = {**result.scores, **judged[result.key].scores}
            num_scored += len(scored)
            progress(num_scored, num_requests)
        if scored or ended or engine.num_unfinished:
            last_event = time.monotonic()
        elif time.monotonic() - last_event > patience_s:
            raise DeadlineError(f"waited {patience_s:.0f} s for scores of {num_requests - num_scored} held-out completions")
        else:
            time.sleep(0.001)  # a worker process is judging; nothing to do here meanwhile
    return _result(rows, [text for text, _ in prompts], judged, judging)


def _result(
    rows: Sequence[Row], prompts: Sequence[str], judged: Mapping[RolloutKey, _Judged], judging: Judging
) -> EvaluationResult:
    """prompts: as the model saw them."""
    totals = {key: judging.composition.of(rows[key.group].columns).reward(each.scores) for key, each in judged.items()}
    first = {key: each for key, each in judged.items() if key.member < judging.num_judged}
    rewards = [total for key in first if (total := totals[key]) is not None]
    names = next((list(each.scores) for each in first.values()), [])
    members = range(judging.num_judged, judging.num_judged + judging.num_sampled)
    drawn = [[RolloutKey(number, 0, member) for member in members] for number in range(len(rows))]
    samples = [(text, RolloutKey(number, 0, 0)) for number, text in enumerate(prompts[:_NUM_SHOWN])]
    return EvaluationResult(
        mean_reward=_mean(rewards),
        accuracy=_mean([judging.solved(each.scores) for each in first.values()]),
        rewards={name: _mean([each.scores[name].value for each in first.values()]) for name in names},
        num_prompts=len(rows),
        failed=len(first) - len(rewards),
        mean_length=_mean([each.num_tokens for each in first.values()]) or 0.0,
        samples=[{"prompt": text, "completion": judged[key].text, "reward": totals[key]} for text, key in samples],
        sampled=summary_of_samples(
            [totals[key] for keys in drawn for key in keys],
            [[judging.solved(judged[key].scores) for key in keys] for keys in drawn],
            judging,
        )
        if judging.num_sampled
        else None,
        solved_by=judging.solved_by,
        group_size=judging.group_size,
    )


def summary_of_samples(
    rewards: Sequence[float | None], solved: Sequence[Sequence[bool | None]], judging: Judging
) -> dict[str, Any]:
    """Of sampled completions: their rewards, None where one could not be judged; of each prompt which solved it, None where
    that is not known.

    `mean_reward` of those that were judged; `failed` counts the others. `pass_at`: for k = 1, 2, 4, ... and all of them, the
    mean of `pass_at` over the prompts of which k could be judged (None: there is no such prompt).
    """
    known = [[each for each in of_prompt if each is not None] for of_prompt in solved]
    ks = [*(1 << i for i in range((judging.num_sampled - 1).bit_length())), judging.num_sampled]
    return {
        "num_samples": judging.num_sampled,
        "temperature": judging.sampling.temperature,
        "mean_reward": _mean(rewards),
        "failed": sum(reward is None for reward in rewards),
        "pass_at": {str(k): _mean([pass_at(k, len(each), sum(each)) for each in known if len(each) >= k]) for k in ks},
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
