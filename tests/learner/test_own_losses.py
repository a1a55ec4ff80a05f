"""Losses and estimators of one's own: declared, checked like shipped ones, tried, and trained with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from making import make_group, weights
from typer.testing import CliRunner

from async_rlhf.api import train
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.cli.commands import app
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.check import RunContext, check
from async_rlhf.learner.config import AdvantageConfig, GuardConfig, LearnerConfig, LossConfig
from async_rlhf.learner.objective.estimation import check_estimator, estimate_advantages, select_members
from async_rlhf.learner.objective.trial import check_loss, try_loss
from async_rlhf.learner.registry import advantage_spec, advantages, load_loss, loss_spec, losses
from async_rlhf.learner.step.controller import make_backend

MINE = """
import torch
from async_rlhf import advantage, loss

@loss()
def plain(inputs, weight_N, config):
    r = (inputs.logp_current_N.detach() - inputs.logp_proximal_N).clamp(-20, 20).exp()
    return -weight_N * r * inputs.advantage_N * inputs.logp_current_N, {}

@loss()
def unweighed(inputs, weight_N, config):
    return -inputs.advantage_N * inputs.logp_current_N, {}

@loss()
def unbounded(inputs, weight_N, config):
    return -weight_N * (inputs.logp_current_N - inputs.logp_proximal_N).exp() * inputs.advantage_N, {}

@loss()
def averaged(inputs, weight_N, config):
    return -weight_N * inputs.advantage_N * inputs.logp_current_N / len(weight_N), {}

@loss()
def hiding(inputs, weight_N, config):
    return -weight_N * inputs.advantage_N * inputs.logp_current_N.nan_to_num(), {}

@loss()
def summed(inputs, weight_N, config):
    return -(weight_N * inputs.advantage_N * inputs.logp_current_N).sum(), {}

@loss()
def turned(inputs, weight_N, config):
    return weight_N * inputs.advantage_N * inputs.logp_current_N, {}

@loss()
def reading(inputs, weight_N, config):
    r = (inputs.logp_current_N - inputs.logp_behaviour_N).clamp(-20, 20).exp()
    return -weight_N * r * inputs.advantage_N, {}

@loss(level="sequence")
def of_sequences(inputs, weight_N, config):
    raise NotImplementedError

@loss(needs=("proximal", "behaviour"))
def twice(inputs, weight_N, config):
    raise NotImplementedError

@loss(needs=("reference",), corrects="nothing")
def held(inputs, weight_N, config):
    return -inputs.logp_current_N, {}

LEVEL = "token"

@loss(level=LEVEL)
def computed(inputs, weight_N, config):
    raise NotImplementedError

@loss(level="word")
def misspelt(inputs, weight_N, config):
    raise NotImplementedError

def undeclared(inputs, weight_N, config):
    raise NotImplementedError

@advantage()
def centred(rewards, *, scale_by_std):
    assert scale_by_std is False
    counting = [r for r in rewards if r is not None]
    return [None if r is None else r - sum(counting) / len(counting) for r in rewards]

@advantage()
def forgetful(rewards):
    return [0.0 for _ in rewards]

@advantage()
def scaled(rewards, *, my_scale=2.0):
    return rewards

@advantage(level="completion", off_policy=False)
def of_tokens(reward_T, value_T, *, gamma):
    return reward_T - value_T, reward_T
"""
DATA = RunContext(group_size=4, max_staleness=1, lowest_staleness=0, exact=False, truncated=None)


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return str(tmp_path / "mine.py")


UNUSABLE = """
from async_rlhf import advantage, loss

@advantage()
def short(rewards):
    return [r for r in rewards if r is not None]

@advantage()
def raising(rewards):
    return [None if r is None else r / (max(q for q in rewards if q is not None) - 1) for r in rewards]

@advantage()
def infinite(rewards):
    return [None if r is None else float("inf") for r in rewards]

@advantage(level="completion", off_policy=False)
def scalar(reward_T, value_T):
    return reward_T.sum(), value_T.sum()

