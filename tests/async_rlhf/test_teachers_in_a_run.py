"""Teachers in a configuration and in a run: which are refused before it begins, and that no reward is needed beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.api import train
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.inspect.rollouts import records
from async_rlhf.run.checks.model import check_teachers
from async_rlhf.run.checks.preflight import preflight
from async_rlhf.run.loading import load
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_dir import RunDir
from tests.conftest import QUICK, SPELLER
from tests.hub_server import Answering, serving

ALONE = {"loss.kind": "reverse_kl", "scoring.reference.path": "tiny-speller"}
HELD = {**ALONE, "scoring.stages.reference.placement": "learner"}
LIKELIEST = {**HELD, "loss.kind": "reverse_kl_top_k"}
SERVED = {"loss.kind": "reverse_kl", "scoring.reference.path": "http://127.0.0.1:1/v1"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss.kind": "forward_kl"}, "learns from a teacher, and none is named: set scoring.reference.path"),
        ({"scoring.reference.path": "tiny-speller"}, "scoring.reference names teachers, and nothing asks for a reference"),
        ({**ALONE, "scoring.reference.path": "nothing-here"}, "nothing-here' is no Hugging Face model .*, and no URL"),
        ({**ALONE, "advantage.kind": "leave_one_out"}, "advantage.kind is set, .*learns from a teacher.*leave it out"),
        ({**ALONE, "advantage.constant_groups": "refill"}, "advantage.constant_groups is set"),
        ({**ALONE, "loss.kl_coef": 0.1, "loss.kl_in": "reward"}, "rewards do not count.*set loss.kl_in = 'loss'"),
        ({**ALONE, "loss.off_policy_delta": 0.1}, "masks where an advantage is below 0, and 'reverse_kl' has none"),
        ({**ALONE, "loss.is_cap": "none"}, "without an importance weight"),
        ({**HELD, "scoring.reference.dtype": "bfloat16"}, r"scoring.reference.dtype is about a stage.*placement = \"actor\""),
        ({**HELD, "loss.kind": "decoupled_ppo"}, "and nothing asks for a reference"),
        ({**ALONE, "loss.kind": "reverse_kl_top_k"}, r"which the learner alone can: set .*placement = \"learner\""),
        ({**SERVED, "loss.kind": "reverse_kl_top_k"}, r"which the learner alone can: set .*placement = \"learner\""),
        ({**LIKELIEST, "scoring.reference.path": "http://127.0.0.1:1/v1"}, "path = 'http.* name one model directory"),
        ({**LIKELIEST, "scoring.reference.by_source": {"code": "tiny-speller"}}, "by_source is about .* one model directory"),
        ({**LIKELIEST, "loss.cap": 2.0}, "'loss.cap' = 2.0: .*'reverse_kl_top_k' has the key top_k; it is one of 'f"),
        ({**ALONE, "loss.top_k": 2}, "'reverse_kl' has no keys of its own; it is one of 'reverse_kl_top_k'"),
        ({**ALONE, "scoring.reference.by_source": {"code": "tiny-speller"}}, "'code', which is the source of no row"),
        ({**ALONE, "scoring.reference.path": "tiny-judge"}, "LlamaForSequenceClassification, which does not write text"),
        ({**SERVED, "scoring.reference.path": "http://"}, "names no host; http://HOST:PORT/v1"),
        ({**SERVED, "generation.temperature": 0.7}, "temperature = 0.7: a server gives probabilities at temperature 1"),
        ({**SERVED, "generation.top_k": 20}, "top_k = 20: a server gives probabilities at temperature 1 over all tokens"),
        ({**SERVED, "scoring.stages.reference.stream_tokens": 4}, "is for one model read here; set stream_tokens = 0"),
        ({**SERVED, "scoring.reference.api_key_env": "NO_SUCH_KEY"}, "'NO_SUCH_KEY': there is no such environment variable"),
    ],
)
def test_a_teacher_that_cannot_be_meant_is_refused_with_the_way_out(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        preflight(load(QUICK, changed))


def test_a_teacher_whose_server_does_not_answer_is_named_before_a_run() -> None:
    remarks = " ".join(preflight(load(QUICK, SERVED)).remarks)
    assert "scoring.reference.path = 'http://127.0.0.1:1/v1': no server answers there within 10 s" in remarks


class OtherTokens(Answering):
    """A teacher's server whose token of an id is the next one of the policy's."""

    def do_POST(self) -> None:
        (ids,) = json.loads(self.body())["prompt"]
        told = [{str(token): {"logprob": -1.0, "decoded_token": f"<{token + 1}>"}} for token in ids[1:]]
        self.answer(200, json.dumps({"choices": [{"index": 0, "prompt_logprobs": [None, *told]}]}).encode())


def test_a_served_teacher_that_reads_the_ids_as_other_texts_is_refused() -> None:
    other = r"has other tokens than model = .*: \d\d of \d\d differ, \d+ is '<"
    with serving(OtherTokens) as address, pytest.raises(ConfigError, match=other):
        preflight(load(QUICK, {**SERVED, "scoring.reference.path": f"{address}/v1"}))


def test_a_teacher_with_other_tokens_is_refused(tmp_path: Path) -> None:
    shutil.copytree(SPELLER, tmp_path / "other")
    tokenizer = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"].popitem()
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="has other tokens than model"):
        preflight(load(QUICK, {**ALONE, "scoring.reference.path": str(tmp_path / "other")}))


def test_a_teacher_that_cannot_read_what_is_generated_is_refused_and_one_with_more_tokens_is_not(tmp_path: Path) -> None:
    other = shutil.copytree(SPELLER, tmp_path / "other")
    given = {**ALONE, "scoring.reference.path": str(other)}
    tokenizer, config = (json.loads((other / name).read_text()) for name in ("tokenizer.json", "config.json"))
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": config["vocab_size"] - 1, "content": "<more>"})
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    preflight(load(QUICK, given))
    (other / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16}))
    with pytest.raises(ConfigError, match=r"other' reads 16 tokens, and generation.max_prompt_length with .* allow"):
        preflight(load(QUICK, given))


def test_a_teacher_must_have_an_output_for_each_token_that_is_compared(tmp_path: Path) -> None:
    other = shutil.copytree(SPELLER, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 1}))
    with pytest.raises(ConfigError, match=r"has an output for 99 tokens and model = .*other' for 100, which loss.kind = "):
        preflight(load(QUICK, {**LIKELIEST, "model": str(other)}))


@pytest.mark.parametrize("given", [{}, ALONE], ids=["no teacher", "a teacher"])
def test_a_model_that_is_a_file_is_compared_with_nothing_before_it_is_converted(given: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    check_teachers(load(QUICK, given).model_copy(update={"model": str(tmp_path / "model.gguf")}))


def test_a_teacher_in_the_learner_is_asked_about_the_likeliest_tokens(small: Callable[..., Any]) -> None:
    given = {**LIKELIEST, "loss.top_k": 4, "rewards.functions": [], "queue.max_staleness": 2, "max_steps": 2}
    first, second = train(small(**given), quiet=True).metrics
    assert first["loss"] == pytest.approx(0.0, abs=1e-5) and first["kl/reference"] == pytest.approx(0.0, abs=0.05)
    assert all(step["applied"] and 0 < step["top_k/mass"] <= 1 for step in (first, second))


def test_without_any_reward_groups_of_one_are_learned_from(small: Callable[..., Any]) -> None:
    given = {**ALONE, "rewards.functions": [], "generation.group_size": 1, "queue.max_staleness": 2, "max_steps": 2}
    result = train(small(**given, **{"queue.keep_rollouts": True}), quiet=True)
    rollouts = [rollout for record in records(Reading(RunDir.existing(result.run_dir))) for rollout in record["rollouts"]]
    assert all(len(rollout["reference"]) == len(rollout["completion_ids"]) for rollout in rollouts)
    for step in result.metrics:
        assert step["applied"] and step["reward"] is None and step["kl/reference"] == pytest.approx(0.0, abs=0.05)
    assert result.metrics[1]["rewards/reference/failed_ratio"] == 0.0
