"""Where a configuration comes from, how overrides are laid upon it, and what is said of a key that is not there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import async_rlhf
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.cli.reference import reference
from async_rlhf.learner.config import AdvantageConfig, LossConfig
from async_rlhf.run.config import Config
from async_rlhf.run.config_keys import ELSEWHERE, KINDS, kind_sections, own_settings, settings
from async_rlhf.run.loading import differences, load, parse_override
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.shipped import FILES, write_start
from tests.conftest import QUICK, REPOSITORY, SPELLER


def test_a_name_a_file_a_mapping_and_a_config_are_one_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    named = load("quick")
    assert named == load(QUICK) == load(named) == load(named.model_dump())
    typed = Config(**{**named.model_dump(), "loss": LossConfig(kl_coef=0.5)})
    assert load(typed).loss.kl_coef == 0.5 and load(named, {"loss": LossConfig(kl_coef=0.5)}) == typed
    (tmp_path / "quick").write_text('model = "tiny-speller"\nmax_steps = 7\ndata.source = "words.jsonl"')
    own = load("quick")  # a file of this name goes before the shipped one
    assert own.max_steps == 7 and own.data.source == str(tmp_path / "words.jsonl")
    assert own.model == str(SPELLER)
    (tmp_path / "marked.toml").write_text((tmp_path / "quick").read_text(), encoding="utf-8-sig")
    assert load("marked.toml") == own, "a byte order mark is no part of the text"


def test_what_differs_is_named_by_key_and_written_as_in_a_file() -> None:
    data = {"source": "", "options": {}, "sources": [{"source": "a.jsonl"}, {"source": "b.jsonl", "weight": None}]}
    one = load(QUICK, {"data": data})
    other = load(one, {"data.sources": [{"source": "a.jsonl"}], "generation.stop": ["."], "checkpoint.keep_every": 5})
    assert differences(one, other) == [
        f'data.sources.1.source: "{Path.cwd() / "b.jsonl"}" -> left out',
        "data.sources.1.options: {} -> left out", "data.sources.1.columns: {} -> left out",
        "data.sources.1.size: 4096 -> left out", 'data.sources.1.name: "" -> left out', 'generation.stop: [] -> ["."]',
        'checkpoint.keep_every: "none" -> 5',
    ]  # fmt: skip


def test_paths_from_python_are_seen_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"model": "tiny-speller", "max_steps": 1, "data": {"source": "mine.jsonl"}, "rewards.functions": "mine.py:f"}
    config = load(given)
    assert (config.data.source, config.rewards.functions) == (str(tmp_path / "mine.jsonl"), (f"{tmp_path}/mine.py:f",))
    assert given["data"] == {"source": "mine.jsonl"}, "what the caller gave is left as it is"


@pytest.mark.parametrize("name", ["..", ".hidden", "-x", "a/b", ""])
def test_a_name_that_leads_elsewhere_or_reads_as_an_option_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^name = "):
        load(QUICK, {"name": name})


def test_an_override_changes_its_key_alone_tables_are_laid_upon_too_and_an_empty_one_empties() -> None:
    quick = load(QUICK)
    for given in ({"generation": {"group_size": 4}}, {"generation.group_size": 4}):
        assert load(QUICK, given).generation == quick.generation.model_copy(update={"group_size": 4})
    before = quick.data.options
    assert load(QUICK, {"data": {"options": {"min_word_len": 4}}}).data.options == {**before, "min_word_len": 4}
    assert load(QUICK, {"data.options": {"min_word_len": 4}}).data.options == {**before, "min_word_len": 4}
    assert load(QUICK, {"data.options": {}}).data.options == {}
    assert load(QUICK, {"data.options": {}, "data.options.min_word_len": 4}).data.options == {"min_word_len": 4}
    with pytest.raises(ConfigError, match=r"override 'name\.first': 'name' is a value, not a section"):
        load(QUICK, {"name": {"first": 1}})


MEANT = {
    "max_staleness": "queue.max_staleness",
    "learner.lr": "learner.learning_rate",
    "lr": "learner.learning_rate",
    "learner.group_size": "generation.group_size",
    "beta": "loss.kl_coef",
    "generation.num_generations": "generation.group_size",
    "learner.per_device_train_batch_size": "learner.batch_size",
    "actor_rollout_ref.rollout.n": "generation.group_size",
    "queue.max_stalenes": "queue.max_staleness",
    "scoring.stages.judge.timeout": "scoring.stages.judge.timeout_s",
    "keep_rollout": "queue.keep_rollouts",
}


@pytest.mark.parametrize("key", MEANT)
def test_an_unknown_key_is_answered_with_the_one_that_was_meant(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key '[\w.]+': did you mean '{re.escape(MEANT[key])}'\?$"):
        load(QUICK, {key: 1})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"loss.kind": "dppo_tv", "loss.dleta": 0.3}, "'dppo_tv' has the key delta; did you mean 'loss.delta'?"),
        ({"loss.kind": "sao", "loss.kl_ceof": 1}, "'sao' has the keys high, low; did you mean 'loss.kl_coef'?"),
        ({"loss.delta": 0.3}, "0.3: loss.kind = 'decoupled_ppo' has no keys of its own; it is one of 'dppo_tv' or '"),
        ({"loss.beta": 1}, "1: loss.kind = 'decoupled_ppo' has no keys of its own; did you mean 'loss.kl_coef'?"),
        ({"advantage.c_cap": 1}, "1: advantage.kind = 'group_relative' has the key scale_by_std; it is one of 'v_trace'"),
        ({"advantage.xyz": 1}, "has the key scale_by_std; choose one of: constant_groups, gamma, "),
    ],
)
def test_a_parameter_that_a_loss_has_not_got_is_answered_with_those_it_has(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key '[\w.]+' = .*{re.escape(says)}"):
        load(QUICK, given)


def test_another_loss_leaves_the_parameters_of_the_former_behind_and_keeps_what_all_share() -> None:
    own = load(QUICK, {"loss": {"kind": "dppo_tv", "delta": 0.3, "is_cap": 3.0}})
    assert load(own, {"loss.kl_coef": 0.1}).loss.parameters == {"delta": 0.3}
    assert load(own, {"loss.kind": "dppo_kl"}).loss == LossConfig(kind="dppo_kl", is_cap=3.0)
    assert load(own, {"loss.epsilon": 0.1, "loss.kind": "ipo"}).loss == LossConfig(kind="ipo", is_cap=3.0, epsilon=0.1)
    with pytest.raises(ConfigError, match="'ipo' has the key epsilon; it is one of 'dppo_tv'"):
        load(own, {"loss.delta": 0.1, "loss.kind": "ipo"})
    assert (
        load(QUICK, {"advantage": AdvantageConfig(level="turn"), "advantage.kind": "leave_one_out"}).advantage.level == "turn"
    )


def test_a_key_of_several_sections_is_answered_with_all_and_one_like_none_with_the_section() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'engine.dtype' or 'scoring.reference.dtype' or 'learner.dtype'\?"):
        load(QUICK, {"generation.dtype": "float32"})
    with pytest.raises(ConfigError, match=r"unknown key 'guard\.xyz': choose one of: enabled, m"):
        load(QUICK, {"guard.xyz": 1})


@pytest.mark.parametrize("given", [{"bad.key": 1}, {"trainer": {"sparkles": 1}}, {"trainer": {}}])
def test_a_section_that_is_like_none_is_answered_with_all_sections(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"unknown key '\w+': choose one of: actors, address, advantage, .*, weights$"):
        load(QUICK, given)


@pytest.mark.parametrize(("key", "name"), [(key, name) for key, names in KINDS.items() for name in names])
def test_the_kind_that_others_call_so_is_answered_with_settings_that_exist(key: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key} = '{name}': no kind has this name; here that is \w+") as refused:
        load(QUICK, {key: name})
    settings_here = re.findall(r"(\w+)\.(\w+) = (\S+?)(?:,|$)", str(refused.value).partition("here that is ")[2])
    for section, field, value in settings_here:
        getattr(load(QUICK), section).model_validate({field: json.loads(value)})
    assert settings_here


def test_what_is_no_configuration_is_answered_with_what_is() -> None:
    given: Any = 3
    with pytest.raises(ConfigError, match=r"a configuration is a TOML file, .* or a Config, not 3$"):
        load(given)


OF_KINDS = {
    (name, kind): own_settings(section, kind, f"{name}.")
    for name, section in kind_sections(Config).items()
    for kind in section.kinds()
}
"""The keys of each loss, estimator and engine alone."""


def test_names_of_other_systems_lead_to_keys_of_ours_and_are_none_of_ours() -> None:
    ours = {setting.key for setting in settings(Config)}
    assert set(ELSEWHERE) <= ours | {own.key for keys in OF_KINDS.values() for own in keys}
    theirs = [name for names in ELSEWHERE.values() for name in names]
    assert len(set(theirs)) == len(theirs) and not set(theirs) & {key.rpartition(".")[2] for key in ours}


def test_one_text_is_a_list_of_one() -> None:
    config = load(QUICK, {"rewards.functions": "exact", "generation.stop": "\n", "learner.lora.targets": "q_proj"})
    assert (config.rewards.functions, config.generation.stop) == (("exact",), ("\n",))
    assert config.learner.lora.targets == ("q_proj",)


def test_what_init_writes_is_a_good_configuration_and_nothing_is_overwritten(tmp_path: Path) -> None:
    from async_rlhf.run.checks.preflight import preflight

    paths = write_start(tmp_path / "new")
    assert [path.name for path in paths] == list(FILES)
    assert preflight(load(paths[0])).num_prompts == 213
    paths[0].write_text("mine")
    paths[1].unlink()
    with pytest.raises(ConfigError, match=r"already there: .*config.toml, .*words.jsonl; nothing is overwritten"):
        write_start(tmp_path / "new")
    assert paths[0].read_text() == "mine" and not paths[1].exists()


def test_the_reference_of_keys_is_what_the_code_says_and_every_key_has_a_meaning() -> None:
    text = reference()
    assert text == (REPOSITORY / "docs" / "configuration.md").read_text(), "python -m async_rlhf.cli.reference writes it"
    for setting in settings(Config):
        table, _, key = setting.key.partition("NAME.")
        repeated = rf"\| `{table}NAME\.KEY` .*`{key}`"
        assert re.search(rf"\| `{re.escape(setting.key)}[=`]|{repeated}", text)
    for (name, kind), keys in OF_KINDS.items():
        of_kind = rf'`{name}.kind = "{kind}"`: .*\n(\n?\|.*\n)*' if name == "engine" else rf"\| `{kind}` "
        for own in keys:
            assert re.search(rf"(?m)^{of_kind}\|.* ?`{own.key}[=`]", text)
    assert len(OF_KINDS) > 20
    assert "| `queue.max_staleness=1` int ≥0, ≤1024 | Largest staleness" in text


def test_the_package_lists_what_it_has() -> None:
    assert set(async_rlhf.__all__) <= set(dir(async_rlhf))
    assert async_rlhf.Config is Config and re.match(r"\d+\.\d+", async_rlhf.__version__)
    assert all(getattr(async_rlhf, name) is not None for name in async_rlhf.__all__)


@pytest.mark.parametrize("number", ["9" * 400, "1e999"])
def test_a_number_that_no_64_bits_hold_is_named_by_its_key(number: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f'model = "tiny-speller"\n[learner]\nlearning_rate = {number}\n')
    with pytest.raises(ConfigError, match=r"config\.toml' cannot be read: .*learning_rate.*: numbers are integers from"):
        load(path)
    with pytest.raises(ConfigError, match=r"^override max_steps: numbers are integers from"):
        parse_override(f"max_steps={number}")
    with pytest.raises(ConfigError, match=r"nested too deeply"):
        parse_override("max_steps=" + "[" * 10_000)


def test_keys_of_an_earlier_version_are_left_out_of_a_run_and_refused_elsewhere(
    small: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDir.create(small())
    run.retire()
    file = run.path / "config.toml"
    text = file.read_text().replace("[guard]\n", "[guard]\nsparkles = 10\n")
    file.write_text(text.replace("[loss]\n", "[loss]\ndelta = 0.1\n"))
    assert run.config() == load(file) == small()
    assert "settings that are none any more: loss.delta, guard.sparkles" in caplog.text
    (tmp_path / "own.toml").write_text(file.read_text())
    with pytest.raises(ConfigError, match=r"unknown key 'guard\.sparkles'"):
        load(tmp_path / "own.toml")
