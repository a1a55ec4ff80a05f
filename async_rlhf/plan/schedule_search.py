"""Looks for good orders of a fused schedule by simulated annealing: `fused_schedule` says what an order is and what it takes.

A step exchanges two neighbours of one stage. Only tasks on a critical path are exchanged while the makespan is to fall: any
other exchange leaves that path, and so the makespan, as long as it was (van Laarhoven, Aarts, Lenstra, Job shop scheduling by
simulated annealing, Operations Research 40(1), 1992). A second pass exchanges any two and lowers the peak of activations
while the makespan stays. After an exchange only the times that change are computed again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from async_rlhf.plan.fused_schedule import Fusion, Orders, Preference, greedy, makespan_s, peak_bytes
from async_rlhf.plan.task_graph import TaskGraph


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best orders of a search. steps: exchanges that were tried in both passes."""

    orders: Orders
    makespan_s: float
    peak_bytes: float
    steps: int


_ANNEALED = 4
"""From so many of the greedy schedules annealing begins: the best of them is not always the one from which it ends lowest."""


def search(fusion: Fusion, *, seed: int = 0, starts: int = 300, steps: int = 20_000, memory_steps: int = 10_000) -> Found:
    """Greedy schedules of drawn preferences, annealing from the best of them, then the pass that lowers memory.

    Equal arguments give equal orders. steps: at most so many exchanges in the first pass, which ends at the lower bound;
    memory_steps: exchanges in the second one.
    """
    randoms = np.random.default_rng(seed)
    drawn = {greedy(fusion, preference) for preference in [Preference(), *(_preference(randoms) for _ in range(starts))]}
    begin = sorted(drawn, key=lambda orders: (makespan_s(fusion, orders), peak_bytes(fusion, orders), orders))[:_ANNEALED]
    graph, kept, tried = TaskGraph(fusion, begin[0]), begin[0], 0
    for orders in begin:
        graph.set_orders(orders)
        tried += shorten(graph, randoms, steps // _ANNEALED)
        kept = min(kept, graph.orders(), key=lambda orders: makespan_s(fusion, orders))
        if makespan_s(fusion, kept) <= fusion.bound_s:
            break
    graph.set_orders(kept)
    tried += lighten(graph, randoms, memory_steps)
    orders = graph.orders()
    return Found(orders=orders, makespan_s=graph.makespan, peak_bytes=peak_bytes(fusion, orders), steps=tried)


def _preference(randoms: np.random.Generator) -> Preference:
    """Which one is best depends on the sizes: they are drawn around the ones that are often good."""
    extras = (None, None, 0, 1, 2, 4)
    ratio, out, back = 2 ** randoms.uniform(-2, 2), randoms.uniform(0, 3), randoms.uniform(0, 4)
    wait = randoms.integers(0, 3) / 2
    first, second = (extras[number] for number in randoms.integers(0, len(extras), 2))
    return Preference(ratio=float(ratio), out=float(out), back=float(back), wait=float(wait), extra=(first, second))


def shorten(graph: TaskGraph, randoms: np.random.Generator, steps: int) -> int:
    """Leaves the graph at the shortest orders met; gives how many exchanges were tried.

    Accepts what is longer by Δ with probability exp(-Δ / temperature); the temperature falls from a forward task's time to a
    twentieth of it.
    """
    bound, unit = graph.fusion.bound_s, min(model.forward_s for model in graph.fusion.models)
    makespan = best = graph.makespan
    kept = graph.orders()
    tried = 0
    while tried < steps and best > bound:
        temperature = unit * 0.05 ** (tried / steps)
        tried += 1
        places = graph.critical_exchanges(randoms)
        if not places:
            break
        stage, place = places[randoms.integers(len(places))]
        undo = graph.exchange(stage, place)
        if undo is None:
            continue
        now = graph.makespan
        if now > makespan and randoms.random() >= math.exp((makespan - now) / temperature):
            graph.take_back(stage, place, undo)
            continue
        makespan = now
        if makespan < best:
            best, kept = makespan, graph.orders()
    graph.set_orders(kept)
    return tried


def lighten(graph: TaskGraph, randoms: np.random.Generator, steps: int) -> int:
    """Leaves the graph at the lowest peak of activations met, the makespan as it was; gives how many exchanges were tried."""
    limit, stages = graph.makespan, len(graph.order)
    unit = max(model.activation_bytes for model in graph.fusion.models)
    peaks = [graph.peak_bytes(stage) for stage in range(stages)]
    best, kept = (max(peaks), sum(peaks)), graph.orders()
    if unit == 0:
        return 0
    for tried in range(steps):
        temperature = unit * 0.02 ** (tried / steps)
        # Where the peak is there is most to gain; elsewhere, room is made for it.
        highest = max(peaks)
        at_peak = [stage for stage in range(stages) if peaks[stage] == highest]
        stage = at_peak[randoms.integers(len(at_peak))] if randoms.random() < 0.5 else int(randoms.integers(stages))
        row = graph.order[stage]
        pairs = [place for place in range(len(row) - 1) if graph.kind[row[place]] % 2 < graph.kind[row[place + 1]] % 2]
        # A backward task that comes before a forward one frees its activations; any other exchange opens the way to such ones.
        place = pairs[randoms.integers(len(pairs))] if randoms.random() < 0.7 else int(randoms.integers(len(row) - 1))
        undo = graph.exchange(stage, place)
        if undo is None:
            continue
        before, peaks[stage] = peaks[stage], graph.peak_bytes(stage)
        worse = max(peaks) - highest + (peaks[stage] - before) / stages
        if graph.makespan > limit or (worse > 0 and randoms.random() >= math.exp(-worse / temperature)):
            graph.take_back(stage, place, undo)
            peaks[stage] = before
        elif (max(peaks), sum(peaks)) < best:
            best, kept = (max(peaks), sum(peaks)), graph.orders()
    graph.set_orders(kept)
    return steps
