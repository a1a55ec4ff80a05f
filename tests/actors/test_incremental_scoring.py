"""Rewards that read completions while they are being written: who is shown what, and what comes of it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.actors.config import ScoringConfig
from async_rlhf.actors.rewards import resolve
from async_rlhf.actors.scoring.pool import ScoringPool
from async_rlhf.actors.scoring.reward_queue import PREFETCH_CALL_S, Prefetch
from async_rlhf.buffers.errors import ConfigError

READER = """
from async_rlhf.actors.rewards import Score, Stream, reward

seen, gone = {}, []

def prefetch(completions, stream_ids, trouble=False):
    if trouble: raise ValueError("cannot read")
    seen.update(zip(stream_ids, completions))

def forget(stream_ids, **options):
    gone.extend(stream_ids)
    for stream in stream_ids: seen.pop(stream, None)

@reward(stream=Stream(prefetch, forget), stream_tokens=4, workers=1, batch_size=4, batch_wait_s=0.0)
def reader(completions, stream_ids, trouble=False):
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


class Reading:
    """A pool whose answers are awaited, with a deadline."""

    def __init__(self, directory: Path, *names: str, **options: Any) -> None:
        (directory / "reader.py").write_text(READER)
        targets = [f"{directory / 'reader.py'}:{name}" for name in names]
        self._waker = threading.Event()
        chosen = {"reader": options} if options else {}
        self.pool = ScoringPool[str](resolve(targets, directory, {"answer"}, chosen), ScoringConfig(), self._waker.set)

    def until(self, done: Any) -> None:
        deadline = time.monotonic() + 300
        while not done() and time.monotonic() < deadline:
            self._waker.wait(0.02)
            self._waker.clear()
        assert done()

    def score(self, key: str, text: str) -> Any:
        found: dict[str, Any] = {}
        self.pool.submit(key, {"prompt": "p", "completion": text})
        self.until(lambda: found.update({each.key: each for each in self.pool.poll()}) or key in found)
        return found[key]

    def show(self, key: str, text: str) -> None:
        """Until the reward has read it."""
        shown = self.pool.counters["reader"].shown
        self.pool.show(key, {"prompt": "p", "completion": text})
        self.until(lambda: self.pool.poll() == [] and self.pool.counters["reader"].shown > shown)


def test_a_reward_is_shown_what_grows_and_scores_the_whole_by_the_same_name(tmp_path: Path) -> None:
    reading = Reading(tmp_path, "reader", "plain")
    try:
        assert reading.pool.stream_tokens == 4
        reading.show("a", "abcd")
        reading.show("a", "abcdefgh")
        done, never_shown = reading.score("a", "abcdefghij"), reading.score("b", "xyz")
        reading.show("c", "abcd")
        reading.pool.discard(["c"])
        reading.show("d", "abcd")
        last = reading.score("d", "abcde")
    finally:
        reading.pool.close(60.0)
    assert done.scores["reader"].value == 10 and done.scores["reader"].metrics["read"] == 8
    assert done.ahead_s["reader"] >= 0 and done.ahead_s.keys() == {"reader"} and done.scores["plain"].value == 1
    assert never_shown.scores["reader"].metrics["read"] == 0 and never_shown.ahead_s == {}
    assert last.scores["reader"].metrics == {"read": 4, "kept": 0, "gone": 1}, "the one dropped is not kept"
    assert not reading.pool._streams and not reading.pool._ahead_s


def test_a_reward_that_fails_to_read_along_still_scores_and_is_counted(tmp_path: Path) -> None:
    reading = Reading(tmp_path, "reader", trouble=True)
    try:
        reading.show("a", "abcd")
        done = reading.score("a", "abcdef")
    finally:
        reading.pool.close(60.0)
    assert done.scores["reader"].value == 6 and done.scores["reader"].metrics["read"] == 0
    assert reading.pool.counters["reader"].not_read == 1


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("plain", {"stream_tokens": 4}, "stream_tokens = 4 but has no incremental scoring"),
        ("reader", {"workers": 2}, "stream_tokens = 4 and workers = 2: what was read lies in one process; set workers = 1"),
    ],
)
def test_reading_along_without_meaning_is_refused(tmp_path: Path, name: str, settings: dict[str, Any], message: str) -> None:
    (tmp_path / "reader.py").write_text(READER)
    with pytest.raises(ConfigError, match=message):
        resolve([f"reader.py:{name}"], tmp_path, {"answer"}, None, {name: settings})
