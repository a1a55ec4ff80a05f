"""How much of a model moves when the same devices go from training to generation, by three ways of grouping them.

From HybridFlow (Sheng et al., arXiv 2409.19256, section 5.4 and table 2). Training shards the model over t · p devices and
repeats it d times; generation shards it over t_g · p_g. All figures are of one device, as exact shares of the model's
weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from async_rlhf.buffers.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """tensor: devices that share each layer; pipeline: groups of layers; data: replicas of the whole."""

    tensor: int
    pipeline: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"a layout with {name} = {value}: at least 1")

    @property
    def model_parallel(self) -> int:
        """Devices that hold the model once."""
        return self.tensor * self.pipeline


@dataclass(frozen=True, kw_only=True)
class Transition:
    """Of the weights of the model: what a device receives, the most it holds, and what it keeps twice while it generates."""

    received: Fraction
    peak: Fraction
    redundant: Fraction


def gather_from_zero(training: Layout) -> Transition:
    """DeepSpeed-Chat: ZeRO-3 divides the weights over all devices; each one gathers all and keeps its part of training.

    received (tpd - 1) / tpd, peak 1, redundant 1 / tpd.
    """
    devices = training.model_parallel * training.data
    return Transition(received=1 - Fraction(1, devices), peak=Fraction(1), redundant=Fraction(1, devices))


def gather_model_parallel(training: Layout) -> Transition:
    """HybridFlow-V: neighbours form the groups of generation, so that a device's new shard need not contain its old one.

    It gathers the weights of its model-parallel group and keeps its part of training: received (tp - 1) / tp, peak 1,
    redundant 1 / tp.
    """
    part = Fraction(1, training.model_parallel)
    return Transition(received=1 - part, peak=Fraction(1), redundant=part)


def gather_micro_data_parallel(training: Layout, generation: Layout) -> Transition:
    """HybridFlow: the groups of generation lie at a stride, so that a device's new shard contains its old one.

    It gathers within the tp / (t_g · p_g) devices of its micro data-parallel group: received (tp - t_g p_g) / (t_g p_g t p),
    peak 1 / (t_g p_g), redundant 0. Raises ConfigError where t_g does not divide t, or p_g not p.
    """
    _check(training, generation)
    whole, part = Fraction(1, generation.model_parallel), Fraction(1, training.model_parallel)
    return Transition(received=whole - part, peak=whole, redundant=Fraction(0))


def generation_cells(training: Layout, generation: Layout, pipeline: int, tensor: int) -> tuple[range, range]:
    """Which of the p · t cells of the model a device of training holds in generation: their rows and columns.

    Its own cell is among them: those of t / t_g consecutive columns and p / p_g consecutive rows. Errors as
    `gather_micro_data_parallel`.
    """
    _check(training, generation)
    rows, columns = training.pipeline // generation.pipeline, training.tensor // generation.tensor
    row, column = pipeline // rows * rows, tensor // columns * columns
    return range(row, row + rows), range(column, column + columns)


def _check(training: Layout, generation: Layout) -> None:
    for name, many, few in (
        ("tensor", training.tensor, generation.tensor),
        ("pipeline", training.pipeline, generation.pipeline),
    ):
        if many % few:
            near = max(number for number in range(1, min(few, many) + 1) if many % number == 0)
            raise ConfigError(f"generation with {name} = {few} must divide training's {many}; nearest: {near}")
