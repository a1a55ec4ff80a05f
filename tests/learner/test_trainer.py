"""The learner's loop with a hub that follows a script: what it refuses, what it survives, what it records."""

from __future__ import annotations

import errno
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from making import VOCABULARY, make_group, make_model, make_rollout
from safetensors.torch import load_file

from async_rlhf.buffers.clients.connection import HubRestartedError
from async_rlhf.buffers.clients.learner import LearnerClient, SuspectGroup, TakenBatch
from async_rlhf.buffers.clients.publication import Publication
from async_rlhf.buffers.composition import Composition
from async_rlhf.buffers.errors import MismatchError, NonFiniteError, RecordError, RefusedError, RewardError, StalenessError
from async_rlhf.buffers.files import Disk
from async_rlhf.buffers.protocol import packing, wire
from async_rlhf.buffers.protocol.wire import Canary
from async_rlhf.buffers.record import Group, Score
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.buffers.stages import StageTime, pack, pack_ahead, stage_metrics
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.buffers.weights.weight_set import WeightSet
from async_rlhf.learner.checkpoint import resuming
from async_rlhf.learner.checkpoint.store import CheckpointError, complete, step_of
from async_rlhf.learner.config import AdvantageConfig, CheckpointConfig, GuardConfig, LearnerConfig, LossConfig
from async_rlhf.learner.loop.metrics import data_metrics
from async_rlhf.learner.loop.trainer import Trainer, TrainerConfig
from async_rlhf.learner.step.controller import make_backend
from tests.conftest import wait_for

REQUIRED = {
    "step", "version", "reward", "reward_std", "rewards/judge/mean", "rewards/failed_ratio", "frac_reward_zero_std",
    "completions/mean_length", "staleness/mean", "staleness/max", "staleness/histogram", "staleness/violations",
    "queue/depth", "is/ratio_max", "is/ess", "clip_ratio/region_mean", "entropy", "grad_norm", "loss", "step_time",
    "tokens_per_second", "idle/learner", "idle/actor", "broadcast/seconds", "num_tokens", "groups", "applied",
    "completions/masked_truncated", "num_tokens_total", "step_time_total", "reward/spelling",
    "completions/spelling/mean_length",
}  # fmt: skip
STEPS = 4


class Killed(BaseException):
    """Stands for the end of the learner's process."""


class ScriptedHub:
    """Offers one batch a step, and forgets its learner (or kills it) at the calls it was told to.

    `faults`: (method, how many calls of it before) -> "forget" or "kill". It holds the learner to the protocol: the order
    of steps, a published version before the first take, batches offered again after a registration.
    """

    def __init__(
        self,
        batches: Sequence[Sequence[Group]],
        faults: Mapping[tuple[str, int], str] | None = None,
        ends: str = "finished",
    ) -> None:
        self.batches, self.faults, self.ends = batches, dict(faults or {}), ends
        self.calls: list[tuple[str, int]] = []
        self.targets: list[int | None] = []
        self.step = self.committed = -1
        self.known = False
        self.published: int | None = None
        self.weights: dict[int, WeightSet] = {}
        self._taking, self._publication = threading.Event(), Publication(lambda: None)
        self.suspects: Sequence[Group] = ()
        self.passed: list[int] = []

    def register(self, step: int, committed: int) -> None:
        self._taking.set()
        self._publication = Publication(lambda: None)
        self.calls.append(("register", step))
        assert committed <= step and committed >= self.committed
        self.step, self.committed, self.published, self.known = step, committed, None, True

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

    def begin_publish(self, version: int, tensors: Mapping[str, RawTensor], canary: Canary | None = None) -> Publication:
        """As late as may be: the weights are read when the next batch has been taken."""
        late, failure = self.published is not None, None
        self._taking.clear()
        try:
            self._called("publish", version)
            assert version == self.step
            self.published = version
        except BaseException as error:  # noqa: BLE001 (the thread's)
            failure = error

        def read() -> None:
            if failure is not None:
                raise failure
            assert not late or self._taking.wait(30)
            self.weights[version] = WeightSet.of(1, version, tensors)

        self._publication = Publication(read)
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


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained")
    make_model("llama").save_pretrained(path)
    return path


class Life:
    """One incarnation of a learner on a run directory."""

    def __init__(
        self,
        directory: Path,
        model_dir: Path,
        hub: ScriptedHub,
        *,
        max_steps: int = STEPS,
        save_every: int = 2,
        keep_last: int = 2,
        background: bool = False,
        max_failed_ratio: float = 0.25,
        loss: LossConfig | None = None,
        max_staleness: int = 1,
        believing: Mapping[str, Any] | None = None,
        changed: Callable[[TrainerConfig, Mapping[str, Any]], TrainerConfig] | None = None,
        composition: Composition | None = None,
        **learner: Any,
    ) -> None:
        self.directory = directory
        loss = loss or LossConfig()
        config = LearnerConfig(**{"batch_size": 6, "learning_rate": 1e-3, "warmup_steps": 2, **learner})
        value_clip = (believing or {}).get("advantage", AdvantageConfig()).value_clip
        self.backend = make_backend(model_dir, config, loss, value_clip=value_clip)
        checkpoint = CheckpointConfig(save_every=save_every, keep_last=keep_last, background=background)
        whole = TrainerConfig(
            config, loss, checkpoint, max_steps, max_staleness, composition or Composition(), max_failed_ratio,
            sampled_groups=1, **(believing or {}),
        )  # fmt: skip
        self.trainer = Trainer(
            cast(LearnerClient, hub), self.backend, directory, whole, changed and (lambda values: changed(whole, values))
        )

    @property
    def weights(self) -> dict[str, bytes]:
        return {name: bytes(tensor.data) for name, tensor in self.backend.tensors().items()}

    def read(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / name).read_text().splitlines()]

    def saved(self) -> list[int]:
        """Steps of the checkpoints that are kept."""
        return [step_of(path) for path in complete(self.directory / "checkpoints")]

    def checkpoint(self, step: int) -> Path:
        return self.directory / "checkpoints" / f"step_{step:06d}"

    def metrics(self) -> list[dict[str, Any]]:
        return self.read("metrics.jsonl")