@loss(level="token")
def raising_loss(inputs, weight_N, config):
    return inputs.no_such_field, {}

@loss(level="token")
def infinite_loss(inputs, weight_N, config):
    return inputs.logp_current_N / 0, {}
"""


@pytest.mark.parametrize("kind", advantages())
def test_every_shipped_estimator_is_usable(kind: str) -> None:
    check_estimator(AdvantageConfig(kind=kind))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("short", "it must give one number for each reward"),
        ("raising", "ZeroDivisionError"),
        ("infinite", r"gave \[inf, inf"),
        ("scalar", "shapes"),
        ("raising_loss", "no_such_field"),
        ("infinite_loss", "gradient"),
    ],
)
def test_an_estimator_or_loss_that_no_step_could_use_is_refused_before_the_run(tmp_path: Path, kind: str, message: str) -> None:
    (tmp_path / "unusable.py").write_text(UNUSABLE)
    name = f"{tmp_path / 'unusable.py'}:{kind}"
    with pytest.raises(ConfigError, match=message):
        check_loss(LossConfig(kind=name)) if kind.endswith("_loss") else check_estimator(AdvantageConfig(kind=name))


@pytest.mark.parametrize("kind", losses())
def test_every_shipped_loss_obeys_the_laws(kind: str) -> None:
    trial = try_loss(LossConfig(kind=kind))
    assert trial.holds, [law for law in trial.laws if law.holds is False]


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("unweighed", {"a masked completion gives no gradient and changes no other"}),
        ("unbounded", {"finite however far the policies are apart"}),
        ("averaged", {"adds up over micro-batches"}),
        ("hiding", {"a log-probability that is no number is not hidden"}),
        ("summed", {"one term for each token"}),
        ("turned", {"the exact direction on data of its own"}),
        ("reading", {"reads only the log-probabilities it declares"}),
    ],
)
def test_a_loss_that_breaks_a_law_is_told_which(mine: str, name: str, broken: set[str]) -> None:
    trial = try_loss(LossConfig(kind=f"{importable(mine)}:{name}"))
    assert broken <= {law.name for law in trial.laws if law.holds is False} and not trial.holds


def importable(mine: str) -> str:
    """The same file without the declarations that Python itself refuses when it is run."""
    text = Path(mine).read_text().replace('@loss(level="word")', "@loss()")
    Path(mine).write_text(text.replace('@loss(needs=("proximal", "behaviour"))', "@loss()"))
    return mine


def test_the_command_prints_the_table_and_its_exit_code_is_the_verdict(mine: str) -> None:
    importable(mine)
    good = CliRunner().invoke(app, ["try", "loss", f"{mine}:plain", "--set", "loss.is_cap=4.0"])
    assert good.exit_code == 0 and "adds up over micro-batches" in good.output and "none (no correction)" in good.output
    assert CliRunner().invoke(app, ["try", "loss", f"{mine}:averaged"]).exit_code == 1
    absent = CliRunner().invoke(app, ["try", "loss", f"{mine}:planar"])
    assert absent.exit_code == 3 and "did you mean 'plain'?" in absent.output


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("undeclared", r"is not declared: write @loss\(\) above its 'def'"),
        ("computed", r"must be written out"),
        ("misspelt", r"declares level = 'word'; it is one of 'token', 'sequence', 'pair'"),
        ("twice", r"the ratio would count twice"),
        ("absent", r"no function 'absent' at the top level"),
        ("centred", r"is declared with @advantage\(\): name it in advantage.kind"),
    ],
)
def test_a_declaration_without_meaning_is_refused_without_running_the_file(mine: str, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        loss_spec(f"{mine}:{name}")
    with pytest.raises(ConfigError, match="cannot be read"):
        loss_spec(f"{mine}.py:{name}")


def test_check_holds_it_to_the_rules_of_shipped_ones(mine: str) -> None:
    learner, guard = LearnerConfig(), GuardConfig()
    own = LossConfig(kind=f"{mine}:of_sequences", token_mask=(0.5, 2.0))
    with pytest.raises(ConfigError, match=r"loss.token_mask masks single tokens, and a term of loss.kind = .*of_sequences"):
        check(learner, AdvantageConfig(), own, guard, DATA)
    tokens = AdvantageConfig(kind=f"{mine}:of_tokens")
    with pytest.raises(ConfigError, match="needs a critic's values"):
        check(learner, tokens, LossConfig(), guard, DATA)
    assert advantage_spec(tokens.kind).needs_critic and LossConfig(kind=f"{mine}:held").needs_reference
    with pytest.raises(ConfigError, match="without an importance weight"):
        check(learner, AdvantageConfig(), LossConfig(kind=f"{mine}:plain", is_cap=None), guard, DATA)


def test_an_estimator_that_asks_for_no_setting_of_its_section_is_refused(mine: str) -> None:
    check(LearnerConfig(), AdvantageConfig(kind=f"{mine}:centred"), LossConfig(), GuardConfig(), DATA)
    with pytest.raises(
        ConfigError, match=r"asks for 'my_scale' by keyword, which is no setting of \[advantage\]: .*scale_by_std"
    ):
        check(LearnerConfig(), AdvantageConfig(kind=f"{mine}:scaled"), LossConfig(), GuardConfig(), DATA)


def test_an_own_loss_and_estimator_train_a_model(mine: str, model_dir: Path) -> None:
    importable(mine)
    groups, rewards = [make_group(0, [3, 1, 4])], [[1.0, None, 0.0]]
    advantage, own = AdvantageConfig(kind=f"{mine}:centred", scale_by_std=False), LossConfig(kind=f"{mine}:plain")
    trained = {}
    for name, config in (("own", own), ("shipped", LossConfig(kind="truncated_is", is_cap=None))):
        found = estimate_advantages(groups, rewards, select_members(groups, rewards, advantage, config), {}, advantage, config)
        assert found.advantages == [[0.5, None, -0.5]]
        backend = make_backend(model_dir, LearnerConfig(learning_rate=1e-2), config)
        assert backend.step([make_rows(groups, found.advantages, 512)], 0).applied
        trained[name] = weights(backend)
    assert trained["own"].keys() == trained["shipped"].keys()
    with pytest.raises(ValueError, match="None where the reward is None"):
        forgetful = AdvantageConfig(kind=f"{mine}:forgetful")
        estimate_advantages(groups, rewards, rewards, {}, forgetful, own)


def test_a_module_is_found_without_being_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_losses.py").write_text("raise SystemExit\n@loss(level='sequence')\ndef own(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert loss_spec("my_losses:own").level == "sequence" and "my_losses" not in sys.modules
    with pytest.raises(ConfigError, match="there is no module 'my_lasses'"):
        loss_spec("my_lasses:own")


def test_a_function_that_cannot_be_imported_is_refused_with_what_to_do(tmp_path: Path) -> None:
    def local(inputs: Any, weight_N: Any, config: Any) -> Any: ...

    with pytest.raises(ConfigError, match=r"is defined inside another function.*%%writefile my_loss.py"):
        train(tmp_path / "none.toml", loss=local)


def test_a_file_may_import_its_neighbours_as_a_file_of_rewards_may(tmp_path: Path) -> None:
    (tmp_path / "beside_the_loss.py").write_text("SCALE = 3.0\n")
    (tmp_path / "scaled.py").write_text(
        "from async_rlhf import loss\nfrom beside_the_loss import SCALE\n"
        "@loss()\ndef scaled(inputs, weight_N, config): return SCALE, {}\n"
    )
    function = load_loss(f"{tmp_path / 'scaled.py'}:scaled")
    assert function(None, None, None) == (3.0, {})


def test_a_file_that_is_not_there_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.py does not exist; paths are relative to the configuration's folder"):
        load_loss(f"{tmp_path / 'none.py'}:plain")
