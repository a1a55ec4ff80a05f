"""Lives of a learner on a run directory, with a hub that follows a script."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from async_rlhf.buffers.clients.learner import LearnerClient, SuspectGroup, TakenBatch, WeightUpload
from async_rlhf.buffers.composition import Composition
from async_rlhf.buffers.errors import HubRestartedError
from async_rlhf.buffers.protocol import packing, wire
from async_rlhf.buffers.protocol.message import Canary
from async_rlhf.buffers.record import Group
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.buffers.weights.weight_set import WeightSet
from async_rlhf.learner.checkpoint.store import complete, step_of
from async_rlhf.learner.config import CheckpointConfig, LearnerConfig, LossConfig
from async_rlhf.learner.loop.budget import Budget
from async_rlhf.learner.loop.trainer import Trainer, TrainerConfig
from async_rlhf.learner.step.controller import make_backend
from tests.learner.making import make_group, weights

STEPS = 4


class Killed(BaseException):
    """Stands for the end of the learner's process."""


class ScriptedHub:
    """Offers one batch a step, and forgets its learner (or kills it) at the calls it was told to.

    `faults`: (method, how many calls of it before) -> "forget" or "kill". It holds the learner to the protocol: the order
    of steps, a published version before the first take, batches offered again after a registration.
    """

    def __init__(
        self, batches: Sequence[Sequence[Group]], faults: Mapping[tuple[str, int], str] | None = None, ends: str = "finished"
    ) -> None:
        self.batches, self.faults, self.ends = batches, dict(faults or {}), ends
        self.calls: list[tuple[str, int]] = []
        self.targets: list[int | None] = []
        self.step = self.committed = -1
        self.begun = 0
        self.known = False
        self.published: int | None = None
        self.weights: dict[int, WeightSet] = {}
        self._taking, self._publication = threading.Event(), WeightUpload(lambda: None)
        self.suspects: Sequence[Group] = ()
        self.passed: list[int] = []

    def register(self, step: int, committed: int) -> int:
        self._taking.set()
        self._publication = WeightUpload(lambda: None)
        self.calls.append(("register", step))
        assert committed <= step and committed >= self.committed
        self.step, self.committed, self.published, self.known = step, committed, None, True
        return self.begun

    def take(self, step: int, target_staleness: int | None = None) -> TakenBatch | SuspectGroup | str:
        self._called("take", step)
        self._publication.check()
        self._taking.set()
        self.targets.append(target_staleness)
        assert step == self.step
        if suspects := [group for group in self.suspects if group.number not in self.passed]:
            header, arrays = packing.pack_group(suspects[0])
            return SuspectGroup(step, header.number, wire.encode(wire.Put(group=header), arrays))
        if step >= len(self.batches):
            return self.ends
        assert self.published is not None
        telemetry = {"queue/depth": 3.0, "actors": 2.0, "busy_s": 3.0 * (step + 1), "idle_s": 1.0 * (step + 1)}
        telemetry |= dict.fromkeys(("curriculum/new", "curriculum/hard", "curriculum/retired", "curriculum/pass_rate"), 0.5)
        return TakenBatch(step, tuple(self.batches[step]), telemetry)

    def tried(self, suspect: SuspectGroup) -> None:
        self._called("tried", suspect.step)
        self.passed.append(suspect.number)

    def trained(self, step: int) -> None:
        self._publication.wait()
        self._called("trained", step)
        assert step == self.step
        self.step = step + 1

    def begin_publish(
        self, version: int, tensors: Mapping[str, RawTensor], canary: Canary | None, read: Callable[[], object]
    ) -> WeightUpload:
        """As late as may be: the weights are read when the next batch has been taken."""
        late, failure = self.published is not None, None
        self._taking.clear()
        try:
            self._called("publish", version)
            assert version == self.step
            self.published = version
        except BaseException as error:  # noqa: BLE001 (the thread's)
            failure = error

        def work() -> None:
            try:
                if failure is not None:
                    raise failure
                assert not late or self._taking.wait(30)
                self.weights[version] = WeightSet.of(1, version, tensors)
            finally:
                read()

        self._publication = WeightUpload(work)
        if failure is not None:
            with suppress(BaseException):
                self._publication.wait()
        return self._publication

    def commit(self, step: int) -> None:
        self._called("commit", step)
        self.committed = step

    def _called(self, method: str, step: int) -> None:
        fault = self.faults.pop((method, sum(name == method for name, _ in self.calls)), None)
        self.calls.append((method, step))
        if fault == "kill":
            raise Killed
        if fault == "forget" or not self.known:
            self.known = False
            raise HubRestartedError("unregistered", "fence 1 is not the present learner's; register")


