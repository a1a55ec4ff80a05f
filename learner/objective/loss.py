"""The seam between the mathematics and the machine: what a loss is given and what it gives back.

Axes: N loss-bearing tokens of one call (a micro-batch, packed, no padding), S completions ("sequences") among them.

*Cutting.* A sequence is never cut between two calls. When the `level` of its declaration is "pair", neither is a group.

*Adding.* A loss returns a **sum**. The machine divides every sum of an update by one number, `denominator(config, counts)`,
where `counts` are those of the whole update over all micro-batches and ranks; masked tokens count too, so that a mask never
changes the learning rate of what is left. So micro-batches, minibatches and ranks add exactly, and nothing about the batch
needs to be known inside a call. Metrics in `sums` are sums over tokens: divide by `counts.num_tokens`.

*Looking at the whole batch.* What cannot be computed within one call (a critic's advantages, KL in the reward, the second
moment mask) is computed before the first update: the trainer takes from `Controller.evaluate(rows)` a `PolicyEvaluation` of
every completion, and hands back `TokenTargets`, which come with the rows (`Member.targets`) into these inputs. `evaluate` is
called only when `needs_evaluation` is true; otherwise the backend finds log p_proximal itself as it goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from async_rlhf.learner.config import LossConfig
from async_rlhf.learner.registry import loss_spec


@dataclass(frozen=True)
class LossInputs:
    """float32 [N] unless noted otherwise; only `logp_current_N` and `entropy_N` carry a gradient.

    logp_current_N, logp_proximal_N, logp_behaviour_N: log-probabilities of the chosen tokens at the sampling temperature,
    now, at the start of the step, and when sampled. logp_reference_N: under the frozen reference (`needs_reference`).
    advantage_N. mask_N: 0 or 1, from corrections that look at the whole batch; None is all ones.
    sequence_N: int64, ascending from 0 to S - 1. group_S: int64, equal for siblings. staleness_N: int64, in steps.
    entropy_N: of the current policy at each token, needed with its gradient only when `entropy_coef` is not 0.
    """

    logp_current_N: Tensor
    logp_proximal_N: Tensor
    logp_behaviour_N: Tensor
    advantage_N: Tensor
    sequence_N: Tensor
    group_S: Tensor
    staleness_N: Tensor
    mask_N: Tensor | None = None
    logp_reference_N: Tensor | None = None
    entropy_N: Tensor | None = None


@dataclass(frozen=True)
class LossOutputs:
    """`total`: the scalar to differentiate, a sum; `sums`: sums over tokens, to be divided by their number for a mean."""

    total: Tensor
    sums: Mapping[str, Tensor]


@dataclass(frozen=True)
class Counts:
    """How much there is to learn from in one optimizer update, over all its micro-batches and ranks, masked or not."""

    num_tokens: int
    num_sequences: int
    num_groups: int


def denominator(config: LossConfig, counts: Counts) -> float:
    """What the sum of an update is divided by: a constant of the data, never of masks or weights.

    token: every token weighs the same. sequence: every completion does. fixed: every token does, and the divisor is the
    number of completions times `fixed_length`, so that it does not move with the lengths (Dr. GRPO, arXiv 2503.20783).
    """
    level = loss_spec(config.kind).level
    if level == "pair":
        return counts.num_groups
    if level == "sequence" or config.reduction == "sequence":
        return counts.num_sequences
    if config.reduction == "fixed":
        return counts.num_sequences * float(config.fixed_length or 1)
    return counts.num_tokens
