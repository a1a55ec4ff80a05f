"""The ledger: the place of every group, the end of every credit, and their snapshot in a journal. Values only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from async_rlhf.buffers.record import Entry


@dataclass(frozen=True)
class QueueSnapshot:
    """The queue's state in a journal: enough to go on as if the hub had not died (leases are soft and come back by `join`)."""

    fence: int = 0
    committed_step: int = 0
    committed_groups: int = 0
    committed_tokens: int = 0
    head: int = 0
    consumed: tuple[int, ...] = ()
    quarantined: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    """Numbers quarantined out of a batch."""
    filtered: tuple[int, ...] = ()
    """Numbers from the head on."""
    filtered_before: int = 0
    """How many were filtered below the head."""
    filtered_tokens: int = 0
    stale: int = 0
    stale_tokens: int = 0
    failed: int = 0
    owner: str = ""
    """The learner that holds the fence."""
    failures: Mapping[int, tuple[int, int, tuple[str, ...]]] = field(default_factory=dict)


_num_tokens = attrgetter("num_tokens")
_OF_TOKENS = ("trained", "queued", "in_flight", "stale", "filtered")
"""States of groups whose tokens are counted too."""


@dataclass
class Ledger:
    """Counts of attempts (one credit = one attempt). It closes at every moment:

        credited = trained + queued + in_flight + leased + stale + filtered + failed + quarantined

    Token counts are of completion tokens that reached the hub in a group that was admitted or filtered.
    """

    credited: int = 0
    trained: int = 0
    """Trained in a step that the learner has done."""
    queued: int = 0
    in_flight: int = 0
    """Taken and not yet trained."""
    leased: int = 0
    """Being generated or scored."""
    stale: int = 0
    """Given up because the bound could not be kept."""
    filtered: int = 0
    """It had no advantage, and another took its place."""
    failed: int = 0
    """The actor was lost."""
    quarantined: int = 0
    """It ended its maker, or the learner, as often as allowed, or an operator took it back."""
    committed: int = 0
    duplicates_refused: int = 0
    tokens_put: int = 0
    tokens_trained: int = 0
    tokens_queued: int = 0
    tokens_in_flight: int = 0
    tokens_stale: int = 0
    tokens_filtered: int = 0

    @property
    def closes(self) -> bool:
        groups = sum(getattr(self, name) for name in (*_OF_TOKENS, "leased", "failed", "quarantined"))
        tokens = sum(getattr(self, f"tokens_{name}") for name in _OF_TOKENS)
        return bool(self.credited == groups and self.tokens_put == tokens and self.committed <= self.trained)

    @staticmethod
    def tokens(entries: Iterable[Entry]) -> int:
        return sum(map(_num_tokens, entries))

    def as_dict(self) -> dict[str, int | bool]:
        return {**vars(self), "closes": self.closes}
