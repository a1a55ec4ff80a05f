"""A held-out evaluation: what it counts, what it shows a person, which is due, and what becomes of it beside a run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rlhf.actors.data.rows import load_rows
from async_rlhf.actors.loop.evaluation import Judging, pass_at, summary_of_samples
from async_rlhf.api import train
from async_rlhf.buffers.composition import Composition
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.preparation import with_reward_settings
from async_rlhf.run.checks.preflight import preflight
from async_rlhf.run.display.console import held_out
from async_rlhf.run.loading import dump, load
from async_rlhf.run.processes.evaluation import evaluated_rows, forget_evaluations, record_evaluation, run_evaluation
from async_rlhf.run.processes.tracking import rewind
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.run_files import figures
from async_rlhf.run.supervision.evaluator import Due, plan
from async_rlhf.run.watching import EvaluationConfig
from tests.conftest import output_of, stdout_of

EVERY_10 = EvaluationConfig(every=10)


def test_a_model_is_judged_by_its_likeliest_answers_and_some_can_be_read(small: Callable[..., Any]) -> None:
    config = small(**{"data.held_out": 10, "evaluation.samples": 3})
    run = RunDir.create(config)
    scored: list[tuple[int, int]] = []
    run_evaluation(run, config, config.model, "start", "0", progress=lambda *done: scored.append(done))
    [record] = run.read_evaluations()
    assert (record["label"], record["num_prompts"], record["failed"], len(record["samples"])) == ("start", 10, 0, 8)
    shown = sum(sample["reward"] for sample in record["samples"])
    assert shown - 1e-6 <= 10 * record["mean_reward"] <= shown + 2 + 1e-6, "the two that are not shown have 0 to 1 each"
    solved = sum(sample["reward"] == 1 for sample in record["samples"])
    assert solved <= 10 * record["accuracy"] + 1e-6 <= solved + 2 + 2e-6
    tokenizer, model = AutoTokenizer.from_pretrained(config.model), AutoModelForCausalLM.from_pretrained(config.model)
    for sample in record["samples"]:
        asked = tokenizer(sample["prompt"], return_tensors="pt", add_special_tokens=False)
        answer = model.generate(**asked, max_new_tokens=config.generation.max_completion_length, do_sample=False)
        told = tokenizer.decode(answer[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        assert sample["completion"] == told
    assert record["rewards"]["reasoning_gym"] == pytest.approx(record["mean_reward"])
    at = record["sampled"]["pass_at"]
    assert list(at) == ["1", "2", "3"] and 0 <= at["1"] <= at["2"] <= at["3"] <= 1
    assert (record["sampled"]["num_samples"], record["sampled"]["failed"]) == (3, 0)
    assert scored == sorted(scored) and scored[-1] == (40, 40)


@pytest.mark.parametrize("num_samples", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_solved_completion(num_samples: int) -> None:
    for num_solved, k in itertools.product(range(num_samples + 1), range(1, num_samples + 1)):
        subsets = [any(i < num_solved for i in each) for each in itertools.combinations(range(num_samples), k)]
        assert pass_at(k, num_samples, num_solved) == pytest.approx(sum(subsets) / len(subsets))


def test_a_sample_that_could_not_be_judged_counts_in_no_pass_at_k() -> None:
    judging = Judging(Composition(), sampled=[Sampling()] * 4)
    solved = [[True, False, None, None], [False, False, False, True]]
    found = summary_of_samples([1.0, 0.0, None, None, 0.0, 0.0, 0.0, 1.0], solved, judging)
    assert found["failed"] == 2 and found["mean_reward"] == pytest.approx(2 / 6)
    assert found["pass_at"] == {"1": pytest.approx((1 / 2 + 1 / 4) / 2), "2": pytest.approx((1 + 1 / 2) / 2), "4": 1.0}


JUDGES = """
from async_rlhf import reward

@reward
def exact(completion): return 0.0

@reward(weight=3.0)
def brief(completion): return 0.5

