"""Which waiting request should take a free slot? Orders of the waiting line compared by counting decode steps.

One actor decodes groups for a learner that takes no time and takes batches in strict order; every running sequence gets a
token a step. Lengths are log-normal, half of their variance (of the logarithm) the prompt's, cut at a limit. Nothing is
dropped and no token changes, whatever the order: only when a sequence begins.

- submitted: in the order of group numbers, members together. What the engine does.
- siblings: of the oldest batch, the group whose ended members were longest.
- prompt: of the oldest batch, the group whose prompt's completions were longest when it came last, an epoch ago.
- known: of the oldest batch, the request that will be longest. Nobody can know; it bounds what an order can gain.

Run as `python -m async_rlhf.experiments.throughput.dispatch [--json]`.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

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


# What sorts the waiting line, lowest first: setting, work, lengths of ended siblings, (group, member).
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


def compare(setting: Setting, batches: int, seeds: int) -> dict[str, dict[str, float]]:
    """For each order: steps until a group is whole, steps a batch (mean and p95), and the share of slots in use."""
    results = {}
    for name, order in ORDERS.items():
        works = [Work.draw(batches * setting.groups_per_batch, setting.group_size, seed) for seed in range(seeds)]
        outcomes = [simulate(setting, work, order) for work in works]
        groups, between = (np.concatenate([getattr(each, part) for each in outcomes]) for part in ("group", "batch"))
        results[name] = {
            "group_mean": round(float(groups.mean()), 1),
            "group_p95": round(float(np.percentile(groups, 95)), 1),
            "batch_mean": round(float(between.mean()), 1),
            "batch_p95": round(float(np.percentile(between, 95)), 1),
            "busy": round(float(np.mean([each.busy for each in outcomes])), 3),
        }
    return results


def main(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per setting instead of a table.")] = False,
    batches: Annotated[int, typer.Option(min=1, help="Batches of 16 groups of 8 in each run.")] = 50,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each order.")] = 4,
) -> None:
    """Count the decode steps that each order of the waiting line takes."""
    for slots in (16, 64):
        for staleness in (0, 1, 2):
            results = compare(Setting(slots, staleness), batches, seeds)
            if as_json:
                typer.echo(json.dumps({"slots": slots, "staleness": staleness, **results}))
                continue
            typer.echo(f"{slots} slots, staleness {staleness}: steps until a group is whole; steps a batch; slots in use")
            for name, found in results.items():
                group, batch = (
                    f"{found[part + '_mean']:>8.1f} p95 {found[part + '_p95']:>6.1f}" for part in ("group", "batch")
                )
                typer.echo(f"  {name:<10}{group}   {batch}   {found['busy']:.3f}")


if __name__ == "__main__":
    typer.run(main)
