"""What an actor may begin and holds: values that `admission` changes and nobody else."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
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

    def has_room(self, number: int, suspects: AbstractSet[int]) -> bool:
        """Whether it can take one more. A suspect is made alone: only then does losing it prove anything."""
        if number in suspects:
            return not self.leases and self.capacity > 0
        return len(self.leases) < self.capacity and suspects.isdisjoint(self.leases)
