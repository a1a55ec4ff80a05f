"""The loops of the episodes benchmark: an actor as a run has it, and one that plays batch after batch.

The actor is `Worker` with the built-in engine, its environment in a process of its own, and credits as a hub gives them to a
learner that takes no time: batches are taken in order, none is begun more than `STALENESS` ahead. The other loop is what a
synchronous trainer does: a turn of all, then all their tools, then the next turn. Both hold keys and values between turns.
Lengths are forced: no end token.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from async_rlhf.actors.config import ScoringConfig
from async_rlhf.actors.engine import Completion, Request, RolloutKey
from async_rlhf.actors.environments.config import EnvironmentConfig
from async_rlhf.actors.environments.pool import EpisodePool
from async_rlhf.actors.environments.rendering import Renderer
from async_rlhf.actors.loop.episodes import Play
from async_rlhf.actors.loop.worker import Work, Worker
from async_rlhf.actors.prompts import Row, turn_seed
from async_rlhf.actors.scoring.pool import ScoringPool
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.buffers.clients.actor import ActorClient, ActorState
from async_rlhf.buffers.model_directory import from_pretrained
from async_rlhf.buffers.protocol.wire import CreditItem, Telemetry
from async_rlhf.buffers.record import Group, Score
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.buffers.stages import StageTime, unpack
from async_rlhf.experiments.throughput.continuation import random_llama
from async_rlhf.experiments.throughput.sides import MODEL
from async_rlhf.experiments.throughput.slow_tool import OBSERVATION, sleep

GROUP_SIZE, GROUPS_PER_BATCH, STALENESS, QUEUED_GROUPS = 8, 16, 8, 8
TURNS, MEDIAN, LONGEST = 4, 24, 64
WIDTH, LAYERS = 576, 6
"""Of the wide model."""
PROMPTS = [f"word {number:03d}" for number in range(200)]
# More than there are episodes, so that no call of a tool waits for another.
_CONCURRENCY = 4096


@dataclass(frozen=True)
class Episode:
    """In all turns together `tokens_of` a rollout; tools: what answers between them, a function of `tools.py`, or None where
    there is one turn and no environment."""

    turns: int
    tools: str | None = None

    def requests(self, requests: Sequence[Request]) -> list[Request]:
        """With the lengths of their turns."""
        return [replace(each, max_new_tokens=TURNS // self.turns * tokens_of(each.key)) for each in requests]


def tokens_of(key: RolloutKey) -> int:
    """Sampled tokens of a rollout's turn, where it has `TURNS`: log-normal, whatever its turns."""
    random = np.random.default_rng((key.group, key.member))
    return int(np.clip(random.lognormal(np.log(MEDIAN), 0.8), 1, LONGEST))


@dataclass(frozen=True)
class LengthsWork(Work):
    """`Work` with the lengths of an episode."""

    episode: Episode = Episode(1)

    def requests(self, *arguments: Any) -> tuple[Row, str, list[Request]]:
        row, prompt, requests = super().requests(*arguments)
        return row, prompt, self.episode.requests(requests)


class Credits:
    """Stands for the hub, as far as an actor asks it. groups: what it has been given since they were last cleared."""

    def __init__(self) -> None:
        self.groups = list[Group]()
        self.unacknowledged = list[tuple[int, int]]()
        self.stop_reason: str | None = None
        self.woken = threading.Event()
        self._credited, self._taken, self._whole = 0, 0, set[int]()
        self._room = 0

    def poll(self, state: ActorState, telemetry: Telemetry, timeout_s: float = 0.0) -> None:
        if timeout_s:
            self.woken.wait(timeout_s)
        self.woken.clear()
        self._room = state.capacity - len(state.holding)

    def credits(self) -> list[CreditItem]:
        bound = (self._taken + 1 + STALENESS) * GROUPS_PER_BATCH
        numbers = range(self._credited, min(bound, self._credited + max(0, self._room)))
        self._credited += len(numbers)
        return [CreditItem(number=number, attempt=0, lowest_version=0) for number in numbers]

    def put(self, group: Group, *, constant: bool) -> None:
        self.groups.append(group)
        self._whole.add(group.number)
        while self._whole.issuperset(batch := range(self._taken * GROUPS_PER_BATCH, (self._taken + 1) * GROUPS_PER_BATCH)):
            self._whole.difference_update(batch)
            self._taken += 1

    def weights(self) -> None:
        """There are none to come."""

    def beat(self, state: ActorState, telemetry: Telemetry) -> None:
        """Nothing is reported."""

    def works_on(self, state: ActorState) -> None:
        """Nothing is lost."""


@dataclass(frozen=True)
class Window:
    """What a loop did while it was measured. cpu_s: of its own thread. tool_s: of the environment's steps; hidden_s: of these,
    while the engine decoded."""

    tokens: int
    rollouts: int
    seconds: float
    cpu_s: float
    tool_s: float = 0.0
    hidden_s: float = 0.0


