"""The cost of an agent that drives the model over HTTP: the same episodes as a generator of ours, side by side.

Both play the actor's loop without a hub: the built-in engine, the environment's own process, turns of a few words behind a
growing conversation. The agent posts each turn as a chat completion to the endpoint in its process.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from transformers import AutoTokenizer

from async_rlhf.actors.data.rows import load_rows
from async_rlhf.actors.engine import Engine, load_engine
from async_rlhf.actors.loop.context import Environments, RunContext
from async_rlhf.actors.loop.episodes import Episodes
from async_rlhf.actors.prompts import Row as Prompt
from async_rlhf.buffers.model_directory import from_pretrained
from async_rlhf.experiments.throughput.harness import MODEL, Bench, BenchmarkRow, alternate, cpu_s
from async_rlhf.run.loading import load
from async_rlhf.run.processes.evaluation import environments_of
from async_rlhf.run.processes.roles import run_context

_TURNS, _WAIT_S = 4, 300.0
_TEMPLATE = """{%- for m in messages %}{{ m.role[0] }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}a: {% endif %}"""
_ENVIRONMENTS = f"""
import httpx
from async_rlhf import Score, environment

TURNS = {_TURNS}
@environment(max_turns=TURNS + 1, timeout_s=120)
async def agent(prompt, llm):
    messages = [{{"role": "user", "content": prompt}}]
    async with httpx.AsyncClient(timeout=None, verify=False) as client:  # of its own: one of all looks through its connections
        for turn in range(TURNS):
            answer = await client.post(llm.base_url + "/chat/completions", json={{"model": "policy", "messages": messages}})
            messages += [answer.raise_for_status().json()["choices"][0]["message"], {{"role": "user", "content": "and"}}]
    return 1.0

@environment(max_turns=TURNS + 1, timeout_s=120)
async def generator(prompt):
    text = prompt
    for turn in range(TURNS):
        yield [{{"role": "user", "content": text}}]
        text = "and"
    yield Score(1.0)
"""


class _Throughput(NamedTuple):
    """tokens: sampled a second. server_s: processor seconds of the environments' processes, of one turn."""

    tokens: float
    server_s: float


def agents(bench: Bench) -> Iterator[BenchmarkRow]:
    """Tokens a second of both, and the processor time of a turn in the environments' process."""
    for sessions in (32, 256):
        at_once = bench.size(sessions, sessions // 8)
        with _player(at_once, "agent") as agent, _player(at_once, "generator") as generator:
            turns = alternate({"agent over HTTP": agent, "generator": generator}, bench.num_turns(5))
        tokens = {name: [turn.tokens for turn in played] for name, played in turns.items()}
        figures = {
            f"{name.split()[0]}_ms_a_turn": 1e3 * statistics.median_high(turn.server_s for turn in played)
            for name, played in turns.items()
        }
        title, goal = f"{at_once} episodes of {_TURNS} turns at once", 0.85 if sessions == 32 else None
        yield BenchmarkRow.of(title, tokens, "tokens/s", at_least=goal, figures=figures)


@contextmanager
def _player(sessions: int, name: str) -> Iterator[Callable[[], _Throughput]]:
    """Plays so many episodes, all at once."""
    bell = threading.Event()
    with tempfile.TemporaryDirectory() as directory:
        config = load({"model": str(_chat_model(Path(directory)))}, _settings(Path(directory), sessions, name))
        tokenizer = from_pretrained(AutoTokenizer, Path(config.model))
        engine = load_engine(config.model, config.served_engine, version=0)
        try:
            rows = load_rows(config.data)[0]
            context = run_context(config, rows, tokenizer)
            with environments_of(config, tokenizer, bell.set) as environments:
                yield lambda: _measured(engine, context, environments, rows, bell)
        finally:
            engine.close()


def _measured(
    engine: Engine, context: RunContext, environments: Environments, rows: Sequence[Prompt], bell: threading.Event
) -> _Throughput:
    episodes = Episodes(engine, context.decode, environments)
    began, cpu = time.perf_counter(), _children_s()
    episodes.begin([(row, number, context.requests(number, 0, row)[2][:1]) for number, row in enumerate(rows)])
    left, tokens, turns, until = len(rows), 0, 0, time.monotonic() + _WAIT_S
    while left:
        for played in episodes.step():
            if played.score is None or played.score.failure is not None or len(played.turns) != _TURNS:
                raise RuntimeError(f"an episode did not come to its end: {played.score}")
            left, tokens, turns = left - 1, tokens + played.num_sampled, turns + len(played.turns)
        if not engine.num_unfinished:
            if time.monotonic() > until:
                raise RuntimeError(f"{left} episodes did not end within {_WAIT_S:.0f} s")
            bell.wait(0.05)
            bell.clear()
    seconds = time.perf_counter() - began
    return _Throughput(tokens / seconds, (_children_s() - cpu) / turns)


def _children_s() -> float:
    """Processor seconds of the environments' processes; those of the other side do nothing meanwhile."""
    return sum(map(cpu_s, psutil.Process().children(recursive=True)))


def _chat_model(directory: Path) -> Path:
    model = shutil.copytree(MODEL, directory / "model")
    (model / "chat_template.jinja").write_text(_TEMPLATE)
    return model


def _settings(directory: Path, sessions: int, name: str) -> dict[str, Any]:
    (directory / "environments.py").write_text(_ENVIRONMENTS)
    (directory / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"row {n}"}) + "\n" for n in range(sessions)))
    return {
        "environment.function": f"{directory / 'environments.py'}:{name}",
        "environment.max_concurrency": sessions,
        "data.source": str(directory / "rows.jsonl"),
        "data.held_out": 0,
        "data.chat": True,
        "rewards.functions": [],
        "generation.max_prompt_length": 64,
        "generation.max_completion_length": 16,
        "generation.max_episode_length": 256,
        "engine.slots": min(sessions, 64),
        "engine.threads": 1,
    }
