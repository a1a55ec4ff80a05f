"""An actor's half of the weight channel: fetches the set it was told to adopt, and gives it out whole and verified.

Waits for nothing: `client` hands it the messages about weights and sends what it wants sent. One set at a time; a newer
target supersedes an unfinished one, and a set that comes damaged is fetched again.
"""

from __future__ import annotations

from collections.abc import Callable

from buffers import wire
from buffers.errors import WeightsError, WireError
from buffers.weights import Assembly, WeightSet

_CHUNKS_AHEAD = 4  # chunks asked for before the first has come
_MAX_DAMAGED = 3  # weight sets in a row that may come damaged (replaced at the hub while they were fetched)


class Fetching:
    """Owns the unfinished set. `send` sends a message and returns its request number.

    serving: (fence, version) that the actor serves; it is not fetched again.
    """

    def __init__(self, send: Callable[[wire.Message], int]) -> None:
        self._send = send
        self.serving: tuple[int, int] | None = None
        self._target: tuple[int, int] | None = None
        self._assembly: Assembly | None = None
        self._weights: WeightSet | None = None
        self._request = self._next_chunk = 0
        self._num_damaged = 0

    def reset(self) -> None:
        """The hub does not know any more what it was asked for."""
        self._target = self._assembly = None

    def adopt(self, target: tuple[int, int]) -> None:
        """Fetch this set and forget any other; nothing is fetched when it is the one the actor serves."""
        if target != self._target:
            self._target = self._assembly = self._weights = None
            if target != self.serving:
                self._target = target
                self._request = self._send(wire.Fetch(fence=target[0], version=target[1]))

    def hear(self, part: wire.Manifest | wire.Chunk, arrays: wire.Frames) -> None:
        """One more part of the set that is fetched; parts of others are dropped. Raises WeightsError when it keeps coming
        damaged."""
        if (part.fence, part.version) != self._target:
            return
        try:
            if isinstance(part, wire.Manifest):
                self._assembly, self._next_chunk = Assembly(part), 0
                for _ in range(_CHUNKS_AHEAD):
                    self._ask_chunk(self._assembly)
            elif self._assembly is None:
                return
            elif len(arrays) != 1:
                raise WireError(f"a chunk is one frame, got {len(arrays)}")
            else:
                self._assembly.add(part.index, arrays[0])
                self._ask_chunk(self._assembly)
            if self._assembly.is_complete:
                assembly, self._assembly, self._target = self._assembly, None, None
                self._weights, self._num_damaged = assembly.whole(), 0
        except WeightsError:
            self._num_damaged += 1
            if self._num_damaged > _MAX_DAMAGED:
                raise
            self._target = None
            self.adopt((part.fence, part.version))

    def refused(self, request: int) -> None:
        """The hub has not (any more) what was asked for under this number: a newer target is on its way."""
        if request >= self._request:  # else it is about a set that is not wanted any more
            self._target = self._assembly = None

    def take(self) -> WeightSet | None:
        """The newest whole, verified weight set, once."""
        weights, self._weights = self._weights, None
        return weights

    def _ask_chunk(self, assembly: Assembly) -> None:
        if self._next_chunk < assembly.num_chunks:
            self._send(wire.FetchChunk(fence=assembly.fence, version=assembly.version, index=self._next_chunk))
            self._next_chunk += 1
