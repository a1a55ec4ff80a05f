"""A world of one thread: virtual time, one heap of events, and a network between peers and the hub.

Two networks. `tcp`: within a connection messages keep their order and come once; a cut loses what is in flight both ways
and the connection is made again (this is what ZeroMQ promises). `wild`: messages are also dropped, duplicated and
reordered while faults last; then every connection is made anew once, for nobody repeats a credit that was dropped.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random

import xxhash

from async_rlhf.buffers.protocol.wire import Frames

MAX_EVENTS = 60_000


class ViolationError(AssertionError):
    """An invariant does not hold. `rule` is its name."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule


class World:
    """Runs events in order of their time; `trace` holds what happened when, `digest` is its hash."""

    def __init__(self, seed: int, deadline: float, *, begin: float = 0.0, max_events: int = MAX_EVENTS) -> None:
        self.rng = Random(seed)
        self.now = begin
        self.deadline, self._max_events = deadline, max_events
        self.wild = False
        self.trace: list[tuple[float, str]] = []
        self._heap: list[tuple[float, int, str, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay: float, label: str, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay, self._count, label, action))

    def note(self, label: str) -> None:
        self.trace.append((self.now, label))

    def step(self) -> None:
        """One event. Raises ViolationError when the run should have ended by now."""
        at, _, label, action = heapq.heappop(self._heap)
        self.now = max(self.now, at)  # what was due while the machine slept comes late
        self.trace.append((self.now, label))
        if self.now > self.deadline or len(self.trace) > self._max_events:
            raise ViolationError("progress", f"not finished at {self.now:.1f} s after {len(self.trace)} events")
        action()

    def next_at(self) -> float:
        return self._heap[0][0] if self._heap else self.deadline + 1

    def digest(self) -> str:
        lines = "\n".join(f"{now:.9f} {label}" for now, label in self.trace)
        return xxhash.xxh3_128_hexdigest(lines.encode())


class Network:
    """All links; knows whether the hub listens and where its messages go."""

    def __init__(self, world: World, arrive: Callable[[bytes, Frames], None]) -> None:
        self.world, self.arrive = world, arrive
        self.listening = self.was_wild = False
        self.links: dict[bytes, SimLink] = {}

    def connect(self, name: str, woken: Callable[[], None] = lambda: None) -> SimLink:
        link = SimLink(self, name, f"{name}-{len(self.links)}".encode(), woken)
        self.links[link.identity] = link
        if self.listening:
            self.world.after(self.latency(), f"{name} connects", link.reconnect)
        return link

    def latency(self) -> float:
        return self.world.rng.uniform(0.0005, 0.01)

    def listen(self) -> None:
        self.listening = True
        for link in self.links.values():
            if not link.closed:
                self.world.after(10 * self.latency(), f"{link.name} connects", link.reconnect)

    def hang_up(self) -> None:
        """The hub is gone, and with it what was on its way."""
        self.listening = False
        for link in self.links.values():
            link.drop()

    def deliver(self, frames: Frames) -> None:
        identity, *rest = frames
        link = self.links.get(identity)
        if link is not None and link.connected and not link.closed:
            link.down(rest)


class SimLink:
    """`buffers.link.Link` over the simulated network. `receive` never waits: the world turns outside, or in a subclass."""

    def __init__(self, network: Network, name: str, identity: bytes, woken: Callable[[], None]) -> None:
        self._network, self.name, self.identity, self.woken = network, name, identity, woken
        self.inbox: deque[Frames] = deque()
        self.connected = self.closed = False
        self.slow = 1.0
        self._ever = self._remade = False
        self._epoch = 0
        self._held: list[Frames] = []
        self._last = {"up": 0.0, "down": 0.0}

    # -- what a client calls -----------------------------------------------------------------------------------------

    def send(self, frames: Frames) -> bool:
        if self.connected:
            self._carry("up", frames)
        elif len(self._held) < 1000:
            self._held.append(frames)
        else:
            return False
        return True

    def receive(self, timeout_s: float) -> Frames | None:
        return self.inbox.popleft() if self.inbox else None

    def was_remade(self) -> bool:
        remade, self._remade = self._remade, False
        return remade

    def is_receiving(self) -> bool:
        return False

    def wake(self) -> None:
        self.woken()

    def clock(self) -> float:
        return self._network.world.now

    def close(self) -> None:
        """What is under way to the hub still arrives."""
        self.closed = True
        self._held.clear()

    # -- what the network does ---------------------------------------------------------------------------------------

    def down(self, frames: Frames) -> None:
        self._carry("down", frames)

    def drop(self) -> None:
        """The connection breaks."""
        self._epoch += 1
        self.connected = False

    def cut(self, seconds: float) -> None:
        self.drop()
        self._network.world.after(seconds, f"{self.name} connects", self.reconnect)

    def reconnect(self) -> None:
        if self.connected or self.closed or not self._network.listening:
            return
        self.connected, self._remade = True, self._ever
        self._ever = True
        held, self._held = self._held, []
        for frames in held:
            self._carry("up", frames)
        self.woken()

    def _carry(self, way: str, frames: Frames) -> None:
        world = self._network.world
        copies = 1
        if world.wild:
            draw = world.rng.random()
            copies = 0 if draw < 0.04 else 2 if draw < 0.08 else 1
        for _ in range(copies):
            at = world.now + self.slow * self._network.latency()
            if not (world.wild and world.rng.random() < 0.1):
                at = self._last[way] = max(at, self._last[way])
            arrive = partial(self._arrive, way, self._epoch, frames)
            world.after(at - world.now, f"{way} {self.name} {len(frames[0])}", arrive)

    def _arrive(self, way: str, epoch: int, frames: Frames) -> None:
        if epoch != self._epoch:
            return
        if way == "up":
            self._network.arrive(self.identity, frames)
        elif not self.closed:
            self.inbox.append(frames)
            self.woken()