@reward(scope="group")
def rank(completions): return [member / len(completions) for member in range(len(completions))]
"""


@pytest.fixture
def judged(small: Callable[..., Any], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The line of an evaluation by these rewards of `JUDGES`, under this configuration."""
    (file := tmp_path / "judges.py").write_text(JUDGES)

    def evaluated(*names: str, **values: Any) -> dict[str, Any]:
        config = small(**{"rewards.functions": [f"{file}:{name}" for name in names], "data.held_out": 5, **values})
        config = with_reward_settings(config)
        run = RunDir.create(config.model_copy(update={"name": "-".join(names)}), overwrite=True)
        preflight(config)
        run_evaluation(run, config, config.model, "start", "0")
        return run.read_evaluations()[-1]

    return evaluated


def test_of_several_rewards_only_the_one_that_is_named_says_what_is_solved(judged: Callable[..., dict[str, Any]]) -> None:
    found = judged("exact", "brief")
    assert found["mean_reward"] == 1.5 and found["accuracy"] is None and found["rewards"] == {"exact": 0.0, "brief": 0.5}
    assert (
        held_out(found) == "held-out reward at the start: 1.500, rewards/exact 0.000, rewards/brief 0.500 (greedy, 5 prompts)"
    )
    found = judged("exact", "brief", **{"evaluation.solved_by": "exact", "evaluation.samples": 2})
    assert found["accuracy"] == 0.0 and found["sampled"]["pass_at"] == {"1": 0.0, "2": 0.0}
    assert held_out(found).startswith("held-out accuracy at the start: 0.000, reward 1.500, rewards/exact 0.000")
    found = judged("exact", "brief", **{"evaluation.solved_by": "brief", "evaluation.solved_at": 0.6, "evaluation.samples": 2})
    assert found["accuracy"] == 0.0 and found["sampled"]["pass_at"]["2"] == 0.0, "its score, before the weight of 3"
    assert judged("brief", **{"evaluation.solved_at": 0.5})["accuracy"] == 1.0, "where there is one reward it is that one"


def test_a_reward_that_receives_whole_groups_judges_groups_as_in_training(judged: Callable[..., dict[str, Any]]) -> None:
    found = judged("rank")
    assert found["rewards"] == {"rank": 0.375} and found["mean_reward"] == 0.375 and found["accuracy"] is None
    assert held_out(found) == "held-out reward at the start: 0.375 (groups of 4 sampled, 5 prompts)"
    found = judged("rank", "brief", **{"evaluation.samples": 8, "evaluation.solved_by": "brief"})
    assert found["rewards"] == {"rank": 0.375, "brief": 0.5} and found["mean_reward"] == 1.875
    assert found["sampled"]["mean_reward"] == 1.875 and list(found["sampled"]["pass_at"]) == ["1", "2", "4", "8"]


def test_check_says_which_rewards_receive_groups_and_refuses_what_no_reward_can_say(small: Any, tmp_path: Path) -> None:
    (file := tmp_path / "judges.py").write_text(JUDGES)

    def checked(*names: str, **values: Any) -> list[str]:
        return preflight(small(**{"rewards.functions": [f"{file}:{name}" for name in names], **values})).remarks

    said = "rank: receives whole groups; evaluations judge 4 completions of each held-out prompt, sampled as in training"
    assert next(remark for remark in checked("rank", "brief") if "groups" in remark).startswith(said)
    assert not [remark for remark in checked("exact", "brief") if "groups" in remark]
    assert not [remark for remark in checked("rank", **{"data.held_out": 0}) if "groups" in remark], "nothing is evaluated"
    both, named = ("exact", "brief"), {"evaluation.solved_by": "brief"}
    for names, setting, says in (
        (both, {"evaluation.solved_by": "exakt"}, r"'exakt' is no reward of this run; did you mean 'exact'"),
        (both, {"evaluation.samples": 4}, r"samples = 4 is about .*: evaluation\.solved_by = 'exact' or 'brief'"),
        (both, {"evaluation.solved_at": 0.5}, r"solved_at = 0\.5 is about .*: evaluation\.solved_by = 'exact' or 'brief'"),
        (("rank",), {"evaluation.samples": 4}, r"only one compares completions.*evaluation\.solved_by = 'rank'"),
        (("rank", "brief"), {"evaluation.samples": 6, **named}, r"samples = 6, .*'rank' .*group_size = 4; nearest: 4 or 8"),
    ):
        with pytest.raises(ConfigError, match=says):
            checked(*names, **setting)
    checked(*both, **named, **{"evaluation.samples": 4, "evaluation.solved_at": 0.5})


