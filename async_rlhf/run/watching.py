"""The sections of the configuration about watching a run: its evaluations, where its metrics and events are sent."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from typing import Any, Literal, get_args

from pydantic import Field, SecretStr, field_validator, model_validator

from async_rlhf.actors.data.config import HELD_OUT_SEED, TASK_PREFIX, DataConfig
from async_rlhf.buffers.config import Secret, Section
from async_rlhf.learner.checkpoint.evaluated import num_since_best

_TASK_PROMPTS = 200  # an accuracy within 0.07 of the model's, 19 times in 20


class EvaluationConfig(Section):
    """Evaluations by pinned weights: greedy completions, or groups as in training where a reward receives whole groups, and
    sampled ones for pass@k. Nothing of them is trained on."""

    at_start: bool = True
    """Evaluate the initial model while training starts."""
    at_end: bool = True
    """Evaluate the last checkpoint when all steps are done."""
    every: int | None = Field(default=None, ge=0)
    """Steps between two evaluations, each of a checkpoint made for it; 0 or `"none"`: none. One at a time: of those due
    meanwhile the newest is next, the others are skipped."""
    patience: int | None = Field(default=None, ge=1)
    """With `every`: the run ends, as finished, after so many evaluations in a row without a higher mean reward. `"none"`: no
    such end."""
    solved_by: str = ""
    """The reward whose score decides what is solved. Empty: the run's only one, unless it receives whole groups; of several
    none, and there is no `accuracy`."""
    solved_at: float = 1.0
    """Score from which on it does, before weights; `accuracy` is the share of those."""
    samples: int = Field(default=0, ge=0, le=4096)
    """Completions sampled of each prompt beside the greedy one, at temperature 1, for pass@1, 2, 4, ... up to this."""
    source: str | None = None
    """Prompts to evaluate on, as `data.source` (of a task 200), in `data.template`; `"none"`: the held-out ones of the run's
    data."""
    columns: dict[str, str] = Field(default_factory=dict)
    """With `source`: renames, as `data.columns`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """With `source`: options of a reasoning-gym task, as `data.options`."""

    @model_validator(mode="after")
    def _of_a_source(self) -> EvaluationConfig:
        given = [name for name in ("columns", "options") if getattr(self, name)]
        if given and self.source is None:
            raise ValueError(f"{given[0]} is about evaluation.source, and there is none; set it, or leave {given[0]} out")
        return self

    @model_validator(mode="after")
    def _patience_counts(self) -> EvaluationConfig:
        if self.patience is not None and not self.every:
            raise ValueError(f"patience = {self.patience} counts evaluations that are made every so many steps; set every")
        return self

    def plateau(self, records: Iterable[dict[str, Any]]) -> str:
        """Why no step follows, by these lines of `evaluations.jsonl`; empty while one may."""
        if self.patience is None or num_since_best(records) < self.patience:
            return ""
        return f"no better evaluation for {self.patience} in a row"

    def data(self, run: DataConfig) -> DataConfig | None:
        """Where the prompts of `source` come from, all of them; None where the held-out ones of `run` are evaluated."""
        if self.source is None:
            return None
        # A task's prompts are drawn with the seed of held-out ones: those of training with another.
        seed = {"seed": HELD_OUT_SEED} if self.source.startswith(TASK_PREFIX) else {}
        return DataConfig(
            source=self.source,
            columns=self.columns,
            options={**seed, **self.options},
            template=run.template,
            chat=run.chat,
            chat_template_kwargs=run.chat_template_kwargs,
            size=_TASK_PROMPTS,
            held_out=0,
        )


TrackerKind = Literal["tensorboard", "wandb", "trackio", "mlflow"]


class TrackingConfig(Section):
    """Trackers that get every step, every evaluation and samples, beside the files of the run directory."""

    kind: tuple[TrackerKind, ...] = ()
    """One or several, each a process of its own; `"none"`: none. `tensorboard`: event files in `tensorboard/` of the run
    directory. `wandb`: Weights & Biases, `trackio`, `mlflow`: with their own variables (`WANDB_PROJECT`, `TRACKIO_DIR`,
    `MLFLOW_TRACKING_URI`; the project or experiment is `async-rlhf` without one)."""

    @field_validator("kind", mode="before")
    @classmethod
    def _listed(cls, kind: Any) -> Any:
        return {"none": ()}.get(kind, (kind,)) if isinstance(kind, str) else kind


EventKind = Literal["stalled", "guard", "failing_rewards", "disk_low", "diverged", "failed", "finished", "best"]
_EVENTS: tuple[EventKind, ...] = get_args(EventKind)


class HooksConfig(Section):
    """The hooks called when a run needs a person or has something to show. A hook's failure or duration never affects the
    run."""

    command: tuple[Secret, ...] | Secret = ()
    """Program and arguments, without a shell. The event is JSON on its standard input; ASYNC_RLHF_EVENT and ASYNC_RLHF_RUN_DIR
    are in its environment."""
    url: Secret | None = None
    """Webhook that the JSON is posted to: `http://`, `https://`, or `$NAME` of an environment variable that holds it."""
    events: tuple[EventKind, ...] = _EVENTS
    """Which events: the page has what each means."""
    timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """Seconds a command or an answer may take; then it is killed, or given up."""

    @field_validator("command")
    @classmethod
    def _can_be_split(cls, command: tuple[SecretStr, ...] | SecretStr) -> tuple[SecretStr, ...] | SecretStr:
        _words(command)  # a quotation that does not end is a ValueError
        return command

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None and not url.get_secret_value().startswith(("http://", "https://", "$")):
            raise ValueError("it is neither http://... or https://..., nor $NAME of an environment variable")
        return url

    @property
    def argv(self) -> list[str]:
        return _words(self.command)

    @property
    def address(self) -> str:
        """Empty where there is none."""
        url = self.url.get_secret_value() if self.url else ""
        return os.environ.get(url[1:], "") if url.startswith("$") else url


def _words(command: tuple[SecretStr, ...] | SecretStr) -> list[str]:
    if isinstance(command, SecretStr):
        return shlex.split(command.get_secret_value())
    return [word.get_secret_value() for word in command]
