"""The twelve published instances of fused schedules, as a measure of `schedule_search`.

From https://github.com/FlexFusion/FlexFusion, the code of RLHFuse (Zhong et al., arXiv 2409.13221): annealing in parallel
processes, with the makespans and peaks that it reports. Times and activations are in its units.
"""

from __future__ import annotations

from dataclasses import dataclass

from async_rlhf.plan.fused_schedule import Fusion, Pipeline
from async_rlhf.plan.schedule_search import Found, search


@dataclass(frozen=True, kw_only=True)
class Published:
    fusion: Fusion
    serial_s: float
    annealed_s: float
    bound_s: float
    peak_bytes: float


def _published(depths: str, micro_batches: str, forwards: str, activations: str, reported: str) -> Published:
    first, second = (
        Pipeline(depth=int(depth), micro_batches=int(count), forward_s=float(forward), activation_bytes=float(size))
        for depth, count, forward, size in zip(
            depths.split(), micro_batches.split(), forwards.split(), activations.split(), strict=True
        )
    )
    serial, annealed, bound, peak = (float(word) for word in reported.split())
    return Published(fusion=Fusion(first, second), serial_s=serial, annealed_s=annealed, bound_s=bound, peak_bytes=peak)


PUBLISHED = (
    _published("8 4", "32 16", "5 4", "1.95 2", "813 708 708 19.7"),
    _published("8 4", "16 8", "5 4", "1.95 2", "477 372 372 15.75"),
    _published("8 4", "8 4", "5 4", "1.95 2", "309 225 225 15.6"),
    _published("8 8", "32 32", "5 2", "1.95 1", "819 702 702 20.5"),
    _published("8 8", "16 16", "5 2", "1.95 1", "483 366 366 18.55"),
    _published("8 8", "8 8", "5 2", "1.95 1", "315 225 225 15.6"),
    _published("16 8", "64 32", "2 2", "1.64 2", "708 618 618 39.72"),
    _published("16 8", "32 16", "2 2", "1.64 2", "420 330 330 29.88"),
    _published("16 8", "16 8", "2 2", "1.64 2", "276 186 186 26.24"),
    _published("16 16", "64 64", "2 1", "1.64 1", "711 613 606 38.72"),
    _published("16 16", "32 32", "2 1", "1.64 1", "423 318 318 32.16"),
    _published("16 16", "16 16", "2 1", "1.64 1", "279 186 186 26.24"),
)


def searched(number: int, *, seed: int = 0) -> Found:
    """What the search finds for an instance, with its own number of starts and steps; a second to half a minute each."""
    return search(PUBLISHED[number].fusion, seed=seed)