def test_a_line_says_accuracy_only_where_one_reward_does() -> None:
    several = {"mean_reward": 1.2, "accuracy": 1.0, "rewards": {"accuracy": 0.0, "brief": 1.2}}
    assert figures(several) == {"reward": 1.2, "rewards/accuracy": 0.0, "rewards/brief": 1.2}
    assert figures({**several, "solved_by": "brief"}) == {"accuracy": 1.0, **figures(several)}
    assert figures({"mean_reward": 0.5, "accuracy": 0.25, "rewards": {"exact": 0.5}}) == {"accuracy": 0.25, "reward": 0.5}
    apart = {"a": {"mean_reward": 0.5}, "b": {"mean_reward": None}, "c": 1}
    assert figures({"mean_reward": 0.5, "by_source": apart}) == {"reward": 0.5, "reward/a": 0.5}
    assert figures({"mean_reward": 10**400, "accuracy": float("nan"), "rewards": [1, 2]}) == {}


def line(label: str, step: int, **more: Any) -> dict[str, Any]:
    return {"label": label, "step": step, "mean_reward": 0.5, **more}


START = line("start", 0)


CASES: dict[str, tuple[EvaluationConfig, list[dict[str, Any]], list[int], dict[str, Any], Due | None]] = {
    "the initial model comes first": (EVERY_10, [], [5, 10], {}, Due("start", 0)),
    "then the newest checkpoint that is due": (EVERY_10, [START], [5, 10], {}, Due("step", 10)),
    "which is evaluated once": (EVERY_10, [START, line("step", 10)], [5, 10, 15], {}, None),
    "nothing at the start": (EvaluationConfig(at_start=False), [], [5, 10], {}, None),
    "the last step is that of the end": (EVERY_10, [START, line("step", 90)], [90, 100], {}, None),
    "when no step follows": (EVERY_10, [START, line("step", 90)], [90, 100], {"finished": True}, Due("end", 100)),
    "once": (EVERY_10, [START, line("step", 90), line("end", 100)], [90, 100], {"finished": True}, None),
    "a step that turned out to be the last": (EVERY_10, [START, line("step", 90)], [90], {"finished": True}, None),
    "not at the end": (EvaluationConfig(every=10, at_end=False), [START, line("step", 90)], [90, 100], {}, Due("step", 100)),
    "what failed is not tried again in this life": (
        EVERY_10, [line("start", 0, missing="it failed")], [10], {"given_up": {Due("start", 0)}}, Due("step", 10),
    ),
    "and is due in the next": (EVERY_10, [line("start", 0, missing="it failed")], [10], {}, Due("start", 0)),
    "also where a full disk took its line": (EVERY_10, [START], [10, 20], {"given_up": {Due("step", 10)}}, Due("step", 20)),
}  # fmt: skip


@pytest.mark.parametrize(("config", "records", "checkpoints", "more", "due"), CASES.values(), ids=CASES)
def test_what_is_evaluated_next(
    config: EvaluationConfig, records: list[Any], checkpoints: list[int], more: dict[str, Any], due: Due | None
) -> None:
    assert plan(config, records, checkpoints, 100, **more)[0] == due


def test_what_cannot_be_evaluated_any_more_is_named_and_not_passed_over() -> None:
    due, missing = plan(EVERY_10, [START], [10, 30, 40], 100)
    assert due == Due("step", 40)
    assert [(each.step, reason) for each, reason in missing] == [
        (10, "skipped: evaluations take longer than the steps between them"),
        (20, "there is no checkpoint of this step"),
        (30, "skipped: evaluations take longer than the steps between them"),
    ]
    told = [START, *(line("step", each.step, missing=reason) for each, reason in missing), line("step", 40)]
    assert plan(EVERY_10, told, [10, 30, 40], 100) == (None, [])


def test_patience_counts_evaluations_since_the_best_and_neither_the_start_nor_missing_ones() -> None:
    patient = EvaluationConfig(every=10, patience=2)
    rising = [line("start", 0, mean_reward=0.9), line("step", 10, mean_reward=0.4), line("step", 20, mean_reward=0.6)]
    flat = [*rising, line("step", 30, mean_reward=0.6), line("step", 40, mean_reward=None, missing="it failed")]
    assert [patient.plateau(records) for records in ([], rising, flat)] == ["", "", ""]
    level = [*flat, line("step", 50, mean_reward=0.5)]
    assert patient.plateau(level) == "no better evaluation for 2 in a row"
    assert EVERY_10.plateau(level) == "" == patient.plateau([*level, line("step", 60, mean_reward=0.61)])


