"""The dials of environments. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from async_rlhf.actors.environments.loading import EnvironmentSpec, resolve
from async_rlhf.buffers.config import Section
from async_rlhf.buffers.errors import ConfigError, EpisodeError


class SourceEnvironment(Section):
    """One environment. A text alone stands for `function`."""

    function: str = ""
    """An import path (`package.module:name`) or a file (`path.py:name`); before it `own_name=...`, then `trl:`, `verifiers:`,
    `openenv:` or `remote:`. Empty: completions have one turn."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Values for those of its parameters that are no columns; of another system's, see `docs/environments.md`."""
    max_turns: int | None = Field(default=None, ge=1)
    """Turns of the model in an episode. `"none"`: that of `@environment`."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Seconds one step of the environment may take. `"none"`: that of `@environment`."""
    episode_timeout_s: float | None = Field(default=None, gt=0)
    """Seconds a whole episode may take, the model's time included. `"none"`: that of `@environment`."""
    workers: int = Field(default=1, ge=1, le=1024)
    """Processes of each actor that run episodes."""
    max_concurrency: int = Field(default=64, ge=1)
    """Steps at once in each of them; of a plain `def`, its threads. The others wait."""
    worker_memory_mb: int | None = Field(default=4096, ge=256)
    """Most memory of each process, and of each program it starts, in MB. `"none"`: no limit. Linux."""
    render: Literal["conversation", "by_message", "split"] = "conversation"
    """With a chat template an observation becomes: what the template adds to the `conversation`, whose earlier turns it must
    keep; `by_message`, that message alone; or `split`: where the template rewrites earlier turns the row begins anew with the
    whole conversation."""

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, values: Any) -> Any:
        return {"function": values} if isinstance(values, str) else values

    @property
    def given(self) -> dict[str, Any]:
        """Those settings that override `@environment(...)`."""
        chosen = {name: getattr(self, name) for name in ("max_turns", "timeout_s", "episode_timeout_s")}
        return {name: value for name, value in chosen.items() if value is not None}

    def spec(self, base_dir: Path) -> EnvironmentSpec:
        """The environment, proven to be loadable (`resolve`). Raises ConfigError for one that is not."""
        try:
            return resolve(self.function, base_dir, self.options, self.given)
        except EpisodeError as error:  # before the start an environment that cannot be loaded is a wrong setting
            raise ConfigError(f"environment.function: {error}") from error


class EnvironmentConfig(SourceEnvironment):
    """The environment that answers the model between its turns. A text alone stands for `function`."""

    by_source: dict[str, SourceEnvironment] = Field(default_factory=dict)
    """By `source` of a row: its environment, with settings of its own. Rows of other sources have that of `function`, or one
    turn where that is empty."""

    @property
    def all(self) -> dict[str, SourceEnvironment]:
        """By source; under `""` that of all other rows, where they have one. Empty: completions have one turn."""
        return {**({"": self} if self.function else {}), **self.by_source}

    @model_validator(mode="after")
    def _check(self) -> EnvironmentConfig:
        if "" in self.by_source:
            raise ValueError('by_source."": a source has a name; environment.function is that of all other rows')
        if empty := next((source for source, own in self.by_source.items() if not own.function), None):
            raise ValueError(f"by_source.{empty} has no function; name one, or leave the source out")
        return self
