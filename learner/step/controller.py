"""Rank 0 leads, the others follow: every call of the learner's loop becomes one command that all ranks carry out.

waits for   leader: what its ranks do together, at most `learner.rank_timeout_s`; follower: the next command
on close    the followers are told to end
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from async_rlhf.buffers.protocol.wire import Canary
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.learner.batch.micro_batch import MicroBatch
from async_rlhf.learner.batch.partition import Update
from async_rlhf.learner.batch.rows import Row
from async_rlhf.learner.objective.estimation import Observation
from async_rlhf.learner.objective.loss import Counts
from async_rlhf.learner.parallel.ranks import Ranks, Tensors
from async_rlhf.learner.step.rank_backend import RankBackend
from async_rlhf.learner.step.report import StepReport


class Leader:
    """A `Backend` made of all ranks; lives on rank 0."""

    def __init__(self, own: RankBackend, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks

    @property
    def row_tokens(self) -> int:
        return self._own.row_tokens

    def observe(self, rows: Sequence[Row]) -> Mapping[int, Observation]:
        parts = self._scatter("observe", self._own.cut([rows], self._ranks.size))
        found = self._own.observe_part(parts[0].batches)
        everyone = self._ranks.gather(_packed(found))
        assert everyone is not None
        return {member: seen for each in everyone for member, seen in _unpacked(each).items()}

    def step(self, updates: Sequence[Sequence[Row]], step: int) -> StepReport:
        return self._own.train(self._scatter("step", self._own.cut(updates, self._ranks.size), step=step), step)

    def rehearse(self, updates: Sequence[Sequence[Row]], step: int) -> None:
        self._own.rehearse_part(self._scatter("rehearse", self._own.cut(updates, self._ranks.size), step=step), step)

    def tensors(self) -> Mapping[str, RawTensor]:
        self._together("tensors")
        return self._own.tensors()

    def canary(self, ids: Sequence[int] = ()) -> Canary:
        self._together("canary", ids=list(ids))
        return self._own.canary(ids)

    def freeze(self) -> Callable[[Path], None]:
        self._together("freeze")
        return self._own.freeze()

    def save(self, directory: Path) -> None:
        self.freeze()(directory)

    def load(self, directory: Path) -> None:
        self._ranks.command({"do": "load", "directory": str(directory)})
        self._own.load(directory)

    def close(self) -> None:
        self._ranks.command({"do": "close"})

    def _together(self, name: str, **header: list[int]) -> None:
        if self._own.collective:
            self._ranks.command({"do": name, **header})

    def _scatter(self, name: str, parts: Sequence[Sequence[Update]], **header: int) -> list[Update]:
        """Send every rank its micro-batches; rank 0's own come back."""
        updates = [{"counts": list(vars(u.counts).values()), "number": u.number, "batches": len(u.batches)} for u in parts[0]]
        tensors = [[batch.tensors() for update in part for batch in update.batches] for part in parts]
        self._ranks.command({"do": name, "updates": updates, **header}, tensors)
        return list(parts[0])


def follow(own: RankBackend, ranks: Ranks) -> None:
    """Carry out what rank 0 says until it says close. Raises RankLostError when it falls silent."""
    while True:
        header, tensors = ranks.commanded()
        name = header["do"]
        if name == "close":
            return
        if name == "load":
            own.load(Path(header["directory"]))
        elif name == "canary":
            own.canary(header["ids"])
        elif name in ("step", "rehearse", "observe"):
            updates = _updates(header["updates"], tensors)
            if name == "step":
                own.train(updates, header["step"])
            elif name == "rehearse":
                own.rehearse_part(updates, header["step"])
            else:
                ranks.gather(_packed(own.observe_part(updates[0].batches)))
        else:
            getattr(own, {"tensors": "tensors", "freeze": "freeze"}[name])()


def _updates(headers: Sequence[Mapping[str, object]], tensors: Sequence[Tensors]) -> list[Update]:
    waiting = iter(tensors)
    updates = []
    for header in headers:
        batches = tuple(MicroBatch(**next(waiting)) for _ in range(int(str(header["batches"]))))
        counts = Counts(*header["counts"])  # type: ignore[misc]
        updates.append(Update(batches, counts, int(str(header["number"]))))
    return updates


def _packed(found: Mapping[int, Observation]) -> dict[str, torch.Tensor]:
    return {
        f"{member}.{name}": torch.from_numpy(np.ascontiguousarray(value))
        for member, seen in found.items()
        for name, value in vars(seen).items()
        if value is not None
    }


def _unpacked(tensors: Tensors) -> dict[int, Observation]:
    by_member: dict[int, dict[str, np.ndarray]] = {}
    for key, tensor in tensors.items():
        member, _, name = key.partition(".")
        by_member.setdefault(int(member), {})[name] = tensor.numpy()
    return {member: Observation(**values) for member, values in by_member.items()}
