"""The actor's loop where the hub changes its mind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from async_rlhf.actors.config import GenerationConfig, ScoringConfig
from async_rlhf.actors.engine import Engine, RolloutKey
from async_rlhf.actors.environments import Reply
from async_rlhf.actors.loop.context import Environment, Environments, RunContext
from async_rlhf.actors.loop.worker import Decoding, Worker
from async_rlhf.actors.prompts import Row
from async_rlhf.actors.rewards import resolve
from async_rlhf.actors.scoring.pool import ScoringPool
from async_rlhf.actors.torch_engine.loading import load_engine
from async_rlhf.actors.torch_engine.settings import TorchEngineConfig
from async_rlhf.buffers.clients.actor import ActorClient, ActorState
from async_rlhf.buffers.errors import WeightsError
from async_rlhf.buffers.protocol.wire import CreditItem, Telemetry
from async_rlhf.buffers.record import Group
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.buffers.weights.weight_set import WeightSet
from async_rlhf.learner.config import LearnerConfig, LossConfig
from async_rlhf.learner.step.controller import make_backend
from tests.actors.scripted import Characters, ScriptedPool, Talker, environment_of
from tests.actors.vllm_model import SHIPPED, make_model, save_model
from tests.conftest import wait_for


class ScriptedHub:
    """Gives one batch of credits a poll, then waits for `wanted` puts and stops the actor."""

    def __init__(self, script: list[list[CreditItem]], wanted: int, weights: Mapping[int, WeightSet] | None = None) -> None:
        self._script, self._wanted, self._weights = script, wanted, dict(weights or {})
        self._polls = 0
        self.states: list[ActorState] = []
        self.works: list[ActorState] = []
        self.groups: list[Group] = []
        self.unacknowledged: list[tuple[int, int]] = []
        self.stop_reason: str | None = None

    def poll(self, state: ActorState, telemetry: Telemetry, timeout_s: float = 0.0) -> None:
        self._polls += 1
        if len(self.groups) >= self._wanted:
            self.stop_reason = "enough"

    def credits(self) -> Sequence[CreditItem]:
        return self._script.pop(0) if self._script else []

    def weights(self) -> WeightSet | None:
        """The set that comes with this poll."""
        return self._weights.pop(self._polls, None)

    def put(self, group: Group, *, constant: bool) -> None:
        self.groups.append(group)

    def beat(self, state: ActorState, telemetry: Telemetry) -> None:
        self.states.append(state)

    def works_on(self, state: ActorState) -> None:
        self.works.append(state)


class Crosses:
    """A tokenizer whose prompt is two tokens, and each token a cross."""

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [20, 21]}

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return "x" * len(ids)


@contextmanager
def worker(
    hub: ScriptedHub,
    engine: Engine | None = None,
    *,
    slots: int = 8,
    group_size: int = 2,
    length: int = 12,
    pool: ScoringPool[RolloutKey] | None = None,
    environment: Environment | None = None,
    partial_every: int = 0,
    **settings: Any,
) -> Iterator[Worker]:
    generation = GenerationConfig(group_size=group_size, max_completion_length=length, **settings)
    context = RunContext(
        0,
        [Row("ab", {"answer": "ba"})],
        generation,
        cast(Any, Crosses()),
        partial_every=partial_every,
        environments=Environments(environment),
    )
    engine = engine or load_engine(str(SHIPPED), TorchEngineConfig(slots=slots), version=0)
    pool = pool or ScoringPool[RolloutKey](resolve(["exact"], Path.cwd()), ScoringConfig())
    try:
        yield Worker("a", cast(ActorClient, cast(Any, hub)), engine, pool, context, 4, 1e-3)
    finally:
        pool.close(60.0)


def credit(number: int, attempt: int = 0) -> CreditItem:
    return CreditItem(number=number, attempt=attempt, lowest_version=0)


@pytest.mark.parametrize(
    ("script", "made"),
    [
        ([[credit(0), credit(1)], [], [credit(0, attempt=1)]], [(0, 1), (1, 0)]),
        ([[credit(0), credit(0, attempt=1)]], [(0, 1)]),
    ],
    ids=["while it is made", "at once"],
)
def test_a_group_credited_again_is_made_once_by_the_newest_attempt(
    script: list[list[CreditItem]], made: list[tuple[int, int]]
) -> None:
    hub = ScriptedHub(script, wanted=len(made))
    with worker(hub) as actor:
        assert actor.run() == "enough"
    assert sorted((group.number, group.attempt) for group in hub.groups) == made
    assert all(len(group.rollouts) == 2 for group in hub.groups)


def test_the_progress_of_a_group_rises_with_every_token_and_score_and_stands_still_with_the_engine() -> None:
    hub = ScriptedHub([[credit(0)]], wanted=1)
    with worker(hub) as actor:
        actor.run()
    amounts = [amount for state in hub.works for number, amount in state.progress if number == 0]
    assert len(set(amounts)) > 3 and amounts == sorted(amounts), amounts
    assert hub.works[-1].progress == ()


@pytest.mark.parametrize("on_update", ["keep", "interrupt", "finish"])
def test_weights_that_come_in_mid_group_are_served_as_configured_and_never_before_the_canary(
    on_update: Any, tmp_path: Path
) -> None:
    directory = save_model(make_model(0), tmp_path / "model")
    backend = make_backend(directory, LearnerConfig(), LossConfig())
    newer = WeightSet.of(2, 1, backend.tensors(), backend.canary())
    hub = ScriptedHub([[credit(number) for number in range(4)]], wanted=4, weights={6: newer})
    engine = load_engine(str(directory), TorchEngineConfig(slots=4), on_update=on_update, version=0)
    with worker(hub, engine, length=20) as actor:
        assert actor.run() == "enough"
    by_group = {group.number: {version for version, _ in group.sampled_spans()} for group in hub.groups}
    if on_update == "finish":
        assert by_group == {0: {0}, 1: {0}, 2: {1}, 3: {1}}
    else:
        assert by_group == {0: {0, 1}, 1: {0, 1}, 2: {1}, 3: {1}}
    served = [(state.fence, state.version) for state in hub.states]
    assert served[-1] == (2, 1) and set(served) <= {(0, 0), (2, 1)}, "version and fence change together"


@pytest.mark.parametrize("off", [0.5, float("nan")])
def test_weights_under_which_the_engine_says_something_else_of_the_probe_generate_nothing(off: float, tmp_path: Path) -> None:
    directory = save_model(make_model(0), tmp_path / "model")
    backend = make_backend(directory, LearnerConfig(), LossConfig())
    told = (canary := backend.canary()).model_copy(update={"logprobs": [each + off for each in canary.logprobs]})
    hub = ScriptedHub([[], [credit(0)]], wanted=1, weights={1: WeightSet.of(2, 1, backend.tensors(), told)})
    engine = load_engine(str(directory), TorchEngineConfig(slots=4), version=0)
    with worker(hub, engine) as actor, pytest.raises(WeightsError, match="Nothing was generated with it"):
        actor.run()
    assert hub.groups == []


def test_another_attempt_of_a_group_draws_the_same_numbers() -> None:
    made = []
    for attempt in (0, 3):
        hub = ScriptedHub([[credit(5, attempt)]], wanted=1)
        with worker(hub) as actor:
            actor.run()
        made.append([rollout.completion_ids.tolist() for rollout in hub.groups[0].rollouts])
    assert made[0] == made[1] and made[0][0] != made[0][1], "members draw their own"


class Endless(Talker):
    """Answers each turn of the first attempt, and ends the second with its first."""

    def reply(self, key: RolloutKey, sent: str | Reply) -> None:
        ScriptedPool.reply(self, key, sent)
        self.ends(key) if key.attempt else self.says(key, "on")


def test_turns_of_dropped_episodes_are_compared_with_those_of_the_trained_ones() -> None:
    environment = environment_of(Endless([]), Characters(64), 8, 200)
    hub = ScriptedHub([[credit(0)], *([[]] * 20), [credit(0, attempt=1)]], wanted=1)
    with worker(hub, length=4, environment=environment) as actor:
        assert actor.run() == "enough"
    (group,) = hub.groups
    assert group.attempt == 1 and all(len(rollout.turn_lengths) == 1 for rollout in group.rollouts)
    report = actor._length_bias.report(0.0)
    assert report["selection_turns_mean_ratio"] < 0.5 and report["selection_turns_correlation"] > 0.9


def test_how_completions_were_sampled_is_in_the_record() -> None:
    hub = ScriptedHub([[credit(0)]], wanted=1)
    with worker(hub, group_size=3, top_k=4) as actor:
        actor.run()
    (group,) = hub.groups
    assert group.sampling == Sampling(top_k=4)
    for rollout in group.rollouts:
        assert rollout.sampling_mask is not None and set(rollout.sampling_mask.sizes.tolist()) == {4}


def test_after_the_clock_was_set_back_only_new_stretches_of_decoding_hide_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter([5000.0, 5005.0, 1402.0])
    monkeypatch.setattr("async_rlhf.actors.loop.worker.time", SimpleNamespace(time=lambda: next(ends)))
    decodes = Decoding(lambda what, began, ended: None)
    decodes.stepped(5000.0)
    decodes.stepped(1400.0)
    assert decodes.overlap(1400.5, 1401.5).hidden_s == 1.0 and decodes.overlap(1401.0, 1404.0).hidden_s == 1.0
    stage = decodes.overlap(1401.0, 400.0)
    assert stage.seconds == 0.0 and stage.hidden_s == 0.0, "it was set back while this ran"


READER = """
from pathlib import Path
from async_rlhf.actors.rewards import Score, Stream, reward

