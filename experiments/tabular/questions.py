"""The questions that the twin is asked: which recipes are run on which worlds, what is looked at, and what is compared with
what.

A question gives rows, one for each cell and seed: the arm (a loss, a correction), x (what is varied: staleness, updates,
learning rate), the seed, and exact quantities. What they show is `findings`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from async_rlhf.experiments.gradient_laws.table import Case, measure
from async_rlhf.experiments.statistics import Array, first_at
from async_rlhf.experiments.tabular.lengths import BOUNDS as QUEUE_BOUNDS
from async_rlhf.experiments.tabular.lengths import CREDIT, NUM_ANSWERS, RULES, lengths
from async_rlhf.experiments.tabular.training import GROUPS, MEMBERS, NUM_UPDATES, Recipe, Trained, history, outcome, train
from async_rlhf.experiments.tabular.world import Worlds, make_worlds
from async_rlhf.learner.config import AdvantageConfig, GuardConfig, LossConfig

Row = dict[str, str | float]
STALENESS = (0, 4, 16)
NAIVE = "PPO around behaviour (naive)"
GUARDED = "guard, at most 16"
# 8 is what the guard of decoupled PPO chooses on average.
BOUNDS = (0, 4, 8, 16)
CORRECTIONS: Mapping[str, LossConfig] = {
    NAIVE: LossConfig(kind="ppo_clip"),
    "recompute only": LossConfig(is_cap=None),
    "decoupled PPO": LossConfig(),
    "truncated IS": LossConfig(kind="truncated_is"),
    "CISPO": LossConfig(kind="cispo"),
    "sequence mask": LossConfig(sequence_mask=(0.5, 2.0)),
}
PREFERENCES: Mapping[str, LossConfig] = {
    "PPO": LossConfig(kind="ppo_clip"),
    "Proximal RLOO": LossConfig(kind="proximal_rloo"),
    "Online DPO": LossConfig(kind="online_dpo"),
}
UPDATES = (1, 4, 16, 64)
# With the bootstrap of the default, `mixed`, and equal caps V-trace and traced lambda-returns are one estimator.
CRITICS: Mapping[str, AdvantageConfig] = {
    "GAE": AdvantageConfig(kind="gae"),
    "V-trace": AdvantageConfig(kind="v_trace", bootstrap="target"),
    "traced": AdvantageConfig(kind="traced"),
}
AGES = (0, 2, 4, 8, 16, 32)
RATES = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4)


@dataclass(frozen=True)
class Cell:
    """One quantity of one arm at one x: a number for each seed."""

    quantity: str
    arm: str
    x: str | float


@dataclass(frozen=True)
class Question:
    """name: of its files. x: what is varied, in words. shown: the quantities of table and picture, with what they are in words.
    compared: of each comparison the cell and its base; all of them share one family of Holm's. samples: of a seed, in words.
    also: quantities that are compared and not shown, in words."""

    name: str
    title: str
    x: str
    shown: Mapping[str, str]
    rows: Callable[[Sequence[int]], list[Row]]
    compared: Sequence[tuple[Cell, Cell]]
    samples: str = f"{NUM_UPDATES * GROUPS * MEMBERS:,} samples trained on in each run"
    also: Mapping[str, str] = field(default_factory=dict)


def values(rows: Sequence[Row], cell: Cell) -> list[float]:
    """By seed, in the order of the seeds."""
    return [float(row[cell.quantity]) for row in rows if (row["arm"], row["x"]) == (cell.arm, cell.x)]


def _run(worlds: Worlds, arm: str, x: str | float, recipe: Recipe) -> tuple[Trained, list[Row]]:
    trained = train(worlds, recipe)
    found = outcome(worlds, trained, recipe)
    return trained, [{"arm": arm, "x": x, "seed": seed, **each} for seed, each in zip(worlds.seeds, found, strict=True)]


def off_policyness(seeds: Sequence[int]) -> list[Row]:
    """Besides outcomes: `proxy_lost`, what N = 1 ends higher with the same loss; `gold_at_kl`, gold progress where the
    divergence from the reference first reaches what every N of that loss reaches on that seed."""
    worlds = make_worlds(seeds)
    rows: list[Row] = []
    for arm, loss in PREFERENCES.items():
        paths: dict[int, list[Array]] = {}
        own: dict[int, list[Row]] = {}
        for n in UPDATES:
            trained, own[n] = _run(worlds, arm, n, Recipe(loss, updates=n, reward="proxy"))
            paths[n] = [torch.stack(column).numpy() for column in zip(*history(worlds, trained), strict=True)]
        reached = np.min([kl.max(0) for _, _, kl in paths.values()], axis=0)
        for n in UPDATES:
            gold, _, kl = paths[n]
            for i, row in enumerate(own[n]):
                row["proxy_lost"] = float(own[UPDATES[0]][i]["proxy"]) - float(row["proxy"])
                row["gold_at_kl"] = first_at(kl[:, i], gold[:, i], reached[i])
            rows += own[n]
    return rows


def corrections(seeds: Sequence[int], num_updates: int = NUM_UPDATES) -> list[Row]:
    worlds = make_worlds(seeds)
    return [
        row
        for arm, loss in CORRECTIONS.items()
        for staleness in STALENESS
        for row in _run(worlds, arm, staleness, Recipe(loss, staleness=staleness, num_updates=num_updates))[1]
    ]


def gradients(seeds: Sequence[int]) -> list[Row]:
    """The first prompt of every world, half-way through the synchronous run; its data were sampled so many steps before."""
    worlds = make_worlds(seeds)
    versions = train(worlds, Recipe(num_updates=NUM_UPDATES // 2)).versions
    rows: list[Row] = []
    for arm, loss in CORRECTIONS.items():
        for staleness in STALENESS:
            for i, seed in enumerate(seeds):
                now, then = versions[-1][i, 0], versions[-1 - staleness][i, 0]
                rows.append(
                    {
                        "arm": arm,
                        "x": staleness,
                        "seed": seed,
                        **vars(measure(Case(arm, loss), now, then, worlds.gold[i, 0], staleness)),
                    }
                )
    return rows


def critics(seeds: Sequence[int]) -> list[Row]:
    worlds = make_worlds(seeds)
    return [
        row
        for arm, advantage in CRITICS.items()
        for staleness in STALENESS
        for row in _run(worlds, arm, staleness, Recipe(advantage=advantage, staleness=staleness))[1]
    ]


def rates(seeds: Sequence[int]) -> list[Row]:
    worlds = make_worlds(seeds)
    return [
        row
        for age in AGES
        for rate in RATES
        for row in _run(worlds, f"staleness {age}", rate, Recipe(staleness=age, learning_rate=rate))[1]
    ]


def guard(seeds: Sequence[int]) -> list[Row]:
    worlds = make_worlds(seeds)
    rows: list[Row] = []
    for arm in (NAIVE, "decoupled PPO"):
        recipe = Recipe(CORRECTIONS[arm])
        for staleness in BOUNDS:
            rows += _run(worlds, arm, f"fixed {staleness}", replace(recipe, staleness=staleness))[1]
        rows += _run(worlds, arm, GUARDED, replace(recipe, staleness=BOUNDS[-1], guard=GuardConfig(enabled=True)))[1]
    return rows


def best_rates(rows: Sequence[Row]) -> dict[int, list[float]]:
    """Of each staleness, by seed: the learning rate that ends highest, between the rates tried by the parabola through the best
    and its neighbours (in log rate); at an end of what was tried it is that end."""
    found: dict[int, list[float]] = {}
    for age in AGES:
        ends = np.array([values(rows, Cell("gold", f"staleness {age}", rate)) for rate in RATES])
        found[age] = [_peak(np.log(RATES), ends[:, i]) for i in range(ends.shape[1])]
    return found


def exponents(best: Mapping[int, Sequence[float]]) -> list[float]:
    """By seed: a of the law rate = c (1 + staleness)^a, least squares in logarithms."""
    x = np.log1p(list(best))
    slopes = np.polyfit(x, np.log(list(best.values())), 1)[0]
    return [float(each) for each in np.atleast_1d(slopes)]


def _peak(x: Array, y: Array) -> float:
    top = int(y.argmax())
    if top in (0, len(y) - 1):
        return float(np.exp(x[top]))
    left, right = y[top] - y[top - 1], y[top] - y[top + 1]
    return float(np.exp(x[top] + (x[top + 1] - x[top]) * (left - right) / (left + right) / 2))


def _against_first(quantity: str, arms: Sequence[str], xs: Sequence[str | float]) -> list[tuple[Cell, Cell]]:
    return [(Cell(quantity, arm, x), Cell(quantity, arm, xs[0])) for arm in arms for x in xs[1:]]


def _against(quantity: str, base: str, arms: Sequence[str], xs: Sequence[str | float]) -> list[tuple[Cell, Cell]]:
    return [(Cell(quantity, arm, x), Cell(quantity, base, x)) for x in xs for arm in arms if arm != base]


_ARMS = list(CORRECTIONS)
_DROPPING = [rule for rule in RULES if rule != CREDIT]
_OLD = STALENESS[1:]
_SHARE = "as a share of the way from the initial policy to the best completions"
QUESTIONS: Sequence[Question] = (
    Question(
        "off_policyness",
        "How many updates does a batch bear?",
        "updates a batch (N)",
        {
            "proxy": f"expected proxy reward, which is optimised, {_SHARE}",
            "gold": f"expected gold reward, {_SHARE}",
            "gold_at_kl": "gold where the divergence from the reference is what all N reach",
        },
        off_policyness,
        [
            *_against_first("proxy", list(PREFERENCES), UPDATES),
            *_against_first("gold", list(PREFERENCES), UPDATES),
            *_against_first("gold_at_kl", list(PREFERENCES), UPDATES),
            *_against("proxy_lost", "PPO", list(PREFERENCES), UPDATES[-1:]),
            *((Cell("gold", arm, 1), Cell("gold_peak", arm, 1)) for arm in PREFERENCES),
        ],
        also={
            "proxy_lost": "proxy of N = 1 minus proxy, with the same loss",
            "gold_peak": "gold where it is highest along the run",
        },
    ),
    Question(
        "corrections",
        "What does old data cost, and which correction gives how much of it back?",
        "staleness [steps]",
        {
            "gold": f"expected reward at the end, {_SHARE}",
            "kl_reference": "divergence from the reference at the end [nats a completion]",
        },
        corrections,
        [
            *_against_first("gold", _ARMS, STALENESS),
            *_against("gold", NAIVE, _ARMS, _OLD),
            *_against("gold", "recompute only", ["decoupled PPO"], _OLD),
        ],
    ),
    Question(
        "gradients",
        "What is each correction's expected gradient on old data?",
        "staleness [steps]",
        {
            "cosine": "cosine of the expected gradient to the exact one",
            "norm": "its norm over the norm of the exact one",
            "spread": "standard deviation of one completion's gradient over the norm of the exact one",
        },
        gradients,
        [
            *_against("cosine", NAIVE, _ARMS, _OLD),
            *_against("cosine", "recompute only", ["decoupled PPO"], _OLD),
            *_against("norm", "recompute only", ["decoupled PPO"], _OLD),
        ],
        "expectations over all completions, none sampled",
    ),
    Question(
        "critics",
        "Does a critic that knows of staleness bear old data better?",
        "staleness [steps]",
        {
            "gold": f"expected reward at the end, {_SHARE}",
            "critic_error": "distance of the critic from the policy's own value (root mean square, reward)",
        },
        critics,
        [
            *_against_first("gold", list(CRITICS), STALENESS),
            *_against("gold", "GAE", list(CRITICS), _OLD),
            *_against_first("critic_error", list(CRITICS), STALENESS),
            *_against("critic_error", "GAE", list(CRITICS), _OLD),
        ],
    ),
    Question(
        "rates",
        "Does the best learning rate fall with staleness?",
        "learning rate",
        {"gold": f"expected reward at the end, {_SHARE}"},
        rates,
        [
            (Cell("gold", f"staleness {age}", RATES[-1]), Cell("gold", f"staleness {age}", Recipe().learning_rate))
            for age in AGES
        ],
    ),
    Question(
        "guard",
        "Does the adaptive guard choose a better staleness than a fixed bound?",
        "bound on staleness",
        {
            "gold": f"expected reward at the end, {_SHARE}",
            "staleness_mean": "staleness of the data, mean over steps",
        },
        guard,
        [
            (Cell("gold", arm, GUARDED), Cell("gold", arm, f"fixed {staleness}"))
            for arm in (NAIVE, "decoupled PPO")
            for staleness in BOUNDS
        ],
    ),
    Question(
        "lengths",
        "Does dropping for age favour short answers?",
        "bound on age [steps]",
        {
            "length": "mean length trained on, over that of the first answers to as many prompts",
            "dropped": "share of the tokens of finished answers that were dropped",
            "ticks": "time of a step, over that of slots that never wait and lose nothing",
        },
        lengths,
        [
            *_against("length", CREDIT, _DROPPING, QUEUE_BOUNDS),
            *_against("ticks", CREDIT, _DROPPING, QUEUE_BOUNDS),
            *((Cell("first", arm, QUEUE_BOUNDS[-1]), Cell("first", CREDIT, QUEUE_BOUNDS[-1])) for arm in _DROPPING),
        ],
        f"{NUM_ANSWERS:,} answers trained on in each",
        {"first": "length, of the first batch alone"},
    ),
)
