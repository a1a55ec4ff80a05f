"""The experts that the built-in engine records are those that computed the keys and values it goes on from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch_models import chosen_experts, finished, own_model
from transformers import PreTrainedModel

from async_rlhf.actors.engine import Completion, Request, RolloutKey
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.routing import SIGMOID, SOFTMAX, routers
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.buffers.tensors import RawTensor
from async_rlhf.experiments.doctor import families

QUICK = ("deepseek_v3", "olmoe", "qwen3_moe")
PROMPTS = [tuple(range(3 + number, 24 + 5 * number)) for number in range(3)]


def moe(kind: str, seed: int = 1) -> PreTrainedModel:
    """3 of 8 experts, so that a wrong position shows."""
    return own_model(kind, seed, **families.experts(kind, 8, 3))


def request(number: int, member: int = 0, num_new: int = 12, **own: Any) -> Request:
    return Request(RolloutKey(number, 0, member), PROMPTS[number], num_new, Sampling(), 10 * number + member, **own)


def raw(model: PreTrainedModel) -> dict[str, RawTensor]:
    return {
        name: RawTensor("float32", tuple(each.shape), each.detach().numpy().tobytes())
        for name, each in model.named_parameters()
    }


def recorded(completion: Completion) -> np.ndarray:
    assert completion.routing is not None and completion.routing.dtype == np.uint8
    return np.sort(completion.routing, axis=-1)


def all_ids(asked: Request, completion: Completion) -> list[int]:
    return [*asked.prefix_ids, *completion.token_ids.tolist()[:-1]]


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.rest) for kind in sorted(SOFTMAX | SIGMOID)]
)
def test_of_each_position_the_experts_are_those_of_a_plain_pass(kind: str) -> None:
    model = moe(kind)
    # Prompts are computed in parts and shared by siblings, rows move and are sent back to make room.
    engine = TorchEngine(model, slots=4, prefill_tokens=7, max_places=100, record_routing=True)
    asked = [request(number, member, 24 + 5 * member) for number in range(3) for member in range(3)]
    done = finished(engine, asked)
    assert engine.num_suspended > 0
    for each in asked:
        np.testing.assert_array_equal(recorded(done[each.key]), chosen_experts(model, all_ids(each, done[each.key])))


def test_a_pass_that_is_replayed_on_the_device_records_too() -> None:
    def record(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        run()
        return run

    model = moe("qwen3_moe")
    done = finished(TorchEngine(model, slots=4, recorder=record, record_routing=True), [request(n) for n in range(3)])
    for key, completion in done.items():
        np.testing.assert_array_equal(recorded(completion), chosen_experts(model, all_ids(request(key.group), completion)))


@pytest.mark.parametrize("on_update", ["keep", "interrupt"])
def test_what_new_weights_compute_again_has_their_experts_and_what_is_kept_has_those_of_the_old(on_update: Any) -> None:
    old, new, asked = moe("olmoe", 1), moe("olmoe", 2), request(0)
    engine = TorchEngine(moe("olmoe", 1), slots=2, record_routing=True, on_update=on_update)
    engine.submit([asked])
    for _ in range(5):
        engine.step()
    engine.load_weights(1, raw(new))
    done = finished(engine)[asked.key]
    ids = all_ids(asked, done)
    assert (chosen_experts(old, ids) != chosen_experts(new, ids)).any(axis=(1, 2)).all(), (
        "the two can be told apart at every position"
    )
    known = len(PROMPTS[0]) + 4  # its last token is computed by the next pass
    if on_update == "interrupt":
        np.testing.assert_array_equal(recorded(done), chosen_experts(new, ids))
    else:
        np.testing.assert_array_equal(recorded(done)[:known], chosen_experts(old, ids)[:known])


def test_a_turn_that_continues_another_has_the_experts_of_the_whole_row() -> None:
    model, asked = moe("qwen3_moe"), request(1, hold=True)
    engine = TorchEngine(model, slots=2, record_routing=True)
    first = finished(engine, [asked])[asked.key]
    goes_on = replace(asked, context=(*first.token_ids.tolist(), 7, 8, 9), seed=5)
    second = finished(engine, [request(0), goes_on])[asked.key]
    np.testing.assert_array_equal(recorded(second), chosen_experts(model, all_ids(goes_on, second)))


def test_a_probe_leaves_nothing_and_without_the_setting_nothing_is_recorded() -> None:
    model, asked = moe("qwen3_moe"), request(0)
    engine = TorchEngine(model, slots=2, record_routing=True)
    engine.submit([asked])
    engine.step()
    engine.probe(range(3, 30))
    done = finished(engine)[asked.key]
    np.testing.assert_array_equal(recorded(done), chosen_experts(model, all_ids(asked, done)))
    plain = moe("qwen3_moe")
    assert finished(TorchEngine(plain, slots=2), [asked])[asked.key].routing is None
    assert not any(each._forward_hooks for each in routers(plain))


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_a_model_whose_experts_cannot_be_recorded_is_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"replay_routing = true with model type '{kind}'.* use one of deepseek_v3, dots1"):
        TorchEngine(own_model(kind, 1), slots=2, record_routing=True)
