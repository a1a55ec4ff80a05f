"""The tasks of a fused schedule with their times, kept while neighbours of a stage change places.

A task starts when the one before it on its stage and its source have ended. `exchange` computes again only the tasks whose
start changes, in the order of their old starts, so that nearly all are computed once.
"""

from __future__ import annotations

import heapq
from itertools import accumulate

import numpy as np

from async_rlhf.plan.fused_schedule import KINDS, Fusion, Orders, end_times

Undo = list[tuple[int, float]]
"""Tasks whose start changed, each with its start before."""


class TaskGraph:
    """Tasks are numbered. Raises ConfigError where `orders` is no schedule of the fusion."""

    def __init__(self, fusion: Fusion, orders: Orders) -> None:
        self.fusion = fusion
        tasks = [
            (stage, kind, micro_batch)
            for stage in range(fusion.stages)
            for kind in KINDS
            for micro_batch in range(fusion.models[kind // 2].micro_batches)
        ]
        self._number = {task: number for number, task in enumerate(tasks)}
        self.stage = [stage for stage, _, _ in tasks]
        self.kind = [kind for _, kind, _ in tasks]
        self.duration = [fusion.duration_s(kind) for kind in self.kind]
        self.source, self.sink = [-1] * len(tasks), [-1] * len(tasks)
        for number, (stage, kind, micro_batch) in enumerate(tasks):
            if source := fusion.source(kind, stage):
                self.source[number] = self._number[*source, micro_batch]
                self.sink[self.source[number]] = number
        self._bytes = [(-1 if kind % 2 else 1) * fusion.models[kind // 2].activation_bytes for kind in self.kind]
        self.set_orders(orders)

    def set_orders(self, orders: Orders) -> None:
        ends = end_times(self.fusion, orders)
        self.order: list[list[int]] = []
        self.place, self.start = [0] * len(self.kind), [0.0] * len(self.kind)
        for stage, order in enumerate(orders):
            done = [0] * len(KINDS)
            self.order.append([])
            for place, kind in enumerate(order):
                number = self._number[stage, kind, done[kind]]
                self.order[-1].append(number)
                self.place[number] = place
                self.start[number] = ends[stage][kind][done[kind]] - self.duration[number]
                done[kind] += 1
        # By the recurrence itself, so that times that are equal are so to the last bit.
        for number in sorted(range(len(self.start)), key=self.start.__getitem__):
            self.start[number] = self._earliest(number)

    @property
    def makespan(self) -> float:
        return max((self.start[row[-1]] + self.duration[row[-1]] for row in self.order if row), default=0.0)

    def orders(self) -> Orders:
        return tuple(tuple(self.kind[number] for number in row) for row in self.order)

    def peak_bytes(self, stage: int) -> float:
        return max(accumulate(self._bytes[number] for number in self.order[stage]), default=0.0)

    def _earliest(self, number: int) -> float:
        earliest = 0.0
        place, source = self.place[number], self.source[number]
        if place:
            before = self.order[self.stage[number]][place - 1]
            earliest = self.start[before] + self.duration[before]
        if source >= 0:
            earliest = max(earliest, self.start[source] + self.duration[source])
        return earliest

    def exchange(self, stage: int, place: int) -> Undo | None:
        """Lets the task at `place` and the next one change places; None, and nothing changed, where that may close a circle.

        Two tasks of a kind are never exchanged (`fused_schedule` says why). A circle would be a way from the first task over
        its sink to the source of the second one; there is none where that source ends before the sink could.
        """
        first, second = self.order[stage][place : place + 2]
        if self.kind[first] == self.kind[second]:
            return None
        sink, source = self.sink[first], self.source[second]
        if sink >= 0 and source >= 0:
            if source == first:
                return None
            if self.start[source] + self.duration[source] >= self.start[first] + self.duration[first] + self.duration[sink]:
                return None
        self._swap(stage, place)
        return self._settle([first, second, *self.order[stage][place + 2 : place + 3]])

    def _swap(self, stage: int, place: int) -> None:
        row = self.order[stage]
        row[place], row[place + 1] = row[place + 1], row[place]
        self.place[row[place]], self.place[row[place + 1]] = place, place + 1

    def _settle(self, changed: list[int]) -> Undo:
        start, undo = self.start, []
        heap = [(start[number], number) for number in changed]
        heapq.heapify(heap)
        while heap:
            number = heapq.heappop(heap)[1]
            now = self._earliest(number)
            if now == start[number]:
                continue
            undo.append((number, start[number]))
            start[number] = now
            row, place = self.order[self.stage[number]], self.place[number] + 1
            if place < len(row):
                heapq.heappush(heap, (start[row[place]], row[place]))
            if self.sink[number] >= 0:
                heapq.heappush(heap, (start[self.sink[number]], self.sink[number]))
        return undo

    def take_back(self, stage: int, place: int, undo: Undo) -> None:
        """As before the exchange at (stage, place) that gave `undo`."""
        self._swap(stage, place)
        for number, before in reversed(undo):
            self.start[number] = before

    def critical_exchanges(self, randoms: np.random.Generator) -> list[tuple[int, int]]:
        """(stage, place) of neighbours of two kinds on one critical path, which is drawn where there are several."""
        ends = [row[-1] for row in self.order if row]
        makespan = self.makespan
        last = [number for number in ends if self.start[number] + self.duration[number] == makespan]
        draws = randoms.random(2 * len(self.order) + len(self.start)).tolist()
        path = [last[int(draws.pop() * len(last))]]
        found = []
        while self.start[number := path[-1]] > 0:
            stage, place, source = self.stage[number], self.place[number], self.source[number]
            before = self.order[stage][place - 1] if place else -1
            tight = [
                other
                for other in (before, source)
                if other >= 0 and self.start[other] + self.duration[other] == self.start[number]
            ]
            chosen = tight[int(draws.pop() * len(tight))]
            if chosen == before and before != source and self.kind[before] != self.kind[number]:
                found.append((stage, place - 1))
            path.append(chosen)
        return found
