"""The stages of a run, each measured alone by its own seam: the engine, the learner's backend, the weight channel.

Loads are measured again and again as long as there is time, and of each the lower quartile counts: what else the machine does
only adds. What is generated ends where the model ends it, so decode steps are measured with as many rows as are still alive.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from async_rlhf.actors.engine import Engine, Request, RolloutKey
from async_rlhf.buffers.clients.actor import ActorClient, ActorState
from async_rlhf.buffers.clients.control import control
from async_rlhf.buffers.clients.learner import LearnerClient
from async_rlhf.buffers.config import QueueConfig
from async_rlhf.buffers.hub.hub import Hub
from async_rlhf.buffers.protocol.wire import Telemetry
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.record import Group, Rollout, Score, Span
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.experiments.planning.model.costs import Costs, Fit, fit
from async_rlhf.launch.sockets import hub_address, socket_directory

if TYPE_CHECKING:
    from async_rlhf.learner.step.controller import Controller

_DEADLINE_S = 60.0
_NEW_TOKENS = 32
_PROMPT, _SIZE = 32, 4  # of a group that is trained on: tokens, completions


_Load = TypeVar("_Load")


def repeated(loads: Sequence[_Load], seconds: float, *, least: int, most: int = 50) -> Iterator[_Load]:
    """The loads in turns until the time is up, `least` of them in any case and none more than `most` times."""
    end = time.monotonic() + seconds
    for number, load in enumerate(itertools.chain.from_iterable(itertools.repeat(loads, most))):
        if number >= least and time.monotonic() >= end:
            return
        yield load


def lower_quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


@dataclass(frozen=True)
class Step:
    """One decode step; context: mean tokens of a row."""

    rows: int
    context: float
    seconds: float


def measure_generation(
    engine: Engine, vocabulary: int, *, longest: int, slots: int, prefill_tokens: int, seconds: float
) -> tuple[Fit, Fit]:
    """Of decode steps and of prefill, in the terms of `Costs`. longest: tokens that the model can hold.

    prefill_tokens: of the engine; prompts that it computes in several steps are not used for prefill.
    """
    rows = sorted({count for count in (1, 4, 16, 64, 256, slots) if count <= slots}, reverse=True)
    new = max(1, min(_NEW_TOKENS, longest // 2))
    contexts = sorted({max(1, min(count, longest - new)) for count in (8, 32, 128, 512)})
    generate(engine, vocabulary, rows[-1], contexts[0], new)  # what is done for the first time
    steps, firsts = dict[tuple[int, int], list[Step]](), dict[tuple[int, int], list[float]]()
    for count, context in repeated([(count, context) for context in contexts for count in rows], seconds, least=2):
        found, first_s = generate(engine, vocabulary, count, context, new)
        if count * context <= prefill_tokens:
            firsts.setdefault((count, context), []).append(first_s)
        for step in found:  # those with as many rows, to the next power of two
            steps.setdefault((step.rows.bit_length(), context), []).append(step)
    decoding = fit(*columns([_middle(each) for each in steps.values()]))
    costs = Costs(decode=decoding.terms, training=(0.0, 0.0, 0.0))
    prefill = list[Step]()
    for (count, context), taken in firsts.items():
        first_s = lower_quartile(taken)  # with the first decode step
        prefill.append(Step(count, context, max(first_s - costs.decode_s(count, context + 1), first_s / 100)))
    return decoding, fit(*columns(prefill))


def columns(points: Sequence[Step]) -> tuple[list[tuple[float, ...]], list[float]]:
    return [(1, step.rows, step.rows * step.context) for step in points], [step.seconds for step in points]


def _middle(steps: Sequence[Step]) -> Step:
    """The step that is at the lower quartile."""
    return sorted(steps, key=lambda step: step.seconds / step.rows)[len(steps) // 4]


def generate(engine: Engine, vocabulary: int, rows: int, context: int, new: int) -> tuple[list[Step], float]:
    """`rows` different prompts of `context` tokens, each continued by `new` tokens at most.

    Returns the decode steps, and the seconds until every row had its first token.
    """
    prompts = np.random.default_rng([rows, context]).integers(0, vocabulary, (rows, context)).tolist()
    engine.submit(
        [Request(RolloutKey(number, 0, 0), tuple(prompt), new, Sampling(), number) for number, prompt in enumerate(prompts)]
    )
    steps, first_s, before = list[Step](), 0.0, engine.progress
    while alive := engine.num_unfinished:
        sampled, began = engine.progress, time.perf_counter()
        engine.step()
        took = time.perf_counter() - began
        if sampled - before < rows:
            first_s += took
        else:
            steps.append(Step(alive, context + len(steps) + 2, took))
    return steps, first_s


def measure_training(backend: Controller, vocabulary: int, seconds: float) -> Fit:
    """Of a learner step, in the terms of `Costs`."""
    from async_rlhf.learner.batch.rows import make_rows

    loads = [(groups, length, updates) for groups, length in ((2, 8), (8, 8), (4, 48), (16, 32)) for updates in (1, 2)]
    taken = dict[tuple[int, int, int], list[float]]()
    for load in itertools.chain(loads[:1], repeated(loads, seconds, least=4)):  # the first one is not counted
        groups, length, updates = load
        batch = [make_group(number, vocabulary, length) for number in range(groups)]
        size = groups // updates
        parts = [
            make_rows(batch[start : start + size], [[0.5, -0.5] * (_SIZE // 2)] * size, backend.row_tokens)
            for start in range(0, groups, size)
        ]
        began = time.perf_counter()
        backend.step(parts, 0)
        taken.setdefault(load, []).append(time.perf_counter() - began)
    del taken[loads[0]][0]
    points = [(load, lower_quartile(each)) for load, each in taken.items() if each]
    rows = [(1, updates, groups * (_PROMPT + _SIZE * length)) for (groups, length, updates), _ in points]
    return fit(rows, [took for _, took in points])


def make_group(number: int, vocabulary: int, length: int) -> Group:
    """`_SIZE` random completions of `length` tokens, of a prompt of `_PROMPT`."""
    random = np.random.default_rng(number)
    rollouts = tuple(
        Rollout(
            completion_ids=random.integers(0, vocabulary, length).astype(np.int32),
            logprobs=np.full(length, -np.log(vocabulary), np.float32),
            spans=(Span(0, length),),
            finish_reason="length",
            scores={"judge": Score(float(random.random()))},
        )
        for _ in range(_SIZE)
    )
    return Group(number, 0, random.integers(0, vocabulary, _PROMPT).astype(np.int32), rollouts, Sampling())


@dataclass(frozen=True)
class Published:
    """For which the learner stands still, until the hub has the set whole, for which the engine stands still."""

    copy_s: float
    travel_s: float
    adopt_s: float


def measure_publication(backend: Controller, engine: Engine, seconds: float) -> Published:
    """Through a real hub on a private socket, from the learner's backend into the engine, as in a run."""
    found = list[tuple[float, float, float]]()
    with hub() as address:
        learner = LearnerClient(address, timeout_s=_DEADLINE_S)
        actor = ActorClient(address, "actor", beat_s=1.0, timeout_s=_DEADLINE_S)
        fence = 0
        for _ in repeated([None], seconds, least=3):
            learner.register(0, 0)  # the same step under a new fence: nothing need be trained in between
            began = time.perf_counter()
            tensors, canary = backend.tensors(), backend.canary()
            publication = learner.begin_publish(0, tensors, canary)
            copied = time.perf_counter()
            publication.wait()
            travelled = time.perf_counter()
            weights = None
            while weights is None or weights.fence == fence:
                actor.poll(ActorState(0, fence, -1, ()), Telemetry(), timeout_s=0.05)
                weights = actor.weights() or weights
            fence, began_adopting = weights.fence, time.perf_counter()
            engine.load_weights(0, weights.tensors())
            engine.probe(canary.ids)
            found.append((copied - began, travelled - copied, time.perf_counter() - began_adopting))
        actor.close()
        learner.close()
    return Published(*(lower_quartile(each) for each in zip(*found, strict=True)))


@contextmanager
def hub() -> Iterator[str]:
    """A real hub in a thread, with a directory and an address of its own."""
    with socket_directory() as folder:
        address = hub_address(folder)
        bound = Bound(groups_per_batch=1, max_staleness=1, num_groups=1)
        running = threading.Thread(target=Hub(address, folder, QueueConfig(lease_s=600), bound).run, daemon=True)
        running.start()
        try:
            yield address
        finally:
            with control(address) as operator:
                operator.halt()
            running.join()