def make_batches(num_steps: int = STEPS, lag: int = 1) -> list[list[Group]]:
    return [
        [
            make_group(2 * step + n, [3, 1, 4], version=max(0, step - lag), rewards=[1.0, 0.0, 0.5 * n], source="spelling")
            for n in (0, 1)
        ]
        for step in range(num_steps)
    ]


class Life:
    """One incarnation of a learner on a run directory. settings: of `TrainerConfig`, its budget and checkpoints, and of
    `[learner]`. background: checkpoints are written while steps are made, as in a run; else a test knows what is there."""

    def __init__(
        self,
        directory: Path,
        model_dir: Path,
        hub: ScriptedHub,
        *,
        background: bool = False,
        changed: Callable[[TrainerConfig, Mapping[str, Any]], TrainerConfig] = lambda whole, values: whole,
        **settings: Any,
    ) -> None:
        def of(names: Iterable[str], **usual: Any) -> dict[str, Any]:
            return {**usual, **{name: settings.pop(name) for name in names if name in settings}}

        self.directory, self.hub = directory, hub
        parts = {
            "budget": Budget(**of(Budget.__dataclass_fields__, max_steps=STEPS)),
            "checkpoint": CheckpointConfig(**of(CheckpointConfig.model_fields, save_every=2)),
            **of(TrainerConfig.__dataclass_fields__, loss=LossConfig(), max_staleness=1, composition=Composition(),
                 max_failed_ratio=0.25, sampled_groups=1),
        }  # fmt: skip
        learner = LearnerConfig(**{"batch_size": 6, "learning_rate": 1e-3, "warmup_steps": 2, **settings})
        whole = TrainerConfig(learner=learner, **parts)
        self.backend = make_backend(model_dir, learner, whole.loss, reference=model_dir if whole.loss.needs_reference else None)
        self.trainer = Trainer(cast(LearnerClient, hub), self.backend, directory, lambda values: changed(whole, values))
        if not background:
            writer, begin = self.trainer._writer, self.trainer._writer.begin
            writer.begin = lambda *args: (begin(*args), writer.wait())[1]  # type: ignore[method-assign]

    def ran(self) -> Life:
        """To its end."""
        self.trainer.run()
        return self

    @property
    def weights(self) -> dict[str, bytes]:
        return weights(self.backend)

    def read(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / name).read_text().splitlines()]

    def saved(self) -> list[int]:
        """Steps of the checkpoints that are kept."""
        return [step_of(path) for path in complete(self.directory / "checkpoints")]

    def checkpoint(self, step: int) -> Path:
        return self.directory / "checkpoints" / f"step_{step:06d}"

    def metrics(self) -> list[dict[str, Any]]:
        return self.read("metrics.jsonl")


Live = Callable[..., Life]


def assert_each_batch_was_trained_once(life: Life, undisturbed: dict[str, bytes]) -> None:
    assert [record["step"] for record in life.metrics()] == list(range(1, STEPS + 1))
    assert [record["groups"] for record in life.metrics()] == [[2 * step, 2 * step + 1] for step in range(STEPS)]
    assert [record["step"] for record in life.read("rollouts.jsonl")] == list(range(1, STEPS + 1))
    assert life.weights == undisturbed
