"""Agents that make several calls at once, in processes of their own: all of them are with the model before any is answered."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.actors.engine import Request, RolloutKey
from async_rlhf.actors.environments.config import EnvironmentConfig
from async_rlhf.actors.environments.pool import EpisodePool
from async_rlhf.actors.environments.rendering import Renderer
from async_rlhf.actors.environments.yields import Read
from async_rlhf.actors.loop.context import Environment, Environments
from async_rlhf.actors.loop.episodes import Episodes
from async_rlhf.actors.loop.rollouts import FinishedRollout
from async_rlhf.actors.prompts import Row
from async_rlhf.actors.torch_engine.loading import load_engine
from async_rlhf.actors.torch_engine.settings import TorchEngineConfig
from async_rlhf.buffers.sampling import Sampling
from tests.actors.agents.by_hand import reply
from tests.actors.environments.played import Bench
from tests.actors.environments.test_environment_rendering import CHATML, tokenizer
from tests.actors.environments.test_environment_server import Server
from tests.actors.torch_models import own_model
from tests.actors.vllm_model import save_model
from tests.conftest import wait_for

AGENTS = """
import asyncio, os, threading
from concurrent.futures import ThreadPoolExecutor
from async_rlhf import environment
from async_rlhf.actors.agents.endpoint import endpoint
from tests.actors.agents.by_hand import asked, answer, post, said
from tests.conftest import wait_for

def asks(llm, text, **headers):
    got = post(llm, said(text, max_tokens=6), **headers)
    assert got.status == 200, got.text
    return got.data["choices"][0]["message"]["content"]

def is_known(llm, count):
    wait_for(lambda: len(endpoint()._sessions[llm.api_key]._calls) == count, f"{count} calls")

def plain(act, n, llm):
    asks(llm, f"plan {os.getpid()}")
    if os.path.isabs(act):
        wait_for(lambda: os.path.exists(act), "leave to go on")
    if act == "leaves":
        threading.Thread(target=asks, args=(llm, "left"), daemon=True).start()
        is_known(llm, 2)
        return 1.0
    with ThreadPoolExecutor(n) as threads:
        if act == "retries":
            with asked(llm, said("part 0", max_tokens=6)):
                is_known(llm, 2)
            found = [threads.submit(asks, llm, "part 0", x_stainless_retry_count="1"), threads.submit(asks, llm, "part 1")]
            found = [each.result() for each in found]
        else:
            found = [*threads.map(lambda part: asks(llm, f"part {part}"), range(n))]
    if act == "hangs":
        threading.Event().wait()
    asks(llm, " ".join(found) + " whole")
    return float(len({*found}))

async def awaiting(act, n, llm):
    await asyncio.to_thread(asks, llm, f"plan {os.getpid()}")
    loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor(n)
    found = await asyncio.gather(*(loop.run_in_executor(threads, asks, llm, f"part {part}") for part in range(n)))
    await asyncio.to_thread(asks, llm, " ".join(found) + " whole")
    return float(len({*found}))