@pytest.mark.rest
def test_a_run_that_gets_no_better_has_finished_and_goes_on_with_more_patience(small: Callable[..., Any]) -> None:
    values = {"max_steps": "none", "learner.learning_rate": 1e-12, "evaluation.every": 1, "evaluation.patience": 1}
    config = small(**values)
    result = train(config, quiet=True)
    end = RunDir(config.run_dir).end()
    assert result.finished and end is not None and end.finished and end.reason == "no better evaluation for 1 in a row"
    made = len(result.metrics)
    assert len(train(config, resume=True, quiet=True).metrics) == made, "nothing is left to do"
    more = load(config, {"evaluation.patience": "none", "evaluation.every": "none", "max_steps": made + 1})
    assert len(train(more, resume=True, quiet=True).metrics) == made + 1


def test_a_run_that_goes_back_forgets_the_evaluations_after_that_step_and_is_another_one_for_trackers(small: Any) -> None:
    run = RunDir.create(small())
    for each in (START, line("step", 10), line("step", 20)):
        record_evaluation(run, each)
    run.tracked("wandb").write_text('{"step": 25, "evaluations": 3}')
    run.tracked("mlflow").write_text('{"step": 9, "evaluations": 2}')
    forget_evaluations(run, after=10)
    rewind(run, 10)
    assert [record["step"] for record in run.read_evaluations()] == [0, 10]
    assert json.loads(run.tracked("wandb").read_text()) == {"step": 0, "evaluations": 0, "sampled": 0, "branch": 2}
    assert json.loads(run.tracked("mlflow").read_text()) == {"step": 9, "evaluations": 2}, "it has nothing of what is redone"


def test_a_file_of_its_own_is_evaluated_whole_with_its_own_columns(small: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "exam.jsonl"
    file.write_text("".join(json.dumps({"question": f"q{i}", "entry": {}, "answer": "a"}) + "\n" for i in range(3)))
    config = small(**{"evaluation.source": str(file), "evaluation.columns": {"prompt": "question"}})
    rows, template = evaluated_rows(RunDir(config.run_dir), config)
    assert [row.prompt for row in rows] == ["q0", "q1", "q2"] and template == config.data.row_template
    assert rows != load_rows(config.data)[1]
    assert preflight(config).num_prompts == 64


def test_a_task_of_its_own_shares_no_seed_with_the_training_prompts(small: Callable[..., Any]) -> None:
    own = {"evaluation.source": "reasoning_gym:spell_backward", "data.held_out": 200}
    config = small(**own, **{"evaluation.options": {"min_word_len": 3, "max_word_len": 6}})
    assert [row.prompt for row in evaluated_rows(RunDir(config.run_dir), config)[0]] == [
        row.prompt for row in load_rows(config.data)[1]
    ]


def test_prompts_that_cannot_be_evaluated_are_refused_before_the_run(small: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "exam.jsonl"
    file.write_text('{"prompt": "q"}\n')
    asked = r"evaluation\.source: .*asks for 'entry'.*every row \(there is no such column\)"
    with pytest.raises(ConfigError, match=asked):
        preflight(small(**{"evaluation.source": str(file)}))
    (file := tmp_path / "data.jsonl").write_text('{"word": "a"}\n')
    asked = r"evaluation\.source: .*data\.jsonl:1 has no column 'prompt'.*evaluation\.columns\.prompt = \"word\""
    with pytest.raises(ConfigError, match=asked):
        preflight(small(**{"evaluation.source": str(file)}))


def test_a_model_is_evaluated_without_a_run(small: Callable[..., Any], tmp_path: Path) -> None:
    config = small(**{"data.held_out": 6})
    (tmp_path / "alone.toml").write_text(dump(config))
    found = json.loads(stdout_of("evaluate", config.model, tmp_path / "alone.toml", "--json"))
    assert (found["label"], found["num_prompts"], found["model"]) == ("alone", 6, config.model) and "step" not in found
    assert not (tmp_path / "runs").exists()
    assert "is no directory" in output_of(3, "evaluate", tmp_path / "none", tmp_path / "alone.toml")
