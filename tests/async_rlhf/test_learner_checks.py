"""Settings without meaning, and settings of the machine that cannot work, are refused with the reason and the nearest valid
choice, which is then accepted."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.learner.config import LearnerConfig, check_division
from async_rlhf.learner.step.deepspeed_machine import deepspeed_settings
from async_rlhf.run.learner_checks import check, remarks
from async_rlhf.run.loading import changed, load
from tests.conftest import QUICK

SIZES = {"max_steps": 100, "learner.batch_size": 16, "generation.group_size": 4, "queue.max_staleness": 2}
BASE = load(QUICK, SIZES)


def checked(*settings: str) -> None:
    """Lines of a configuration, `;` between them; later ones win."""
    config = BASE
    for text in settings:
        config = changed(config, tomllib.loads(text.replace(";", "\n")))
    check(config)


# what is asked, what the refusal says, and what makes it right as the refusal says
CASES = [
    ("advantage.kind='traced'", "'traced' needs a critic's values.*critic.kind = 'head'", "learner.critic={kind='head'}"),
    ("learner.critic={kind='model'}", "no use for values.*learner.critic.kind = 'none'", "learner.critic={kind='none'}"),
    ("advantage.kind='traced'; learner.critic={kind='head', updates=2}", "critic.updates is for .*kind = 'model'",
     "learner.critic.kind='model'"),
    ("advantage={kind='traced', c_cap=2.0}; learner.critic={kind='head'}", "c_cap = 2 is above .*rho_cap.*highest: 1",
     "advantage.c_cap=1.0"),
    ("advantage.kind='v_trace'; learner.critic={kind='head'}; loss.kind='gspo'",
     "one advantage for a completion.*'v_trace' has several.*'decoupled_ppo'", "loss.kind='decoupled_ppo'"),
    ("advantage.kind='reinforce_pp'; advantage.gamma=0.9; loss.kind='gspo'", "pp' has several", "advantage.gamma=1.0"),
    ("advantage.level='turn'; advantage.kind='reinforce_pp'", "turns within a group.*'leave_one_out'",
     "advantage.kind='leave_one_out'"),
    ("advantage.level='turn'; loss.kind='gspo'", "'turn' has several.*'decoupled_ppo'", "loss.kind='decoupled_ppo'"),
    ("advantage.kind='optimal_token'; loss.kl_coef=0.1; loss.kl_in='reward'", "each token a reward", "loss.kl_in='loss'"),
    ("advantage.kind='optimal_token'; loss.kind='gspo'", "has one advantage.*has several", "loss.kind='decoupled_ppo'"),
    ("advantage.kind='max_rl'; loss.kl_coef=0.1; loss.kl_in='reward'", "below 0.*'max_rl' divides", "loss.kl_in='loss'"),
    ("loss.kind='oapl'", "'oapl' fits log-ratios.*'group_relative' gives", "advantage.kind='oapl'"),
    ("advantage.level='turn'; advantage.constant_groups='drop'", "turns can differ", "advantage.constant_groups='keep'"),
    ("loss.kind='online_dpo'; generation.group_size=1", "group_size = 1; lowest: 2", "generation.group_size=2"),
    ("generation.group_size=1", "every advantage would be 0.*advantage.kind = 'reinforce_pp'", "advantage.kind='reinforce_pp'"),
    ("generation.group_size=1; advantage.kind='reinforce_pp'; advantage.constant_groups='drop'", "equal to itself.*'keep'",
     "advantage.constant_groups='keep'"),
    ("advantage.constant_groups='refill'; rewards.normalise=['reasoning_gym']",
     r"rewards.normalise = \['reasoning_gym'\].*'drop', or rewards.normalise = \[\]", "advantage.constant_groups='drop'"),
    ("loss.kind='best_of_n'; loss.sequence_mask=[0.9, 1.1]", "which policy sampled.*'none'", "loss.sequence_mask='none'"),
    ("loss.kind='best_of_n'; loss.divergence_max=0.5", "divergence_max: .*sampled.*'none'", "loss.divergence_max='none'"),
    ("loss.kind='gspo'; loss.token_mask=[0.5, 2.0]", "masks single tokens.*'decoupled_ppo'", "loss.kind='decoupled_ppo'"),
    ("loss.kind='ppo_clip'; loss.is_level='sequence'", "ratio to .*behaviour.* in itself.*= 'token'", "loss.is_level='token'"),
    ("loss.kind='ipo'; loss.is_normalised=true", "has no importance weight.*= false", "loss.is_normalised=false"),
    ("loss.proximal='interpolate'; loss.is_normalised=true", "all weights before.*'recompute'", "loss.proximal='recompute'"),
    ("loss.token_mask=[1.1, 2.0]", r"token_mask = \[1.1, 2.0\] would mask.*\[0.5, 2.0\]", "loss.token_mask=[0.5, 2.0]"),
    ("loss.kind='online_dpo'; loss.reduction='sequence'", "is no single token.*at 'token'", "loss.reduction='token'"),
    ("loss.kind='online_dpo'; loss.kl_coef=0.1; loss.kl_in='reward'", "only ranks.*'loss'", "loss.kl_in='loss'"),
    ("loss.is_cap='none'", "max_staleness = 2 without an importance weight.*loss.is_cap = 2.0", "loss.is_cap=2.0"),
    ("loss.kind='truncated_is'; loss.is_cap='none'", "weight.*allow_uncorrected = true", "loss.allow_uncorrected=true"),
    ("advantage.kind='gae'; learner.critic={kind='head'}", "policies that sampled.*'traced'", "advantage.kind='traced'"),
    ("generation.top_p=0.9; engine.kind='vllm'",
     "top_p = 0.9 cuts off.*would not be 1.*Set generation.top_k", "generation.top_k=64"),
    ("generation.min_p=0.1; engine.kind='vllm'", "kind = 'online_dpo'", "loss.kind='online_dpo'"),
    ("guard.enabled=true; queue.exact=true", "exact = true fixes the staleness", "queue.exact=false"),
    ("guard.target=1; queue.exact=true", r"exact = true fixes .* guard\.target = 'none'", "guard.target='none'"),
    ("guard.target=9", r"target = 9 is not between .* the bound, queue\.max_staleness = 2; nearest: 2", "guard.target=2"),
    ("guard.enabled=true; guard.target=0", r"no room below guard\.target = 0.* = 1 or more, or guard", "guard.target=1"),
    ("guard.enabled=true; learner.publish_every=3", r"no room below queue\.max.*= 2.*= 3 or more", "queue.max_staleness=3"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "message", "remedy"), CASES, ids=[asked for asked, *_ in CASES])
def test_what_has_no_meaning_is_refused_and_what_is_proposed_is_accepted(asked: str, message: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        checked(asked)
    assert re.search(message, str(refusal.value)), refusal.value
    checked(asked, remedy)


@pytest.mark.parametrize("kind", ["ppo_clip", "topr", "proximal_rloo", "online_dpo", "best_of_n"])
def test_the_defaults_are_accepted_and_a_loss_that_needs_no_weight_may_be_stale_without_one(kind: str) -> None:
    checked()
    checked(f"loss.kind='{kind}'; loss.is_cap='none'")


DEEPSPEED = {"backend": "deepspeed", "ranks": 2}
MACHINES: list[tuple[dict[str, Any], str]] = [
    ({"ranks": 5}, r"learner.ranks = 5 cannot share an update of 4 groups.*Highest: learner.ranks = 4"),
    ({"ranks": 3, "updates_per_step": 2}, "of 2 groups.*Highest: learner.ranks = 2"),
    ({"ranks": 2, "device": "cuda:1"}, "'cuda:1' is one device for 2 ranks; 'cuda' gives every rank"),
    ({"deepspeed_config": "ds.json"}, "is for learner.backend = 'deepspeed'"),
    ({"backend": "deepspeed", "dtype": "bfloat16"}, "weights of 16 bits, .*: set engine.dtype = 'bfloat16', or engine.canary"),
    ({"critic": {"warmup_steps": 3}}, "critic.warmup_steps = 3 and no critic: set learner.critic.kind"),
    ({"backend": "deepspeed", "compile": True}, "set learner.compile = false, or learner.backend ="),
    ({"backend": "deepspeed", "deepspeed_config": "/nowhere/ds.json"}, "'/nowhere/ds.json' is no file"),
    (DEEPSPEED | {"sequence_parallel": 2, "ranks": 4}, "all ranks share a row, or none; set it to 4 or 1"),
    ({"sequence_parallel": 2, "ranks": 2}, "set learner.backend = 'deepspeed'"),
    (DEEPSPEED | {"sequence_parallel": 2, "critic": {"kind": "head"}},
     "with a critic, which ranks do not share; set it to 1, or learner.critic.kind = 'none'"),
    (DEEPSPEED | {"tensor_parallel": 2, "ranks": 4}, "learner.tensor_parallel = 2 of learner.ranks = 4: .*set it to 4 or 1"),
    ({"tensor_parallel": 2, "ranks": 2}, "or learner.tensor_parallel = 1"),
    (DEEPSPEED | {"tensor_parallel": 2, "critic": {"kind": "model"}}, "set it to 1, or learner.critic.kind = 'none'"),
    (DEEPSPEED | {"tensor_parallel": 2, "lora": {"rank": 4}},
     "with adapters, whose layers are not split; set it to 1, or learner.lora.rank = 0"),
    (DEEPSPEED | {"tensor_parallel": 2, "sequence_parallel": 2}, "ranks share positions or layers; set one of them to 1"),
    ({"lora": {"publish": "adapter"}}, "there is no adapter. Set learner.lora.rank = 8"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), MACHINES)
def test_what_cannot_work_is_refused_with_what_can(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check(changed(BASE, {"learner": settings}))
    assert re.search(message, str(raised.value)), raised.value


@pytest.mark.parametrize(
    ("setting", "choice"),
    [("sequence_parallel", "_heads = 6; choose 1, 2, 3, 6"), ("tensor_parallel", "_size = 32; choose 1, 2")],
)
def test_ranks_that_do_not_divide_what_they_share_are_refused_with_what_does(setting: str, choice: str) -> None:
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 6, "intermediate_size": 32}
    with pytest.raises(ConfigError, match=f"learner.{setting} = 4 does not divide all of the model's num_attention.*{choice}"):
        check_division(LearnerConfig(ranks=4, **{setting: 4}), sizes.get)
    check_division(LearnerConfig(ranks=2, **{setting: 2}), sizes.get)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "must hold one JSON object"),
        ('{"optimizer": {}, "train_batch_size": 8}', "sets train_batch_size, optimizer, which"),
        ('{"tensor_parallel": {"autotp_size": 2}}', "sets tensor_parallel, which"),
        ('{"zero_optimization": {"stage": 1}}', "asks for ZeRO stage 1; set learner.zero_stage = 1"),
        ('{"zero_optimization": {"reduce_bucket_size": 7}, "wall_clock_breakdown": true}', ""),
    ],
)
def test_a_deepspeed_file_is_laid_over_ours_and_refused_where_it_contradicts_the_run(
    text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "ds.json").write_text(text)
    config = LearnerConfig(backend="deepspeed", dtype="bfloat16", deepspeed_config=str(tmp_path / "ds.json"))
    if message:
        with pytest.raises(ConfigError, match=message):
            deepspeed_settings(config)
        return
    settings = deepspeed_settings(config.model_copy(update={"zero_stage": 3}))
    assert settings["zero_optimization"] | {"stage": 3, "reduce_bucket_size": 7} == settings["zero_optimization"]
    assert settings["wall_clock_breakdown"] and settings["bf16"]["enabled"] and settings["gradient_clipping"] == 1.0


def test_products_in_float32_on_a_gpu_are_remarked_upon() -> None:
    (remark,) = remarks(changed(BASE, {"learner.device": "cuda:1"}))
    assert re.search("'float32' on learner.device = 'cuda:1'.*Set learner.dtype = 'bfloat16'", remark)
    assert [*remarks(BASE), *remarks(changed(BASE, {"learner.device": "cuda", "learner.dtype": "bfloat16"}))] == []


def test_a_run_that_ends_within_its_warm_up_is_remarked_upon() -> None:
    warm = {"learner.warmup_steps": 4, "max_steps": 4}
    assert [*remarks(changed(BASE, warm))] == ["learner.warmup_steps = 4: all 4 steps (max_steps) are warm-up."]
    (remark,) = remarks(changed(BASE, {"learner.critic.kind": "head", "learner.critic.warmup_steps": 10, "max_steps": 10}))
    assert remark == "learner.critic.warmup_steps = 10: in 10 steps (max_steps) only the critic learns."
    assert [*remarks(changed(BASE, {**warm, "max_steps": 5}))] == []
