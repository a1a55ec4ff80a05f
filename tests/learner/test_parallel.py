"""The share of each rank in a row, and how DeepSpeed splits a model; that two ranks make the step of one is in `test_ranks`."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from making import make_group, make_model

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.learner.batch.micro_batch import Packing, make_micro_batches
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.model.sequence import Share
from async_rlhf.learner.step.deepspeed_machine import autotp_settings


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_token_is_of_one_rank_which_has_its_position_and_its_support(size: int) -> None:
    rows = make_rows([make_group(n, [3, 1, 6]) for n in range(2)], [[1.0, -1.0, 0.5]] * 2, 512)
    (plain,) = make_micro_batches(rows, Packing(512))
    sizes = torch.arange(plain.num_tokens) % 3
    batch = replace(plain, sizes_N=sizes, ids_K=torch.arange(int(sizes.sum())))
    assert batch.sampling_masks is not None
    sampling_masks = batch.sampling_masks.chunks(1)
    shares = [Share.of(batch, rank, size) for rank in range(size)]
    assert torch.cat([share.index_M for share in shares]).sort().values.tolist() == list(range(batch.num_tokens))
    for share in shares:
        assert share.own.ids_RL.shape[1] * size == share.segments_RL.shape[1]
        assert share.own.target_N.equal(batch.target_N[share.index_M])
        read = share.own.ids_RL.flatten()[share.own.source_N]
        assert read.equal(batch.ids_RL.flatten()[batch.source_N[share.index_M]])
        assert share.own.sampling_masks is not None
        wanted = [sampling_masks[token].ids_K for token in share.index_M.tolist()]
        assert share.own.sampling_masks.ids_K.equal(torch.cat([*wanted, torch.empty(0, dtype=torch.int64)]))


SPLIT = {"q_proj": "column", "k_proj": "column", "v_proj": "column", "o_proj": "row"}
SPLIT |= {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3"])
def test_all_products_of_a_layer_are_split_and_nothing_else(name: str) -> None:
    model = make_model(name)
    specs = autotp_settings(model, 2)["partition_config"]["layer_specs"]
    kinds = {spec["patterns"][0]: spec["partition_type"] for spec in specs if spec["partition_type"] != "skip"}
    names = [f"model.{parameter}" for parameter, _ in model.named_parameters()]
    split = {each: kind for each in names for pattern, kind in kinds.items() if re.match(pattern, each)}
    assert len(split) == 2 * len(SPLIT) and all(kind == SPLIT[each.split(".")[-2]] for each, kind in split.items())


@pytest.mark.parametrize(
    ("name", "plan", "message"),
    [
        ("gpt2", None, "GPT2LMHeadModel has no plan how to be split; set learner.tensor_parallel = 1"),
        ("llama", {"layers.*.mlp.experts": "moe_experts"}, "LlamaForCausalLM splits layers as moe_experts, which is not"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(name: str, plan: dict[str, str] | None, message: str) -> None:
    model = make_model(name)
    model.config.base_model_tp_plan = plan
    with pytest.raises(ConfigError, match=message):
        autotp_settings(model, 2)
