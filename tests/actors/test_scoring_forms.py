"""The scoring pool with rewards that ask for more than one completion, limit themselves, or try again."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from async_rlhf.actors.scoring.pool import Place
from async_rlhf.buffers.record import Score
from tests.actors.scored import Bench

JUDGES = """
import asyncio, os, time
from async_rlhf.actors.rewards import Score, reward

@reward(scope="group")
def best(completions, prompt, answer, completion_ids, finish_reasons):
    assert prompt == "p" and answer == "a" and finish_reasons == ["stop"] * len(completions)
    assert completion_ids == [[1, 2, 3]] * len(completions)
    top = max(map(float, completions))
    return [float(float(c) == top) for c in completions]

@reward(scope="group")
async def short_list(completions): return [1.0]

@reward(scope="group", workers=1, timeout_s=1.0)
def hangs(completions):
    while True: pass

def plain(completion): return 1.0
async def measured(completion): return Score(1.0, metrics={"length": len(completion), "words": 2})
def nan_metric(completion): return Score(1.0, metrics={"bad": float("nan")})

@reward(timeout_s=1.0)
async def blocker(completion):
    time.sleep(100)

async def innocent(completion):
    await asyncio.sleep(0.05)
    return float(completion)

async def dies(completion):
    await asyncio.sleep(0.02)
    os._exit(9)
"""


def test_a_reward_of_groups_sees_all_members_in_their_order_and_each_gets_its_own(bench: Callable[..., Bench]) -> None:
    pool = bench("best measured")
    for member in (2, 0, 1):
        pool.submit(member, str(member), Place("g", member, 3))
    scored = pool.wait()
    assert [scored[member].scores["best"].value for member in range(3)] == [0.0, 0.0, 1.0]
    assert scored[1].scores["measured"] == Score(1.0, metrics={"length": 1.0, "words": 2.0})
    began, ended = scored[0].stages["best"]
    assert 0 < began <= ended and scored[0].stages["best"] == scored[2].stages["best"]


def test_a_group_that_gets_too_few_scores_fails_as_a_whole(bench: Callable[..., Bench]) -> None:
    pool = bench("short_list")
    for member in range(2):
        pool.submit(member, "1", Place("g", member, 2))
    assert {each.scores["short_list"].failure for each in pool.wait().values()} == {
        "returned list [1.0] for 2 completions; a list of 2 scores was expected"
    }


def test_a_hanging_reward_of_groups_with_workers_and_a_time_out_of_its_own_delays_no_other(bench: Callable[..., Bench]) -> None:
    pool = bench("hangs plain")
    for member in range(2):
        pool.submit(member, "1", Place("g", member, 2))
    scores = pool.wait()[0].scores
    assert "timed out after 1 s" in (scores["hangs"].failure or "") and scores["plain"].value == 1.0


def test_a_discarded_member_takes_its_group_with_it(bench: Callable[..., Bench]) -> None:
    pool = bench("best")
    pool.submit(0, "1", Place(("g", 0), 0, 2))
    pool.pool.discard([0])
    for member in range(2):
        pool.submit(member, "7", Place(("g", 0), member, 2))
    assert [each.scores["best"].value for each in pool.wait().values()] == [1.0, 1.0]


def test_a_metric_must_be_finite(bench: Callable[..., Bench]) -> None:
    assert "metric 'bad' of a score must be finite" in (bench("nan_metric").one("1").failure or "")


@pytest.mark.parametrize(("culprit", "told"), [("blocker", "it blocked the event loop"), ("dies", "exit code 9")])
def test_only_the_call_at_fault_fails_and_the_others_on_its_loop_begin_again(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture, culprit: str, told: str
) -> None:
    with caplog.at_level(logging.WARNING):
        (scores,) = bench(f"innocent {culprit}").score("7")
    assert told in (scores[culprit].failure or "") and scores["innocent"] == Score(7.0)
    if culprit == "blocker":
        assert any("reward 'blocker' has kept the event loop to itself" in r.getMessage() for r in caplog.records)
