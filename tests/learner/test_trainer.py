"""The learner's loop with a hub that follows a script: what it refuses, what it survives, what it records."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from making import VOCABULARY, make_group, make_rollout

from async_rlhf.buffers.clients.learner import SuspectGroup, TakenBatch
from async_rlhf.buffers.composition import Composition
from async_rlhf.buffers.errors import MismatchError, NonFiniteError, RecordError, RewardError, StalenessError
from async_rlhf.buffers.record import Group, Score, Span
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.buffers.stages import StageTime, pack, pack_ahead, stage_metrics
from async_rlhf.learner.config import AdvantageConfig, GuardConfig, LossConfig
from async_rlhf.learner.loop import safeguards
from async_rlhf.learner.loop.metrics import data_metrics
from tests.conftest import REPOSITORY, wait_for
from tests.learner.lives import STEPS, Life, Live, ScriptedHub, assert_each_batch_was_trained_once, make_batches

# What a step may have no number for.
UNMEASURED = {"drift/kl", "mismatch/kl", "mismatch/abs_log_ratio"}


def applied(life: Life) -> list[bool]:
    return [record["applied"] for record in life.metrics()]


def advantage(kind: str, **settings: Any) -> AdvantageConfig:
    return AdvantageConfig.model_validate({"kind": kind, **settings})


def test_it_takes_trains_publishes_and_commits_in_this_order(live: Live) -> None:
    life = live()
    assert life.trainer.run() == "finished"
    assert life.hub.calls == [
        ("register", 0), ("publish", 0),
        ("take", 0), ("trained", 0), ("publish", 1),
        ("take", 1), ("trained", 1), ("publish", 2),  # a checkpoint, and one more is to be kept
        ("take", 2), ("trained", 2), ("publish", 3),
        ("take", 3), ("trained", 3), ("commit", 2),  # nobody will sample from the last version
        ("take", 4), ("commit", 4),
    ]  # fmt: skip
    assert life.trainer.step == life.hub.committed == STEPS
    assert set(life.hub.targets) == {None}, "without a guard there is no target"


def test_every_step_is_recorded_with_everything_that_is_promised(live: Live) -> None:
    life = live(loss=LossConfig(kl_coef=0.01)).ran()
    metrics = life.metrics()
    for record in metrics:
        assert record.keys() == metrics[0].keys() >= named_in_the_guide()
        assert {name for name, value in record.items() if value is None} <= UNMEASURED
        assert record["num_tokens"] == 16 and record["queue/depth"] == 3.0 and record["actors"] == 2.0
        assert record["idle/actor"] == pytest.approx(0.25) and 0 <= record["idle/learner"] <= 1
        assert record["tokens_per_second"] == pytest.approx(16 / record["step_time"])
    assert [record["staleness/histogram"] for record in metrics] == [{"0": 16}, {"1": 16}, {"1": 16}, {"1": 16}]
    assert [record["version"] for record in metrics] == [1, 2, 3, 3]
    sample = life.read("rollouts.jsonl")[2]
    assert sample["group"] == 4
    assert [rollout["scores"]["judge"] for rollout in sample["rollouts"]] == [1.0, 0.0, 0.0]
    assert sample["rollouts"][0]["advantage"] > 0 and all(rollout["weight"] > 0 for rollout in sample["rollouts"])


def named_in_the_guide() -> set[str]:
    """The metrics that docs/coming-from.md calls ours."""
    text = (REPOSITORY / "docs" / "coming-from.md").read_text()
    tables = re.findall(r"(?ms)^\|[^|\n]* metric \|.*?(?=^[^|]|\Z)", text)
    ours = {name for table in tables for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[2])}
    assert len(ours) > 15
    return {name.replace("<name>", "judge").replace("<source>", "spelling") for name in ours}


def test_the_documentation_names_every_metric_of_a_step_and_no_other(live: Live) -> None:
    text = (REPOSITORY / "docs" / "metrics.md").read_text().split("## The ledger")[0]
    cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    documented = [name for cell in cells for name in re.findall(r"`(.+?)`", cell)]
    recorded = set[str]()
    for name, settings in {
        "plain": {},
        "pairs": {"loss": LossConfig(kind="online_dpo")},
        "likeliest": {"loss": LossConfig(kind="reverse_kl_top_k")},
        "critic": {"advantage": advantage("gae"), "critic": {"kind": "head"}},
    }.items():
        recorded |= live(make_batches(1), name=name, **settings).ran().metrics()[0].keys()
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


@pytest.mark.parametrize("kind", ["group_relative", "reinforce_pp"])
def test_a_step_with_nothing_to_learn_from_is_recorded_with_the_same_names(live: Live, kind: str) -> None:
    """All scores failed; and a batch from which every group was taken out."""
    batches = make_batches()
    batches[0], batches[1] = [make_group(0, [2, 2], rewards=[None] * 2, source="spelling")], []
    life = live(batches, advantage=advantage(kind), max_failed_ratio=1.0).ran()
    nothing, taken_out, something, _ = life.metrics()
    assert applied(life) == [False, False, True, True] and taken_out["groups"] == []
    assert nothing.keys() == something.keys() and nothing["loss"] is None and nothing["reward"] is None


def test_a_token_over_the_bound_is_refused_before_any_gradient(live: Live) -> None:
    batches = make_batches(lag=1)
    batches[2][1] = make_group(5, [3, 1, 4], version=0)
    life = live(batches)
    with pytest.raises(StalenessError, match=r"step 2 was given tokens of staleness 2, the bound is 1 \(groups \[5\]\)"):
        life.trainer.run()
    assert life.hub.calls[-1] == ("take", 2) and len(life.metrics()) == 2
    published = wait_for(lambda: life.hub.weights.get(2), "the weights under way")
    assert {name: bytes(tensor.data) for name, tensor in published.tensors().items()} == life.weights


@pytest.mark.parametrize(
    ("failed", "size", "ratio", "begun"),
    [(2, 8, 0.25, 0), (1, 7, 0.1, 0), (8, 8, 1.0, 0), (0, 8, 0.0, 0), (8, 8, 0.25, 1)],
    ids=["at the limit", "too few to say", "anything goes", "none", "made before this learner"],
)
def test_failed_scores_up_to_the_limit_are_left_out(live: Live, failed: int, size: int, ratio: float, begun: int) -> None:
    group = make_group(0, [2] * size, rewards=[None] * failed + [float(n % 2) for n in range(size - failed)])
    life = live([[group]], max_steps=1, max_failed_ratio=ratio)
    life.hub.begun = begun
    assert life.trainer.run() == "finished"
    assert life.metrics()[0]["rewards/failed_ratio"] == pytest.approx(failed / size)


def test_an_engine_that_samples_from_another_policy_than_the_learner_s_ends_the_run(live: Live) -> None:
    def run(name: str, version: int, limit: float, cache_version: int | None = None, begun: int = 0) -> str:
        """Of tokens that are meant to be the learner's own: of the present version of this life, and behind no older keys."""
        groups = [make_group(n, [12] * 6, version=version, rewards=[0.0, 1.0] * 3) for n in (0, 1)]
        spans = (Span(0, 2), Span(version, 10, cache_version=cache_version))
        batch = [with_members(group, range(6), spans=spans) for group in groups] if cache_version is not None else groups
        life = live([[], batch], name=name, max_steps=2, mismatch_limit=limit)
        life.hub.begun = begun
        return life.trainer.run()

    assert run("raised", 1, 100.0) == run("of older weights", 0, 0.01) == run("behind older keys", 1, 0.01, 0) == "finished"
    assert run("of an earlier life", 1, 0.01, begun=2) == "finished"
    with pytest.raises(
        MismatchError, match=r"differ by \d.* nats on average .* the limit is 0\.01.*raise engine\.mismatch_limit"
    ):
        run("fresh", 1, 0.01)


