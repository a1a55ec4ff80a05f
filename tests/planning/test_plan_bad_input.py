"""Specs that cannot be planned: one message each, before anything is searched; and no plan that `check` would refuse."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.cli.commands import app
from async_rlhf.experiments.planning.placement.search import search
from async_rlhf.experiments.planning.placement.settings import as_toml
from async_rlhf.experiments.planning.placement.spec import parse
from async_rlhf.run.config import validated
from async_rlhf.run.config_checks import check
from tests.planning.specs import LLAMA_1B

MODEL = f"policy = {{ {', '.join(f'{key} = {json.dumps(value)}' for key, value in LLAMA_1B.items())} }}"
GOOD = {"models": MODEL, "lengths": "mean = 300\nlongest = 1024", "cluster": 'device = "A100-80GB"'}


def text(**sections: str) -> str:
    return "\n".join(f"[{name}]\n{lines}" for name, lines in {**GOOD, **sections}.items() if lines)


WRONG = {
    "an empty file": ("", r"models.*required|models"),
    "no TOML": ("[models", r"is no TOML"),
    "a section that is none": (text(modles="policy = 1"), r"modles.*models"),
    "a key that is none": (text(batch="group = 3"), r"batch\.group.*group"),
    "no model": (text(models=""), r"models"),
    "a model that is not there": (text(models='policy = "nowhere"'), r"no model configuration at .*nowhere"),
    "a model of an unknown family": (text(models='policy = { model_type = "lama" }'), r"'lama'.*llama"),
    "a model without its sizes": (text(models='policy = { model_type = "llama" }'), r"of the model's config.json is None"),
    "no lengths": (text(lengths=""), r"lengths"),
    "lengths without an end": (text(lengths="mean = 300"), r"lengths\.longest"),
    "an end that is endless": (text(lengths="mean = 300\nlongest = inf"), r"lengths\.longest"),
    "a mean that is no number": (text(lengths="mean = nan\nlongest = 1024"), r"lengths\.mean"),
    "two sources of lengths": (text(lengths='mean = 3\nrollouts = "x"\nlongest = 9'), r"mean and rollouts are given"),
    "a device that is none": (text(cluster='device = "H10"'), r"'H10' is not in the catalogue.*H100"),
    "a cluster without links": (
        text(cluster='device = "own"\nown = { peak_flops = 1e12, memory_bytes = 8e9, memory_bytes_per_s = 1e11 }'),
        r"cluster\.own\.link_bytes_per_s",
    ),
    "links that carry nothing": (
        text(
            cluster='device = "own"\nown = { peak_flops = 1e12, memory_bytes = 8e9, memory_bytes_per_s = 1e11, '
            "link_bytes_per_s = 0.0, link_latency_s = 0.0, network_bytes_per_s = 1e9, network_latency_s = 0.0, "
            "host_bytes_per_s = 1e9 }"
        ),
        r"cluster\.own\.link_bytes_per_s",
    ),
    "no nodes": (text(cluster='device = "H100"\nnodes = 0'), r"cluster\.nodes"),
    "a batch that updates do not divide": (
        text(batch="groups = 32\nupdates_per_step = 5"),
        r"must divide groups = 32.*nearest: 4",
    ),
    "a batch of nothing": (text(batch="groups = 0"), r"batch\.groups"),
    "a verdict that takes for ever": (text(reward="seconds = inf"), r"reward\.seconds"),
    "an environment without turns": (text(environment="turns = 0"), r"environment\.turns"),
    "a loss that is none": (text(loss='kind = "ppo_clop"'), r"ppo_clip"),
    "a share above the peak": (text(efficiency="training = 1.5"), r"efficiency\.training"),
    "a strategy that is none": (text(search='strategies = ["flatening"]'), r"'flatening'.*flattening"),
    "bounds that are none": (text(search="max_staleness = []"), r"one or more of 0 to 1024"),
    "a model that fits nowhere": (
        text(cluster='device = "L40S"\ndevices_per_node = 1', lengths="mean = 300\nlongest = 2000000"),
        r"no placement fits: shared out over all 1 devices, each takes at least: generate .*Add nodes",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_spec_gets_one_message(name: str, tmp_path: Path) -> None:
    content, message = WRONG[name]
    (path := tmp_path / "spec.toml").write_text(content)
    result = CliRunner().invoke(app, ["plan", str(path)])
    assert result.exit_code == 3, result.output
    said = result.output.strip()
    assert said.startswith("error: ") and "Traceback" not in said and "pydantic" not in said
    assert len(said.splitlines()) == 1
    with pytest.raises(AssertionError, match=message):  # so that a mismatch shows what was said
        raise AssertionError(said)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.toml"):
        result = CliRunner().invoke(app, ["plan", str(path)])
        assert result.exit_code == 3 and "no spec can be read from" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "plan needs a SPEC.toml, --from-run RUN, or --devices"),
        (["SPEC", "--lose-actor", "3"], "give --simulate STEPS, too"),
        (["SPEC", "--picture", "plan.jpg"], "a picture is written as .png or .svg, not '.jpg'"),
        (["SPEC", "--settings", "nowhere/plan.toml"], "--settings 'nowhere/plan.toml': its folder does not exist"),
        (["--from-run", "nowhere", "--settings", "plan.toml"], "--settings is of a plan: give a SPEC.toml"),
        (["--from-run", "nowhere"], "nowhere"),
        (["SPEC", "--from-run", "nowhere"], "nowhere"),
    ],
)
def test_arguments_that_mean_nothing_are_refused_before_the_search(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("spec.toml").write_text(text())
    monkeypatch.setattr("async_rlhf.experiments.planning.placement.search.Evaluation", None)  # nothing is evaluated
    result = CliRunner().invoke(app, ["plan", *("spec.toml" if each == "SPEC" else each for each in arguments)])
    assert result.exit_code == 3 and message in result.output, result.output


specs = st.fixed_dictionaries(
    {
        "cluster": st.fixed_dictionaries(
            {
                "device": st.sampled_from(["A100-40GB", "H100", "L40S", "MI300X"]),
                "nodes": st.integers(1, 3),
                "devices_per_node": st.sampled_from([1, 2, 3, 4, 8]),
            }
        ),
        "lengths": st.fixed_dictionaries(
            {"prompt": st.sampled_from([64, 2048]), "mean": st.integers(16, 900), "longest": st.sampled_from([1024, 32768])}
        ),
        "batch": st.fixed_dictionaries(
            {
                "groups": st.sampled_from([1, 6, 7, 32]),
                "group_size": st.integers(2, 8),
                "updates_per_step": st.sampled_from([1, 2]),
            }
        ),
        "loss": st.sampled_from([{}, {"kl_coef": 0.05}, {"kind": "decoupled_ppo"}, {"kind": "truncated_is"}]),
        "environment": st.sampled_from([{}, {"turns": 3, "seconds": 1.0, "observation_tokens": 50}]),
        "search": st.sampled_from([{}, {"max_staleness": [0]}, {"max_staleness": [3]}]),
    }
)


@settings(max_examples=25, deadline=None)
@given(specs)
def test_whatever_is_asked_the_settings_of_a_plan_are_a_configuration_or_there_are_none(values: dict[str, Any]) -> None:
    try:
        found = search(parse({"models": {"policy": LLAMA_1B}, **values}, Path()))
    except ConfigError as error:
        assert "no placement fits" in str(error) or "must divide groups" in str(error)
        return
    if found.best is None:
        assert found.refusal and not found.settings
        return
    sections = tomllib.loads(as_toml(found.settings))
    config = validated({**sections, "name": "planned", "model": "MODEL", "data": {"source": "DATA"}})
    check(config, has_model=False)
    assert config.queue.max_staleness in found.roles.spec.search.max_staleness
    assert config.actors.queued_groups == found.queued_groups
