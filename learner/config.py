"""The dials of the learner's wing: optimisation, the loss, checkpoints. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from buffers.config import Section


class LossConfig(Section):
    """The objective and its correction for data sampled by other weights."""

    kind: Literal["ppo_clip"] = "ppo_clip"
    """`ppo_clip`: clipped surrogate around the policy at the start of the step, times a truncated importance weight."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio to the start of the step is clipped at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio to the start of the step is clipped at 1 + clip_high."""
    dual_clip: float = Field(default=3.0, gt=1)
    """With a negative advantage the surrogate stops growing at this ratio."""
    is_cap: float | None = Field(default=2.0, gt=0)
    """Upper truncation of the weight proximal / behaviour, per token; `"none"`: no weight, as if data were on-policy."""
    allow_uncorrected: bool = False
    """Permit staleness above 0 without an importance weight."""
    scale_by_std: bool = True
    """Divide a group's centred rewards by their standard deviation."""


class LearnerConfig(Section):
    """The optimiser and the machine it runs on."""

    batch_size: int = Field(default=128, ge=1)
    """Completions per step; a multiple of `generation.group_size`."""
    learning_rate: float = Field(default=1e-4, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    adam_betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""
    updates_per_step: int = Field(default=1, ge=1)
    """Optimizer updates made from one batch (minibatches of whole groups)."""
    micro_batch_tokens: int = Field(default=2048, ge=1)
    """Padded tokens of one forward and backward pass."""
    row_tokens: int = Field(default=512, ge=1)
    """Completions of one prompt share a row, and the prompt's computation, up to this many tokens."""
    publish_every: int = Field(default=1, ge=1)
    """Steps between two published weight sets."""
    device: str = "cpu"
    dtype: Literal["float32"] = "float32"
    threads: int = Field(default=1, ge=1)
    """CPU threads."""
    max_nonfinite_steps: int = Field(default=3, ge=1)
    """So many refused steps in a row end the run."""


class CheckpointConfig(Section):
    """When the learner's state is made durable."""

    save_every: int = Field(default=25, ge=1)
    """Steps between two checkpoints (the last step always makes one)."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints kept."""