"""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    (tmp_path / "parallel_agents.py").write_text(AGENTS)
    with ExitStack() as made:
        yield lambda name, **settings: made.enter_context(Bench(tmp_path / "parallel_agents.py", name, **settings))


def reads(played: Bench, key: Any) -> list[Read]:
    """The calls of an episode since it was last begun."""
    return [each for each in played.events[key][-played.turns(key) :] if isinstance(each, Read)]


def text_of(read: Read) -> str:
    assert read.call is not None
    return str(read.call.messages[-1]["content"])


def answers(played: Bench, key: Any, read: Read) -> None:
    assert read.call is not None
    played.pool.reply(key, reply(f"re {text_of(read)}", read.call.conversation))


def until_open(played: Bench, key: Any, count: int, **fields: Any) -> list[Read]:
    """Begins an episode, until so many calls behind its first are with the model at once, none of which is answered."""
    played.begin(key, **fields)
    played.until(lambda: played.turns(key) == 1)
    answers(played, key, reads(played, key)[0])
    played.until(lambda: played.turns(key) == 1 + count)
    return reads(played, key)[1:]


def to_the_end(played: Bench, key: Any) -> Any:
    played.until(lambda: played.ended(key) is not None, lambda of, turn: "whole" if of != key else reply("whole"))
    return played.ended(key)


@pytest.mark.parametrize(("name", "count"), [("plain", 2), ("awaiting", 8)])
def test_calls_at_the_same_time_are_with_the_model_at_the_same_time(bench: Callable[..., Bench], name: str, count: int) -> None:
    played = bench(name, timeout_s=60.0)
    opened = until_open(played, "one", count, n=count)
    assert sorted(map(text_of, opened)) == [f"part {part}" for part in range(count)]
    assert sorted(read.call.conversation for read in opened if read.call) == [*range(1, count + 1)]
    for read in reversed(opened):
        answers(played, "one", read)
    end = to_the_end(played, "one")
    assert text_of(reads(played, "one")[-1]) == " ".join(f"re part {part}" for part in range(count)) + " whole"
    assert end.score.value == count and end.score.metrics["calls"] == end.score.metrics["conversations"] == count + 2


def test_a_retry_of_one_of_several_calls_joins_it_and_an_agent_that_ends_leaves_what_is_open(
    bench: Callable[..., Bench],
) -> None:
    played = bench("plain", timeout_s=60.0)
    for read in until_open(played, "one", 2, act="retries", n=2):
        answers(played, "one", read)
    end = to_the_end(played, "one")
    assert end.score.value == 2.0 and end.score.metrics.items() >= {"calls": 4, "retries_joined": 1}.items()
    until_open(played, "two", 0, act="leaves")  # whether its open call is read before its end depends on who is faster
    played.until(lambda: played.ended("two") is not None)
    assert played.ended("two").score.value == 1.0  # type: ignore[union-attr]


@pytest.mark.rest
def test_an_agent_whose_process_is_killed_with_several_open_calls_begins_again_and_one_that_hangs_behind_them_fails(
    bench: Callable[..., Bench],
) -> None:
    played = bench("plain", timeout_s=6.0)
    opened = until_open(played, "killed", 3, n=3)
    process = int(text_of(reads(played, "killed")[0]).split()[1])
    answers(played, "killed", opened[1])
    os.kill(process, signal.SIGKILL)
    played.until(lambda: None in played.events["killed"] and played.turns("killed") == 1)
    answers(played, "killed", reads(played, "killed")[0])
    played.until(lambda: played.turns("killed") == 4)
    for read in reads(played, "killed")[1:]:
        answers(played, "killed", read)
    assert to_the_end(played, "killed").score.value == 3.0
    for read in until_open(played, "hangs", 2, act="hangs", n=2):
        answers(played, "hangs", read)
    assert to_the_end(played, "hangs").failure.reason == "timed out after 6 s (timeout_s)"


def test_a_server_answers_calls_at_the_same_time_one_after_the_other(tmp_path: Path) -> None:
    with ExitStack() as made:
        server = Server(tmp_path, AGENTS, "plain")
        made.callback(server.stop)
        server.start()
        played = made.enter_context(Bench(tmp_path, f"remote:{server.address}"))
        played.begin("one", n=4)
        played.until(lambda: played.ended("one") is not None, lambda key, turn: reply(f"re {text_of(reads(played, key)[-1])}"))
        end = played.ended("one")
        assert end is not None and end.score is not None and end.score.value == 4.0


def test_the_built_in_engine_decodes_several_calls_of_one_episode_together(tmp_path: Path) -> None:
    made = tokenizer(CHATML)
    (tmp_path / "parallel_agents.py").write_text(AGENTS)
    model = own_model("llama", 0, vocab_size=len(made), max_position_embeddings=1000)
    engine = load_engine(str(save_model(model, tmp_path / "model")), TorchEngineConfig(slots=8), version=0)
    config = EnvironmentConfig(function=f"{tmp_path / 'parallel_agents.py'}:plain")
    spec = config.spec(tmp_path)
    pool = EpisodePool[RolloutKey](spec, config)
    environment, key = Environment(spec, pool, Renderer(made, chat=True), 300, 900), RolloutKey(0, 0, 0)
    episodes = Episodes(engine, lambda ids: str(made.decode(ids, skip_special_tokens=True)), Environments(environment))
    try:
        request = Request(key, (1,), 6, Sampling(), seed=7)
        episodes.begin([(Row("?", {"act": str(tmp_path / "go"), "n": 8, "question": "?"}), 1, [request])])
        found: list[FinishedRollout] = []

        def steps(done: Callable[[], bool], step: Callable[[], list[FinishedRollout]]) -> None:
            def is_done() -> bool:
                found.extend(step())
                return done()

            wait_for(is_done, "the agent")

        steps(lambda: engine.num_unfinished == 1, episodes.poll)
        steps(lambda: not engine.num_unfinished, episodes.step)
        (tmp_path / "go").touch()
        steps(lambda: engine.num_unfinished == 8, episodes.poll)
        steps(lambda: bool(found), episodes.step)
    finally:
        pool.close(60.0)
    (played,) = found
    assert len(played.turns) == 10 and sum(span.restarts for span in played.rollout.spans) == 9
    text = made.decode(played.rollout.completion_ids.tolist())
    at = [text.index(f"part {part}") for part in range(8)]
    assert at == sorted(at), "conversations of one burst are in the order of their prompts"
