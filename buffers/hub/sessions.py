"""The actors' side of the hub: which are connected, under which name, and whether they make progress. Their groups: `exchange`.

Knows no socket and no file. A name belongs to one process. Of two that claim it the first keeps it as long as it sends; when
nothing has come from it for `_SILENT_BEATS` beats, it counts as ended and the second takes its name.

silence          ends a lease after `queue.lease_s` and counts against no group; bytes that still arrive are no silence
no progress      of a group, for `queue.progress_timeout_s`, ends its lease and counts against it
a late hub       extends every deadline by the time in which it received nothing
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from async_rlhf.buffers.config import QueueConfig
from async_rlhf.buffers.errors import RefusedError
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.admission import Actor, Admission
from async_rlhf.buffers.weights.server import WeightServer

_log = logging.getLogger(__name__)
_SILENT_BEATS = 3
# Two that differ say all there is to say.
_MOST_BITS = 8
# A tick that comes later than this after the last, or than half a lease, proves that nothing was received.
_MAX_LATE_S = 2.0
_NOTHING_YET = wire.Telemetry().model_dump(exclude={"failures"})


class ActorSessions:
    """Owns nothing. `shared`: digests that every actor must have in common with the hub."""

    def __init__(
        self,
        admission: Admission,
        weights: WeightServer,
        config: QueueConfig,
        shared: Mapping[str, str],
        welcome: wire.Welcome,
    ) -> None:
        self._admission, self._fleet, self._weight_server = admission, admission.fleet, weights
        self._config, self._shared, self._welcome = config, shared, welcome
        self._ticked_at: float | None = None
        self._bits = dict[tuple[str, str], str]()

    def name_of(self, identity: bytes, now: float) -> str:
        """Name of the living actor behind an identity; its message extends its leases."""
        if (name := self.arrives(identity, now)) is None:
            raise RefusedError("unknown-actor", "send Hello first (the hub was restarted, or the lease has expired)")
        return name

    def arrives(self, identity: bytes, now: float) -> str | None:
        """Bytes arrive from this peer, perhaps of a message that is not whole yet: it lives. Its name, if it is an actor."""
        if (name := self._fleet.name(identity)) is not None:
            self._fleet.actors[name].last_seen = now
        return name

    def hello(self, identity: bytes, hello: wire.Hello, now: float) -> wire.Message:
        """Raises RefusedError: `shared` for an actor of another configuration, `name-taken` while another process holds it."""
        self._check_shared(hello)
        name, before = hello.actor, self._fleet.name(identity)
        self._check_name(hello, now)
        if before is not None and before != name:
            self._fleet.leave(before, f"joined again as {name}")
        actor = Actor(
            hello.capacity, hello.fence, hello.version, now, life=hello.life, identity=identity, telemetry=_NOTHING_YET,
            device=hello.device,
        )  # fmt: skip
        self._fleet.join(name, actor, hello.holding)
        if len(self._bits) < _MOST_BITS:
            self._bits.setdefault(hello.bits, name)
        self._weight_server.broadcasts.membership.joined((name, hello.life))
        _log.info("%s joined with version %d, holding %d groups", name, hello.version, len(hello.holding))
        return self._welcome

    def handle(self, name: str, message: wire.Beat | wire.Release | wire.Bye, now: float) -> wire.Message:
        match message:
            case wire.Beat():
                actor = self._fleet.actors[name]
                self._weight_server.serves(actor, message.fence, message.version)
                self._weight_server.broadcasts.reported(actor, message.device)
                actor.capacity, actor.telemetry = message.capacity, _by_name(message.telemetry)
                actor.progressed(message.progress, now)
            case wire.Release(numbers=numbers):
                self._admission.release(name, numbers)
            case wire.Bye():  # also of an actor that ends by an error: the supervisor reports its end
                self._fleet.leave(name, "left", seen=False)
        return wire.Done()

    def tick(self, now: float) -> None:
        """Take the groups of silent, late and stuck actors away."""
        late, timeout_s = 0.0 if self._ticked_at is None else now - self._ticked_at, self._config.progress_timeout_s
        self._ticked_at = now
        if late > min(_MAX_LATE_S, self._config.lease_s / 2):
            _log.warning("the hub's loop stalled for %.1f s: all leases are longer by that", late)
            self._fleet.forgive(late, now)
        for name in self._weight_server.late(self._admission, now, timeout_s):
            self._fleet.drop(name, "adopted no weights in time")
            _log.warning("%s adopted no weights for %.0f s: its groups go to others", name, timeout_s)
        for name in self._fleet.expire(now):
            _log.warning("%s was silent for %.0f s: its groups go to others", name, self._config.lease_s)
        for name, number in self._fleet.overdue(now, timeout_s):
            _log.warning("%s made no progress with group %d for %.0f s: it goes to others", name, number, timeout_s)

    def status(self, now: float) -> dict[str, Any]:
        """The telemetry, version and groups of each actor, by name, why it does not serve its target version, and why it takes
        no part in broadcasts any more."""
        return {
            name: {
                **actor.telemetry,
                "version": actor.version,
                "capacity": actor.capacity,
                "groups": len(actor.leases),
                "silent_s": round(now - actor.last_seen, 3),
                **self._weight_server.behind(name, self._admission, now),
                **({"no_broadcasts": actor.device.out} if actor.device and actor.device.out else {}),
            }
            for name, actor in self._fleet.actors.items()
        }

    def bits(self) -> list[tuple[str, str, str]]:
        """(actor, digest, obstacle) of each distinct promise of engines, by its first actor; in the order of joining."""
        return [(name, digest, obstacle) for (digest, obstacle), name in self._bits.items() if digest or obstacle]

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
        holder = self._fleet.actors.get(hello.actor)
        if holder is None or holder.life == hello.life:
            return
        if (silent_s := now - holder.last_seen) < _SILENT_BEATS * self._config.beat_s:
            raise RefusedError(
                "name-taken",
                f"an actor called {hello.actor!r} is in the run, its last message {silent_s:.1f} s ago. "
                "Choose another name, or end that one",
            )


def _by_name(telemetry: wire.Telemetry) -> dict[str, float]:
    failures = {f"failures_{kind}_total": count for kind, count in telemetry.failures.items()}
    return telemetry.model_dump(exclude={"failures"}) | failures