@pytest.fixture
def undisturbed(tmp_path: Path, model_dir: Path) -> dict[str, bytes]:
    """The weights after the same batches, when nothing happens on the way."""
    life = Life(tmp_path / "undisturbed", model_dir, ScriptedHub(make_batches()))
    life.trainer.run()
    return life.weights


def assert_each_batch_was_trained_once(life: Life, undisturbed: dict[str, bytes]) -> None:
    assert [record["step"] for record in life.metrics()] == list(range(1, STEPS + 1))
    assert [record["groups"] for record in life.metrics()] == [[2 * step, 2 * step + 1] for step in range(STEPS)]
    assert [record["step"] for record in life.read("rollouts.jsonl")] == list(range(1, STEPS + 1))
    assert life.weights == undisturbed


def test_it_takes_trains_publishes_and_commits_in_this_order(tmp_path: Path, model_dir: Path) -> None:
    hub = ScriptedHub(make_batches())
    life = Life(tmp_path, model_dir, hub)
    assert life.trainer.run() == "finished"
    assert hub.calls == [
        ("register", 0), ("publish", 0),
        ("take", 0), ("trained", 0), ("publish", 1),
        ("take", 1), ("trained", 1), ("publish", 2),  # a checkpoint, and one more is to be kept
        ("take", 2), ("trained", 2), ("publish", 3),
        ("take", 3), ("trained", 3), ("commit", 2),  # nobody will sample from the last version
        ("take", 4), ("commit", 4),
    ]  # fmt: skip
    assert life.trainer.step == hub.committed == STEPS


def test_every_step_is_recorded_with_everything_that_is_promised(tmp_path: Path, model_dir: Path) -> None:
    life = Life(tmp_path, model_dir, ScriptedHub(make_batches()), loss=LossConfig(kl_coef=0.01))
    life.trainer.run()
    metrics = life.metrics()
    for record in metrics:
        assert record.keys() >= REQUIRED
        assert all(record[name] is not None for name in REQUIRED)
        assert record["num_tokens"] == 16 and record["queue/depth"] == 3.0 and record["actors"] == 2.0
        assert record["idle/actor"] == pytest.approx(0.25)
        assert 0 <= record["idle/learner"] <= 1 and record["staleness/violations"] == 0
        assert record["tokens_per_second"] == pytest.approx(16 / record["step_time"])
    assert [record["staleness/histogram"] for record in metrics] == [{"0": 16}, {"1": 16}, {"1": 16}, {"1": 16}]
    assert [record["version"] for record in metrics] == [1, 2, 3, 3]
    sample = life.read("rollouts.jsonl")[2]
    assert sample["group"] == 4 and [rollout["scores"] for rollout in sample["rollouts"]] == [
        {"judge": 1.0}, {"judge": 0.0}, {"judge": 0.0},
    ]  # fmt: skip
    assert sample["rollouts"][0]["advantage"] > 0 and all(rollout["weight"] > 0 for rollout in sample["rollouts"])
    assert named_in_the_guide() - metrics[0].keys() == set()


