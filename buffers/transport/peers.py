"""Who is connected to the hub: names, identities on the socket, what was announced to each last and what it reports.

Decides nothing (which are alive is in `admission`) and sends nothing. Holds nothing of an actor that has left but its share
of the counters, so it does not grow with the number of actors that ever joined. Called by `exchange`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from async_rlhf.buffers.protocol.wire import Telemetry


@dataclass
class Peer:
    """One actor's end of the wire."""

    identity: bytes
    announced: tuple[int, int] | None = None
    """The weights (fence, version) announced to it last."""
    behind_since: float | None = None
    """Since when (seconds of the hub's clock) it serves other weights than announced, and has adopted nothing."""
    telemetry: Telemetry = field(default_factory=Telemetry)


class Peers:
    """The actors by name and by identity."""

    def __init__(self) -> None:
        self._peers: dict[str, Peer] = {}
        self._names: dict[bytes, str] = {}
        self._left: dict[str, float] = {}

    def join(self, name: str, identity: bytes) -> None:
        """An actor (re)joins; an earlier holder of its name is no longer known."""
        before = self._peers.get(name)
        telemetry = before.telemetry if before is not None and before.identity == identity else Telemetry()
        if before is not None:
            self._names.pop(before.identity, None)
            if before.identity != identity:
                self._keep_counters(before)
        self._peers[name], self._names[identity] = Peer(identity, telemetry=telemetry), name

    def forget(self, name: str) -> None:
        """An actor has left; what it counted stays in the sums."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            self._names.pop(peer.identity, None)
            self._keep_counters(peer)

    def name(self, identity: bytes) -> str | None:
        """Name of the actor behind an identity, or None before its Hello."""
        return self._names.get(identity)

    def __getitem__(self, name: str) -> Peer:
        return self._peers[name]

    @property
    def identities(self) -> list[bytes]:
        return list(self._names)

    def telemetry(self) -> dict[str, float]:
        """What all actors report, summed; counters (`*_total`, `*_s`) include those of actors that have left."""
        total = dict(self._left)
        for peer in self._peers.values():
            _add(total, peer.telemetry.model_dump())
        return total

    def forgive(self, seconds: float, now: float) -> None:
        """So long the hub did not listen."""
        for peer in self._peers.values():
            if peer.behind_since is not None:
                peer.behind_since = min(now, peer.behind_since + seconds)

    def _keep_counters(self, peer: Peer) -> None:
        _add(
            self._left, {name: value for name, value in peer.telemetry.model_dump().items() if name.endswith(("_total", "_s"))}
        )


def _add(total: dict[str, float], values: dict[str, float]) -> None:
    for name, value in values.items():
        total[name] = total.get(name, 0.0) + value
