"""Which waiting request should take a free slot? Orders of waiting requests compared by counting decode steps.

One actor decodes groups for a learner that takes no time and takes batches in strict order; every running sequence gets a
token a step. Lengths are log-normal, half of their variance (of the logarithm) the prompt's, cut at a limit. Nothing is
dropped and no token changes, whatever the order: only when a sequence begins.

- submitted: in the order of group numbers, members together. What the engine does.
- siblings: of the oldest batch, the group whose ended members were longest.
- prompt: of the oldest batch, the group whose prompt's completions were longest when it came last, an epoch ago.
- known: of the oldest batch, the request that will be longest. No engine can know; it bounds what an order can gain.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from async_rlhf.experiments.throughput.harness import Bench, Row

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Setting:
    """An actor with `slots` that holds what they take and `queued_groups` more; no batch more than `staleness` ahead."""

    slots: int
    staleness: int
    queued_groups: int = 8
    group_size: int = 8
    groups_per_batch: int = 16

    @property
    def capacity(self) -> int:
        return -(-self.slots // self.group_size) + self.queued_groups


@dataclass(frozen=True)
class Work:
    """lengths: int [groups, members]. earlier: float [groups], mean length of the prompt's completions an epoch ago."""

    lengths: Ints
    earlier: npt.NDArray[np.float64]

    @classmethod
    def draw(
        cls, num_groups: int, group_size: int, seed: int, *, median: int = 48, sigma: float = 0.8, limit: int = 256
    ) -> Work:
        random = np.random.default_rng(seed)
        of_prompt = random.normal(0, sigma / 2**0.5, (num_groups, 1))
        now, before = (
            np.clip(median * np.exp(of_prompt + random.normal(0, sigma / 2**0.5, (num_groups, group_size))), 1, limit)
            for _ in range(2)
        )
        return cls(now.astype(np.int64), before.mean(axis=1))


@dataclass(frozen=True)
class Outcome:
    """Steps from a group's submission until it is whole, steps between whole batches, and the share of slots in use."""

    group: Ints
    batch: Ints
    busy: float


# What sorts the waiting requests, lowest first: setting, work, lengths of ended siblings, (group, member).
Order = Callable[[Setting, Work, dict[int, list[int]], tuple[int, int]], Any]


def _in_batch(value: Callable[[Work, dict[int, list[int]], tuple[int, int]], float]) -> Order:
    """Oldest batch first; in it the highest value; then in the order of submission."""
    return lambda setting, work, ended, at: (at[0] // setting.groups_per_batch, -value(work, ended, at), at)


ORDERS: dict[str, Order] = {
    "submitted": lambda setting, work, ended, at: at,
    "siblings": _in_batch(lambda work, ended, at: float(np.mean(ended[at[0]])) if ended[at[0]] else 0.0),
    "prompt": _in_batch(lambda work, ended, at: float(work.earlier[at[0]])),
    "known": _in_batch(lambda work, ended, at: float(work.lengths[at])),
}


def simulate(setting: Setting, work: Work, order: Order) -> Outcome:
    """Decode all groups; their number is a whole number of batches."""
    num_groups, size = work.lengths.shape
    ended: dict[int, list[int]] = {group: [] for group in range(num_groups)}
    submitted, whole = np.zeros(num_groups, np.int64), np.full(num_groups, -1, np.int64)
    batches: list[int] = []
    waiting: list[tuple[int, int]] = []
    running: list[tuple[int, tuple[int, int]]] = []
    now = begun = num_held = 0
    while len(batches) * setting.groups_per_batch < num_groups:
        allowed = min(num_groups, (setting.staleness + 1 + len(batches)) * setting.groups_per_batch)
        while num_held < setting.capacity and begun < allowed:
            submitted[begun] = now
            waiting += [(begun, member) for member in range(size)]
            begun, num_held = begun + 1, num_held + 1
        waiting.sort(key=lambda at: order(setting, work, ended, at))
        entering = waiting[: setting.slots - len(running)]
        del waiting[: len(entering)]
        for at in entering:
            heapq.heappush(running, (now + int(work.lengths[at]), at))
        now = running[0][0]
        while running and running[0][0] == now:
            group, member = heapq.heappop(running)[1]
            ended[group].append(int(work.lengths[group, member]))
            if len(ended[group]) == size:
                whole[group], num_held = now, num_held - 1
        while len(batches) * setting.groups_per_batch < num_groups and (_batch(setting, whole, len(batches)) >= 0).all():
            batches.append(now)
    return Outcome(whole - submitted, np.diff([0, *batches]), float(work.lengths.sum() / (now * setting.slots)))


def _batch(setting: Setting, values: Ints, number: int) -> Ints:
    return values[number * setting.groups_per_batch : (number + 1) * setting.groups_per_batch]


def dispatch(
    bench: Bench,
    batches: Annotated[int | None, typer.Option(min=1, help="Batches of 16 groups of 8 in each run.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each order.")] = None,
) -> Iterator[Row]:
    """Count the decode steps a batch that each order takes, beside the order of submission."""
    for slots in (16, 64):
        for staleness in (0, 1, 2):
            setting = Setting(slots, staleness)
            outcomes = compare(setting, batches or bench.size(50, 2), seeds or bench.size(4, 1))
            submitted = float(outcomes["submitted"].batch.mean())
            for name, found in outcomes.items():
                steps = {name: [float(found.batch.mean())]} | ({} if name == "submitted" else {"submitted": [submitted]})
                p95 = {f"{part}_p95": float(np.percentile(getattr(found, part), 95)) for part in ("group", "batch")}
                load, mean = f"{slots} slots, staleness {staleness}, {name}", float(found.group.mean())
                yield Row.of(load, steps, "steps", counted=True, figures={"group_mean": mean, **p95, "busy": found.busy})


def compare(setting: Setting, batches: int, seeds: int) -> dict[str, Outcome]:
    """For each order, all runs together; every order is given the same work."""
    works = [Work.draw(batches * setting.groups_per_batch, setting.group_size, seed) for seed in range(seeds)]
    return {name: joined([simulate(setting, work, order) for work in works]) for name, order in ORDERS.items()}


def joined(runs: list[Outcome]) -> Outcome:
    """Steps of all runs; the mean share of slots in use."""
    group, batch = (np.concatenate([getattr(each, part) for each in runs]) for part in ("group", "batch"))
    return Outcome(group, batch, float(np.mean([each.busy for each in runs])))
