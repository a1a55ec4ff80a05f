"""The hub's half of the weight channel: takes in what the learner publishes, serves it, and announces to actors what to adopt.

Knows no socket and no group: `exchange` hands it the messages about weights, and `admission` decides who should serve what. A
set is whole and verified before it is announced. No actor is waited for: an actor fetches when it can, and one that has
adopted nothing for too long is dropped from the set of actors, as if it were dead, until its next Hello.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import cast

from async_rlhf.buffers.config import WeightsConfig
from async_rlhf.buffers.errors import WeightsError, WireError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.protocol.message import DeltaSpec
from async_rlhf.buffers.queue.admission import Actor, Admission
from async_rlhf.buffers.weights.adoption import Adoption, Version, adoption_of, fetched_for_credit
from async_rlhf.buffers.weights.assembly import Assembly, ChunkedBytes, EarlyParts, Verifier
from async_rlhf.buffers.weights.broadcast import Broadcasts
from async_rlhf.buffers.weights.digests import num_threads
from async_rlhf.buffers.weights.shared import HeapPool, Memory, SealedMemory, SealedPool, attach
from async_rlhf.buffers.weights.store import MAX_DELTA_SHARE, Delta, WeightStore
from async_rlhf.buffers.weights.weight_set import WeightSet, chunk_of, chunks_of, content_digest

# Verified before other peers have a turn: some ten milliseconds. Of a set that is announced the learner requests each
# such piece, and waits for it.
_TURN_BYTES = 64 << 20


@dataclass
class _Incoming:
    """The set that is on its way from the learner, and the delta to it when one comes too."""

    assembly: Assembly
    wanted: wire.Wanted
    base: WeightSet | None
    delta: DeltaSpec | None
    delta_bytes: ChunkedBytes

    def add(self, chunk: wire.Chunk, data: bytes) -> None:
        if chunk.delta is None:
            self.assembly.add(chunk.index, data)
        elif self.delta is not None and chunk.delta == self.delta.result:
            self.delta_bytes.add(chunk.index, data)
            if self.base is not None and not self.delta_bytes.missing:
                self.assembly.patch(self.base, [self.delta_bytes.memory.view])
                self.base = None
        else:
            raise WireError(f"a chunk of a delta that was not announced: {chunk.delta!r}")

    @property
    def is_complete(self) -> bool:
        return self.base is None and self.assembly.is_complete and not self.delta_bytes.missing


class WeightServer:
    """Owns the store, the set that is on its way from the learner, and before that the parts of it that are sealed."""

    def __init__(self, store: WeightStore, config: WeightsConfig | None = None) -> None:
        self.store, self._config = store, config or WeightsConfig()
        self._pool = HeapPool() if self._config.transport == "chunks" else SealedPool()
        self._incoming: _Incoming | None = None
        self._early: EarlyParts | None = None
        self.broadcasts = Broadcasts()
        self._sends_chunks = False  # an actor fetches chunks where a delta could serve
        self._counters = {"sets": 0, "sets_mapped": 0, "deltas": 0, "delta_bytes": 0, "served_bytes": 0, "dropped_actors": 0}

    def forget(self) -> None:
        """Another learner has registered: drop the unfinished set of the former one."""
        self._incoming = self._early = None

    # -- from the learner --------------------------------------------------------------------------------------------

    def receive(
        self, message: wire.Publish | wire.Chunk | wire.Check, arrays: wire.Frames, admission: Admission
    ) -> wire.Message:
        """The answer to the learner. A set that is whole is stored, and published by `admission`.

        Raises RefusedError for a version that may not come, WeightsError for what does not fit or does not match its digest,
        WireError for a part of another set, and DiskFullError when there is no room for the whole: `store_again` once there is.
        """
        if isinstance(message, wire.Publish):
            admission.check_version(message.version)
        is_here = message.version == admission.published and self.has((message.fence, message.version))
        if is_here:  # repeated after its answer was lost
            return wire.Checked(done=True) if isinstance(message, wire.Check) else wire.Done()
        answer: wire.Message = wire.Done()
        incoming = self._incoming
        if isinstance(message, wire.Publish):
            # One repeated late must not throw away the chunks that came since.
            if incoming is None or incoming.assembly.version != message.version:
                incoming = self._incoming = self._begin(message)
            answer = incoming.wanted
        elif incoming is None or incoming.assembly.version != message.version:
            raise WireError(f"{message.type!r} is not for the hub, or came at the wrong time")
        elif isinstance(message, wire.Chunk):
            if len(arrays) != 1:
                raise WireError(f"a chunk is one frame, got {len(arrays)}")
            incoming.add(message, arrays[0])
        is_whole = self._advance(incoming, admission, is_asked=not isinstance(message, wire.Publish))
        return wire.Checked(done=is_whole) if isinstance(message, wire.Check) else answer

    def sealed(self, part: wire.SealedPart, admission: Admission) -> None:
        """Map a part of the set that will be announced. Nothing comes of one that is late or cannot be mapped."""
        steps, known = admission.step, self._incoming is not None and self._incoming.assembly.version == part.version
        if known or part.version == admission.published or part.version not in (steps, steps + 1):
            return
        if self._config.transport == "chunks":
            return
        if self._early is None or not self._early.is_of(part):
            self._early = EarlyParts(part, SealedMemory(part.num_bytes), num_threads())
        if not self._early.add(part):
            self._early = None

    def verify(self) -> bool:
        """Verify a piece of the sealed parts that are not announced yet; returns whether there is more to do."""
        try:
            return self._early is not None and self._early.advance(_TURN_BYTES)
        except WeightsError:
            self._early = None  # once announced it is refused, and the learner gets the reason
            return False

    def store_again(self, admission: Admission) -> None:
        """Publish the set that was whole when there was no room for it, if there is one. Raises DiskFullError."""
        if self._incoming is not None:
            self._advance(self._incoming, admission, is_asked=False)

    def _begin(self, announced: wire.Publish) -> _Incoming:
        """Decide which bytes of this set must be sent."""
        delta = announced.delta
        if delta is not None and (
            delta.num_bytes > MAX_DELTA_SHARE * announced.num_bytes or delta.result != content_digest(announced.tensors)
        ):
            raise WeightsError(f"version {announced.version}: a delta of {delta.num_bytes} bytes is none of this set")
        given, begun = self._given(announced)
        base = self.store.find(delta.base) if delta is not None and given is None else None
        wanted = wire.Wanted(
            chunks=given is None and base is None,
            delta=delta is not None,
            delta_next=self._config.delta and (given is None or self._sends_chunks),
        )
        assembly = Assembly(announced, self._pool.make, given, begun, num_threads())
        incoming = ChunkedBytes(f"the delta to version {announced.version}", delta.num_bytes if delta else 0)
        self._counters["sets_mapped"] += given is not None
        return _Incoming(assembly, wanted, base, delta, incoming)

    def _given(self, announced: wire.Publish) -> tuple[Memory | None, Verifier | None]:
        """The memory in which this set lies, and how far it is verified, as far as it has come."""
        early, self._early = self._early, None
        if early is not None and early.fits(announced):
            return early.memory, early.verifier
        is_shared = announced.places and self._config.transport != "chunks"
        return (attach(announced.places, announced.num_bytes) if is_shared else None), None

    def _advance(self, incoming: _Incoming, admission: Admission, *, is_asked: bool) -> bool:
        """Verify a piece of the incoming set; returns whether it was the last, so that the set is stored and published."""
        try:
            if is_asked:
                incoming.assembly.advance(_TURN_BYTES)
            if not (incoming.is_complete and incoming.assembly.is_verified):
                return False
            weights = incoming.assembly.whole()
        except WeightsError:
            self._incoming = None
            raise
        spec = incoming.delta
        deltas = [] if spec is None else [Delta(spec.base, spec.result, incoming.delta_bytes.memory.view)]
        self.store.add(weights, deltas)
        self._incoming = None
        self._counters["sets"] += 1
        self._counters["deltas"] += len(deltas)
        self._counters["delta_bytes"] += 0 if spec is None else spec.num_bytes
        admission.publish(weights.version)
        return True

    # -- to the actors -----------------------------------------------------------------------------------------------

    def serve(self, request: wire.Fetch | wire.FetchChunk) -> Iterator[tuple[wire.Message, wire.Frames]]:
        """The requested chunk, or manifest and first chunks; raises WeightsError when it is not here."""
        if isinstance(request, wire.FetchChunk):
            yield self._chunk(request, request.delta, request.index)
            return
        if not self.has((request.fence, request.version)):
            raise WeightsError(f"version {request.version} is not here; there are {sorted(self.store.versions)}")
        manifest = self._manifest(request)
        yield manifest, []
        if not manifest.places and request.holds != self.store.get(request.version).digest:
            for chunk in islice(chunks_of(manifest), request.ahead):
                yield self._chunk(request, *chunk)

    def _chunk(self, request: wire.Fetch | wire.FetchChunk, delta: str | None, index: int) -> tuple[wire.Chunk, wire.Frames]:
        if delta is None:
            data = self.store.get(request.version).chunk(index)
        else:
            data = chunk_of(self.store.delta(delta).data, index, "the delta")
        self._counters["served_bytes"] += len(data)
        chunk = wire.Chunk(fence=request.fence, version=request.version, index=index, delta=delta)
        return chunk, cast("wire.Frames", [data])  # a view is sent like bytes

    def _manifest(self, request: wire.Fetch) -> wire.Manifest:
        """The answer to a fetch: places to map the set, or deltas from the asker's set, or neither."""
        weights = self.store.get(request.version)
        manifest = weights.manifest()
        deltas: list[DeltaSpec] = []
        places = manifest.places if request.maps and self._config.transport != "chunks" else []
        if not places:
            self._sends_chunks = True
            if request.holds is not None:
                deltas = [step.spec for step in self.store.path(request.holds, weights.digest)]
                if sum(step.num_bytes for step in deltas) > MAX_DELTA_SHARE * manifest.num_bytes:
                    deltas = []
        return manifest.model_copy(update={"fence": request.fence, "places": places, "deltas": deltas})

    def adoptions(self, admission: Admission, now: float) -> Iterator[tuple[bytes, wire.Message]]:
        """(identity, message) for every actor whose target is neither served nor announced, and the messages of a broadcast to
        engines."""
        yield from self.broadcasts.messages
        self.broadcasts.messages.clear()
        for name, actor in admission.fleet.actors.items():
            state, target = adoption_of(name, actor, admission, self)
            if target is None or state is Adoption.NOT_STORED:
                continue
            if target == (actor.fence, actor.version):
                actor.behind_since = None
            elif actor.behind_since is None:
                actor.behind_since = now
            if state is Adoption.DUE:
                actor.announced = target
                offer = self.broadcasts.offer(actor, target)
                yield actor.identity, wire.Adopt(fence=target[0], version=target[1], **offer)

    def behind(self, name: str, admission: Admission, now: float) -> dict[str, int | float | str]:
        """For an operator: the target of an actor that does not serve it, the reason, and the seconds since."""
        actor = admission.fleet.actors[name]
        state, target = adoption_of(name, actor, admission, self)
        if target is None or target == (actor.fence, actor.version):
            return {}
        seconds = 0.0 if actor.behind_since is None else now - actor.behind_since
        return {"behind_version": target[1], "behind_s": round(seconds, 3), "behind_because": str(state)}

    def drop_old(self, admission: Admission) -> None:
        """Forget the sets that are neither needed nor being fetched for a credit."""
        needed = admission.lowest_needed_version()
        if all(version >= needed for version in self.store.versions):
            return
        fetched = (fetched_for_credit(actor, admission, self) for actor in admission.fleet.actors.values())
        lowest = min([needed, *(each for each in fetched if each is not None)])
        self.store.keep(lambda version: version >= lowest)

    # -- what is here (`adoption.Stored`) ----------------------------------------------------------------------------

    def has(self, version: Version) -> bool:
        """Whether the bytes of this version are here; for a broadcast one, those of its own learner."""
        fence, number = version
        is_broadcast = self.broadcasts.newest == version
        return number in self.store and (not is_broadcast or self.store.get(number).fence == fence)

    def was_broadcast(self, actor: Actor, version: Version) -> bool:
        return self.broadcasts.has_received(actor, version)

    def is_in_broadcast(self, name: str, actor: Actor, version: Version) -> bool:
        return self.broadcasts.is_expected(name, actor, version)

    @staticmethod
    def serves(actor: Actor, fence: int, version: int) -> None:
        """The weights that the actor serves."""
        if (fence, version) not in ((actor.fence, actor.version), actor.announced):
            actor.announced = None  # it had already left for an earlier target: announce again
        if (fence, version) != (actor.fence, actor.version):
            actor.behind_since = None  # it moves: a newer version than the one it adopted begins a new wait
        actor.fence, actor.version = fence, version

    def late(self, admission: Admission, now: float, timeout_s: float) -> list[str]:
        """The actors that have adopted nothing for so long since the announcement; counted as dropped."""
        waits = {name: actor.behind_since for name, actor in admission.fleet.actors.items()}
        late = [name for name, since in waits.items() if since is not None and now - since > timeout_s]
        self._counters["dropped_actors"] += len(late)
        return late

    def status(self) -> dict[str, int]:
        """Counters since the hub began. sets_mapped: those not copied from the learner; dropped_actors: for being late."""
        return self._counters | self.broadcasts.counters
