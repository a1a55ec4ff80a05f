"""What the learner writes: numbers checked by hand; no step is missing and nothing half written, whatever was killed."""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from making import make_group, make_rollout

from async_rlhf.buffers.composition import Composition
from async_rlhf.buffers.record import Group, Score
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.learner.loop.metrics import SourceMetrics, data_metrics, sample_record, staleness_histogram
from async_rlhf.learner.loop.recording import Recording
from async_rlhf.learner.step.report import StepTokens, measure, step_metrics

PROMPT = np.array([1, 2], np.int32)


def make(number: int, *rollouts: Any) -> Group:
    return Group(number, 0, PROMPT, tuple(rollouts), Sampling())


def rewards(groups: list[Group], weights: dict[str, float] | None = None) -> list[list[float | None]]:
    rule = Composition(weights or {})
    return [[rule.reward(rollout.scores) for rollout in group.rollouts] for group in groups]


def test_the_histogram_counts_tokens_by_their_own_age() -> None:
    groups = [
        make(0, make_rollout(5, spans=[(3, 2), (4, 3)]), make_rollout(2, spans=[(4, 2)])),
        make(1, make_rollout(1, spans=[(6, 1)])),  # from a version this learner has not reached (again): as foreign as old
    ]
    assert staleness_histogram(groups, 5) == {1: 6, 2: 2}
    assert list(staleness_histogram(groups, 4)) == [0, 1, 2]
    unknown = make(2, make_rollout(1, spans=[(-(1 << 31), 1)]))
    assert max(staleness_histogram([unknown], 0)) > 1 << 30


def test_the_metrics_of_a_batch_are_those_worked_out_by_hand() -> None:
    def scores(value: float | None, other: float | None = None, failure: str | None = None) -> dict[str, Score]:
        return {"judge": Score(value, failure), "style": Score(other)}

    groups = [
        # 1 + 2 * 0.5 = 2 and 0 (style does not apply) count, the third failed: mean 1, std 1
        make(
            0,
            make_rollout(2, spans=[(0, 2)], scores=scores(1.0, 0.5)),
            make_rollout(4, spans=[(0, 1), (1, 3)], scores=scores(0.0), finish_reason="length"),
            make_rollout(6, spans=[(1, 6)], scores=scores(None, 1.0, "boom")),
        ),
        # all the same
        make(1, *[make_rollout(1, spans=[(1, 1)], scores=scores(3.0)) for _ in range(3)]),
        # nobody counts
        make(2, make_rollout(3, spans=[(1, 3)], scores=scores(None, None, "boom"))),
    ]
    assert data_metrics(groups, rewards(groups, {"style": 2.0}), step=2, max_staleness=1) == {
        "reward": pytest.approx((2 + 0 + 3 + 3 + 3) / 5),
        "reward_std": pytest.approx(1 / 3),
        "frac_reward_zero_std": pytest.approx(2 / 3),
        "rewards/failed_ratio": pytest.approx(2 / 14),
        "rewards/judge/mean": pytest.approx((1 + 0 + 3 + 3 + 3) / 5),
        "rewards/judge/failed_ratio": pytest.approx(2 / 7),
        "rewards/style/failed_ratio": 0.0,
        "rewards/style/mean": pytest.approx((0.5 + 1.0) / 2),
        "completions/mean_length": pytest.approx(18 / 7),
        "completions/max_length": 6,
        "completions/clipped_ratio": pytest.approx(1 / 7),
        "num_tokens": 18,
        "staleness/mean": pytest.approx((15 * 1 + 3 * 2) / 18),
        "staleness/max": 2,
        "staleness/histogram": {"1": 15, "2": 3},
        "staleness/violations": 3,
    }


def test_mixed_data_are_measured_by_source_under_a_bounded_number_of_names() -> None:
    groups = [
        make_group(0, [2, 4], rewards=[1.0, None], source="maths"),
        make_group(1, [6, 6], rewards=[0.0, 1.0], source="code"),
        make_group(2, [3], rewards=[0.5], source="maths"),
        make_group(3, [9], rewards=[9.0]),
    ]
    measured = SourceMetrics()
    assert measured.measure(groups, rewards(groups)) == {
        "reward/maths": 0.75, "reward/code": 0.5, "completions/maths/mean_length": 3.0, "completions/code/mean_length": 6.0,
    }  # fmt: skip
    many = [make_group(n, [1], rewards=[1.0], source=f"site {n}") for n in range(4, 104)]
    many.append(make_group(104, [1], rewards=[0.0], source="a whole document " * 10))
    found = measured.measure([*many, groups[0]], rewards([*many, groups[0]]))
    assert len(found) == 2 * (SourceMetrics.MOST - 2 + 2)  # two names were known, and all that are left share one
    assert found["reward/other"] == pytest.approx((100 - 62) / (101 - 62)) and found["reward/maths"] == 1.0


