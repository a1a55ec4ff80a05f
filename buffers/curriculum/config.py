"""Settings of a curriculum."""

from __future__ import annotations

from pydantic import Field

from async_rlhf.buffers.config import Section
from async_rlhf.buffers.errors import ConfigError


class CurriculumConfig(Section):
    """Prompts are chosen by how often they have been solved: `reward` names their score; empty: no curriculum."""

    reward: str = ""
    """The reward, by its name, whose score decides whether a prompt is solved. Empty: prompts come in their order."""
    passes_at: float = 1.0
    """A completion solves its prompt when that score is at least this; `docs/data.md` has what follows."""
    easy_at: float = Field(default=1.0, gt=0, le=1)
    """A prompt is easy when at least this share of its newest group solved it."""
    hard_at: float = Field(default=0.0, ge=0, lt=1)
    """A prompt is hard when at most this share of its newest group solved it; below `easy_at`."""
    retire_after: int = Field(default=2, ge=1)
    """Groups in a row in which a prompt must be easy to be used no more."""
    new_share: float = Field(default=0.5, ge=0, le=1)
    """Share of the groups that are for prompts not used before, as long as there are any; 0: when no other is left."""
    hard_share: float = Field(default=0.1, ge=0, le=1)
    """Share of the groups that are for hard prompts; 0: when no other is left. What both shares leave is for the others."""

    @property
    def is_on(self) -> bool:
        """Whether a reward is named."""
        return bool(self.reward)

    def check(self) -> None:
        """What no setting can see alone. Raises ConfigError."""
        if not self.is_on:
            if self != CurriculumConfig():
                raise ConfigError(
                    "data.curriculum has settings and no reward; name the one that says what is solved: "
                    'data.curriculum.reward = "..."'
                )
            return
        if self.hard_at >= self.easy_at:
            raise ConfigError(f"data.curriculum.hard_at = {self.hard_at} is not below easy_at = {self.easy_at}: lower it")
        if (both := self.new_share + self.hard_share) > 1:
            raise ConfigError(
                f"data.curriculum.new_share + hard_share = {both:g} is more than all groups; highest new_share: "
                f"{1 - self.hard_share:g}"
            )