class Clock:
    """Measures what `engine` samples from now on."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine, self._sampled = engine, engine.num_sampled
        self._began, self._cpu = time.perf_counter(), time.thread_time()

    def window(self, rollouts: int, stages: Sequence[StageTime] = ()) -> Window:
        tokens, seconds = self._engine.num_sampled - self._sampled, time.perf_counter() - self._began
        tool_s, hidden_s = sum(stage.seconds for stage in stages), sum(stage.hidden_s for stage in stages)
        return Window(tokens, rollouts, seconds, time.thread_time() - self._cpu, tool_s, hidden_s)


class Actor:
    """An actor's loop that goes on from call to call."""

    def __init__(self, worker: Worker, engine: TorchEngine, credits: Credits, tools: str | None) -> None:
        self._worker, self._engine, self._credits, self._tools = worker, engine, credits, tools

    def play(self, first: int, measured: int) -> Window:
        """Let `first` groups end, so that rows are at different places, then measure until `measured` more have."""
        self._play(first)
        clock = Clock(self._engine)
        groups = self._play(measured)
        timings = [unpack(rollout.timings) for group in groups for rollout in group.rollouts]
        return clock.window(len(timings), [times[self._tools] for times in timings if self._tools in times])

    def _play(self, num_groups: int) -> list[Group]:
        groups = self._credits.groups
        groups.clear()
        while len(groups) < num_groups:
            self._worker.turn()
        return list(groups)


@contextmanager
def actor(episode: Episode, slots: int, wide: bool = False) -> Iterator[Actor]:
    """Its processes run until the end of the block."""
    engine, tokenizer = make_engine(slots, wide), from_pretrained(AutoTokenizer, MODEL)
    credits, scoring = Credits(), ScoringPool[RolloutKey]((), ScoringConfig())
    try:
        with _play_of(episode, tokenizer, credits) as play:
            work = LengthsWork(
                seed=0,
                rows=[Row(prompt, {}) for prompt in PROMPTS],
                encode=lambda row: (str(row.prompt), tokenizer(row.prompt, add_special_tokens=False)["input_ids"]),
                decode=tokenizer.decode,
                group_size=GROUP_SIZE,
                max_completion_length=TURNS * LONGEST,
                sampling=Sampling(),
                play=play,
                episode=episode,
            )
            capacity = -(-slots // GROUP_SIZE) + QUEUED_GROUPS
            client = cast(ActorClient, cast(Any, credits))
            yield Actor(Worker("actor", client, engine, scoring, work, capacity, 1.0), engine, credits, episode.tools)
    finally:
        scoring.close()


@contextmanager
def _play_of(episode: Episode, tokenizer: PreTrainedTokenizerBase, credits: Credits) -> Iterator[Play | None]:
    if episode.tools is None:
        yield None
        return
    target = f"async_rlhf.experiments.throughput.tools:{episode.tools}"
    config = EnvironmentConfig(function=target, options={"turns": episode.turns}, max_concurrency=_CONCURRENCY)
    spec = config.spec(Path.cwd())
    assert spec is not None
    pool = EpisodePool[RolloutKey](spec, config, credits.woken.set)
    try:
        yield Play(spec.name, pool, Renderer(tokenizer, chat=False), 64, TURNS * (LONGEST + len(OBSERVATION)), Score(0.0))
    finally:
        pool.close()


def make_engine(slots: int, wide: bool = False) -> TorchEngine:
    """Of the tiny model, or a wide one of random weights with its vocabulary; without end tokens."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, local_files_only=True, trust_remote_code=False)
    if wide:
        model = random_llama(WIDTH, LAYERS, 512, model.config.vocab_size)
    return TorchEngine(model, slots=slots, version=0, max_length=512)


class BatchLoop:
    """Plays one batch after the other."""

    def __init__(self, episode: Episode, slots: int) -> None:
        self._episode, self._engine, self._batches = episode, make_engine(slots), 0
        tokenizer = from_pretrained(AutoTokenizer, MODEL)
        self._prompts = [tuple(tokenizer(prompt, add_special_tokens=False)["input_ids"]) for prompt in PROMPTS]
        self._observation = tuple(tokenizer(OBSERVATION, add_special_tokens=False)["input_ids"])

    def play(self, batches: int) -> Window:
        clock = Clock(self._engine)
        for _ in range(batches):
            self._play()
        return clock.window(batches * GROUPS_PER_BATCH * GROUP_SIZE)

    def _play(self) -> None:
        first = self._batches * GROUPS_PER_BATCH
        self._batches += 1
        requests = [
            Request(
                RolloutKey(group, 0, member),
                self._prompts[group % len(PROMPTS)],
                LONGEST,
                Sampling(),
                seed=group * GROUP_SIZE + member,
                hold=True,
            )
            for group in range(first, first + GROUPS_PER_BATCH)
            for member in range(GROUP_SIZE)
        ]
        requests = self._episode.requests(requests)
        for turn in range(1, self._episode.turns):
            turns = self._generate(requests)
            asyncio.run(_all(len(requests)))
            requests = [self._after(request, turns[request.key], turn) for request in requests]
        self._generate([replace(request, hold=False) for request in requests])

    def _after(self, request: Request, written: Completion, turn: int) -> Request:
        context = (*request.context, *written.token_ids.tolist(), *self._observation)
        return replace(request, context=context, seed=turn_seed(request.seed, turn))

    def _generate(self, requests: Sequence[Request]) -> dict[RolloutKey, Completion]:
        self._engine.submit(requests)
        ended = dict[RolloutKey, Completion]()
        while self._engine.num_unfinished:
            ended |= {completion.key: completion for completion in self._engine.step()}
        return ended


async def _all(calls: int) -> None:
    await asyncio.gather(*(sleep() for _ in range(calls)))
