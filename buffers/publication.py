"""The hub's half of the weight channel: puts together what the learner publishes, serves it, and tells actors what to adopt.

Knows no socket, no clock and no group: `exchange` hands it the messages about weights, and `admission` says who should
serve what. A set is whole and verified before anybody hears of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from buffers import wire
from buffers.admission import Actor, Admission
from buffers.errors import WireError
from buffers.peers import Peer, Peers
from buffers.weights import Assembly, WeightSet, WeightStore


class Publication:
    """Owns the store and the set that is on its way from the learner."""

    def __init__(self, store: WeightStore) -> None:
        self.store = store
        self._assembly: Assembly | None = None

    def forget(self) -> None:
        """Another learner has registered: what the former one had begun to send is not continued."""
        self._assembly = None

    def hear(self, message: wire.Publish | wire.Chunk, arrays: wire.Frames, published: int | None) -> WeightSet | None:
        """One more part from the learner, whose newest whole version is `published`; the set, stored, once it is whole.

        Raises WeightsError for what does not fit or is not what its digest says, WireError for a part of another set.
        """
        match message:
            case wire.Publish():
                # One repeated late must not throw away the chunks that came since.
                if message.version not in (published, self._assembly and self._assembly.version):
                    self._assembly = Assembly(message)
            case wire.Chunk(version=version, index=index) if self._assembly and version == self._assembly.version:
                if len(arrays) != 1:
                    raise WireError(f"a chunk is one frame, got {len(arrays)}")
                self._assembly.add(index, arrays[0])
            case wire.Chunk(version=version) if version == published:
                pass  # repeated after its answer was lost
            case _:
                raise WireError(f"{message.type!r} is not for the hub, or came at the wrong time")
        if self._assembly is None or not self._assembly.is_complete:
            return None
        assembly, self._assembly = self._assembly, None
        weights = assembly.whole()
        self.store.add(weights)
        return weights

    def serve(self, asked: wire.Fetch | wire.FetchChunk) -> tuple[wire.Message, wire.Frames]:
        """The manifest or the chunk that was asked for; raises WeightsError when it is not here."""
        weights = self.store.get(asked.version)
        if isinstance(asked, wire.Fetch):
            return weights.manifest().model_copy(update={"fence": asked.fence}), []
        chunk = wire.Chunk(fence=asked.fence, version=asked.version, index=asked.index)
        return chunk, [weights.chunk(asked.index)]

    def adoptions(self, admission: Admission, peers: Peers) -> Iterator[tuple[bytes, wire.Adopt]]:
        """(identity, message) for every actor that should serve something else than it serves or was told last."""
        for name, actor in admission.actors.items():
            version, peer = admission.target(name), peers[name]
            if version is not None and version in self.store:
                target = (admission.fence, version)
                # Also when it is to stay after all: it may be about to leave for what it was told before.
                if target != (peer.announced or (actor.fence, actor.version)):
                    peer.announced = target
                    yield peer.identity, wire.Adopt(fence=target[0], version=version)

    @staticmethod
    def serves(actor: Actor, peer: Peer, fence: int, version: int) -> None:
        """The actor says which weights it serves."""
        if (fence, version) not in ((actor.fence, actor.version), peer.announced):
            peer.announced = None  # it had already left for what it was told earlier: it is told again
        actor.fence, actor.version = fence, version
