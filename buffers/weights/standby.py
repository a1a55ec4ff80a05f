"""An engine's half of the device channel: the newest set that came by a broadcast, until the hub orders that it is adopted.

No torch. What receives is a `SetReceiver`, this engine's part in one epoch (see `broadcast`); one that fails, or takes longer
than a broadcast may, is left, as the next beat reports; after three in a row the engine takes part no more. Nothing that came
is given out by its name alone: the digest that was taken here is compared with the one that the hub has from the learner.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from async_rlhf.buffers.protocol import broadcasts
from async_rlhf.buffers.protocol.broadcasts import EngineDevice
from async_rlhf.buffers.weights.weight_set import WeightSet

_log = logging.getLogger(__name__)
_MAX_LOST = 3
"""Seats lost in a row before a set was adopted: after them the engine takes part no more, for it keeps others waiting, up to
the deadline at every version."""
_NOTHING = (0, -1)

Target = tuple[int, int]
"""The fence and version of a set."""
Received = Callable[[WeightSet | None], None]
"""Called by any thread, with each set that came whole; with None when no more will come."""


class SetReceiver(Protocol):
    """Receives sets one after another, those that `do` names. Neither method waits."""

    def do(self, target: Target, /) -> None: ...
    def leave(self) -> None: ...


TakeSeat = Callable[[broadcasts.Receive, Received], SetReceiver]


class Standby:
    """Owns the seat and the newest set. Waits for nothing: `look` collects what has come, and leaves a seat that is late.

    take_seat: begins to take part in an epoch. wake: called by the seat's threads when there is something to look at.
    """

    def __init__(self, take_seat: TakeSeat, clock: Callable[[], float], timeout_s: float, wake: Callable[[], object]) -> None:
        self._take_seat, self._clock, self._timeout_s, self._wake = take_seat, clock, timeout_s, wake
        self._state = EngineDevice()
        self._seat: SetReceiver | None = None
        self._coming: deque[tuple[Target, float]] = deque()  # and since when it was waited for
        self._newest, self._num_lost = _NOTHING, 0
        self._set: WeightSet | None = None
        self._outcomes: SimpleQueue[tuple[tuple[int, int], WeightSet | None]] = SimpleQueue()

    def look(self) -> EngineDevice:
        """The report for the hub."""
        while not self._outcomes.empty():
            epoch, weights = self._outcomes.get()
            if self._seat is None or epoch != self._state.epoch_id:
                continue  # of a seat that was left
            if weights is None:
                self._lose("the broadcast failed")
            else:
                self._coming.popleft()
                self._set = weights
                self._change(received=(weights.fence, weights.version))
        if self._coming and self._clock() - self._coming[0][1] > self._timeout_s:
            self._lose(f"no set came within {self._timeout_s:g} s")
        return self._state

    def receive(self, message: broadcasts.Receive) -> None:
        """A set is about to come, in this epoch or in one that begins with it."""
        epoch, target = (message.fence, message.epoch), (message.fence, message.version)
        if epoch > self._state.epoch_id and not self._state.out:
            self.close()
            self._change(epoch_id=epoch, is_member=True)
            self._seat = self._take_seat(message, partial(self._outcome, epoch))
            self._newest = _NOTHING
        if self._seat is not None and epoch == self._state.epoch_id and target > self._newest:
            self._newest = target
            self._coming.append((target, self._clock()))
            self._seat.do(target)

    def disband(self, epoch: tuple[int, int]) -> None:
        """A broadcast of this epoch failed, and it is over."""
        if epoch >= self._state.epoch_id:
            if self._seat is not None:
                self._lose("the learner's broadcast failed")
            self._change(epoch_id=epoch, is_member=False)

    def take(self, target: Target, digest: str) -> WeightSet | None:
        """The set that came by this name, once, if it has the digest that the learner broadcast. Else this is counted, and the
        seat left; but for a newer set that has come since."""
        weights = self._set
        if weights is not None and self._state.received == target and weights.digest == digest:
            self._set, self._num_lost = None, 0
            return weights
        self._change(num_refused=self._state.num_refused + 1)
        if self._state.received == target:
            self._set = None
            self._change(received=_NOTHING)
            self._lose("what came is not what the learner broadcast")
        return None

    def _outcome(self, epoch: tuple[int, int], weights: WeightSet | None) -> None:
        self._outcomes.put((epoch, weights))
        self._wake()

    def _lose(self, why: str) -> None:
        self._num_lost += 1
        _log.warning("the engine leaves epoch %d of fence %d: %s", self._state.epoch_id[1], self._state.epoch_id[0], why)
        self.close()
        self._change(is_member=False, out=why if self._num_lost >= _MAX_LOST else "")
        if self._state.out:
            _log.warning("the engine takes no part in broadcasts any more: %d seats were lost in a row", self._num_lost)

    def close(self) -> None:
        """Leave the seat."""
        seat, self._seat = self._seat, None
        self._coming.clear()
        if seat is not None:
            seat.leave()

    def _change(self, **changed: object) -> None:
        self._state = self._state.model_copy(update=changed)
