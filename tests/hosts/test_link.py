"""Links between hosts: a link's decisions, and hosts that reach each other as it says."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.hosts.link import BACKLOG, Conditions, Link

FRAMES = st.lists(st.tuples(st.floats(0, 1), st.integers(60, 1514)), max_size=50)
PROBABILITY = st.floats(0, 1)


def arrivals(conditions: Conditions, frames: list[tuple[float, int]]) -> list[tuple[float, list[float]]]:
    link, now, made = Link(conditions, Random(0)), 0.0, []
    for pause, size in frames:
        now += pause
        made.append((now, link.arrivals(now, size)))
    return made


@given(FRAMES, PROBABILITY, PROBABILITY, PROBABILITY)
def test_no_frame_arrives_before_its_delay_unless_it_overtakes(frames, loss, duplicate, jitter) -> None:  # type: ignore[no-untyped-def]
    for sent, times in arrivals(Conditions(delay_s=2, jitter_s=jitter, loss=loss, duplicate=duplicate), frames):
        assert all(time >= sent + 2 - jitter for time in times) and len(times) <= 2


@given(FRAMES, PROBABILITY)
def test_jitter_does_not_reorder(frames, jitter) -> None:  # type: ignore[no-untyped-def]
    times = [time for _, times in arrivals(Conditions(delay_s=1, jitter_s=jitter), frames) for time in times]
    assert times == sorted(times) and len(times) == len(frames)


@given(FRAMES)
def test_a_rate_is_kept_and_a_full_queue_drops(frames) -> None:  # type: ignore[no-untyped-def]
    rate = 8000.0
    made = arrivals(Conditions(rate=rate), frames)
    carried = 0
    for (_, size), (sent, times) in zip(frames, made, strict=True):
        carried += size if times else 0
        assert all(time * rate / 8 >= carried - 1e-6 for time in times), "never more than the rate since the start"
        assert times or sent < carried * 8 / rate - BACKLOG * 8 / rate + 1e-6


@given(FRAMES)
def test_a_cut_link_and_a_full_loss_carry_nothing_and_large_frames_are_swallowed(frames) -> None:  # type: ignore[no-untyped-def]
    assert not any(times for _, times in arrivals(Conditions(cut=True), frames) + arrivals(Conditions(loss=1), frames))
    for (_, size), (_, times) in zip(frames, arrivals(Conditions(largest=1000), frames), strict=True):
        assert bool(times) == (size <= 1000)


def test_a_frame_that_overtakes_is_not_delayed() -> None:
    assert arrivals(Conditions(delay_s=1, reorder=1), [(0.0, 100)]) == [(0.0, [0.0])]
