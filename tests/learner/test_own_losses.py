"""Losses and estimators of one's own: declared, checked like shipped ones, tried, and trained with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from making import make_backend, make_group

import async_rlhf
from async_rlhf.api import train
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.config import AdvantageConfig, LossConfig
from async_rlhf.learner.objective.estimation import check_estimator, estimate_advantages, select_members
from async_rlhf.learner.objective.trial import check_loss, try_loss
from async_rlhf.learner.registry import advantage_spec, advantages, load_function, loss_spec
from async_rlhf.run.learner_checks import check
from async_rlhf.run.loading import changed, load
from tests.conftest import QUICK, output_of

# What a loss gives; `r` is the ratio current / proximal, `score` is A log p.
GIVES = {
    "plain": "-weight_N * r.detach() * score",
    "unweighed": "-score",
    "unbounded": "-weight_N * (inputs.logp_current_N - inputs.logp_proximal_N).exp() * inputs.advantage_N",
    "averaged": "-weight_N * score / len(weight_N)",
    "hiding": "-weight_N * inputs.advantage_N * inputs.logp_current_N.nan_to_num()",
    "summed": "-(weight_N * score).sum()",
    "turned": "weight_N * score",
    "reading": "-weight_N * (inputs.logp_current_N - inputs.logp_behaviour_N).clamp(-20, 20).exp() * inputs.advantage_N",
    "peeking": "-weight_N * score + 0 * inputs.logp_current_NK.sum(-1)",
    "raising": "inputs.no_such_field",
    "infinite": "inputs.logp_current_N / 0",
}
# The law that one breaks.
BROKEN = {
    "unweighed": "a masked completion gives no gradient and changes no other",
    "unbounded": "finite however far the policies are apart",
    "averaged": "adds up over micro-batches",
    "recording": "adds up over micro-batches",
    "hiding": "a log-probability that is no number is not hidden",
    "summed": "one term for each token",
    "turned": "the exact direction on data of its own",
    **dict.fromkeys(("reading", "peeking"), "reads only the log-probabilities it declares"),
}
# Declarations; of the first two that Python itself refuses when the file is run.
DECLARED = {
    "misspelt": '@loss(level="word")',
    "twice": '@loss(needs=("proximal", "behaviour"))',
    "of_sequences": '@loss(level="sequence")',
    "held": '@loss(needs=("reference",), corrects="nothing")',
    "computed": "@loss(level=LEVEL)",
    "undeclared": "",
}
ESTIMATORS = """
@advantage()
def centred(rewards, *, scale_by_std=False):
    assert scale_by_std is False
    counting = [r for r in rewards if r is not None]
    return [None if r is None else r - sum(counting) / len(counting) for r in rewards]

@advantage()
def forgetful(rewards): return [0.0 for _ in rewards]

@advantage()
def discounted(rewards, *, gamma: float = 0.9): return rewards

@advantage()
def short(rewards): return [r for r in rewards if r is not None]

@advantage()
def dividing(rewards): return [None if r is None else r / (max(q for q in rewards if q is not None) - 1) for r in rewards]

@advantage()
def boundless(rewards): return [None if r is None else float("inf") for r in rewards]

@advantage(level="tokens", critic=True, off_policy=False)
def scalar(tokens): return tokens.reward_N.sum(), tokens.value_N.sum()
"""


SCALED = """
Positive = Annotated[float, Field(gt=0)]

@loss()
def scaled(inputs, weight_N, *, clip_low: float, scale: Positive = 2.0, limits: tuple[Positive, Positive] | None = None): ...

@loss()
def required(inputs, weight_N, *, scale: Positive): ...

@loss()
def mistaken(inputs, weight_N, *, scale: Positive = -1.0): ...

@loss()
def typed(inputs, weight_N, *, scale: bytes = 1): ...

@loss()
def counted(inputs, weight_N, *, scale=len(LEVEL)): ...

