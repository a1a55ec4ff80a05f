"""The adaptive guard: aims below the staleness bound while data look too old to learn from. A pure state machine.

The hard bound never moves and never depends on this; the aim only says how much of it to use. Several signals, because an
effective sample size near 1 alone certifies nothing. Down after `patience` bad steps in a row, up after `recovery` good ones;
good is better than the limit by `margin`, so that between the two the aim stays where it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from async_rlhf.learner.config import GuardConfig


@dataclass(frozen=True)
class Aim:
    """The staleness aimed at, and how many steps in a row looked bad or good since it last moved."""

    staleness: int
    bad: int = 0
    good: int = 0


def observe(aim: Aim, metrics: Mapping[str, Any], config: GuardConfig, lowest: int, highest: int) -> tuple[Aim, str | None]:
    """The aim after a step with these metrics, and why it moved (None when it did not).

    `lowest` is the smallest staleness at which the run still goes on, `highest` the hard bound. A metric that is missing or
    None says nothing; a step about which nothing is known changes nothing.
    """
    bad, known, clearly_good = _judge(metrics, config)
    if not known:
        return aim, None
    if bad:
        worse = replace(aim, bad=aim.bad + 1, good=0)
        if worse.bad < config.patience or aim.staleness <= lowest:
            return worse, None
        return Aim(aim.staleness - 1), f"{config.patience} steps in a row: {', '.join(bad)}"
    better = replace(aim, bad=0, good=aim.good + 1 if clearly_good else 0)
    if better.good < config.recovery or aim.staleness >= highest:
        return better, None
    return Aim(aim.staleness + 1), f"{config.recovery} steps in a row well within all limits"


def _judge(metrics: Mapping[str, Any], config: GuardConfig) -> tuple[list[str], bool, bool]:
    """What is over its limit, whether anything is known, whether all that is known is better than its limit by the margin."""
    clipped = [metrics.get(name) for name in ("clip_ratio/region_mean", "is/masked_ratio")]
    known_clips = [value for value in clipped if value is not None]
    # each as (what, value, limit, sign): with sign +1 a value above the limit is bad, with -1 one below
    signals = [
        ("is/ess", metrics.get("is/ess"), config.min_ess, -1),
        ("is/second_moment", metrics.get("is/second_moment"), config.max_second_moment, 1),
        ("clipped or masked", sum(known_clips) if known_clips else None, config.max_clip_ratio, 1),
    ]
    known = [(name, value, limit, sign) for name, value, limit, sign in signals if value is not None]
    bad = [
        f"{name} {value:.3g} {'above' if sign > 0 else 'below'} {limit:g}"
        for name, value, limit, sign in known
        if sign * (value - limit) > 0
    ]
    clearly_good = all(sign * (value - limit) <= -config.margin * limit for _, value, limit, sign in known)
    return bad, bool(known), clearly_good
