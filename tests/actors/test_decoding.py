"""What an engine's decoding hides, by a wall clock that is set."""

from __future__ import annotations

import pytest

from async_rlhf.actors.loop import decoding
from async_rlhf.actors.loop.decoding import Decoding


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(decoding, "time", found)
    return found


def step(decodes: Decoding, clock: Clock, seconds: float = 1.0) -> None:
    began = clock.now
    clock.now += seconds
    decodes.stepped(began)


def test_after_the_clock_was_set_back_new_stretches_hide_what_runs_in_them(clock: Clock) -> None:
    decodes = Decoding()
    step(decodes, clock, 5.0)
    clock.now -= 3600.0
    began = clock.now
    step(decodes, clock, 2.0)
    assert decodes.overlap(began + 0.5, began + 1.5).hidden_s == 1.0
    assert decodes.overlap(began + 1.0, began + 4.0).hidden_s == 1.0


def test_a_stage_in_which_the_clock_was_set_back_took_no_time(clock: Clock) -> None:
    decodes = Decoding()
    step(decodes, clock)
    stage = decodes.overlap(1000.5, 400.0)
    assert stage.seconds == 0.0 and stage.hidden_s == 0.0
