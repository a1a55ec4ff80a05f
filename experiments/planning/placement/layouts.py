"""How a model may lie on so many devices: tensor, pipeline, context, expert and data parallelism, ZeRO, recomputation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

from async_rlhf.experiments.planning.model.model_costs import ModelCosts, Recompute

Kind = Literal["any", "here", "zero-3"]
"""Of training. here: what this learner has, data parallelism by ZeRO, or all devices one tensor or one sequence group. zero-3:
that stage over all devices."""
MOST_RANKS = 64
"""Of this learner."""
_LONG_ROW = 16384
_MOST_MICRO_ROWS = 16
_RECOMPUTES: tuple[Recompute, ...] = ("none", "full")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """tensor, pipeline, context, experts, data: as in `stages.Place`. micro_rows: of one forward and backward pass of a
    data-parallel part."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    experts: int = 1
    data: int = 1
    zero_stage: int = 0
    micro_rows: int = 1
    recompute: Recompute = "none"

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    def __str__(self) -> str:
        sizes = {"tp": self.tensor, "pp": self.pipeline, "cp": self.context, "dp": self.data, "ep": self.experts}
        parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        if self.zero_stage:
            parts.append(f"ZeRO-{self.zero_stage}")
        if self.recompute == "full":
            parts.append("recomputation")
        return ", ".join(parts) or "one device"


def powers(most: int) -> list[int]:
    """Of two, up to `most`."""
    return [1 << power for power in range(most.bit_length())] if most else []


def tensor_sizes(model: ModelCosts, count: int, node: int) -> list[int]:
    """Powers of two within a node that divide heads and devices."""
    return [size for size in powers(min(count, node)) if count % size == 0 and model.heads % size == 0]


def training(
    model: ModelCosts, count: int, node: int, kind: Kind, *, update_rows: int, update_groups: int, longest_row: int
) -> Iterator[Layout]:
    """Of all `count` devices. update_rows, update_groups: of one optimizer update. Context parallelism is for long rows."""
    contexts = powers(min(count, node)) if longest_row >= _LONG_ROW else [1]
    for tensor, context in product(tensor_sizes(model, count, node), contexts):
        for pipeline in powers(min(count // tensor // context, model.layers)):
            data = count // (tensor * context * pipeline)
            if data * tensor * context * pipeline != count or (kind == "zero-3" and data < count):
                continue
            if kind == "here" and not _has_ranks_for(tensor, context, pipeline, count):
                continue
            # Here a rank trains on whole groups.
            if data > (update_groups if kind == "here" else update_rows):
                continue
            shared = data * context
            stages = (0,) if shared == 1 else (1,) if pipeline > 1 else (3,) if kind == "zero-3" else (1, 2, 3)
            experts = sorted({1, math.gcd(model.experts, data)}) if model.experts and kind == "any" else [1]
            micro = powers(min(math.ceil(update_rows / data), _MOST_MICRO_ROWS))
            for zero_stage, few, recompute, micro_rows in product(stages, experts, _RECOMPUTES, micro):
                yield Layout(
                    tensor=tensor,
                    pipeline=pipeline,
                    context=context,
                    experts=few,
                    data=data,
                    zero_stage=zero_stage,
                    micro_rows=micro_rows,
                    recompute=recompute,
                )


def _has_ranks_for(tensor: int, context: int, pipeline: int, count: int) -> bool:
    """Whether this learner's ranks can lie so."""
    return count <= MOST_RANKS and pipeline == 1 and tensor in (1, count) and context in (1, count)