def test_tokens_of_versions_that_are_made_again_are_counted(live: Live) -> None:
    """Group 0 was begun before, by the checkpoint's weights and by later ones of an earlier life; group 1 was not."""
    spans = (Span(0, 2), Span(1, 10))
    before = with_members(make_group(0, [12] * 6, version=1, rewards=[0.0, 1.0] * 3), range(6), spans=spans)
    life = live([[], [before, make_group(1, [12] * 6, version=1, rewards=[0.0, 1.0] * 3)]], max_steps=2)
    life.hub.begun = 1
    assert [record["staleness/nominal"] for record in life.ran().metrics()] == [0, 60]


@pytest.mark.parametrize(("proximal", "tokens"), [("recompute", 144), ("interpolate", 72)])
def test_where_the_policy_before_a_step_is_interpolated_only_the_first_update_is_compared_with_the_engine(
    live: Live, proximal: Any, tokens: int
) -> None:
    batch = [make_group(n, [12] * 6, version=0, rewards=[0.0, 1.0] * 3) for n in (0, 1)]
    (record,) = live([batch], max_steps=1, loss=LossConfig(proximal=proximal), updates_per_step=2).ran().metrics()
    assert record["mismatch/tokens"] == tokens


def poisoned(group: Group) -> Group:
    """The same group with a log-probability that is no number, past the door that would have refused it."""
    group.rollouts[0].logprobs[0] = float("nan")
    return group