def test_a_number_of_a_reward_never_stands_for_one_of_ours() -> None:
    names = {"mean": 99.0, "failed_ratio": 5.0}
    group = make(0, *[make_rollout(1, scores={"judge": Score(0.25, metrics=names)}) for _ in range(2)])
    metrics = data_metrics([group], rewards([group]), 0, 1)
    assert (metrics["rewards/judge/mean"], metrics["rewards/judge/failed_ratio"]) == (0.25, 0.0)
    assert (metrics["reported/judge/mean"], metrics["reported/judge/failed_ratio"]) == (99.0, 5.0)


def test_the_metrics_a_reward_returns_are_averaged_over_those_that_have_them_and_of_nothing_the_mean_is_none() -> None:
    told = [Score(1.0, metrics={"words": 2.0}), Score(0.0, metrics={"words": 4.0}), Score(0.5)]
    group = make(0, *[make_rollout(1, scores={"judge": score}) for score in told])
    metrics = data_metrics([group], rewards([group]), 0, 1)
    assert metrics["reported/judge/words"] == 3.0 and metrics["rewards/judge/mean"] == 0.5
    failed = make(0, make_rollout(1, scores={"judge": Score(failure="boom")}))
    metrics = data_metrics([failed], rewards([failed]), 0, 0)
    assert metrics["reward"] is None and metrics["rewards/judge/mean"] is None and metrics["rewards/failed_ratio"] == 1.0


def test_a_sample_shows_every_member_with_what_it_was_worth() -> None:
    group = make(
        7,
        make_rollout(2, spans=[(3, 1), (4, 1)], scores={"judge": Score(1.0)}),
        make_rollout(1, scores={"judge": Score(failure="boom")}),
    )
    record = sample_record(group, 5, [0.5, None], [1.25, None])
    assert json.loads(json.dumps(record)) == record
    assert record["step"] == 5 and record["group"] == 7
    first, second = record["rollouts"]
    assert first["spans"] == [[3, 1], [4, 1]] and first["tokens"] == group.rollouts[0].completion_ids.tolist()
    assert (first["scores"], first["advantage"], first["weight"]) == ({"judge": 1.0}, 0.5, 1.25)
    assert (second["scores"], second["advantage"], second["weight"]) == ({"judge": "boom"}, None, None)


rows = st.lists(
    st.tuples(st.floats(-8, 0, width=32), st.floats(-8, 0, width=32), st.floats(-2, 2, width=32), st.integers(0, 3)),
    min_size=1,
    max_size=30,
)


def tokens(drawn: list[tuple[float, float, float, int]]) -> StepTokens:
    proximal, behaviour, advantage, staleness = map(torch.tensor, zip(*drawn, strict=True))
    of_one = torch.zeros(len(drawn), dtype=torch.int64)
    return StepTokens(proximal, behaviour, advantage, staleness, torch.ones(len(drawn), dtype=torch.bool), of_one)


def test_an_example_by_hand() -> None:
    two, half = math.log(2), -math.log(2)
    found = measure(tokens([(0.0, 0.0, 1.0, 0), (two, 0.0, -1.0, 1), (half, 0.0, 1.0, 1), (2 * two, 0.0, -1.0, 2)]), cap=3.0)
    assert found["is/ratio_max"] == pytest.approx(4) and found["is/ratio_mean"] == pytest.approx(7.5 / 4)
    assert found["is/ess"] == pytest.approx(7.5**2 / (4 * (1 + 4 + 0.25 + 16)))
    assert found["is/second_moment"] == pytest.approx((0 + 1 + 1 + 4) * two**2 / 4)
    assert found["is/tail_negative"] == pytest.approx(4 / 7.5)  # only the last is above the cap, and it is disliked
    assert found["kl/behaviour"] == pytest.approx(-2 * two / 4)
    assert found["mismatch/kl"] == 0 and found["mismatch/abs_log_ratio"] == 0
    of_ages = {"1": (2 - 1 - two + 0.5 - 1 + two) / 2, "2": 4 - 1 - 2 * two}
    curve = found["drift/by_staleness"]
    assert curve["0"] == {"kl": 0.0, "tokens": 1} and curve["1"]["tokens"] == 2
    assert {age: curve[age]["kl"] for age in of_ages} == pytest.approx(of_ages)
    assert found["drift/kl"] == pytest.approx((2 * of_ages["1"] + of_ages["2"]) / 3)


@given(rows)
def test_its_names_are_always_all_there_and_the_curve_counts_every_token(drawn: list[tuple[float, float, float, int]]) -> None:
    found = measure(tokens(drawn), cap=None)
    assert set(found) < set(step_metrics())
    assert sum(point["tokens"] for point in found["drift/by_staleness"].values()) == len(drawn)
    assert 0 <= found["is/tail_negative"] <= 1 and 0 < found["is/ess"] <= 1
    assert found["is/ratio_q01"] <= found["is/ratio_q50"] <= found["is/ratio_q99"] <= found["is/ratio_max"] * (1 + 1e-6)


def test_engine_noise_is_told_from_staleness() -> None:
    noisy = [(-1.0 + 0.01 * (-1) ** i, -1.0, 1.0, 0) for i in range(10)]
    stale = [(-1.0 + 0.5 * (-1) ** i, -1.0, 1.0, 4) for i in range(10)]
    found = measure(tokens(noisy + stale), None)
    assert found["mismatch/kl"] == pytest.approx(0.01**2 / 2, rel=0.01)
    assert found["drift/kl"] == pytest.approx(math.cosh(0.5) - 1 - found["mismatch/kl"], rel=1e-3)
    assert measure(tokens(stale), None)["mismatch/kl"] is None and measure(tokens(noisy), None)["drift/kl"] is None


