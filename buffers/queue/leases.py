"""What an actor may begin and holds: values that `admission` changes and nobody else."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Credit:
    """Permission to begin one group, whose first token must come from `lowest_version` or newer."""

    number: int
    attempt: int
    lowest_version: int


@dataclass
class Actor:
    """One actor: how many groups it can hold, the weights it serves (learner fence, version), when it was last heard."""

    capacity: int
    fence: int
    version: int
    heard_at: float
    leases: dict[int, Credit] = field(default_factory=dict)