def named_in_the_guide() -> set[str]:
    """The metrics that docs/coming-from.md calls ours."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "coming-from.md").read_text()
    tables = re.findall(r"(?ms)^\|[^|\n]* metric \|.*?(?=^[^|]|\Z)", text)
    ours = {name for table in tables for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[2])}
    assert len(ours) > 15
    return {name.replace("<name>", "judge").replace("<source>", "spelling") for name in ours}


def test_the_documentation_names_every_metric_of_a_step_and_no_other(tmp_path: Path, model_dir: Path) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text().split("## The ledger")[0]
    cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    documented = [name for cell in cells for name in re.findall(r"`(.+?)`", cell)]
    gae = {"advantage": AdvantageConfig(kind="gae")}
    lives = [
        Life(tmp_path / "plain", model_dir, ScriptedHub(make_batches(1))),
        Life(tmp_path / "pairs", model_dir, ScriptedHub(make_batches(1)), loss=LossConfig(kind="online_dpo")),
        Life(tmp_path / "critic", model_dir, ScriptedHub(make_batches(1)), believing=gae, critic={"kind": "head"}),
    ]
    recorded = set[str]()
    for life in lives:
        life.trainer.run()
        recorded |= life.metrics()[0].keys()
    of_episode = [(0, 2), (None, 3), (0, 4)]
    judge = [make_rollout(9, spans=of_episode, scores={"judge": Score(1.0, metrics={"words": 2.0})})]
    recorded |= data_metrics([Group(0, 0, judge[0].completion_ids, tuple(judge), Sampling())], [[1.0]], 0, 1).keys()
    recorded |= stage_metrics([pack({"judge": StageTime(1.0, 2.0)}) | pack_ahead({"judge": 0.5})]).keys()
    patterns = {name: re.sub(r"<\w+>", "[^/]+", name) for name in documented}
    assert len(patterns) == len(documented)
    missing = [name for name in recorded if not any(re.fullmatch(pattern, name) for pattern in patterns.values())]
    assert not missing, f"docs/metrics.md says nothing of {missing}"
    unknown = [name for name, pattern in patterns.items() if not any(re.fullmatch(pattern, real) for real in recorded)]
    assert not unknown, f"docs/metrics.md names {unknown}, which no step records"


def test_a_step_with_nothing_to_learn_from_is_recorded_with_the_same_names(tmp_path: Path, model_dir: Path) -> None:
    batches = [
        [make_group(0, [2, 2], rewards=[None, None], source="spelling")],
        [make_group(1, [2, 2], version=0, rewards=[0.0, 1.0], source="spelling")],
    ]
    life = Life(tmp_path, model_dir, ScriptedHub(batches), max_steps=2)
    life.trainer.run()
    nothing, something = life.metrics()
    assert nothing.keys() == something.keys() >= REQUIRED
    assert nothing["loss"] is None and nothing["reward"] is None and not nothing["applied"]
    assert something["applied"]


@pytest.mark.parametrize("kind", ["group_relative", "leave_one_out", "reinforce_pp"])
def test_a_batch_from_which_every_group_was_taken_out_is_a_step_of_nothing(tmp_path: Path, model_dir: Path, kind: str) -> None:
    batches = make_batches()
    batches[1] = []
    advantage = AdvantageConfig.model_validate({"kind": kind})
    life = Life(tmp_path, model_dir, ScriptedHub(batches), believing={"advantage": advantage})
    assert life.trainer.run() == "finished"
    metrics = life.metrics()
    assert [record["groups"] for record in metrics] == [[0, 1], [], [4, 5], [6, 7]]
    assert [record["applied"] for record in metrics] == [True, False, True, True]


def test_a_token_over_the_bound_is_refused_before_any_gradient(tmp_path: Path, model_dir: Path) -> None:
    batches = make_batches(lag=1)
    batches[2][1] = make_group(5, [3, 1, 4], version=0)
    hub = ScriptedHub(batches)
    life = Life(tmp_path, model_dir, hub)
    with pytest.raises(StalenessError, match=r"step 2 was given tokens of staleness 2, the bound is 1 \(groups \[5\]\)"):
        life.trainer.run()
    assert hub.calls[-1] == ("take", 2) and len(life.metrics()) == 2
    published = wait_for(lambda: hub.weights.get(2), "the weights under way")
    assert {name: bytes(tensor.data) for name, tensor in published.tensors().items()} == life.weights


def test_too_many_failed_scores_end_the_run_with_the_first_reason(tmp_path: Path, model_dir: Path) -> None:
    groups = [make_group(n, [2, 2, 2, 2], rewards=[0.0, 1.0, None, None if n else 1.0]) for n in (0, 1)]
    life = Life(tmp_path, model_dir, ScriptedHub([groups]), max_steps=1)
    before = life.weights
    with pytest.raises(
        RewardError,
        match=r"3 of 8 scores failed \(38%\); rewards.max_failed_ratio is 25%. "
        r"First: reward 'judge' of group 0: the judge fell asleep. The full traceback is in the run directory: logs/actor-",
    ):
        life.trainer.run()
    assert life.weights == before


@pytest.mark.parametrize(
    ("failed", "size", "ratio"),
    [(2, 8, 0.25), (1, 7, 0.1), (8, 8, 1.0), (0, 8, 0.0)],
    ids=["at the limit", "too few to say", "anything goes", "none"],
)
def test_failed_scores_up_to_the_limit_are_left_out(
    tmp_path: Path, model_dir: Path, failed: int, size: int, ratio: float
) -> None:
    group = make_group(0, [2] * size, rewards=[None] * failed + [float(n % 2) for n in range(size - failed)])
    life = Life(tmp_path, model_dir, ScriptedHub([[group]]), max_steps=1, max_failed_ratio=ratio)
    assert life.trainer.run() == "finished"
    assert life.metrics()[0]["rewards/failed_ratio"] == pytest.approx(failed / size)


def test_an_engine_that_samples_from_another_policy_than_the_learner_s_ends_the_run(tmp_path: Path, model_dir: Path) -> None:
    def life(name: str, version: int, limit: float) -> Life:
        batch = [make_group(n, [12] * 6, version=version, rewards=[0.0, 1.0] * 3) for n in (0, 1)]
        return Life(tmp_path / name, model_dir, ScriptedHub([[], batch]), max_steps=2, believing={"mismatch_limit": limit})

    ended = "finished"
    assert life("raised", 1, 100.0).trainer.run() == ended
    assert life("of older weights", 0, 0.01).trainer.run() == ended  # a difference that staleness makes
    with pytest.raises(
        MismatchError, match=r"differ by \d.* nats on average .* the limit is 0\.01.*raise engine\.mismatch_limit"
    ):
        life("fresh", 1, 0.01).trainer.run()


def poisoned(group: Group) -> Group:
    """The same group with a log-probability that is no number, past the door that would have refused it."""
    group.rollouts[0].logprobs[0] = float("nan")
    return group


def test_so_many_refused_steps_in_a_row_end_the_run(tmp_path: Path, model_dir: Path) -> None:
    batches = make_batches(6)
    for step in (0, 2, 3, 4):
        batches[step] = [poisoned(group) for group in batches[step]]
    life = Life(tmp_path, model_dir, ScriptedHub(batches), max_steps=6, max_nonfinite_steps=3)
    with pytest.raises(NonFiniteError, match=r"3 steps in a row .* \[8, 9\]. Lower learner.learning_rate"):
        life.trainer.run()
    metrics = life.metrics()
    assert [record["applied"] for record in metrics] == [False, True, False, False]
    assert metrics[0]["loss"] is None and metrics[1]["loss"] is not None


@pytest.mark.parametrize("max_steps", [1, 4])
def test_weights_that_are_no_numbers_any_more_are_neither_published_nor_saved(
    tmp_path: Path, model_dir: Path, max_steps: int
) -> None:
    hub = ScriptedHub(make_batches())
    life = Life(tmp_path, model_dir, hub, max_steps=max_steps, save_every=1, learning_rate=1e38, warmup_steps=0)
    with pytest.raises(NonFiniteError, match=r"the weights after step 1 cannot be used.*not finite.*learner\.learning_rate"):
        life.trainer.run()
    assert hub.published == 0 and life.saved() == []


FORGETS = [
    *[("take", n) for n in range(STEPS + 1)],
    *[("trained", n) for n in range(STEPS)],
    *[("publish", n) for n in range(STEPS)],
    *[("commit", n) for n in range(2)],
]


@pytest.mark.parametrize("fault", FORGETS, ids=lambda fault: f"{fault[0]} {fault[1]}")
def test_a_hub_that_was_restarted_is_told_where_we_are_and_no_batch_is_trained_twice(
    tmp_path: Path, model_dir: Path, undisturbed: dict[str, bytes], fault: tuple[str, int]
) -> None:
    hub = ScriptedHub(make_batches(), {fault: "forget"})
    life = Life(tmp_path / "life", model_dir, hub)
    assert life.trainer.run() == "finished"
    assert not hub.faults
    assert_each_batch_was_trained_once(life, undisturbed)
    assert hub.committed == hub.step == STEPS
    registrations = [n for n, (name, _) in enumerate(hub.calls) if name == "register"]
    assert len(registrations) == 2
    again = registrations[1]
    # A hub that does not know us is told nothing else, but for what was said before a publication under way has found it out.
    first = max(0, again - 3) if fault[0] == "publish" else again - 1
    assert fault[0] in {name for name, _ in hub.calls[first:again]}
    if again == len(hub.calls) - 1:
        assert fault == ("commit", 1)  # there is nothing more to say
        return
    step = hub.calls[again][1]
    # nothing is said between the registration and the publication, and then the batch is taken that was next
    expected = [("take", step)] if step == STEPS else [("publish", step), ("take", step)]
    assert hub.calls[again + 1 : again + 1 + len(expected)] == expected


def test_a_hub_that_restarts_again_and_again_is_followed(
    tmp_path: Path, model_dir: Path, undisturbed: dict[str, bytes]
) -> None:
    faults = {(method, n): "forget" for method in ("take", "trained", "publish", "commit") for n in range(0, 12, 2)}
    life = Life(tmp_path / "life", model_dir, ScriptedHub(make_batches(), faults))
    life.trainer.run()
    assert_each_batch_was_trained_once(life, undisturbed)


KILLS = [fault for fault in FORGETS if fault != ("take", STEPS)]


@pytest.mark.parametrize("fault", KILLS, ids=lambda fault: f"{fault[0]} {fault[1]}")
def test_a_learner_that_died_is_succeeded_without_a_trace(
    tmp_path: Path, model_dir: Path, undisturbed: dict[str, bytes], fault: tuple[str, int]
) -> None:
    first = Life(tmp_path / "life", model_dir, ScriptedHub(make_batches(), {fault: "kill"}))
    with pytest.raises(Killed):
        first.trainer.run()
    second = Life(tmp_path / "life", model_dir, ScriptedHub(make_batches()))
    assert second.trainer.step in (0, 2, 4)
    second.trainer.run()
    assert_each_batch_was_trained_once(second, undisturbed)


def test_killed_while_it_writes_a_checkpoint_it_goes_on_from_the_one_before(
    tmp_path: Path, model_dir: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Life(tmp_path / "life", model_dir, ScriptedHub(make_batches()))
    freeze = first.backend.snapshot

    def killed_in_the_second() -> Callable[[Path], None]:
        write = freeze()

        def killed(directory: Path) -> None:
            (directory / "model").mkdir()
            raise Killed

        return killed if first.trainer.step == 4 else write

    monkeypatch.setattr(first.backend, "snapshot", killed_in_the_second)
    with pytest.raises(Killed):
        first.trainer.run()
    second = Life(tmp_path / "life", model_dir, ScriptedHub(make_batches()))
    assert second.trainer.step == 2
    second.trainer.run()
    assert_each_batch_was_trained_once(second, undisturbed)


def test_the_recorded_version_is_the_newest_begun_also_after_a_resume_between_two(tmp_path: Path, model_dir: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 12, "save_every": 3, "publish_every": 5}
    batches = [[make_group(step, [2, 3], version=step)] for step in range(12)]
    first = ScriptedHub(batches[:3])
    Life(tmp_path, model_dir, first, **settings).trainer.run()
    second = ScriptedHub(batches, {("publish", 2): "forget"})  # the publication of 10 is lost, and made up for at the take
    life = Life(tmp_path, model_dir, second, **settings)
    life.trainer.run()
    versions = {record["step"]: record["version"] for record in life.metrics()}
    assert sorted(first.weights) == [0] and sorted(second.weights) == [3, 5, 10]
    assert versions == {1: 0, 2: 0, 3: 0, 4: 3, 5: 5, 6: 5, 7: 5, 8: 5, 9: 5, 10: 10, 11: 10, 12: 10}


def test_a_drained_run_ends_with_a_checkpoint_of_its_last_step(tmp_path: Path, model_dir: Path) -> None:
    hub = ScriptedHub(make_batches()[:3])
    life = Life(tmp_path, model_dir, hub)
    life.trainer.run()
    assert hub.committed == 3
    resumed = Life(tmp_path, model_dir, ScriptedHub(make_batches()))
    assert resumed.trainer.step == 3 and resumed.weights == life.weights
    resumed.trainer.run()


def test_a_drained_run_gives_up_nothing_that_a_kept_checkpoint_needs(tmp_path: Path, model_dir: Path) -> None:
    hub = ScriptedHub(make_batches(5), ends="drained")
    life = Life(tmp_path, model_dir, hub, max_steps=9)
    assert life.trainer.run() == "drained"
    assert (life.saved(), hub.committed) == ([4, 5], 4)


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_groups_are_given_up_when_no_kept_checkpoint_needs_them(tmp_path: Path, model_dir: Path, keep_last: int) -> None:
    hub = ScriptedHub(make_batches(9), {("take", 9): "kill"})
    life = Life(tmp_path, model_dir, hub, max_steps=20, keep_last=keep_last)
    with pytest.raises(Killed):
        life.trainer.run()
    assert life.saved() == [2, 4, 6, 8][-keep_last:]
    assert hub.committed == life.saved()[0]


@pytest.mark.parametrize("step", [0, 2, 4])
def test_a_learner_goes_back_to_any_step_it_keeps_and_trains_the_same_again(tmp_path: Path, model_dir: Path, step: int) -> None:
    whole = Life(tmp_path / "whole", model_dir, ScriptedHub(make_batches(6)), max_steps=6)
    whole.trainer.run()
    hub = ScriptedHub(make_batches(6), {("take", 5): "kill"})
    first = Life(tmp_path / "life", model_dir, hub, max_steps=6, keep_last=3)
    with pytest.raises(Killed):
        first.trainer.run()
    assert first.saved() == [2, 4] and hub.committed == 0
    resuming.go_back(first.directory, step)
    second = Life(tmp_path / "life", model_dir, ScriptedHub(make_batches(6)), max_steps=6, keep_last=3)
    assert second.trainer.step == step
    second.trainer.run()
    assert second.weights == whole.weights
    assert [record["groups"] for record in second.metrics()] == [record["groups"] for record in whole.metrics()]


def test_nothing_recorded_is_cut_off_before_the_hub_has_taken_the_learner(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Life(tmp_path, model_dir, ScriptedHub(make_batches(), {("take", 3): "kill"}))
    with pytest.raises(Killed):
        first.trainer.run()
    resuming.go_back(tmp_path, 0)

    def refuse(step: int, committed: int) -> None:
        raise RefusedError("committed", f"a learner cannot resume from step {step}")

    hub = ScriptedHub(make_batches())
    monkeypatch.setattr(hub, "register", refuse)
    with pytest.raises(RefusedError, match="cannot resume from step 0"):
        Life(tmp_path, model_dir, hub).trainer.run()
    assert [record["step"] for record in first.metrics()] == [1, 2, 3]
    assert [record["step"] for record in first.read("rollouts.jsonl")] == [1, 2, 3]


def test_a_step_of_several_updates_deals_out_whole_groups(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path, model_dir, ScriptedHub(make_batches()), updates_per_step=2, row_tokens=1)
    seen: list[list[set[int]]] = []
    step = life.backend.step

    def spy(updates: Any, number: int) -> Any:
        seen.append([{row.group.number for row in rows} for rows in updates])
        return step(updates, number)

    monkeypatch.setattr(life.backend, "step", spy)
    life.trainer.run()
    assert seen == [[{2 * n}, {2 * n + 1}] for n in range(STEPS)]


def test_the_guard_tells_the_hub_what_it_aims_at_and_says_why(
    tmp_path: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub = ScriptedHub(make_batches(lag=1))
    guard = GuardConfig(enabled=True, min_ess=0.999, patience=2)  # made-up log-probabilities are far from the model's
    with caplog.at_level("INFO"):
        Life(tmp_path, model_dir, hub, max_staleness=3, believing={"guard": guard, "lowest_staleness": 1}).trainer.run()
    assert hub.targets == [3, 3, 2, 2, 1]
    moves = [message for message in caplog.messages if "aiming at staleness" in message]
    assert len(moves) == 2 and "aiming at staleness 2 instead of 3: 2 steps in a row: is/ess" in moves[0]


def test_without_a_guard_nothing_is_said_of_an_aim(tmp_path: Path, model_dir: Path) -> None:
    hub = ScriptedHub(make_batches())
    Life(tmp_path, model_dir, hub).trainer.run()
    assert set(hub.targets) == {None}


def test_groups_that_say_nothing_are_left_out_and_counted(tmp_path: Path, model_dir: Path) -> None:
    batches = [[make_group(0, [3, 1], rewards=[1.0, 1.0]), make_group(1, [2, 2], rewards=[0.0, 1.0])]]
    dropping = {"advantage": AdvantageConfig(constant_groups="drop")}
    life = Life(tmp_path, model_dir, ScriptedHub(batches), max_steps=1, believing=dropping)
    life.trainer.run()
    (record,) = life.metrics()
    assert record["groups/zero_advantage"] == 1
    assert sum(point["tokens"] for point in record["drift/by_staleness"].values()) == 4


def cut(group: Group, *members: int) -> Group:
    """The group with these members cut at their greatest length."""
    rollouts = [replace(r, finish_reason="length") if m in members else r for m, r in enumerate(group.rollouts)]
    return replace(group, rollouts=tuple(rollouts))


def without(group: Group, *members: int) -> Group:
    """The group with the scores of these members failed."""
    failed = {"judge": Score(failure="left out")}
    rollouts = [replace(r, scores=failed) if m in members else r for m, r in enumerate(group.rollouts)]
    return replace(group, rollouts=tuple(rollouts))


@pytest.mark.parametrize("kind", ["leave_one_out", "reinforce_pp"])
def test_masked_out_of_loss_and_baseline_a_cut_completion_trains_as_one_that_was_never_scored(
    tmp_path: Path, model_dir: Path, kind: str
) -> None:
    cuts = {0: (1,), 3: (0, 1, 2), 5: (2,)}  # group 3 is cut whole
    loss, believing = (
        LossConfig(mask_truncated="loss and baseline"),
        {"advantage": AdvantageConfig.model_validate({"kind": kind})},
    )
    as_cut = [[cut(group, *cuts.get(group.number, ())) for group in batch] for batch in make_batches()]
    as_failed = [[without(group, *cuts.get(group.number, ())) for group in batch] for batch in make_batches()]
    life = Life(tmp_path / "cut", model_dir, ScriptedHub(as_cut), loss=loss, believing=believing)
    other = Life(tmp_path / "failed", model_dir, ScriptedHub(as_failed), believing=believing, max_failed_ratio=1.0)
    for each in (life, other):
        each.trainer.run()
    assert life.weights == other.weights
    records = life.metrics()
    assert [record["completions/masked_truncated"] for record in records] == [1, 3, 1, 0]
    assert [record["groups/zero_advantage"] for record in records] == [0, 1, 0, 0]
    assert records[1]["reward"] == pytest.approx(2.5 / 6)  # what was cut has its reward all the same


def test_batches_in_which_all_was_cut_are_steps_of_nothing_until_they_end_the_run(tmp_path: Path, model_dir: Path) -> None:
    batches = [[cut(group, 0, 1, 2) for group in batch] for batch in make_batches()]
    for mask in ("loss", "loss and baseline"):
        loss, believing = LossConfig(mask_truncated=mask), {"advantage": AdvantageConfig(max_constant_batches=3)}  # type: ignore[arg-type]
        life = Life(tmp_path / mask, model_dir, ScriptedHub(batches), loss=loss, believing=believing)
        with pytest.raises(RewardError, match=r"3 batches in a row.*6 of its 6 completions were cut.*max_completion_length"):
            life.trainer.run()
        assert [record["applied"] for record in life.metrics()] == [False, False]


def test_so_many_batches_in_a_row_that_say_nothing_end_the_run(tmp_path: Path, model_dir: Path) -> None:
    batches = [[make_group(n, [2, 2], version=max(0, n - 1), rewards=[1.0, 1.0])] for n in range(4)]
    dropping = {"advantage": AdvantageConfig(constant_groups="drop", max_constant_batches=3)}
    life = Life(tmp_path, model_dir, ScriptedHub(batches), believing=dropping)
    with pytest.raises(RewardError, match=r"3 batches in a row had no group.*the groups \[2\].*too easy or all too hard"):
        life.trainer.run()
    assert life.trainer.step == 2


@pytest.mark.parametrize(("max_steps", "limit"), [(4, 3), (2, 2)])
def test_a_reward_that_always_returns_none_ends_the_run(tmp_path: Path, model_dir: Path, max_steps: int, limit: int) -> None:
    groups = [make_group(n, [2, 2], version=max(0, n - 1)) for n in range(4)]
    silent = {"judge": Score()}
    batches = [[replace(g, rollouts=tuple(replace(r, scores=silent) for r in g.rollouts))] for g in groups]
    thrice = {"advantage": AdvantageConfig(max_constant_batches=3)}
    life = Life(tmp_path, model_dir, ScriptedHub(batches), max_steps=max_steps, believing=thrice)
    with pytest.raises(RewardError, match=rf"{limit} batches in a row had no score: judge returned None .*`return`"):
        life.trainer.run()
    assert life.trainer.step == limit - 1


@pytest.mark.parametrize(
    "loss",
    [
        LossConfig(kind="online_dpo"),
        LossConfig(kind="best_of_n"),
        LossConfig(kind="gspo", kl_coef=0.1),
        LossConfig(second_moment=0.04, proximal="interpolate"),
        LossConfig(kl_coef=0.1, kl_in="reward", entropy_coef=0.01),
    ],
    ids=lambda loss: f"{loss.kind}-{loss.kl_in}",
)
def test_every_kind_of_belief_reaches_the_gradient_of_a_real_model(tmp_path: Path, model_dir: Path, loss: LossConfig) -> None:
    life = Life(tmp_path, model_dir, ScriptedHub(make_batches()), loss=loss)
    before = life.weights
    life.trainer.run()
    assert all(record["applied"] for record in life.metrics())
    assert life.weights != before


def test_in_the_background_a_checkpoint_holds_the_step_it_was_begun_at_however_long_it_takes(
    tmp_path: Path, model_dir: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path / "life", model_dir, ScriptedHub(make_batches()), background=True)
    freeze, trained, saved = life.backend.snapshot, threading.Event(), []
    monkeypatch.setattr(life.trainer, "_record", after(life.trainer._record, lambda: life.trainer.step == 3 and trained.set()))

    def slow() -> Callable[[Path], None]:
        weights, write = life.weights, freeze()

        def once_another_step_was_made(directory: Path) -> None:
            assert trained.wait(60)
            write(directory)
            saved.append((weights, load_file(directory / "model" / "model.safetensors")))

        return once_another_step_was_made

    monkeypatch.setattr(life.backend, "snapshot", slow)
    assert life.trainer.run() == "finished"
    assert len(saved) == 2
    for weights, written in saved:
        assert {name: written[name].numpy().tobytes() for name in weights} == weights
    assert_each_batch_was_trained_once(life, undisturbed)


def after(function: Callable[..., None], then: Callable[[], object]) -> Callable[..., None]:
    def both(*arguments: Any) -> None:
        function(*arguments)
        then()

    return both


def test_the_record_of_its_steps_is_durable_before_a_checkpoint_is(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path, model_dir, ScriptedHub(make_batches()))
    synced: list[tuple[str, int]] = []
    sync = Disk.sync_path

    def spy(self: Disk, path: Path) -> None:
        synced.append((path.name, len(life.read("metrics.jsonl"))))
        sync(self, path)

    monkeypatch.setattr(Disk, "sync_path", spy)
    life.trainer.run()
    for step in (2, 4):
        named = synced.index((f".tmp-step_{step:06d}", step))
        for record in ("metrics.jsonl", "rollouts.jsonl", tmp_path.name):
            assert (record, step) in synced[:named], synced


def test_the_rewards_of_a_source_are_weighted_as_it_says(tmp_path: Path, model_dir: Path) -> None:
    rule = Composition({"judge": 7.0}, by_source={"spelling": {"judge": 2.0}, "chat": {"judge": 3.0}})
    life = Life(tmp_path, model_dir, ScriptedHub(make_batches(1)), max_steps=1, composition=rule)
    life.trainer.run()
    assert life.metrics()[0]["reward"] == pytest.approx(2.0 * (2 * 1.0 + 0.5) / 6)


def test_a_full_disk_is_counted_and_the_next_checkpoint_is_tried(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = ScriptedHub(make_batches())
    life = Life(tmp_path, model_dir, hub)
    freeze = life.backend.snapshot

    def full_at_first() -> Callable[[Path], None]:
        def write(directory: Path) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        return write if life.trainer.step == 2 else freeze()

    monkeypatch.setattr(life.backend, "snapshot", full_at_first)
    assert life.trainer.run() == "finished"
    assert [record["checkpoint/failed"] for record in life.metrics()] == [0, 0, 1, 1]
    assert life.saved() == [4]


def test_a_last_checkpoint_that_cannot_be_written_ends_the_run_with_the_reason(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path, model_dir, ScriptedHub(make_batches()))
    freeze = life.backend.snapshot

    def full_at_last() -> Callable[[Path], None]:
        def write(directory: Path) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        return write if life.trainer.step == 4 else freeze()

    monkeypatch.setattr(life.backend, "snapshot", full_at_last)
    with pytest.raises(CheckpointError, match=r"step 4 could not be written: .*No space left.*--resume goes on from step 2"):
        life.trainer.run()


def test_epochs_go_over_the_batch_again_around_the_same_policy(tmp_path: Path, model_dir: Path) -> None:
    lives = [Life(tmp_path / str(epochs), model_dir, ScriptedHub(make_batches()), epochs=epochs) for epochs in (1, 2)]
    for life in lives:
        life.trainer.run()
    assert lives[0].weights != lives[1].weights
    assert all(record["clip_ratio/region_mean"] == 0 for record in lives[0].metrics())
    assert any(record["clip_ratio/region_mean"] > 0 for record in lives[1].metrics())


@pytest.mark.parametrize("kind", ["gae", "v_trace", "traced"])
def test_with_a_critic_policy_and_values_learn_from_token_advantages(tmp_path: Path, model_dir: Path, kind: str) -> None:
    advantage = AdvantageConfig.model_validate({"kind": kind})
    critic = {"kind": "head", "learning_rate": 1e-2}
    hub = ScriptedHub(make_batches())
    life = Life(tmp_path, model_dir, hub, believing={"advantage": advantage}, critic=critic)
    life.trainer.run()
    metrics = life.metrics()
    assert all(record["applied"] for record in metrics)
    assert metrics[0]["critic/value_mean"] == 0.0  # its last layer begins at zero
    assert all(record["critic/loss"] > 0 and record["critic/value_mean"] != 0.0 for record in metrics[1:])


TRIED: dict[str, dict[str, Any]] = {
    "plain": {},
    "several updates and passes": {"updates_per_step": 2, "epochs": 2},
    "a critic": {"critic": {"kind": "head", "learning_rate": 1e-2}, "believing": {"advantage": AdvantageConfig(kind="gae")}},
    "a reference in the reward": {"loss": LossConfig(kl_coef=0.1, kl_in="reward", entropy_coef=0.01)},
    "running statistics": {"composition": Composition(normalise=("judge",))},
    "adapters": {"lora": {"rank": 2, "alpha": 4.0}},
    "constant groups": {"believing": {"advantage": AdvantageConfig(constant_groups="drop", max_constant_batches=2)}},
}


@pytest.mark.parametrize("settings", TRIED.values(), ids=TRIED)
def test_a_run_in_which_groups_are_tried_has_the_bits_of_one_in_which_none_is(
    tmp_path: Path, model_dir: Path, settings: dict[str, Any]
) -> None:
    batches = make_batches()
    batches[1] = [make_group(n, [3, 1, 4], version=0, rewards=[1.0, 1.0, 1.0]) for n in (2, 3)]
    tried = [*batches[2], batches[1][0], make_group(9, [2, 2], rewards=[None, None]), poisoned(make_group(8, [3, 1, 4]))]

    class Trying(ScriptedHub):
        def take(self, step: int, target_staleness: int | None = None) -> TakenBatch | SuspectGroup | str:
            states = torch.get_rng_state()
            for group in tried:
                lives[1].trainer.try_group(group)
            assert torch.equal(torch.get_rng_state(), states)
            assert all(p.grad is None for p in lives[1].backend.machine._learning())
            return super().take(step, target_staleness)

    lives = [
        Life(tmp_path / str(number), model_dir, hub, **settings)
        for number, hub in enumerate((ScriptedHub(batches), Trying(batches)))
    ]
    for life in lives:
        life.trainer.run()
    assert lives[0].weights == lives[1].weights
    for step in (2, 4):
        whole, other = (
            {path.name: path.read_bytes() for path in life.checkpoint(step).rglob("*") if path.is_file()} for life in lives
        )
        assert whole.keys() == other.keys() and whole == other
    timed = {"time", "step_time", "step_time_total", "tokens_per_second", "samples_per_second"}
    for one, two in zip(lives[0].metrics(), lives[1].metrics(), strict=True):
        assert {name for name in one if one[name] != two[name] and "/seconds" not in name and "_seconds" not in name} <= {
            *timed,
            "idle/learner",
        }


def test_groups_that_are_suspected_are_tried_and_named_before_the_batch_is_taken(
    tmp_path: Path, model_dir: Path, undisturbed: dict[str, bytes]
) -> None:
    hub = ScriptedHub(make_batches(), {("tried", 1): "forget"})
    hub.suspects = make_batches()[0]
    life = Life(tmp_path / "life", model_dir, hub)
    life.trainer.run()
    assert hub.passed == [0, 1]
    assert hub.calls[:10] == [
        ("register", 0), ("publish", 0), ("take", 0), ("tried", 0), ("take", 0), ("tried", 0),
        ("register", 0), ("publish", 0), ("take", 0), ("tried", 0),
    ]  # fmt: skip
    assert_each_batch_was_trained_once(life, undisturbed)


def test_a_suspected_group_that_ends_the_learner_is_not_said_to_have_passed(tmp_path: Path, model_dir: Path) -> None:
    hub = ScriptedHub(make_batches())
    hub.suspects = [make_batches()[0][0], other_tokens(make_batches()[0][1])]
    with pytest.raises(RecordError, match=f"group 1 has token {VOCABULARY}"):
        Life(tmp_path, model_dir, hub).trainer.run()
    assert hub.passed == [0]


def other_tokens(group: Group) -> Group:
    group.rollouts[1].completion_ids[0] = VOCABULARY
    return group


def no_scores(group: Group) -> Group:
    cast(dict[str, Score], group.rollouts[1].scores).clear()
    return group


@pytest.mark.parametrize(
    ("spoil", "raised", "says"),
    [
        (other_tokens, RecordError, rf"group 4 has token {VOCABULARY}, the model has those from 0 to {VOCABULARY - 1}"),
        (no_scores, KeyError, "judge"),
    ],
)
def test_what_a_step_would_end_with_a_try_ends_with_and_names_the_groups(
    tmp_path: Path, model_dir: Path, spoil: Callable[[Group], Group], raised: type[Exception], says: str
) -> None:
    batches = make_batches()
    batches[2][0] = spoil(batches[2][0])
    life = Life(tmp_path, model_dir, ScriptedHub(batches))
    with pytest.raises(raised, match=says) as error:
        life.trainer.run()
    assert error.value.__notes__ == ["at step 2, with the groups [4, 5]"]
    before = life.weights
    with pytest.raises(raised, match=says) as error:
        life.trainer.try_group(batches[2][0])
    assert error.value.__notes__ == ["at step 2, with the groups [4]"]
    life.trainer.try_group(batches[2][1])
    assert life.weights == before
