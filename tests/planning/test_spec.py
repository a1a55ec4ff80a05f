"""The question of a plan: one message for a spec that cannot be planned, before anything is searched; lengths as they are
stated; and for any spec no plan that `check` would refuse."""

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
from async_rlhf.experiments.planning.placement.search import as_toml, search
from async_rlhf.experiments.planning.placement.spec import LengthsConfig, parse
from async_rlhf.run.config_checks import check
from async_rlhf.run.loading import validated
from tests.planning.specs import LLAMA_1B

MODEL = f"policy = {{ {', '.join(f'{key} = {json.dumps(value)}' for key, value in LLAMA_1B.items())} }}"
GOOD = {"models": MODEL, "lengths": "mean = 300\nlongest = 1024", "cluster": 'device = "A100-80GB"'}


def text(**sections: str) -> str:
    return "\n".join(f"[{name}]\n{lines}" for name, lines in {**GOOD, **sections}.items() if lines)


WRONG = {
    "an empty file": ("", r"models.*required|models"),
    "no TOML": ("[models", r"cannot be read: Expected"),
    "a section that is none": (text(modles="policy = 1"), r"modles.*models"),
    "a key that is none": (text(batch="group = 3"), r"batch\.group.*group"),
    "a model that is not there": (text(models='policy = "nowhere"'), r"no model configuration at .*nowhere"),
    "a model of an unknown family": (text(models='policy = { model_type = "lama" }'), r"'lama'.*llama"),
    "a model without its sizes": (text(models='policy = { model_type = "llama" }'), r"of the model's config.json is None"),
    "a mean that is no number": (text(lengths="mean = nan\nlongest = 1024"), r"lengths\.mean"),
    "two sources of lengths": (text(lengths='mean = 3\nrollouts = "x"\nlongest = 9'), r"each of mean and rollouts is given"),
    "a device that is none": (text(cluster='device = "H10"'), r"'H10' is not in the catalogue.*H100"),
    "a device of one's own without figures": (text(cluster='device = "own"'), r"needs cluster\.own"),
    "links that carry nothing": (text(cluster='device = "own"\nown = { link_bytes_per_s = 0.0 }'), r"own\.link_bytes_per_s"),
    "no lengths of either source": (text(lengths="longest = 9"), r"neither of mean and rollouts is given"),
    "a mean that cannot be reached": (text(lengths="mean = 9\nlongest = 9"), r"mean = 9 must be below longest = 9"),
    "a batch that updates do not divide": (text(batch="groups = 32\nupdates_per_step = 5"), r"divide groups = 32.*nearest: 4"),
    "more updates than can be tried": (text(batch=f"groups = 32\nupdates_per_step = {10**18}"), r"groups = 32.*nearest: 32"),
    "a batch that no step has": (text(batch=f"groups = {10**18}"), r"the 131072 completions .*nearest: groups = 16384"),
    "a loss that is none": (text(loss='kind = "ppo_clop"'), r"ppo_clip"),
    "a share above the peak": (text(efficiency="training = 1.5"), r"efficiency\.training"),
    "bounds that are none": (text(search="max_staleness = []"), r"one or more of 0 to 1024"),
    "a model that fits nowhere": (
        text(cluster='device = "L40S"\ndevices_per_node = 1', lengths="mean = 300\nlongest = 2000000"),
        r"no placement fits: training takes at least .* generation .*Add nodes",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_spec_gets_one_message(name: str, tmp_path: Path) -> None:
    content, message = WRONG[name]
    (path := tmp_path / "spec.toml").write_text(content)
    result = CliRunner().invoke(app, ["plan", str(path)])
    assert result.exit_code == 3, result.output
    printed = result.output.strip()
    assert printed.startswith("error: ") and "Traceback" not in printed and "pydantic" not in printed
    assert len(printed.splitlines()) == 1
    with pytest.raises(AssertionError, match=message):  # so that a mismatch shows what was printed
        raise AssertionError(printed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "plan needs a SPEC.toml, --from-run RUN, or --devices"),
        (["SPEC", "--settings", "nowhere/plan.toml"], "--settings 'nowhere/plan.toml': its folder does not exist"),
        (["--from-run", "nowhere", "--settings", "plan.toml"], "--settings is of a plan: give a SPEC.toml"),
        (["--from-run", "nowhere"], "nowhere"),
        (["SPEC", "--from-run", "nowhere"], "nowhere"),
        (["folder.toml"], "cannot be read"),
        (["none.toml"], "does not exist"),
    ],
)
def test_arguments_that_mean_nothing_are_refused_before_the_search(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("spec.toml").write_text(text())
    Path("folder.toml").mkdir()
    monkeypatch.setattr("async_rlhf.experiments.planning.placement.search.placements", None)  # nothing is evaluated
    result = CliRunner().invoke(app, ["plan", *("spec.toml" if each == "SPEC" else each for each in arguments)])
    assert result.exit_code == 3 and message in result.output, result.output


@given(st.integers(2, 5000), st.floats(0, 2), st.integers(8, 600), st.floats(1.05, 20))
def test_a_log_normal_has_its_mean_after_it_is_cut(mean: int, spread: float, rows: int, times: float) -> None:
    longest = int(mean * times) + 1
    found = LengthsConfig(mean=mean, spread=spread, longest=longest).batch(rows)
    assert len(found) == rows and list(found) == sorted(found, reverse=True)
    assert min(found) >= 1 and max(found) <= longest
    assert sum(found) / rows == pytest.approx(mean, abs=0.51)


def test_a_wider_spread_has_a_longer_tail_at_the_same_mean() -> None:
    even, wide, wider = (LengthsConfig(mean=100, spread=spread, longest=10_000).batch(500)[0] for spread in (0.0, 0.5, 1.0))
    assert even == 100 < wide < wider


def test_lengths_of_a_run_are_those_of_its_rollouts_and_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    groups = [{"rollouts": [{"tokens": [0] * 3}, {"tokens": [0] * 9}]}, {"rollouts": [{"tokens": [0] * 6}, {"tokens": []}]}]
    path.write_text("".join(json.dumps(group) + "\n" for group in groups))
    found = LengthsConfig(rollouts=str(path), longest=8)
    assert found.batch(3) == (8, 6, 3) and found.batch(6) == (8, 8, 6, 6, 3, 3) and found.batch(1) == (6,)
    path.write_text('{"step": 1}\n')
    for each in (path, tmp_path / "missing.jsonl"):
        with pytest.raises(ConfigError, match="no completions in it"):
            LengthsConfig(rollouts=str(each), longest=8).batch(3)


specs = st.fixed_dictionaries({
    "cluster": st.builds(
        lambda device, nodes, size: {"device": device, "nodes": nodes, "devices_per_node": size},
        st.sampled_from(["A100-40GB", "H100", "L40S", "MI300X"]), st.integers(1, 3), st.sampled_from([1, 2, 3, 4, 8]),
    ),
    "lengths": st.builds(
        lambda prompt, mean, longest: {"prompt": prompt, "mean": mean, "longest": longest},
        st.sampled_from([64, 2048]), st.integers(16, 900), st.sampled_from([1024, 32768]),
    ),
    "batch": st.builds(
        lambda groups, size, updates: {"groups": groups, "group_size": size, "updates_per_step": updates},
        st.sampled_from([1, 6, 7, 32]), st.integers(2, 8), st.sampled_from([1, 2]),
    ),
    "loss": st.sampled_from([{}, {"kl_coef": 0.05}, {"kind": "decoupled_ppo"}, {"kind": "truncated_is"}]),
    "environment": st.sampled_from([{}, {"turns": 3, "seconds": 1.0, "observation_tokens": 50}]),
    "search": st.sampled_from([{}, {"max_staleness": [0]}, {"max_staleness": [3]}]),
})  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(specs)
def test_for_any_spec_the_settings_of_a_plan_are_a_configuration_or_there_are_none(values: dict[str, Any]) -> None:
    try:
        found = search(parse({"models": {"policy": LLAMA_1B}, **values}, Path()))
    except ConfigError as error:
        assert "no placement fits" in str(error) or "must divide groups" in str(error)
        return
    if not found.settings:
        assert found.refusal
        return
    sections = tomllib.loads(as_toml(found.settings))
    config = validated({**sections, "name": "planned", "model": "MODEL", "data": {"source": "DATA"}})
    check(config)
    assert config.queue.max_staleness in found.roles.spec.search.max_staleness
