"""The settings of the reference as a stage, and of teachers in its place. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import Field

from async_rlhf.buffers.config import Section
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.record import source_of


def is_address(path: str) -> bool:
    """Whether a model is a server's, and no directory."""
    return path.startswith(("http://", "https://"))


class ReferenceConfig(Section):
    """The frozen reference, where it is a stage of the actors; of one in the learner `path` alone counts."""

    path: str = ""
    """A teacher, in place of the initial model: a model directory, or the URL of a server that gives log-probabilities of
    prompts, as vLLM's (`http://host:8000/v1`; `#name` behind it where it serves several)."""
    by_source: dict[str, str] = Field(default_factory=dict)
    """By `source` of a row: a teacher for these."""
    api_key_env: str = ""
    """Name of the environment variable that holds the key of such servers."""
    device: str = "cpu"
    """Torch device."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of its weights and activations; log-probabilities are float32 always."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads of each of its processes."""
    cache_bytes: int = Field(default=1 << 30, ge=1)
    """Most bytes of keys and values of unfinished completions (incremental scoring)."""

    @property
    def directories(self) -> tuple[str, ...]:
        """The teachers that no server has."""
        return tuple(each for each in self.teachers if not is_address(each))

    @property
    def teachers(self) -> tuple[str, ...]:
        """Each once."""
        return tuple(dict.fromkeys(each for each in (self.path, *self.by_source.values()) if each))

    def check_taught(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """rows: the columns of each. Raises ConfigError for a row without a teacher."""
        if not self.by_source or self.path:
            return
        if (left := next((source for source in map(source_of, rows) if source not in self.by_source), "")) != "":
            raise ConfigError(
                f"scoring.reference.by_source has no teacher for rows of the source {left!r}; add it, or set "
                "scoring.reference.path for all others"
            )
