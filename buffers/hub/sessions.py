"""The actors' side of the hub: which are connected, under which name, and whether they make progress. Their groups: `exchange`.

Knows no socket and no file. A name belongs to one process. Of two that claim it the first keeps it as long as it sends; when
nothing has come from it for `_SILENT_BEATS` beats since the second came, it counts as ended and the second takes its name.

silence          ends a lease after `queue.lease_s` and counts against no group; bytes that still arrive are no silence
no progress      of a group, for `queue.progress_timeout_s`, ends its lease and counts against it
a late hub       extends every deadline by the time in which it received nothing
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from async_rlhf.buffers.config import QueueConfig
from async_rlhf.buffers.errors import RefusedError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.admission import Actor, Admission
from async_rlhf.buffers.transport.peers import Peers
from async_rlhf.buffers.weights.server import WeightServer

_log = logging.getLogger(__name__)
_SILENT_BEATS = 3
# A tick that comes later than this after the last, or than half a lease, proves that nothing was received.
_MAX_LATE_S = 2.0


class ActorSessions:
    """Owns nothing but the challenges to names. `shared`: digests that every actor must have in common with the hub."""

    def __init__(
        self,
        admission: Admission,
        peers: Peers,
        publication: WeightServer,
        config: QueueConfig,
        shared: Mapping[str, str],
        incarnation: str,
    ) -> None:
        self._admission, self._peers, self._weight_server, self._config = admission, peers, publication, config
        self._shared, self._incarnation = shared, incarnation
        self._challenged: dict[str, float] = {}  # name -> since when another process claims it
        self._ticked_at: float | None = None

    def name_of(self, identity: bytes, now: float) -> str:
        """Name of the living actor behind an identity; its message extends its leases."""
        name = self._peers.name(identity)
        if name is None or name not in self._admission.fleet.actors:
            raise RefusedError("unknown-actor", "send Hello first (the hub was restarted, or the lease has expired)")
        self._admission.fleet.actors[name].last_seen = now
        return name

    def arrives(self, identity: bytes, now: float) -> None:
        """Bytes of a message that is not whole yet arrive from this peer: it lives."""
        name = self._peers.name(identity)
        if name is not None and name in self._admission.fleet.actors:
            self._admission.fleet.actors[name].last_seen = now

    def hello(self, identity: bytes, hello: wire.Hello, now: float) -> wire.Message:
        """Raises RefusedError: `shared` for an actor of another configuration, `name-taken` while another process holds it."""
        self._check_shared(hello)
        name, before = hello.actor, self._peers.name(identity)
        self._check_name(hello, now)
        if before is not None and before != name:
            self.leave(before, f"joined again as {name}")
        self._peers.join(name, identity)
        actor = Actor(hello.capacity, hello.fence, hello.version, now, life=hello.life)
        self._admission.fleet.join(name, actor, hello.holding)
        _log.info("%s joined with version %d, holding %d groups", name, hello.version, len(hello.holding))
        return wire.Welcome(incarnation=self._incarnation, max_frame_bytes=self._config.max_frame_bytes)

    def handle(self, name: str, message: wire.Beat | wire.Release | wire.Bye, now: float) -> wire.Message:
        match message:
            case wire.Beat():
                actor, peer = self._admission.fleet.actors[name], self._peers[name]
                self._weight_server.serves(actor, peer, message.fence, message.version)
                actor.capacity, peer.telemetry = message.capacity, message.telemetry
                actor.progressed(message.progress, now)
            case wire.Release(numbers=numbers):
                self._admission.release(name, numbers)
            case wire.Bye():  # also of an actor that ends by an error: the supervisor reports its end
                self.leave(name, "left", seen=False)
        return wire.Done()

    def leave(self, name: str, reason: str, *, seen: bool = True) -> None:
        self._admission.fleet.leave(name, reason, seen=seen)
        self._forget(name)

    def tick(self, now: float) -> None:
        """Time has passed: who is silent, late or stuck loses its groups."""
        late = 0.0 if self._ticked_at is None else now - self._ticked_at
        self._ticked_at = now
        if late > min(_MAX_LATE_S, self._config.lease_s / 2):
            _log.warning("the hub's loop stalled for %.1f s: all leases are longer by that", late)
            self._admission.fleet.forgive(late, now)
            self._peers.forgive(late, now)
            self._challenged.clear()
        for name in self._weight_server.late(self._admission, self._peers, now):
            self._admission.fleet.drop(name, "exceeded weights.adopt_timeout_s")
            self._forget(name)
            _log.warning("%s adopted no weights within weights.adopt_timeout_s: its groups go to others", name)
        for name in self._admission.fleet.expire(now):
            self.leave(name, "", seen=False)
            _log.warning("%s was silent for %.0f s: its groups go to others", name, self._config.lease_s)
        for name, number in self._admission.fleet.overdue(now, self._config.progress_timeout_s):
            _log.warning(
                "%s made no progress with group %d for %.0f s: it goes to others", name, number, self._config.progress_timeout_s
            )

    def _forget(self, name: str) -> None:
        self._peers.forget(name)
        self._challenged.pop(name, None)

    def _check_shared(self, hello: wire.Hello) -> None:
        other = sorted(name for name, digest in self._shared.items() if hello.shared.get(name) != digest)
        if other:
            raise RefusedError(
                "shared",
                f"{hello.actor} and this run differ in: {', '.join(other)}. Give the actor the same files and settings "
                "(paths may differ), or start it from the run's config.toml",
            )

    def _check_name(self, hello: wire.Hello, now: float) -> None:
        """Raises RefusedError while another living process holds the name."""
        holder = self._admission.fleet.actors.get(hello.actor)
        if holder is None or holder.life == hello.life:
            self._challenged.pop(hello.actor, None)
            return
        silence_s = _SILENT_BEATS * self._config.beat_s
        since = self._challenged.setdefault(hello.actor, now)
        if holder.last_seen > since:
            since = self._challenged[hello.actor] = holder.last_seen
        if now - since < silence_s:
            raise RefusedError(
                "name-taken",
                f"an actor called {hello.actor!r} is in the run, its last message {now - holder.last_seen:.1f} s ago. "
                "Choose another name, or end that one",
            )
        del self._challenged[hello.actor]
