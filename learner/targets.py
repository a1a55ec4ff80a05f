"""What is observed of, and believed about, each completion of a batch, token by token. No gradient here.

Axis: T tokens of one completion.
"""

from __future__ import annotations

from dataclasses import dataclass

from async_rlhf.buffers.record import Float32Array


@dataclass(frozen=True)
class Observation:
    """Of one completion, before the first update of a step; float32 [T], None for what the run has no use for.

    logp_proximal: under the learner's own policy. logp_reference: under the frozen reference. value: the critic's
    estimate of the return from just before each token on.
    """

    logp_proximal: Float32Array
    logp_reference: Float32Array | None = None
    value: Float32Array | None = None


@dataclass(frozen=True)
class TokenTargets:
    """What is believed of one completion token by token, where a number per completion is not enough; float32 [T].

    advantage replaces the completion's own. mask (0 or 1) leaves tokens out of numerators only: it comes from
    corrections that look at the whole batch. returns are what the critic is fitted to.
    """

    observed: Observation
    advantage: Float32Array | None = None
    mask: Float32Array | None = None
    returns: Float32Array | None = None
