"""What is left of a turn that may be continued: its tokens, its place in line, its keys and values while there is room.

A row that ends with `Request.hold` leaves a `Hold` behind. The request that continues it goes on where it was: at its place in
line, and from its keys and values, which were copied out of the row when the turn ended and are copied into another row when
the continuation is admitted. They are bounded in places; the oldest are evicted first, and what was evicted is computed
again, with the same result. No tensor here: what is copied is opaque, and goes with the last reference to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from async_rlhf.actors.engine import Request, RolloutKey


@dataclass(eq=False)
class Hold:
    """ids: all tokens of the row, int [T]; number: its place in the order of submission.

    version: the oldest weights that computed the cache. cache: keys and values of the first T - 1 tokens (the last one is the
    first that a continuation computes), empty once they were evicted. num_places: columns of a cache that they fill.
    """

    ids: tuple[int, ...]
    number: int
    version: int
    cache: tuple[Any, ...]
    num_places: int


class Holds:
    """Owns the holds by key, in the order in which their turns ended. Waits for nothing; nothing to close."""

    def __init__(self) -> None:
        self._held: dict[RolloutKey, tuple[Request, Hold]] = {}

    def add(self, request: Request, hold: Hold, room: int) -> None:
        """Hold the end of this request; of the caches, the newest stay that take at most `room` places together."""
        self._held[request.key] = request, hold
        cached = [each for _, each in self._held.values() if each.cache]
        excess = sum(each.num_places for each in cached) - room
        for each in cached:
            if excess > 0:
                excess -= each.num_places
                each.cache = ()

    def continued_by(self, request: Request) -> Hold | None:
        """What this request continues; it stays held until it is forgotten.

        Of a request with another prompt, which begins the row anew, only the place in line; where its context does not begin
        with what is held, that is forgotten.
        """
        before, hold = self._held.get(request.key, (request, None))
        if hold is None:
            return None
        # The prompt counts too: where it ends decides how the tokens around it are computed.
        if request.prompt_ids != before.prompt_ids:
            hold.cache = ()
            return hold
        if request.prefix_ids[: len(hold.ids)] == hold.ids:
            return hold
        self.forget([request.key])
        return None

    def forget(self, keys: Iterable[RolloutKey]) -> None:
        """Nothing is held of these any more; unknown ones are ignored."""
        for key in keys:
            self._held.pop(key, None)

    def release_caches(self) -> None:
        """Keep tokens and places in line only."""
        for _, hold in self._held.values():
            hold.cache = ()
