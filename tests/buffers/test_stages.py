"""What a rollout's timings say of its stages, and how much of them somebody else's work hid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.buffers.stages import Activity, SpanFile, StageTime, pack, pack_ahead, read_spans, stage_metrics, unpack


def test_stages_come_back_from_a_rollouts_timings_in_their_order() -> None:
    stages = {"generation": StageTime(1.0, 2.0), "a.b": StageTime(2.0, 5.0, 1.5)}
    timings = json.loads(json.dumps(pack(stages)))
    assert unpack({**timings, "other_s": 1.0}) == stages and list(unpack(timings)) == ["generation", "a.b"]


def test_what_no_decoding_hid_is_reported_for_each_reward_and_as_a_share() -> None:
    first = pack({"generation": StageTime(0.0, 4.0), "judge": StageTime(4.0, 6.0, 2.0), "exact": StageTime(4.0, 4.5, 0.5)})
    second = pack({"generation": StageTime(0.0, 2.0), "judge": StageTime(2.0, 3.0, 0.5), "exact": StageTime(2.0, 2.5, 0.5)})
    assert stage_metrics([first, second]) == {
        "stages/generation/seconds": 3.0,
        "stages/judge/seconds": 1.5,
        "stages/exact/seconds": 0.5,
        "stages/judge/exposed_s": 0.25,
        "stages/exact/exposed_s": 0.0,
        "stages/exposed_ratio": pytest.approx(0.5 / 4.0),
    }
    assert stage_metrics([{}]) == {}


def test_what_was_done_ahead_is_told_apart_from_the_call_at_the_end() -> None:
    timings = {**pack({"judge": StageTime(1.0, 2.0, 1.0)}), **pack_ahead({"judge": 3.0})}
    assert unpack(timings) == {"judge": StageTime(1.0, 2.0, 1.0)}
    metrics = stage_metrics([timings, pack({"judge": StageTime(1.0, 2.0)})])
    assert (metrics["stages/judge/ahead_s"], metrics["stages/judge/seconds"]) == (3.0, 1.0)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 9)), max_size=12), st.integers(0, 100), st.integers(0, 30))
def test_what_is_covered_is_what_counting_seconds_says(spans: list[tuple[int, int]], began: int, length: int) -> None:
    busy = {second for start, width in spans for second in range(start, start + width)}
    found = Activity((start, start + width) for start, width in spans)
    asked = range(began, began + length)
    assert found.covers(began, began + length) == len(busy & set(asked))
    found.forget(began)
    assert found.covers(began, began + length) == len(busy & set(asked))


def test_the_line_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "spans" / "actor-0.jsonl"
    file = SpanFile(path)
    file.write("idle", 1.0, 2.5)
    file.write("adopt", 2.0, 2.1, version=3)
    file.close()
    with path.open("a") as torn:
        torn.write('{"name": "id')
    assert list(read_spans(path)) == [
        {"name": "idle", "began": 1.0, "ended": 2.5},
        {"name": "adopt", "began": 2.0, "ended": 2.1, "version": 3},
    ]
    assert list(read_spans(tmp_path / "nobody.jsonl")) == []
