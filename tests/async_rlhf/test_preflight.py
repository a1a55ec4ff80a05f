"""What `check` calls good can begin: prompts, columns, tokenizer, packages, devices and model are looked at before a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from async_rlhf.actors.prompts import Row
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.run.checks.model import check_adapters
from async_rlhf.run.checks.preflight import preflight
from tests.conftest import QUICK

MODELS = QUICK.parent / "models"


@pytest.fixture
def checked(small: Any, tmp_path: Path) -> Callable[..., Any]:
    """`checked(rows, **overrides)`: what the check of a run on these rows finds."""

    def check(rows: list[dict[str, Any]], **overrides: Any) -> Any:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"data.source": str(path), "data.options": {}, "data.held_out": None, "rewards.functions": ["exact"]}
        return preflight(small(**{**data, **overrides}))

    return check


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy that can be changed."""
    return shutil.copytree(MODELS / "tiny-speller", tmp_path / "model")


def rows(*prompts: Any, **columns: Any) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "answer": "a", **columns} for prompt in prompts]


@pytest.mark.parametrize(
    ("given", "overrides", "message"),
    [
        (
            rows("a", "b" * 97, "c" * 120),
            {},
            r"prompt 1 has 97 tokens \(2 prompts are too long\), the limit is generation\.max_prompt_length = 96; "
            r"longest: 120\. Raise the limit, shorten the prompt, which begins 'bbb.*on_overlong = 'drop'",
        ),
        (
            rows("a", "b" * 20),
            {"generation.max_completion_length": 500},
            r"prompt 1 has 20 tokens .*limit is 12: the model holds 512 tokens, of which generation\.max_comp.* = 500",
        ),
        (
            rows("a", "b" * 20),
            {"generation.max_completion_length": 100000, "data.on_overlong": "drop"},
            r"max_completion_length = 100000 leaves no room for a prompt: the model holds 512 tokens together, "
            r"the longest prompt has 20; highest: 492$",
        ),
        (rows("a", "b" * 97), {"data.template": "{answer}{prompt:.96}"}, r"prompt 1 has 97 tokens"),
        (rows("b" * 97), {"data.on_overlong": "drop"}, "all 1 training prompts are left out"),
        (rows("a", ""), {}, r"prompt 1 has no tokens \(1 such prompts\), its text is ''; remove the row"),
        (rows([{"role": "user", "content": "a"}]), {}, "the tokenizer has no chat template; give text"),
        (rows("a"), {"data.chat": True}, "the tokenizer has no chat template; give text, without data.chat"),
        (
            [*rows("a", "b"), {"prompt": "c"}],
            {},
            r"prompt 2 has no column 'answer', and others have: reward 'exact' asks for 'answer'",
        ),
        (
            [*rows("a", level=3), *rows("b")],
            {"data.template": "{level} {prompt}"},
            "names the column 'level', which a row does not have",
        ),
        (rows("a"), {"model": str(MODELS / "tiny-judge")}, "is a LlamaForSequenceClassification, which does not write text"),
        (
            rows("a"),
            {"engine.device": "cuda:99"},
            r"engine\.device = 'cuda:99'(: torch .* sees no cuda device| needs 100 cuda devices)",
        ),
        (
            rows("a"),
            {"learner.lora": {"rank": 4, "targets": ["q_proj", "nope"]}},
            r"learner\.lora\.targets names 'nope', which is no layer of the model; choose among down_proj, .*v_proj, or 'all",
        ),
        (rows("a"), {"engine.device": "gpu"}, r"engine\.device = 'gpu' is no torch device; use 'cuda', 'cuda:N' or 'cpu'"),
    ],
)
def test_what_would_end_the_run_in_its_first_minute_is_refused(
    checked: Callable[..., Any], given: list[dict[str, Any]], overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(given, **overrides)


def test_a_package_that_only_one_setting_needs_is_missed_in_time(
    checked: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for package, extra, setting, value in (
        ("vllm", "vllm", "engine.kind", "vllm"),
        ("deepspeed", "deepspeed", "learner.backend", "deepspeed"),
        ("peft", "lora", "learner.lora.rank", 4),
    ):
        refused = rf"{setting} = {value!r} needs the package {package}: pip install 'async-rlhf\[{extra}\]'"
        with pytest.raises(ConfigError, match=refused):
            checked(rows("a"), **{setting: value})
    with pytest.raises(ConfigError, match=r"needs the package gguf: pip install 'async-rlhf\[gguf\]'"):
        checked(rows("a"), model=str(tmp_path / "model.gguf"))


def test_a_model_without_its_tokenizer_is_refused(checked: Callable[..., Any], model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        checked(rows("a"), model=str(model))


def test_a_broken_model_file_is_refused_by_its_name_also_where_it_is_to_get_adapters(checked: Any, model: Path) -> None:
    (model / "model.safetensors").write_bytes(bytes(100))
    with pytest.raises(ConfigError, match=r"model\.safetensors' cannot be used"):
        checked(rows("a"), model=str(model), **{"learner.lora": {"rank": 4, "targets": ["q_proj"]}})


def test_rows_that_cannot_be_had_are_asked_for_once(checked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def none(data: Any) -> Any:
        asked.append(data)
        raise ConfigError("the data are gone")

    monkeypatch.setattr("async_rlhf.run.checks.subject.load_rows", none)
    with pytest.raises(ConfigError, match=r"^the data are gone$"):
        checked(rows("a"))
    assert len(asked) == 1


def test_where_every_held_out_prompt_is_left_out_an_evaluation_is_refused_with_the_reason(small: Any) -> None:
    config = small(**{"data.on_overlong": "drop", "evaluation.every": 1, "rewards.functions": ["exact"]})
    given = [Row("a", {"answer": "a"})], [Row("b" * 97, {"answer": "a"})]
    with pytest.raises(ConfigError, match=r"evaluation\.every = 1, and all 1 held-out prompts are left out: they are too long"):
        preflight(config, given)


def test_prompts_that_are_too_long_can_be_left_out_and_unknown_characters_are_no_obstacle(checked: Callable[..., Any]) -> None:
    found = checked(rows("a", "b" * 97, "c漢"), **{"data.on_overlong": "drop"})
    assert [row.prompt for row in found.rows[0]] == ["a", "c漢"]
    assert found.remarks == [
        "1 prompts are left out: they are too long (data.on_overlong = 'drop').",
        "1 prompts have characters that the model has no token for, and does not see: 漢",
    ]


def test_prompts_that_hold_their_answers_are_remarked_on(checked: Callable[..., Any], model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    asked = [{"role": "user", "content": "a"}]
    given = rows(asked, [*asked, {"role": "assistant", "content": "b"}])
    (remark,) = checked(given, model=str(model)).remarks
    assert remark.startswith("1 prompts end with a message of the assistant")


def test_a_model_that_ends_no_completion_is_remarked_on(checked: Callable[..., Any], model: Path) -> None:
    for file, key in (("generation_config", "eos_token_id"), ("tokenizer_config", "eos_token"), ("config", "eos_token_id")):
        assert checked(rows("a"), model=str(model)).remarks == []
        path = model / f"{file}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), key: None}))
    (remark,) = checked(rows("a"), model=str(model)).remarks
    assert remark.startswith("the model's files name no end token") and "generation.max_completion_length" in remark
    assert checked(rows("a"), model=str(model), **{"generation.stop": "."}).remarks == []


def test_a_chat_template_that_rewrites_what_was_said_before_takes_no_episodes(small: Any, model: Path, tmp_path: Path) -> None:
    (model / "chat_template.jinja").write_text(
        "{{ messages | length }} messages. {% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    (tmp_path / "talk.py").write_text("def talk(prompt):\n    yield prompt\n")
    settings = {"model": str(model), "environment": str(tmp_path / "talk.py:talk"), "rewards.functions": [], "data.chat": True}
    with pytest.raises(ConfigError, match=r"rewrites what was said before.*'by_message'"):
        preflight(small(**settings))
    assert preflight(small(**settings, **{"environment.render": "by_message"})).num_prompts > 0


def test_prompts_to_evaluate_on_have_the_columns_that_the_environment_asks_for(
    checked: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "say.py").write_text("def say(prompt, answer):\n    yield prompt\n")
    (evaluated := tmp_path / "evaluated.jsonl").write_text('{"prompt": "b", "answer": "b"}\n')
    settings = {"environment": str(tmp_path / "say.py:say"), "evaluation.source": str(evaluated), "rewards.functions": []}
    assert checked(rows("a"), **settings).environments[""].name == "say"
    evaluated.write_text('{"prompt": "b"}\n')
    with pytest.raises(ConfigError, match=r"evaluation.source: .*'answer'"):
        checked(rows("a"), **settings)


def test_a_training_prompt_in_which_the_model_reads_a_held_out_one_is_left_out_and_counted(
    checked: Callable[..., Any], model: Path
) -> None:
    """A chat template that trims, and has no use for names; a normalizer that composes what is written in two characters."""
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}:{{ m.content | trim }};{% endfor %}")
    described = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps({**described, "normalizer": {"type": "NFC"}}))
    user = {"role": "user", "content": "\u00e9"}
    given = rows("a", [{**user, "content": " e\u0301\n"}], [{**user, "name": "Ann"}], "\u00e9 \u00e9", [user])
    found = checked(given, model=str(model), **{"data.chat": True, "data.held_out": 1})
    assert [row.prompt for row in found.rows[0]] == ["a", "\u00e9 \u00e9"] and found.dropped == 2
    assert "2 training prompts are left out: what is read of them is read of held-out ones too." in found.remarks


def test_with_a_template_or_an_environment_prompts_are_the_same_where_it_is_given_the_same(
    checked: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "play.py").write_text("def play(prompt, board):\n    yield prompt\n")
    given = [{"prompt": "Play:", "board": f"{n % 4}", "answer": "a", "id": n} for n in range(10)]
    playing = {"environment": str(tmp_path / "play.py:play"), "rewards.functions": []}
    with pytest.raises(
        ConfigError, match=r"all 9 training prompts are left out: .*9 are, as the model reads them, prompts that are held out"
    ):
        checked(given, **{"data.held_out": 1})
    for settings in ({"data.template": "{prompt}{board}"}, playing):
        found = checked(given, **settings, **{"data.held_out": 1})
        assert [row.columns["id"] for row in found.rows[0]] == [0, 2, 3, 4, 6, 7, 8] and found.dropped == 2


@pytest.mark.parametrize(
    ("described", "is_refused"), [({}, False), ({"tie_word_embeddings": True}, True), ({"model_type": "gemma"}, True)]
)
def test_an_adapter_of_a_tied_output_layer_is_refused_by_what_the_configuration_says(
    small: Any, model: Path, described: dict[str, Any], is_refused: bool
) -> None:
    """Though the file holds its weight. Where nothing is said the family's default counts."""
    own = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": False} | described
    if "model_type" in described:
        del own["tie_word_embeddings"]
    weights = load_file(model / "model.safetensors")
    save_file({"lm_head.weight": weights["model.embed_tokens.weight"]} | weights, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps(own))
    config = small(model=str(MODELS / "tiny-speller"), **{"learner.lora": {"rank": 4, "targets": ["q_proj", "lm_head"]}})
    config = config.model_copy(update={"model": str(model)})
    if not is_refused:
        check_adapters(config)
        return
    with pytest.raises(
        ConfigError, match=r"targets names 'lm_head', whose weight is that of embeddings .*choose among down_proj"
    ):
        check_adapters(config)


def test_variables_of_the_chat_template_are_looked_at(checked: Callable[..., Any], model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}{{ 'x' * 200 if think else '' }}")
    settings = {"model": str(model), "data.chat": True}
    assert checked(rows("a", "b"), **settings, **{"data.chat_template_kwargs": {"think": False}}).num_prompts == 2
    for variables, message in (({"think": True}, "prompt 0 has 201 tokens"), ({"thnk": True}, "did you mean 'think'")):
        with pytest.raises(ConfigError, match=message):
            checked(rows("a", "b"), **settings, **{"data.chat_template_kwargs": variables})
    for chat, texts in ((False, ("a", "b")), (False, ("a", [{"role": "user", "content": "b"}])), (True, ("a", "b"))):
        found = checked(rows(*texts), **{**settings, "data.chat": chat, "data.chat_template_kwargs": {"think": False}})
        assert ("chat_template_kwargs has no effect" in str(found.remarks)) == (not chat and texts == ("a", "b"))
