"""The scoring pool with rewards that ask for more than one completion, limit themselves, or try again."""

from __future__ import annotations

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

async def measured(completion): return Score(1.0, metrics={"length": len(completion), "words": 2})

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


def test_a_discarded_member_takes_its_group_with_it(bench: Callable[..., Bench]) -> None:
    pool = bench("best")
    pool.submit(0, "1", Place(("g", 0), 0, 2))
    pool.pool.discard([0])
    for member in range(2):
        pool.submit(member, "7", Place(("g", 0), member, 2))
    assert [each.scores["best"].value for each in pool.wait().values()] == [1.0, 1.0]


@pytest.mark.parametrize(("culprit", "told"), [("blocker", "it blocked the event loop"), ("dies", "exit code 9")])
def test_only_the_call_at_fault_fails_and_the_others_on_its_loop_begin_again(
    bench: Callable[..., Bench], culprit: str, told: str
) -> None:
    (scores,) = bench(f"innocent {culprit}").score("7")
    assert told in (scores[culprit].failure or "") and scores["innocent"] == Score(7.0)