def with_members(group: Group, members: Collection[int], **fields: Any) -> Group:
    """The group, of which these members have other fields."""
    return replace(group, rollouts=tuple(replace(r, **fields) if m in members else r for m, r in enumerate(group.rollouts)))


def cut(group: Group, *members: int) -> Group:
    """The group with these members cut at their greatest length."""
    return with_members(group, members, finish_reason="length")


def alike(number: int, **fields: Any) -> list[Group]:
    """A batch of one group whose rewards are equal."""
    return [with_members(make_group(number, [2, 2], version=max(0, number - 1), rewards=[1.0, 1.0]), (0, 1), **fields)]


THRICE = advantage("group_relative", max_constant_batches=3)
UNSCORED = [alike(n, scores={"judge": Score()}) for n in range(4)]
# The batches, other settings, what the run ends with, and whether the steps before were applied.
ENDS: dict[str, tuple[list[list[Group]], dict[str, Any], type[Exception], str, list[bool]]] = {
    "scores that failed": (
        [[make_group(n, [2] * 4, rewards=[0.0, 1.0, None, None if n else 1.0]) for n in (0, 1)]], {}, RewardError,
        r"3 of 8 scores failed \(38%\); rewards.max_failed_ratio is 25%. First: reward 'judge' of group 0: the judge fell "
        r"asleep. The full traceback is in the run directory: logs/actor-", [],
    ),
    "gradients that are no numbers": (
        [[poisoned(g) for g in batch] if n != 1 else batch for n, batch in enumerate(make_batches(6))], {"max_steps": 6},
        NonFiniteError, r"3 steps in a row .* \[8, 9\]. Lower learner.learning_rate", [False, True, False, False],
    ),
    "groups that are all equal": (
        [alike(n) for n in range(4)],
        {"advantage": advantage("group_relative", constant_groups="drop", max_constant_batches=3)}, RewardError,
        r"3 batches in a row had no group.*the groups \[2\].*too easy or all too hard", [False, False],
    ),
    "completions that were all cut": (
        [[cut(group, 0, 1, 2) for group in batch] for batch in make_batches()],
        {"loss": LossConfig(mask_truncated=True), "advantage": THRICE}, RewardError,
        r"3 batches in a row.*6 of its 6 completions were cut.*max_completion_length", [False, False],
    ),
    "rewards that return None": (
        UNSCORED, {"advantage": THRICE}, RewardError, "3 batches in a row had no score: judge returned None .*`return`",
        [False, False],
    ),
    "rewards that return None in a short run": (
        UNSCORED, {"advantage": THRICE, "max_steps": 2}, RewardError, "2 batches in a row had no score", [False],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("batches", "settings", "error", "says", "steps"), ENDS.values(), ids=ENDS)
def test_what_would_go_on_in_vain_ends_the_run_with_the_reason(
    live: Live, batches: list[list[Group]], settings: dict[str, Any], error: type[Exception], says: str, steps: list[bool]
) -> None:
    life = live(batches, **settings)
    before = life.weights
    with pytest.raises(error, match=says):
        life.trainer.run()
    assert (applied(life) if steps else []) == steps
    assert (life.weights == before) == (True not in steps)


@pytest.mark.parametrize("max_steps", [1, 4])
def test_weights_that_are_no_numbers_any_more_are_neither_published_nor_saved(live: Live, max_steps: int) -> None:
    life = live(max_steps=max_steps, save_every=1, learning_rate=1e38, warmup_steps=0)
    with pytest.raises(NonFiniteError, match=r"the weights after step 1 cannot be used.*not finite.*learner\.learning_rate"):
        life.trainer.run()
    assert life.hub.published == 0 and life.saved() == []


def test_the_hub_is_sent_the_target_of_the_guard_which_logs_its_reason(
    live: Live, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safeguards, "MIN_ESS", 0.999)  # made-up log-probabilities are far from the model's
    with caplog.at_level("INFO"):
        life = live(max_staleness=3, guard=GuardConfig(enabled=True), lowest_staleness=1).ran()
    assert life.hub.targets == [3, 3, 3, 2, 2]
    (move,) = (message for message in caplog.messages if "aiming at staleness" in message)
    assert "aiming at staleness 2 instead of 3: 3 steps in a row: is/ess" in move


def test_what_was_cut_is_left_out_and_counted_and_its_reward_is_recorded_all_the_same(live: Live) -> None:
    cuts = {0: (1,), 3: (0, 1, 2), 5: (2,)}  # group 3 is cut whole
    batches = [[cut(group, *cuts.get(group.number, ())) for group in batch] for batch in make_batches()]
    records = live(batches, loss=LossConfig(mask_truncated=True)).ran().metrics()
    assert [record["completions/masked_truncated"] for record in records] == [1, 3, 1, 0]
    assert [record["groups/zero_advantage"] for record in records] == [0, 1, 0, 0]
    assert [sum(each["tokens"] for each in record["drift/by_staleness"].values()) for record in records] == [15, 8, 12, 16]
    assert records[1]["reward"] == pytest.approx(2.5 / 6)


def test_the_rewards_of_a_source_are_weighted_as_it_says(live: Live) -> None:
    rule = Composition({"judge": 7.0}, by_source={"spelling": {"judge": 2.0}, "chat": {"judge": 3.0}})
    (record,) = live(make_batches(1), max_steps=1, composition=rule).ran().metrics()
    assert record["reward"] == pytest.approx(2.0 * (2 * 1.0 + 0.5) / 6)


def test_epochs_go_over_the_batch_again_around_the_same_policy(live: Live) -> None:
    once, twice = (live(name=str(epochs), epochs=epochs).ran() for epochs in (1, 2))
    assert once.weights != twice.weights
    assert all(record["clip_ratio/region_mean"] == 0 for record in once.metrics())
    assert any(record["clip_ratio/region_mean"] > 0 for record in twice.metrics())


HEAD = {"kind": "head", "learning_rate": 1e-2}
TRIED: dict[str, dict[str, Any]] = {
    "plain": {},
    "several updates and passes": {"updates_per_step": 2, "epochs": 2},
    "pairs": {"loss": LossConfig(kind="online_dpo")},
    "the best alone": {"loss": LossConfig(kind="best_of_n")},
    "whole completions": {"loss": LossConfig(kind="gspo", kl_coef=0.1)},
    "a mask over the batch": {"loss": LossConfig(second_moment=1.0, proximal="interpolate")},
    "weights of a mean of 1": {"loss": LossConfig(is_normalised=True, is_level="sequence", second_moment=1.0)},
    "the best policy nearby": {"loss": LossConfig(kind="oapl"), "advantage": advantage("oapl")},
    "a reference in the reward": {"loss": LossConfig(kl_coef=0.1, kl_in="reward", entropy_coef=0.01)},
    **{kind: {"critic": HEAD, "advantage": advantage(kind)} for kind in ("gae", "v_trace", "traced")},
    "running statistics": {"composition": Composition(normalise=("judge",))},
    "adapters": {"lora": {"rank": 2, "alpha": 4.0}},
    "constant groups": {"advantage": advantage("group_relative", constant_groups="drop", max_constant_batches=2)},
}
TIMED = {"time", "step_time", "step_time_total", "tokens_per_second", "samples_per_second", "idle/learner"}


@pytest.mark.parametrize("settings", TRIED.values(), ids=TRIED)
def test_a_run_in_which_groups_are_tried_has_the_bits_of_one_in_which_none_is(live: Live, settings: dict[str, Any]) -> None:
    batches = make_batches()
    batches[1] = [make_group(n, [3, 1, 4], version=0, rewards=[1.0, 1.0, 1.0]) for n in (2, 3)]
    tried = [*batches[2], batches[1][0], make_group(9, [2, 2], rewards=[None, None]), poisoned(make_group(8, [3, 1, 4]))]

    class Trying(ScriptedHub):
        def take(self, step: int, target_staleness: int | None = None) -> TakenBatch | SuspectGroup | str:
            states = torch.get_rng_state()
            for group in tried:
                other.trainer.try_group(group)
            assert torch.equal(torch.get_rng_state(), states)
            assert all(p.grad is None for p in other.backend.machine._learning())
            return super().take(step, target_staleness)

    life = live(batches, **settings)
    before = life.weights
    assert life.ran().weights != before and applied(life)[2:] == [True, True]
    other = live(hub=Trying(batches), name="trying", **settings)
    assert other.ran().weights == life.weights
    for step in (2, 4):
        whole, same = (
            {path.name: path.read_bytes() for path in each.checkpoint(step).rglob("*") if path.is_file()}
            for each in (life, other)
        )
        assert whole.keys() == same.keys() and whole == same
    for one, two in zip(life.metrics(), other.metrics(), strict=True):
        assert {name for name in one if one[name] != two[name] and not name.endswith(("/seconds", "_seconds"))} <= TIMED


def test_suspected_groups_are_tried_and_named_before_the_batch_is_taken(live: Live, undisturbed: dict[str, bytes]) -> None:
    life = live(faults={("tried", 1): "forget"})
    life.hub.suspects = make_batches()[0]
    life.ran()
    assert life.hub.passed == [0, 1]
    assert life.hub.calls[:10] == [
        ("register", 0), ("publish", 0), ("take", 0), ("tried", 0), ("take", 0), ("tried", 0),
        ("register", 0), ("publish", 0), ("take", 0), ("tried", 0),
    ]  # fmt: skip
    assert_each_batch_was_trained_once(life, undisturbed)


def test_a_suspected_group_that_ends_the_learner_is_not_reported_as_passed(live: Live) -> None:
    life = live()
    life.hub.suspects = [make_batches()[0][0], other_tokens(make_batches()[0][1])]
    with pytest.raises(RecordError, match=f"group 1 has token {VOCABULARY}"):
        life.trainer.run()
    assert life.hub.passed == [0]


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
    live: Live, spoil: Callable[[Group], Group], raised: type[Exception], says: str
) -> None:
    batches = make_batches()
    batches[2][0] = spoil(batches[2][0])
    life = live(batches)
    with pytest.raises(raised, match=says) as error:
        life.trainer.run()
    assert error.value.__notes__ == ["at step 2, with the groups [4, 5]"]
    before = life.weights
    with pytest.raises(raised, match=says) as error:
        life.trainer.try_group(batches[2][0])
    assert error.value.__notes__ == ["at step 2, with the groups [4]"]
    life.trainer.try_group(batches[2][1])
    assert life.weights == before
