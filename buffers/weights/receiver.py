"""An actor's half of the weight channel: gets the set announced to it, and gives it out whole and verified.

Waits for nothing: `client` hands it the messages about weights, sends its requests, and calls `advance` when it has
time. One set at a time; a newer target supersedes an unfinished one, and a set that comes damaged is fetched again. It is
mapped where the hub is on the same machine (which has verified it), else made of what is held with deltas, else fetched chunk
by chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from async_rlhf.buffers.config import WeightsConfig
from async_rlhf.buffers.errors import WeightsError, WireError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.protocol.message import Canary, DeltaSpec
from async_rlhf.buffers.weights.assembly import Assembly, ChunkedBytes, mapped
from async_rlhf.buffers.weights.shared import HeapPool, MakeMemory, attach, is_local
from async_rlhf.buffers.weights.standby import Standby
from async_rlhf.buffers.weights.store import Delta
from async_rlhf.buffers.weights.weight_set import WeightSet, chunks_of, content_digest

_log = logging.getLogger(__name__)
_CHUNKS_AHEAD = 8  # chunks on their way at once; the first come with the manifest
TURN_S = 0.02
"""Time for verification between two decode steps, about one step of a large model: 8 GB take 50 to 100 turns."""
_MAX_DAMAGED = 3  # weight sets in a row that may come damaged (replaced at the hub while they were fetched)


class WeightReceiver:
    """Owns the unfinished set and, where deltas may come, the newest whole one. `send` returns its request number; by `clock`
    is counted how long `advance` takes.

    serving: (fence, version) that the actor serves; it is not fetched again. applied: the deltas that made the newest set.
    """

    def __init__(
        self,
        send: Callable[[wire.Message], int],
        clock: Callable[[], float],
        address: str,
        config: WeightsConfig,
        make: MakeMemory | None = None,
        standby: Standby | None = None,
    ) -> None:
        self._standby = standby
        self._send, self._clock, self._config, self._make = send, clock, config, make or HeapPool().make
        self._maps = config.transport != "chunks" and is_local(address)
        self.serving: tuple[int, int] | None = None
        self._target: tuple[int, int] | None = None
        self._assembly: Assembly | None = None
        self._deltas: dict[str, ChunkedBytes] = {}
        self._steps: list[DeltaSpec] = []
        self.applied: list[Delta] = []
        self._asking: Iterator[tuple[str | None, int]] = iter(())
        self._held: WeightSet | None = None
        self._weights: WeightSet | None = None
        self._request = 0
        self._num_damaged = 0

    def reset(self) -> None:
        """The hub has forgotten the requests; the bytes of an unfinished set are kept, in case it is still the one to adopt."""
        self._target = None

    def adopt(self, target: tuple[int, int], digest: str | None = None, canary: Canary | None = None) -> None:
        """Fetch this set and forget any other; nothing is fetched when it is the one the actor serves, or came by the device
        channel with this digest. canary: its, then."""
        if target == self._target:
            return
        self._target = self._weights = None
        if self._assembly is not None and (self._assembly.fence, self._assembly.version) != target:
            self._drop()
        if target == self.serving:
            return
        weights = None if digest is None or self._standby is None else self._standby.take(target, digest)
        if weights is not None:
            self._finish(replace(weights, canary=canary))
            self._held = None  # its digest is of another kind, so no delta starts from it
        else:
            self._target = target
            holds = None if self._held is None else self._held.digest
            ahead = _num_ahead(self._assembly)
            fetch = wire.Fetch(fence=target[0], version=target[1], maps=self._maps, holds=holds, ahead=ahead)
            self._request = self._send(fetch)

    def receive(self, part: wire.Manifest | wire.Chunk, arrays: wire.Frames) -> None:
        """One more part of the set that is fetched; parts of others are dropped. Raises WeightsError when it keeps coming
        damaged."""
        if (part.fence, part.version) != self._target:
            return
        try:
            if isinstance(part, wire.Manifest):
                self._begin(part)
            elif self._assembly is not None:
                if len(arrays) != 1:
                    raise WireError(f"a chunk is one frame, got {len(arrays)}")
                self._add(self._assembly, part, arrays[0])
                self._ask_chunk()
        except WeightsError as error:
            self._fetch_again(error)
        else:
            self.advance()

    @property
    def has_work(self) -> bool:
        """Whether `advance` has more to do although nothing more comes."""
        return self._assembly is not None and self._target is not None and self._assembly.is_complete

    def advance(self) -> None:
        """Verify bytes that have come, for `TURN_S` at most. Raises WeightsError when a set keeps coming damaged."""
        if self._assembly is None or self._target is None:
            return
        until = self._clock() + TURN_S
        try:
            self._assembly.advance()
            while self.has_work and not self._assembly.is_verified and self._clock() < until:
                self._assembly.advance()
            if self._assembly.is_complete and self._assembly.is_verified:
                self._finish(self._assembly.whole())
        except WeightsError as error:
            self._fetch_again(error)

    def refused(self, request: int) -> bool:
        """The hub does not have, or no longer has, the requested bytes. Whether the set is given up: when the hub has no such
        set, a newer target is on its way; a part that is gone may be a delta's, and then the set is fetched in another way."""
        if request < self._request or self._target is None:
            return False  # it is about a set that is not wanted any more
        target, self._target = self._target, None
        self._drop()
        if request > self._request:
            self.adopt(target)
        return self._target is None

    def take(self) -> WeightSet | None:
        """The newest whole, verified weight set, once."""
        weights, self._weights = self._weights, None
        return weights

    def _begin(self, manifest: wire.Manifest) -> None:
        """Decide how to come by the set, and ask for its first chunks."""
        digest, unfinished, ahead = content_digest(manifest.tensors), self._assembly, _num_ahead(self._assembly)
        if self._held is not None and self._held.digest == digest:
            again = replace(self._held, fence=manifest.fence, version=manifest.version, canary=manifest.canary)
            self._finish(again)
            return
        if manifest.places and self._maps:
            self._map(manifest)
            return
        steps = manifest.deltas if self._leads(manifest.deltas, digest) else []
        if unfinished is None or self._deltas or steps or content_digest(unfinished.specs) != digest:
            self._drop()
            self._assembly = unfinished = Assembly(manifest, self._make)
            self._steps = list(steps)
            name = f"the delta to version {manifest.version}"
            self._deltas = {step.result: ChunkedBytes(name, step.num_bytes) for step in steps}
        taken = manifest.model_copy(update={"deltas": steps})
        coming = set(islice(chunks_of(manifest), ahead))
        needed = [chunk for chunk in chunks_of(taken) if steps or chunk[1] in unfinished.missing]
        self._asking = (chunk for chunk in needed if chunk not in coming)
        for _ in range(_CHUNKS_AHEAD - len(coming.intersection(needed))):
            self._ask_chunk()

    def _leads(self, steps: list[DeltaSpec], digest: str) -> bool:
        """Whether these deltas lead from the held set to the one with this digest."""
        if self._held is None or not steps:
            return False
        contents = [self._held.digest, *(step.result for step in steps)]
        return contents[:-1] == [step.base for step in steps] and contents[-1] == digest

    def _map(self, manifest: wire.Manifest) -> None:
        memory = attach(manifest.places, manifest.num_bytes)
        if memory is not None:
            self._finish(mapped(manifest, memory))
        else:
            self._maps, self._target = False, None
            self.adopt((manifest.fence, manifest.version))

    def _add(self, assembly: Assembly, part: wire.Chunk, data: bytes) -> None:
        if part.delta is None:
            assembly.add(part.index, data)
        elif part.delta in self._deltas:
            self._deltas[part.delta].add(part.index, data)
            if self._held is not None and not any(each.missing for each in self._deltas.values()) and assembly.missing:
                assembly.patch(self._held, [each.memory.view for each in self._deltas.values()])

    def _finish(self, weights: WeightSet) -> None:
        self.applied = [Delta(step.base, step.result, self._deltas[step.result].memory.view) for step in self._steps]
        self._drop()
        self._target, self._num_damaged = None, 0
        self._weights = weights
        self._held = weights if self._config.delta and not self._maps else None

    def _fetch_again(self, damage: WeightsError) -> None:
        """Fetch the whole set again, without deltas. Raises the damage after too many damaged sets in a row."""
        self._num_damaged += 1
        if self._num_damaged > _MAX_DAMAGED or self._target is None:
            raise damage
        target, self._target, self._held = self._target, None, None
        _log.warning(
            "version %d came damaged, fetched again (%d of %d): %s", target[1], self._num_damaged, _MAX_DAMAGED, damage
        )
        self._drop()
        self.adopt(target)

    def _drop(self) -> None:
        """Forget the unfinished set."""
        self._assembly, self._deltas, self._steps, self._asking = None, {}, [], iter(())

    def _ask_chunk(self) -> None:
        ask = next(self._asking, None)
        if ask is not None and self._target is not None:
            fence, version = self._target
            self._send(wire.FetchChunk(fence=fence, version=version, delta=ask[0], index=ask[1]))


def _num_ahead(unfinished: Assembly | None) -> int:
    """Chunks that come with a manifest: none where some are here already, of which the hub does not know."""
    return _CHUNKS_AHEAD if unfinished is None else 0
