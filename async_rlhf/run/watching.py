"""The sections of the configuration about watching a run: its evaluations, and where its metrics are sent."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from async_rlhf.actors.config import TASK_PREFIX, DataConfig
from async_rlhf.buffers.config import Section


class EvaluationConfig(Section):
    """Evaluations by pinned weights: greedy completions, and sampled ones for pass@k. Nothing of them is trained on."""

    at_start: bool = True
    """Evaluate the initial model while training starts."""
    at_end: bool = True
    """Evaluate the last checkpoint when all steps are done."""
    every: int | None = Field(default=None, ge=0)
    """Steps between two evaluations while training goes on, each of a checkpoint that is made for it; 0 or `"none"`: none. One
    at a time: of those that come due meanwhile the newest is next, the others are skipped, and counted."""
    solved_at: float = 1.0
    """Reward from which on a completion counts as solved; `accuracy` is the share of those."""
    samples: int = Field(default=0, ge=0, le=4096)
    """Completions sampled of each prompt beside the greedy one, for pass@1, 2, 4, ... up to this many."""
    temperature: float = Field(default=1.0, gt=0, le=100)
    """Temperature of those; what else cuts tokens off is as in `[generation]`."""
    source: str | None = None
    """Prompts to evaluate on, as `data.source`; `"none"`: the held-out ones of the run's data."""
    columns: dict[str, str] = Field(default_factory=dict)
    """With `source`: renames, as `data.columns`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """With `source`: options of a reasoning-gym task, as `data.options`."""
    size: int = Field(default=200, ge=1)
    """With `source`: number of prompts drawn from a procedural task; a file gives what it holds."""
    template: str | None = None
    """With `source`: as `data.template`; `"none"`: the same as that."""

    @model_validator(mode="after")
    def _of_a_source(self) -> EvaluationConfig:
        fields = {name: type(self).model_fields[name] for name in ("columns", "options", "size", "template")}
        given = [name for name, field in fields.items() if getattr(self, name) != field.get_default(call_default_factory=True)]
        if given and self.source is None:
            raise ValueError(f"{given[0]} is about evaluation.source, and there is none; set it, or leave {given[0]} out")
        return self

    def data(self, run: DataConfig) -> DataConfig | None:
        """Where the prompts of `source` come from, all of them; None where the held-out ones of `run` are evaluated."""
        if self.source is None:
            return None
        # A task's prompts are drawn with the seed of held-out ones: those of training with another.
        seed = {"seed": run.held_out_seed} if self.source.startswith(TASK_PREFIX) else {}
        return DataConfig(
            source=self.source,
            columns=self.columns,
            options={**seed, **self.options},
            template=self.template or run.template,
            chat=run.chat,
            size=self.size,
            held_out=0,
        )


class TrackingConfig(Section):
    """A tracker that gets every step and every evaluation, beside the files of the run directory."""

    kind: Literal["none", "tensorboard", "wandb"] = "none"
    """`tensorboard`: event files in `tensorboard/` of the run directory. `wandb`: Weights & Biases. Each needs the extra of its
    name."""
    project: str = Field(default="async-rlhf", min_length=1, max_length=128)
    """`wandb`: the project; the run has the name of the run directory."""
    mode: Literal["online", "offline"] = "online"
    """`wandb`: `offline` writes into `wandb/` of the run directory, for `wandb sync`, and needs no network."""
