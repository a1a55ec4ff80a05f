"""Evaluation: completions of held-out prompts by one pinned weight set, judged by the run's rewards.

Greedy, one a prompt, or where a reward receives whole groups a group of each, as in training; and where it is wanted several
sampled ones, whose share of solved prompts is pass@k.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_rlhf.actors.engine import Engine, Request, RolloutKey
from async_rlhf.actors.loop.context import RunContext
from async_rlhf.actors.loop.episodes import Episodes
from async_rlhf.actors.loop.rollouts import FinishedRollout
from async_rlhf.actors.prompts import Row, environment_seed
from async_rlhf.actors.scoring.pool import GroupMember, ScoringPool
from async_rlhf.buffers.composition import Composition
from async_rlhf.buffers.errors import DeadlineError
from async_rlhf.buffers.record import Score, source_of
from async_rlhf.buffers.sampling import GREEDY, Sampling

_NUM_SHOWN = 8
_MOST_SOURCES = 64
_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Judging:
    """The completions sampled of each prompt, and the criterion for solved ones."""

    composition: Composition
    """Without running statistics, so that a reward means the same at the start and at the end of a run."""
    judged: Sequence[Sampling] = (GREEDY,)
    """Settings of the completions that are judged together, a greedy one or a group as in training."""
    sampled: Sequence[Sampling] = ()
    """Settings of further ones, as many as fill such groups."""
    solved_by: str = ""
    """The score that decides whether a prompt is solved; empty: none."""
    solved_at: float = 1.0
    """The least score of a solved one."""

    def place(self, key: RolloutKey) -> GroupMember:
        """The group that rewards receive: so many members, one behind the other."""
        size = len(self.judged)
        return GroupMember((key.group, key.member // size), key.member % size, size)

    def solved(self, scores: Mapping[str, Score]) -> bool | None:
        """None where no score is named, or it has no value."""
        score = scores.get(self.solved_by)
        return None if score is None or score.value is None else score.value >= self.solved_at


def judge(
    engine: Engine,
    scoring: ScoringPool[RolloutKey],
    context: RunContext,
    begun: Mapping[int, tuple[Row, str, Sequence[Request]]],
    place: Callable[[RolloutKey], GroupMember],
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> dict[RolloutKey, FinishedRollout]:
    """Generate and score these groups, by their numbers: all completions, with their scores.

    place: of a completion in what rewards receive. progress: called when completions have been scored: how many, and of how
    many.

    Raises DeadlineError when neither a score nor an environment's answer arrives for `_PATIENCE_S`, and as long as one step may
    take, after generation has ended.
    """
    count, environments = sum(len(requests) for _, _, requests in begun.values()), context.environments
    patience_s = _PATIENCE_S + max((environment.spec.timeout_s for environment in environments.all), default=0.0)
    episodes = Episodes(engine, context.decode, environments)
    episodes.begin((row, environment_seed(context.seed, number), requests) for number, (row, _, requests) in begun.items())
    ended: dict[RolloutKey, FinishedRollout] = {}
    judged: dict[RolloutKey, FinishedRollout] = {}
    last_event = time.monotonic()
    while len(judged) < count:
        now_ended = episodes.step()
        for finished in now_ended:
            key, row = finished.key, begun[finished.key.group][0]
            ended[key] = finished
            scoring.submit(key, finished.fields(row, context.template), place(key))
        if answers := scoring.poll():
            for scored in answers:
                finished, row = ended.pop(scored.key), begun[scored.key.group][0]
                by_environment = environments.scores(environments.of(row.columns), finished.score)
                judged[scored.key] = finished.judged(scored, by_environment, {})
            progress(len(judged), count)
        if answers or now_ended or engine.num_unfinished:
            last_event = time.monotonic()
        elif time.monotonic() - last_event > patience_s:
            raise DeadlineError(f"waited {patience_s:.0f} s for scores of {count - len(judged)} completions")
        else:
            time.sleep(0.001)  # a worker process is judging; nothing to do here meanwhile
    return judged


def evaluate(
    engine: Engine,
    scoring: ScoringPool[RolloutKey],
    context: RunContext,
    judging: Judging,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Any]:
    """Evaluates the rows of `context`, with one seed and so the same random numbers for each weight set. progress, raises: as
    `judge`.

    `mean_reward`, `accuracy`, `rewards` (scores by name, before weights) and `mean_length` are means over the completions that
    could be judged, None over none; `failed` counts the others, of `num_prompts` prompts. accuracy: share of solved ones among
    those that `solved_by` judged. samples: of the first prompts the `prompt` as the model saw it, its first `completion` and
    its `reward`, so that a person can read what became of the model. by_source: `mean_reward`, `accuracy` and
    `num_prompts` of the rows with each `source`; after the first 64 `other`. sampled: what `summary_of_samples` makes of the
    sampled completions, where there are some. group_size: completions of each prompt, judged as a group; None: one, greedy.
    """
    samplings, rows = [*judging.judged, *judging.sampled], context.rows
    begun = {number: context.requests(number, 0, row, samplings=samplings) for number, row in enumerate(rows)}
    judged = judge(engine, scoring, context, begun, judging.place, progress)
    scores = {key: finished.rollout.scores for key, finished in judged.items()}
    totals = {key: judging.composition.of(rows[key.group].columns).reward(of_judges) for key, of_judges in scores.items()}
    num_judged = len(judging.judged)
    first = [key for key in judged if key.member < num_judged]
    rewards = [total for key in first if (total := totals[key]) is not None]
    known = {key: judging.solved(scores[key]) for key in first}
    members = range(num_judged, num_judged + len(judging.sampled))
    drawn = [[RolloutKey(number, 0, member) for member in members] for number in range(len(rows))]
    shown = [(begun[number][1], RolloutKey(number, 0, 0)) for number in range(min(len(rows), _NUM_SHOWN))]
    results = [totals[key] for keys in drawn for key in keys]
    solved = [[judging.solved(scores[key]) for key in keys] for keys in drawn]
    return {
        "mean_reward": _mean(rewards),
        "accuracy": _mean([*known.values()]),
        "by_source": {
            source: {
                "mean_reward": _mean([totals[key] for key in keys]),
                "accuracy": _mean([known[key] for key in keys]),
                "num_prompts": len({key.group for key in keys}),
            }
            for source, keys in _by_source(first, rows).items()
        },
        "rewards": {name: _mean([scores[key][name].value for key in first]) for name in (scores[first[0]] if first else ())},
        "num_prompts": len(rows),
        "failed": len(first) - len(rewards),
        "mean_length": _mean([judged[key].rollout.num_tokens for key in first]) or 0.0,
        "samples": [{"prompt": text, "completion": judged[key].rollout.text, "reward": totals[key]} for text, key in shown],
        "sampled": summary_of_samples(results, solved, judging) if judging.sampled else None,
        "solved_by": judging.solved_by,
        "group_size": None if judging.judged == (GREEDY,) else num_judged,
    }


def _by_source(keys: Sequence[RolloutKey], rows: Sequence[Row]) -> dict[str, list[RolloutKey]]:
    keys_of: dict[str, list[RolloutKey]] = {}
    for key in sorted(keys):  # in the order of the rows, whichever ended first
        if (source := source_of(rows[key.group].columns)) is not None:
            keys_of.setdefault(source if source in keys_of or len(keys_of) < _MOST_SOURCES else "other", []).append(key)
    return keys_of


def summary_of_samples(
    rewards: Sequence[float | None], solved: Sequence[Sequence[bool | None]], judging: Judging
) -> dict[str, Any]:
    """The metrics of sampled completions. rewards: None for unjudged ones; solved: of each prompt's completions, None for
    unknown.

    `mean_reward` of those that were judged; `failed` counts the others. `pass_at`: for k = 1, 2, 4, ... and all of them, the
    mean of `pass_at` over the prompts of which k could be judged (None: there is no such prompt).
    """
    known = [[is_solved for is_solved in of_prompt if is_solved is not None] for of_prompt in solved]
    num_samples = len(judging.sampled)
    ks = [*(1 << i for i in range((num_samples - 1).bit_length())), num_samples]
    return {
        "num_samples": num_samples,
        "temperature": judging.sampled[0].temperature,
        "mean_reward": _mean(rewards),
        "failed": sum(reward is None for reward in rewards),
        "pass_at": {str(k): _mean([pass_at(k, len(judged), sum(judged)) for judged in known if len(judged) >= k]) for k in ks},
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
