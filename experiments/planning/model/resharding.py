"""How much of a model moves when the same devices go from training to generation, by three ways of grouping them.

From HybridFlow (Sheng et al., arXiv 2409.19256, section 5.4 and table 2). Training shards the model over t · p devices and
repeats it d times; generation shards it over t_g · p_g. All figures are of one device, as exact shares of the model's weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from async_rlhf.buffers.errors import ConfigError


@dataclass(frozen=True)
class Sharding:
    """tensor: devices that share each layer; pipeline: groups of layers; data: replicas of the whole."""

    tensor: int
    pipeline: int = 1
    data: int = 1

    @property
    def part(self) -> Fraction:
        """Of the model, that a device holds."""
        return Fraction(1, self.tensor * self.pipeline)


@dataclass(frozen=True)
class Transition:
    """Of the weights of the model: what a device receives, the most it holds, and what it keeps twice while it generates."""

    received: Fraction
    peak: Fraction
    redundant: Fraction


def gather_from_zero(training: Sharding) -> Transition:
    """DeepSpeed-Chat: ZeRO-3 divides the weights over all devices; each one gathers all and keeps its part of training.

    received (tpd - 1) / tpd, peak 1, redundant 1 / tpd.
    """
    part = training.part / training.data
    return Transition(1 - part, Fraction(1), part)


def gather_model_parallel(training: Sharding) -> Transition:
    """HybridFlow-V: neighbours form the groups of generation, so that a device's new shard need not contain its old one.

    It gathers the weights of its model-parallel group and keeps its part of training: received (tp - 1) / tp, peak 1,
    redundant 1 / tp.
    """
    return Transition(1 - training.part, Fraction(1), training.part)


def gather_micro_data_parallel(training: Sharding, generation: Sharding) -> Transition:
    """HybridFlow: the groups of generation lie at a stride, so that a device's new shard contains its old one.

    It gathers within the tp / (t_g · p_g) devices of its micro data-parallel group: received (tp - t_g p_g) / (t_g p_g t p),
    peak 1 / (t_g p_g), redundant 0. Raises ConfigError where t_g does not divide t, or p_g not p.
    """
    for name in ("tensor", "pipeline"):
        many, few = getattr(training, name), getattr(generation, name)
        if many % few:
            near = max(number for number in range(1, min(few, many) + 1) if many % number == 0)
            raise ConfigError(f"generation with {name} = {few} must divide training's {many}; nearest: {near}")
    return Transition(generation.part - training.part, generation.part, Fraction(0))
