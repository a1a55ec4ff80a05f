"""Rewards that read completions while they are being written: who is shown what, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.actors.rewards import resolve
from async_rlhf.actors.scoring.pool import Scored
from async_rlhf.actors.scoring.prefetch import PREFETCH_CALL_S, Prefetch
from async_rlhf.buffers.errors import ConfigError
from tests.actors.scored import Bench

JUDGES = """
from async_rlhf.actors.rewards import Score, Stream, reward

seen, gone = {}, []

def prefetch(completions, stream_ids):
    if "trouble" in completions: raise ValueError("cannot read")
    seen.update(zip(stream_ids, completions))

def forget(stream_ids, **options):
    gone.extend(stream_ids)
    for stream in stream_ids: seen.pop(stream, None)

@reward(stream=Stream(prefetch, forget), stream_tokens=4, workers=1, batch_size=4, batch_wait_s=0.0)
def reader(completions, stream_ids):
    read = [seen.pop(stream, "") for stream in stream_ids]
    assert all(whole.startswith(part) for whole, part in zip(completions, read))
    metrics = [{"read": len(part), "kept": len(seen), "gone": len(gone)} for part in read]
    return [Score(len(each), metrics=numbers) for each, numbers in zip(completions, metrics)]

@reward
def plain(completion): return 1.0
"""


@given(data=st.data())
def test_the_newest_is_shown_once_and_never_what_is_whole_or_forgotten(data: st.DataObject) -> None:
    ahead, newest, over, running = Prefetch(max_size=4), dict[int, int](), set[int](), False
    told: set[int] = set()
    for number in range(data.draw(st.integers(0, 40))):
        stream = data.draw(st.integers(0, 5))
        act = data.draw(st.sampled_from(["offer", "offer", "ended", "forget", "due", "shown"]))
        if act == "offer" and stream not in over:
            newest[stream] = number
            ahead.offer(stream, {"completion": number})
        elif act in ("ended", "forget"):
            newest.pop(stream, None)
            over.add(stream)
            ahead.ended(stream) if act == "ended" else ahead.forget([stream])
            told |= {stream} if act == "forget" else set()
        elif act == "shown":
            running = False
            ahead.shown(data.draw(st.sampled_from([0.0, 1.0])))
        elif act == "due":
            peek = ahead.due()
            assert (peek is None) == (running or not (newest or told))
            if peek is not None:
                assert 0 < len(peek.members) <= 4 or told
                assert all(newest.pop(shown) == member["completion"] for shown, member in peek.members.items())
                assert set(peek.forgotten) == told
                told, running = set(), True


def test_so_much_is_shown_at_once_as_ends_soon() -> None:
    ahead, sizes = Prefetch(max_size=8), []
    for seconds in [0.0, 0.0, 0.0, 0.0, 2 * PREFETCH_CALL_S, 2 * PREFETCH_CALL_S, 0.0]:
        for stream in range(20):
            ahead.offer(stream, {})
        peek = ahead.due()
        assert peek is not None
        sizes.append(len(peek.members))
        ahead.shown(seconds)
    assert sizes == [1, 2, 4, 8, 8, 4, 2]


def show(reading: Bench, key: str, text: str) -> None:
    """Until the reward has read it."""
    shown = reading.pool.counters["reader"].shown
    reading.pool.show(key, {"prompt": "p", "completion": text})
    reading.until(lambda: reading.pool.poll() == [] and reading.pool.counters["reader"].shown > shown)


def score(reading: Bench, key: str, text: str) -> Scored[str]:
    reading.submit(key, text)
    return reading.wait()[key]


def test_a_reward_is_shown_what_grows_and_scores_the_whole_by_the_same_name(bench: Callable[..., Bench]) -> None:
    reading = bench("reader plain")
    assert reading.pool.stream_tokens == 4
    show(reading, "a", "abcd")
    show(reading, "a", "abcdefgh")
    done, never_shown = score(reading, "a", "abcdefghij"), score(reading, "b", "xyz")
    show(reading, "c", "abcd")
    reading.pool.discard(["c"])
    show(reading, "d", "abcd")
    last = score(reading, "d", "abcde")
    assert done.scores["reader"].value == 10 and done.scores["reader"].metrics["read"] == 8
    assert done.ahead_s["reader"] >= 0 and done.ahead_s.keys() == {"reader"} and done.scores["plain"].value == 1
    assert never_shown.scores["reader"].metrics["read"] == 0 and never_shown.ahead_s == {}
    assert last.scores["reader"].metrics == {"read": 4, "kept": 0, "gone": 1}, "the one dropped is not kept"
    assert not reading.pool._streams and not reading.pool._ahead_s


def test_a_reward_that_fails_to_read_along_still_scores_and_is_counted(bench: Callable[..., Bench]) -> None:
    reading = bench("reader")
    show(reading, "a", "trouble")
    done = score(reading, "a", "trouble with it")
    assert done.scores["reader"].value == 15 and done.scores["reader"].metrics["read"] == 0
    assert reading.pool.counters["reader"].not_read == 1


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("plain", {"stream_tokens": 4}, "stream_tokens = 4 but has no incremental scoring"),
        ("reader", {"workers": 2}, "stream_tokens = 4 and workers = 2: what was read lies in one process; set workers = 1"),
    ],
)
def test_reading_along_without_meaning_is_refused(tmp_path: Path, name: str, settings: dict[str, Any], message: str) -> None:
    (tmp_path / "reader.py").write_text(JUDGES)
    with pytest.raises(ConfigError, match=message):
        resolve([f"reader.py:{name}"], tmp_path, None, {name: settings})
