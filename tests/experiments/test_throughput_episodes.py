"""The loops of the episodes benchmark play the same work. No rate is measured here."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from async_rlhf.actors.engine import Request, RolloutKey
from async_rlhf.buffers.clients.actor import ActorState
from async_rlhf.buffers.protocol.wire import Telemetry
from async_rlhf.buffers.record import Group
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.experiments.throughput import slow_tool
from async_rlhf.experiments.throughput.episode_loops import (
    GROUP_SIZE,
    GROUPS_PER_BATCH,
    LONGEST,
    STALENESS,
    TURNS,
    BatchLoop,
    Credits,
    Episode,
    actor,
    tokens_of,
)
from async_rlhf.experiments.throughput.trl_loop import TrlLoop

KEYS = [RolloutKey(group, 0, member) for group in range(GROUPS_PER_BATCH) for member in range(GROUP_SIZE)]


def test_a_rollout_has_as_many_sampled_tokens_in_one_turn_as_in_several() -> None:
    requests = [Request(key, (1,), 1, Sampling(), seed=0) for key in KEYS]
    several, single = (Episode(turns).requests(requests) for turns in (TURNS, 1))
    assert [TURNS * each.max_new_tokens for each in several] == [each.max_new_tokens for each in single]
    lengths = [tokens_of(key) for key in KEYS]
    assert lengths == [each.max_new_tokens for each in several] and len(set(lengths)) > LONGEST // 4
    assert min(lengths) >= 1 and max(lengths) <= LONGEST


def test_an_actor_plays_all_turns_and_the_time_of_its_tools_is_counted() -> None:
    with actor(Episode(TURNS, "instant"), GROUP_SIZE) as loop:
        window = loop.play(0, 2)
    assert window.rollouts == 2 * GROUP_SIZE and 0 <= window.hidden_s <= window.tool_s
    # Two groups end whole; of others there may be some tokens beside theirs.
    of_group = sorted(sum(tokens_of(RolloutKey(group, 0, member)) for member in range(GROUP_SIZE)) for group in range(8))
    assert window.tokens >= TURNS * sum(of_group[:2])


def test_the_loop_that_plays_batch_after_batch_samples_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_tool, "MEAN_S", 0.0)
    window = BatchLoop(Episode(TURNS), 64).play(1)
    assert (window.rollouts, window.tokens) == (len(KEYS), TURNS * sum(map(tokens_of, KEYS)))


def test_credits_are_those_of_a_hub_whose_learner_takes_no_time() -> None:
    credits, more = Credits(), 10_000
    credits.poll(ActorState(GROUPS_PER_BATCH, 0, 0, ()), Telemetry())
    assert [each.number for each in credits.credits()] == list(range(GROUPS_PER_BATCH))
    credits.poll(ActorState(more, 0, 0, ()), Telemetry())
    assert len(credits.credits()) == STALENESS * GROUPS_PER_BATCH
    for number in reversed(range(GROUPS_PER_BATCH)):
        assert credits.credits() == []
        credits.put(cast(Group, SimpleNamespace(number=number)), constant=False)
    assert len(credits.credits()) == GROUPS_PER_BATCH


def test_a_tool_takes_half_a_second_in_the_mean_and_has_a_longest() -> None:
    found = [slow_tool.seconds(number, slow_tool.MEAN_S) for number in range(20_000)]
    # The cut takes 0.016 off the mean; three standard errors are 0.012.
    assert statistics.mean(found) == pytest.approx(0.484, abs=0.012)
    assert min(found) > 0 and max(found) == 12 * slow_tool.MEAN_S


@pytest.mark.rest
def test_trl_plays_as_many_turns_of_as_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    monkeypatch.setattr(slow_tool, "MEAN_S", 0.0)
    with TrlLoop(Path(sys.executable), 1, threads=1) as loop:
        steps = [loop.step(), loop.step()]
    sampled = [TURNS * sum(tokens_of(RolloutKey(group, 0, member)) for member in range(GROUP_SIZE)) for group in (0, 1)]
    assert [(step["tokens"], step["calls"]) for step in steps] == [(tokens, TURNS - 1) for tokens in sampled]
