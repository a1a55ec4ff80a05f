"""Which CPUs of a host each part of a run may use: a pure function of a strategy, the parts that are there and their weights.

    flattening      generation, scoring and learning all use every CPU
    interleaving    generation | scoring and learning: scores are computed on the learner's CPUs, beside generation
    separation      generation | scoring | learning

The strategies are those of APP (Xiao et al., An Adaptive Placement and Parallelism Framework for Accelerating RLHF Training,
https://arxiv.org/abs/2312.11819), with one difference: there the policy generates on the devices on which it is trained, and
`interleaving` spreads the frozen models over halves of them; here generation is a process of its own, so the frozen models lie
beside the learner.

The sets of a strategy share the CPUs by weight: each gets one, and the rest goes by largest remainders (Hamilton's method).
Sets are consecutive numbers in the order above. With fewer CPUs than sets scoring shares the set of generation, as it does
where actors score by themselves; what still has no room is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Literal

from async_rlhf.buffers.errors import ConfigError

Strategy = Literal["flattening", "interleaving", "separation"]
Part = Literal["generation", "scoring", "learning"]
Weights = Mapping[Part, float]
PARTS: tuple[Part, ...] = ("generation", "scoring", "learning")

_SETS: dict[Strategy, tuple[tuple[Part, ...], ...]] = {
    "flattening": (PARTS,),
    "interleaving": (("generation",), ("scoring", "learning")),
    "separation": (("generation",), ("scoring",), ("learning",)),
}
_SHARING: tuple[tuple[Part, ...], ...] = (("generation", "scoring"), ("learning",))
"""With fewer CPUs than sets."""


def cpu_sets(
    strategy: Strategy, parts: Collection[Part], weights: Weights, num_cpus: int, host: str
) -> dict[Part, tuple[int, ...]]:
    """Of each of `parts`, its CPUs by number from 0. weights: above 0, of all parts. host: in words, for errors.

    Raises ConfigError when there are fewer CPUs than sets.
    """
    sets = _there(_SETS[strategy], parts)
    if num_cpus < len(sets):
        sets = _there(_SHARING, parts)
    if num_cpus < len(sets):
        raise ConfigError(
            f"placement.strategy = {strategy!r} needs {len(sets)} CPUs of {host} ({' | '.join(map(' and '.join, sets))}), "
            f"which has {num_cpus} for the run; set 'flattening', with which all share them, or say more in placement.hosts"
        )
    sizes = shares([sum((Fraction(weights[part]) for part in each), Fraction()) for each in sets], num_cpus)
    ends = accumulate(sizes, initial=0)
    return {part: tuple(range(*span)) for each, span in zip(sets, pairwise(ends), strict=True) for part in each}


def shares(weights: Sequence[Fraction], num_cpus: int) -> list[int]:
    """Whole shares of `num_cpus`, at least one each, by largest remainders; equal ones go to the first."""
    total = sum(weights)
    exact = [weight * num_cpus / total for weight in weights]
    found = [max(1, int(share)) for share in exact]
    while (left := num_cpus - sum(found)) != 0:
        owed = [share - has for share, has in zip(exact, found, strict=True)]
        if left > 0:
            found[owed.index(max(owed))] += 1
        else:  # those that were given one although less was their share
            found[min((number for number, has in enumerate(found) if has > 1), key=owed.__getitem__)] -= 1
    return found


def _there(sets: Sequence[tuple[Part, ...]], parts: Collection[Part]) -> list[tuple[Part, ...]]:
    left = [tuple(part for part in each if part in parts) for each in sets]
    return [each for each in left if each]