seen = {}

def prefetch(completions, stream_ids):
    seen.update(zip(stream_ids, completions))
    for stream in stream_ids: Path(__file__).with_name(f"read {stream}").touch()

def forget(stream_ids): [seen.pop(stream, None) for stream in stream_ids]

@reward(stream=Stream(prefetch, forget), stream_tokens=4, workers=1, batch_size=4, batch_wait_s=0.0)
def reader(completions, stream_ids):
    read = [len(seen.pop(stream, "")) for stream in stream_ids]
    return [Score(len(whole), metrics={"read": part}) for whole, part in zip(completions, read)]
"""


def test_a_judge_that_reads_along_has_read_most_of_a_completion_when_it_ends(tmp_path: Path) -> None:
    (tmp_path / "reader.py").write_text(READER)
    pool = ScoringPool[RolloutKey](resolve(["reader.py:reader"], tmp_path), ScoringConfig())
    # The judge's process has started before anything is written that it could prefetch.
    pool.submit(RolloutKey(99, 0, 0), {"completion": "x", "prompt": "ab", "finish_reason": "stop"})
    wait_for(pool.poll, "the judge to start")

    class Patient(ScriptedHub):
        """Lets the actor go on when the judge has read something of each unfinished completion of the second group that it was
        offered: it may get no time while the engine writes."""

        def poll(self, state: ActorState, telemetry: Telemetry, timeout_s: float = 0.0) -> None:
            super().poll(state, telemetry, timeout_s)
            for key, stream in pool._streams.items():
                if key.group == 1:
                    wait_for((tmp_path / f"read {stream}").exists, "the judge to read")

    # The second attempt drops what was begun: what was read of that is let go.
    hub = Patient([[credit(0), credit(1)], *[[]] * 8, [credit(0, attempt=1)], *[[credit(n)] for n in range(2, 6)]], wanted=6)
    with worker(hub, slots=4, length=200, pool=pool, partial_every=pool.stream_tokens, temperature=3.0) as actor:
        actor.run()
    rollouts = [rollout for group in hub.groups for rollout in group.rollouts]
    assert all(rollout.scores["reader"].value == rollout.num_tokens for rollout in rollouts)
    read = [rollout.scores["reader"].metrics["read"] for rollout in rollouts]
    assert sum(read) > 0 and all(tokens <= rollout.num_tokens for tokens, rollout in zip(read, rollouts, strict=True))
    along = [rollout.timings.get("reader.ahead_s") for rollout in rollouts if rollout.scores["reader"].metrics["read"]]
    assert all(seconds is not None for seconds in along)
    assert not actor._shown and not pool._streams and not pool._ahead_s


def test_what_environments_have_makes_room_for_others_but_what_has_not_begun_only_once_over() -> None:
    """20 groups of 2 are credited at once: 4 of them (the capacity) may wait for their first words beside 4 others."""
    hub, environments = ScriptedHub([[credit(number) for number in range(20)]], wanted=1), ScriptedPool()
    with worker(hub, slots=40, environment=environment_of(environments, Characters(64), 8, 30)) as actor:
        actor.turn()
        assert hub.works[-1].capacity == 4 + 4
        for key, _ in environments.begun:
            environments.says(key, "ab")
        actor.turn()
        assert hub.works[-1].capacity == 4  # all of them are the engine's
        while len(environments.replies) < 40:
            actor.turn()
        assert hub.works[-1].capacity == 4 + 20
