"""Agents in processes of their own, played by the built-in engine and put as a group: the same turns are sampled by hand."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rlhf.actors.config import GenerationConfig, ScoringConfig
from async_rlhf.actors.engine import Completion, Engine, Request, RolloutKey, completed
from async_rlhf.actors.environments import EnvironmentConfig
from async_rlhf.actors.environments.pool import EpisodePool
from async_rlhf.actors.environments.rendering import Renderer
from async_rlhf.actors.loop.context import Environment, Environments, RunContext
from async_rlhf.actors.loop.worker import Worker
from async_rlhf.actors.prompts import Row, rollout_seed, turn_seed
from async_rlhf.actors.scoring.pool import ScoringPool
from async_rlhf.actors.torch_engine.loading import load_engine
from async_rlhf.actors.torch_engine.settings import TorchEngineConfig
from async_rlhf.buffers.record import Group, Span
from async_rlhf.buffers.sampling import Sampling
from tests.actors.environments.test_environment_rendering import CHATML, tokenizer
from tests.actors.test_worker import ScriptedHub, credit
from tests.actors.torch_models import own_model
from tests.actors.vllm_model import save_model

# The text of a turn is the content of another call, so each turn depends on all before it.
AGENTS = """
import os
from pathlib import Path
from async_rlhf import Score, environment
from async_rlhf.actors.environments import Call

def user(text): return [{"role": "user", "content": text}]
def told(reply): return user(f"{reply.text!r} {reply.finish_reason} {reply.num_prompt} {reply.num_tokens}")

@environment(calls=True)
def synchronous(prompt, path):
    first = yield Call(0, user(prompt))
    sub = yield Call(1, user("sub"), max_tokens=3)
    with open(path, "a") as file: file.write(f"{os.getpid()}\\n")
    back = yield Call(0, told(sub))
    yield Call(1, told(back), trained=False)
    last = yield Call(1, told(first))
    yield Score(float(last.num_tokens), metrics={"calls": 5})
"""
AGENTS += AGENTS[AGENTS.index("@") :].replace("def synchronous", "async def asynchronous")
SIZE, LENGTH, SAMPLING = 3, 6, Sampling(temperature=0.8)
PROMPT = "a question"


class Killing(ScriptedHub):
    """Kills the process that an agent has named, once it is in the midst of its episode."""

    def __init__(self, path: Path | None) -> None:
        super().__init__([[credit(0)]], wanted=1)
        self._path, self.killed = path, 0

    def poll(self, *arguments: Any) -> None:
        super().poll(*arguments)
        if self._path is not None and not self.killed and self._path.exists() and (named := self._path.read_text().split()):
            self.killed = int(named[0])
            os.kill(self.killed, signal.SIGKILL)


@contextmanager
def actor(hub: ScriptedHub, engine: Engine, source: Path, name: str, made: Any, path: Path) -> Iterator[Worker]:
    config = EnvironmentConfig(function=f"{source}:{name}")
    spec = config.spec(source.parent)
    assert spec.calls
    pool = EpisodePool[RolloutKey](spec, config)
    scoring = ScoringPool[RolloutKey]((), ScoringConfig())
    environment = Environment(spec, pool, Renderer(made, chat=True), 100, 800)
    generation = GenerationConfig(group_size=SIZE, max_completion_length=LENGTH, temperature=0.8)
    context = RunContext(0, [Row(PROMPT, {"path": str(path)})], generation, made, environments=Environments(environment))
    try:
        yield Worker("a", hub, engine, scoring, context, 4, 1e-3)  # type: ignore[arg-type]
    finally:
        scoring.close(60.0)
        pool.close(60.0)


def by_hand(engine: Engine, made: Any, member: int) -> tuple[list[int], list[float], tuple[Span, ...]]:
    """The tokens of a member, their log-probabilities and spans: each turn is sampled alone."""
    renderer, key = Renderer(made, chat=True), RolloutKey(9, 0, member)

    def user(text: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": text}]

    def write(prompt: Sequence[int], context: Sequence[int], turn: int, most: int = LENGTH) -> Completion:
        seed = turn_seed(rollout_seed(0, 0, member), turn)
        request = Request(key, tuple(prompt), most, SAMPLING, seed, context=tuple(context))
        return completed(engine, [request])[key]

    def told(wrote: Completion, before: int) -> list[dict[str, Any]]:
        text = made.decode(wrote.token_ids.tolist(), skip_special_tokens=True)
        return user(f"{text!r} {wrote.finish_reason} {before} {len(wrote.token_ids)}")

    def behind(wrote: Completion, messages: list[dict[str, Any]]) -> list[int]:
        return renderer.observation(messages, messages, wrote.token_ids.tolist()).ids

    ask, sub = renderer.prompt(user(PROMPT)).ids, renderer.prompt(user("sub")).ids
    a = write(ask, [], 0)
    b = write(sub, [], 1, 3)
    after_a = behind(a, told(b, len(sub)))
    row = [*a.token_ids.tolist(), *after_a]
    c = write(ask, row, 2)
    after_b = behind(b, told(c, len(ask) + len(row)))
    other = [*b.token_ids.tolist(), *after_b]
    d = write(sub, other, 3)
    other += [*d.token_ids.tolist(), *behind(d, told(a, len(ask)))]
    e = write(sub, other, 4)
    ids = [*row, *c.token_ids.tolist(), *sub, *other, *e.token_ids.tolist()]
    sizes = [len(each.token_ids) for each in (a, b, c, e)]
    read = len(other) - sizes[1]
    spans = (
        Span(0, sizes[0]), Span(None, len(after_a)), Span(0, sizes[2]),
        Span(None, len(sub), restarts=True), Span(0, sizes[1]), Span(None, read), Span(0, sizes[3]),
    )  # fmt: skip
    return ids, np.concatenate([each.logprobs for each in (a, c, b, e)]).tolist(), spans


@pytest.mark.parametrize("name", ["asynchronous", "synchronous"])
def test_the_record_of_an_agent_is_the_one_made_by_hand_also_when_its_process_is_killed(name: str, tmp_path: Path) -> None:
    made, source = tokenizer(CHATML), tmp_path / "agents.py"
    source.write_text(AGENTS)
    model = own_model("llama", 0, vocab_size=len(made), max_position_embeddings=1000)
    directory = str(save_model(model, tmp_path / "model"))
    groups: list[Group] = []
    for path, kills in ((tmp_path / "undisturbed", False), (tmp_path / "killed", True)):
        hub = Killing(path if kills else None)
        with actor(hub, load_engine(directory, TorchEngineConfig(slots=8), version=0), source, name, made, path) as worker:
            assert worker.run() == "enough"
        assert bool(hub.killed) == kills and len(set(path.read_text().split())) == 1 + kills
        groups += hub.groups
    engine = load_engine(directory, TorchEngineConfig(slots=8), version=0)
    for group in groups:
        assert group.prompt_ids.tolist() == Renderer(made, chat=True).prompt([{"role": "user", "content": PROMPT}]).ids
        assert PROMPT in group.prompt and len(group.rollouts) == SIZE
        for member, rollout in enumerate(group.rollouts):
            ids, logprobs, spans = by_hand(engine, made, member)
            assert (rollout.completion_ids.tolist(), rollout.spans) == (ids, spans)
            np.testing.assert_allclose(rollout.logprobs, logprobs, atol=1e-5)
            score = rollout.scores[name]
            assert (score.value, dict(score.metrics)) == (float(spans[-1].num_tokens), {"calls": 5.0})