@loss(needs=("reference", "top_k"), corrects="nothing")
def likeliest(inputs, weight_N): ...
"""
MEAN = """
@loss()
def recording(inputs, weight_N): return -weight_N * inputs.logp_current_N, {"mine/weight": weight_N.mean()}
"""


def source(declared: dict[str, str]) -> str:
    body = (
        "    r = (inputs.logp_current_N - inputs.logp_proximal_N).clamp(-20, 20).exp()\n"
        "    score = inputs.advantage_N * inputs.logp_current_N\n"
    )
    given = [f"@loss()\ndef {name}(inputs, weight_N):\n{body}    return {gives}, {{}}\n" for name, gives in GIVES.items()]
    given += [f"{decorator}\ndef {name}(inputs, weight_N): ...\n" for name, decorator in declared.items()]
    imports = "from typing import Annotated\nfrom pydantic import Field\nfrom async_rlhf import advantage, loss"
    return "\n".join([imports, 'LEVEL = "token"', *given, SCALED, MEAN, ESTIMATORS])


@pytest.fixture
def mine(tmp_path: Path) -> str:
    """A file that can be run."""
    (tmp_path / "mine.py").write_text(
        source({name: how for name, how in DECLARED.items() if name not in ("misspelt", "twice")})
    )
    return str(tmp_path / "mine.py")


@pytest.fixture
def unrun(tmp_path: Path) -> str:
    (tmp_path / "unrun.py").write_text(source(DECLARED), encoding="utf-8-sig")  # as some editors write it
    return str(tmp_path / "unrun.py")


@pytest.mark.parametrize("kind", advantages())
def test_every_shipped_estimator_is_usable(kind: str) -> None:
    check_estimator(AdvantageConfig(kind=kind))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", "it must give one number for each reward"),
        ("dividing", "ZeroDivisionError"), ("boundless", r"gave \[\[inf, inf"), ("scalar", "shape"),
        ("raising", "no_such_field"), ("infinite", "gradient"),
    ],
)  # fmt: skip
def test_an_estimator_or_loss_that_no_step_could_use_is_refused_before_the_run(mine: str, name: str, message: str) -> None:
    kind = f"{mine}:{name}"
    with pytest.raises(ConfigError, match=message):
        check_loss(LossConfig(kind=kind)) if name in GIVES else check_estimator(AdvantageConfig(kind=kind))


@pytest.mark.parametrize("name", BROKEN)
def test_a_loss_that_breaks_a_law_is_named_with_it(mine: str, name: str) -> None:
    trial = try_loss(LossConfig(kind=f"{mine}:{name}"))
    assert BROKEN[name] in {law.name for law in trial.laws if law.holds is False} and not trial.holds


def test_the_command_prints_the_table_and_its_exit_code_is_the_verdict(mine: str) -> None:
    good = output_of(0, "try", "loss", f"{mine}:plain", "--set", "loss.is_cap=4.0")
    assert "adds up over micro-batches" in good and "none (no correction)" in good
    output_of(1, "try", "loss", f"{mine}:averaged")
    assert "did you mean 'plain'?" in output_of(3, "try", "loss", f"{mine}:planar")


def test_a_declaration_says_what_is_wrong_where_it_is_written() -> None:
    with pytest.raises(ConfigError, match=r"write @loss\(\), with its parentheses"):
        async_rlhf.loss(len)
    with pytest.raises(ConfigError, match=r"^@advantage level = 'word': .* 'tokens'$"):
        async_rlhf.advantage(level="word")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("undeclared", r"is not declared: write @loss\(\) above its 'def'"),
        ("computed", r"must be written out"),
        ("misspelt", r"@loss level = 'word': .* 'token', 'sequence' or 'pair'"),
        ("twice", r"the ratio would count twice"),
        ("absent", r"no function 'absent' at the top level"),
        ("centred", r"is declared with @advantage\(\): name it in advantage.kind"),
    ],
)
def test_a_declaration_without_meaning_is_refused_without_running_the_file(unrun: str, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        loss_spec(f"{unrun}:{name}")
    with pytest.raises(ConfigError, match="cannot be read"):
        loss_spec(f"{unrun}.py:{name}")


def test_check_holds_it_to_the_rules_of_shipped_ones(mine: str) -> None:
    def checked(loss: dict[str, Any], advantage: str = "centred") -> None:
        own = {"loss": loss | {"kind": f"{mine}:{loss['kind']}"}, "advantage": {"kind": f"{mine}:{advantage}"}}
        check(changed(load(QUICK), own))

    checked({"kind": "plain"})
    for loss, advantage, says in (
        ({"kind": "of_sequences", "token_mask": (0.5, 2.0)}, "centred", "token_mask masks single .*of_sequences"),
        ({"kind": "plain"}, "scalar", "needs a critic's values"),
        ({"kind": "plain", "is_cap": None}, "centred", "without an importance weight"),
        ({"kind": "plain"}, "discounted", r"'gamma' has the name of advantage.gamma, .*leave its default out"),
        (
            {"kind": "scaled", "scael": 2.0},
            "centred",
            r"key 'loss.scael' = 2.0: loss.kind = .* has the keys limits, scale; "
            "did you mean 'loss.scale'",
        ),
        ({"kind": "scaled", "scale": -1.0}, "centred", "loss.scale = -1.0: Input should be greater than 0"),
        ({"kind": "scaled", "scale": True}, "centred", "loss.scale = True: it cannot be true or false"),
        ({"kind": "scaled", "clip_low": 2.0}, "centred", "loss.clip_low = 2.0: Input should be less than 1"),
        ({"kind": "required"}, "centred", "key 'loss.scale' is missing and has no default"),
        ({"kind": "mistaken"}, "centred", "loss.scale = -1.0: Input should be greater than 0"),
        ({"kind": "typed"}, "centred", r"parameter 'scale: bytes': bytes is not understood. .*a type is float, int"),
        ({"kind": "counted"}, "centred", r"parameter 'scale': malformed node.*a default is a literal"),
        ({"kind": "likeliest"}, "centred", r"needs = \(\"top_k\",\): .*such as \*, top_k: int = 32"),
    ):
        with pytest.raises(ConfigError, match=says):
            checked(loss, advantage)
    assert advantage_spec(f"{mine}:scalar").critic and LossConfig(kind=f"{mine}:held").needs_reference


def test_its_parameters_are_settings_that_a_reader_of_the_configuration_needs_no_file_for(mine: str) -> None:
    config = LossConfig(kind=f"{mine}:scaled", clip_low=0.5, limits=[1, 2.5])
    assert config.arguments == {"clip_low": 0.5, "scale": 2.0, "limits": (1.0, 2.5)}
    assert LossConfig(kind=f"{mine}:scaled", limits="none").parameters["limits"] is None
    other = config.model_copy(update={"kind": "gone.py:scaled"})
    assert LossConfig.model_validate(other.model_dump()) == other
    run = changed(load(QUICK), {"loss": {"kind": f"{mine}:scaled", "scale": 3.0}})
    assert changed(run, {"loss.kind": "ipo"}).loss == LossConfig(kind="ipo"), "another loss begins with its own"
    assert changed(run, {"loss.kl_coef": 0.5}).loss.parameters["scale"] == 3.0


def test_an_own_loss_and_estimator_train_a_model(mine: str, model_dir: Path) -> None:
    groups, rewards = [make_group(0, [3, 1, 4])], [[1.0, None, 0.0]]
    advantage = AdvantageConfig(kind=f"{mine}:centred", scale_by_std=False)
    own = LossConfig(kind=f"{mine}:plain")
    found = estimate_advantages(groups, rewards, select_members(groups, rewards, advantage, own), {}, advantage, own)
    assert found.advantages == [[0.5, None, -0.5]]
    report = make_backend(model_dir, own).step([make_rows(groups, found.advantages)], 0)
    assert report.applied and report.metrics["grad_norm"] > 0
    with pytest.raises(ValueError, match="None where the reward is None"):
        estimate_advantages(groups, rewards, rewards, {}, AdvantageConfig(kind=f"{mine}:forgetful"), own)


def test_a_module_is_found_without_being_run_and_imports_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_losses.py").write_text("raise SystemExit\n@loss(level='sequence')\ndef own(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert loss_spec("my_losses:own").level == "sequence" and "my_losses" not in sys.modules
    (tmp_path / "beside_the_loss.py").write_text("SCALE = 3.0\n")
    (tmp_path / "scaled.py").write_text(
        "from async_rlhf import loss\nfrom beside_the_loss import SCALE\n"
        "@loss()\ndef scaled(inputs, weight_N): return SCALE, {}\n"
    )
    assert load_function("loss", f"{tmp_path / 'scaled.py'}:scaled")(None, None) == (3.0, {})
    for kind, says in (
        ("my_lasses:own", "there is no module 'my_lasses'"),
        ("none.py:own", r"paths are relative to the config"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_function("loss", kind) if ".py" in kind else loss_spec(kind)


def test_a_function_that_cannot_be_imported_is_refused_with_what_to_do(tmp_path: Path) -> None:
    def local(inputs: Any, weight_N: Any) -> Any: ...

    with pytest.raises(ConfigError, match=r"is defined inside another function.*%%writefile my_loss.py"):
        train(tmp_path / "none.toml", loss=local)