def test_tokens_behind_older_keys_and_values_are_no_engine_noise() -> None:
    exact, mixed = [(-1.0, -1.0, 1.0, 0)] * 3, [(-1.0, -1.5, 1.0, 0)] * 2
    both = tokens(exact + mixed)
    found = measure(both._replace(comparable_N=torch.tensor([True] * 3 + [False] * 2)), None)
    assert (found["mismatch/kl"], found["mismatch/abs_log_ratio"], found["mismatch/tokens"]) == (0, 0, 3)
    assert found["drift/kl"] is None and found["drift/by_staleness"]["0"]["tokens"] == 5
    assert measure(both, None)["mismatch/abs_log_ratio"] == pytest.approx(0.2)
    nothing = measure(both._replace(comparable_N=torch.zeros(5, dtype=torch.bool)), None)
    assert (nothing["mismatch/kl"], nothing["mismatch/abs_log_ratio"], nothing["mismatch/tokens"]) == (None, None, 0)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def begun(directory: Path, steps_done: int = 0) -> Recording:
    recording = Recording(directory)
    recording.begin(steps_done)
    return recording


@pytest.fixture
def limit() -> Iterator[Any]:
    """`limit(n)`: no file grows beyond n bytes; `limit(None)`: as before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def to(num_bytes: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft if num_bytes is None else num_bytes, hard))

    yield to
    to(None)


def test_a_resumed_run_cuts_off_what_was_lost_and_goes_on(tmp_path: Path) -> None:
    first = begun(tmp_path)
    for step in (1, 2, 3, 4):
        first.step({"step": step, "life": 1})
        for group in (0, 1):
            first.sample({"step": step, "group": group})
    first.close()
    Recording(tmp_path).close()  # nothing is cut off before it begins
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    second = begun(tmp_path, 2)
    second.step({"step": 3, "life": 2})
    second.begin(0)  # the hub was restarted, and the learner registers again
    second.close()
    assert [(line["step"], line["life"]) for line in read(tmp_path / "metrics.jsonl")] == [(1, 1), (2, 1), (3, 2)]
    assert [(line["step"], line["group"]) for line in read(tmp_path / "rollouts.jsonl")] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert first.lost_lines == second.lost_lines == 0


@pytest.mark.parametrize("torn", [b'{"step": 2, "rew', b'{"step": 2}', b"\0" * 4096])
def test_a_half_written_last_line_is_removed(tmp_path: Path, torn: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + torn)
    recording = begun(tmp_path, 1)
    recording.step({"step": 2, "whole": True})
    recording.close()
    assert read(path) == [{"step": 1}, {"step": 2, "whole": True}]
    assert f"metrics.jsonl ended with {len(torn)} bytes that were no whole lines" in caplog.text


def test_steps_that_a_checkpoint_holds_and_the_record_does_not_are_named_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2}\n' + b"\0" * 4096 + b'{"step": 6}\n')
    recording = begun(tmp_path, 5)
    assert recording.lost_lines == 3
    assert "metrics.jsonl is damaged: it has no lines of the steps from 3 to 5" in caplog.text
    recording.step({"step": 6, "again": True})
    recording.close()
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1, 2, 6]


def test_a_line_is_on_disk_when_it_is_written_and_is_json_for_everyone(tmp_path: Path) -> None:
    recording = begun(tmp_path)
    recording.step({"step": 1, "loss": math.nan, "nested": {"a": [math.inf, 1.5]}, "numpy": np.float32(0.5)})

    def refuse(word: str) -> None:
        pytest.fail(f"{word} is no JSON")

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=refuse) == {"step": 1, "loss": None, "nested": {"a": [None, 1.5]}, "numpy": 0.5}
    recording.close()


def test_on_a_full_disk_a_step_waits_for_room_and_samples_are_counted_and_each_is_said_once(
    tmp_path: Path, limit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    waited: list[float] = []
    recording = Recording(tmp_path, sleep=lambda seconds: (waited.append(seconds), limit(None) if len(waited) == 3 else None))
    recording.begin(0)
    for number in range(1, 5):
        limit(20 if number in (2, 3) else None)
        recording.sample({"step": number} | ({"text": "more than there is room for"} if number in (2, 3) else {}))
        if number == 3:
            recording.step({"step": 1, "text": "more than there is room for"})
    recording.close()
    assert waited == [1.0, 1.0, 1.0] and recording.lost_lines == 2
    assert read(tmp_path / "rollouts.jsonl") == [{"step": 1}, {"step": 4}] and len(read(tmp_path / "metrics.jsonl")) == 1
    lost, full, room = caplog.messages
    assert "rollouts.jsonl loses lines" in lost and "the disk is full: step 1 waits until metrics.jsonl has room" in full
    assert room == "there is room on the disk again: step 1 is recorded"
