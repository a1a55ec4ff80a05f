"""How far a host's clock is off: laws over clocks that run fast or slow, answers that are late, and a clock that is set."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.launch.clocks import DRIFT, Offset, correction, is_news, measured, read_offsets

NOW = 1.8e9
ROUNDING = 1e-5  # seconds since the epoch are doubles
delays = st.floats(0, 10)
ahead = st.floats(-1e6, 1e6)


@given(ahead, delays, delays)
def test_the_error_is_at_most_half_the_round_trip_however_unlike_its_two_ways_are(off: float, out: float, back: float) -> None:
    found = measured(NOW, NOW + out + off, NOW + out + back)
    assert found.error_s == pytest.approx((out + back) / 2, abs=ROUNDING)
    assert abs(found.offset_s + off) <= found.error_s + ROUNDING


@given(
    ahead, st.floats(-DRIFT, DRIFT), st.lists(st.tuples(st.floats(0.5, 300), delays, delays), min_size=1, max_size=40), delays
)
def test_times_of_a_clock_that_drifts_are_as_right_as_the_measurement_before_them(
    off: float, drift: float, trips: list[tuple[float, float, float]], later_s: float
) -> None:
    def shown(here: float) -> float:
        return here + off + drift * (here - NOW)

    kept, here = list[Offset](), NOW
    for pause_s, out, back in trips:
        new = measured(here, shown(here + out), here + out + back)
        if is_news(kept[-1] if kept else None, new):
            kept.append(new)
        here += out + back + pause_s
    happened = here + later_s
    right = (1 + 2 * DRIFT) * kept[-1].error_at(shown(happened)) + ROUNDING
    assert abs(shown(happened) + correction(kept, shown(happened)) - happened) <= right


def test_only_what_is_surer_or_due_is_kept_and_a_clock_that_is_set_is_seen_at_once() -> None:
    first = Offset(NOW, -300.0, 0.01)
    assert is_news(None, first)
    assert not is_news(first, Offset(NOW + 1, -300.0, 0.009))
    assert is_news(first, Offset(NOW + 1, -300.0, 0.004))
    assert not is_news(first, Offset(NOW + 61, -300.0, 0.5)), "it came late"
    assert is_news(first, Offset(NOW + 61, -300.0, 0.012)), "it may have drifted by as much"
    was_set = Offset(NOW - 299, 0.0, 0.02)
    assert is_news(first, was_set)
    kept = sorted([first, was_set, Offset(NOW + 60, -300.0, 0.01)])
    assert correction(kept, NOW + 2) == -300.0 and correction(kept, NOW - 290) == 0.0
    assert correction([], NOW) == 0.0
    last, num_kept = first, 0
    for second in range(3600):
        new = Offset(NOW + second, -300.0, 0.01 + second % 7 * 0.001)
        if is_news(last, new):
            last, num_kept = new, num_kept + 1
    assert 50 <= num_kept <= 60, "one a minute"


def test_what_was_written_is_read_in_the_order_of_the_readings(tmp_path: Path) -> None:
    path = tmp_path / "actor-0.jsonl"
    assert read_offsets(path) == []
    path.write_text(
        '{"there": 2.0, "offset_s": -300.0, "error_s": 0.5}\n{"there": 1.0, "offset_s": 0.0, "error_s": 0.1}\n{"there": 3'
    )
    assert read_offsets(path) == [Offset(1.0, 0.0, 0.1), Offset(2.0, -300.0, 0.5)]
