"""What the learner writes for people: numbers checked by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from making import make_group, make_rollout

from async_rlhf.buffers.composition import Composition
from async_rlhf.buffers.record import Group, Score
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.learner.loop.metrics import SourceMetrics, data_metrics, sample_record, staleness_histogram

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


def test_the_metrics_a_reward_returns_are_averaged_over_those_that_have_them_and_of_nothing_the_mean_is_none() -> None:
    told = [Score(1.0, metrics={"words": 2.0}), Score(0.0, metrics={"words": 4.0}), Score(0.5)]
    group = make(0, *[make_rollout(1, scores={"judge": score}) for score in told])
    metrics = data_metrics([group], rewards([group]), 0, 1)
    assert metrics["rewards/judge/words"] == 3.0 and metrics["rewards/judge/mean"] == 0.5
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
