"""vLLM samples behind images as plain transformers passes say, whatever it has in its caches."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_rlhf.actors.engine import Request
from async_rlhf.actors.served_model.reading import check_behind_images
from async_rlhf.actors.served_model.weights import Base
from async_rlhf.actors.vllm_engine.settings import VLLMEngineConfig
from async_rlhf.buffers.errors import ConfigError, EngineError
from async_rlhf.buffers.images.tower import ImageTower, tower_parameters
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.learner.step.torch_machine import raw
from tests import image_models
from tests.actors.test_torch_engine_images import Served
from tests.actors.torch_models import finished
from tests.actors.vllm_model import plain_logprobs

# vLLM and what it imports warn of their own affairs.
pytestmark = [pytest.mark.rest, pytest.mark.filterwarnings("ignore")]

TOLERANCE = 1e-4
# What transformers or vLLM import for the others is installed apart, by `make test-all`.
ALONE = ("idefics3",)


class Running:
    """A family's tiny model behind a running vLLM."""

    def __init__(self, own: Served) -> None:
        from async_rlhf.actors.vllm_engine.loading import load_engine

        config = VLLMEngineConfig(kind="vllm", slots=4, kv_bytes=1 << 27)
        self.own, self.engine = own, load_engine(str(own.directory), config, version=0, images=own.processor)

    def check(self, *asked: Request) -> None:
        self.own.assert_plain(asked, finished(self.engine, asked), TOLERANCE)

    def publish(self, factor: float, stays: Collection[str] = ()) -> None:
        """Another version, in which every parameter has changed but those that it has not; the next one that is adopted."""
        named = {name: p for name, p in self.own.model.named_parameters() if name not in stays}
        with torch.no_grad():
            for parameter in named.values():
                parameter.mul_(factor)
        self.engine.load_weights(self.engine.version + 1, {name: raw(p.detach().clone()) for name, p in named.items()})


@pytest.fixture(scope="module", params=sorted(image_models.MAKERS.keys() - {"gemma3"}))
def running(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    pytest.importorskip("vllm")
    if request.param not in ALONE and not find_spec("torchvision"):
        pytest.skip(f"{request.param} needs torchvision in vLLM")
    torch.set_num_threads(1)
    found = Running(Served(request.param, tmp_path_factory.mktemp(request.param), wide=True))
    yield found
    found.engine.close()
    gc.collect()  # vLLM leaves a socket context to the collector, which warns of it


def test_sampled_log_probabilities_are_those_of_plain_passes(running: Running) -> None:
    own = running.own
    a, b, c = own.images
    together = own.request(2, 0, b, a, c), own.request(2, 1, b, a, c), own.request(4, 0, a, b)
    running.check(own.request(0, 0, a), own.request(0, 1, a), own.request(1, 0, b), own.request(3, 0), *together)


def test_images_of_the_same_size_behind_the_same_text_share_nothing(running: Running) -> None:
    own = running.own
    images = [own.store.add(image_models.drawn(24, 24, seed)) for seed in (1, 2)]
    long = "what? " * 60  # some blocks of vLLM's cache
    asked = [own.request(group, member, images[group], text=long) for member in range(2) for group in range(2)]
    assert len({each.prompt_ids for each in asked}) == 1
    for each in asked:  # one after the other: a prompt is found in the cache
        running.check(each)


def test_a_turn_goes_on_behind_an_image_and_a_sampled_token_of_an_image(running: Running) -> None:
    own = running.own
    first = own.request(0, 0, own.images[1])
    ids = tuple(finished(running.engine, [first])[first.key].token_ids.tolist())
    ids = tuple(9 if each == own.processor.place_id else each for each in ids)
    running.check(Request(first.key, first.prompt_ids, 6, Sampling(), 3, images=first.images, context=(*ids, 9, 10, 11)))
    spelt = Request(first.key, first.prompt_ids, 6, Sampling(), 3, images=first.images, context=(own.processor.place_id, 9))
    assert len(finished(running.engine, [spelt])[first.key].token_ids) >= 1


def test_a_probe_is_of_plain_text_or_behind_made_up_images(running: Running) -> None:
    ids = tuple(range(8, 30))
    expected = plain_logprobs(running.own.model, ids[:1], np.array(ids[1:], np.int32))
    np.testing.assert_allclose(running.engine.probe(ids), expected, atol=TOLERANCE)
    prompt = running.own.tower.sample
    logits = running.own.tower.plain([*prompt.ids, *ids[:-1]], len(prompt.ids), prompt.images)[len(prompt.ids) :]
    expected = torch.log_softmax(logits.float(), -1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
    np.testing.assert_allclose(running.engine.probe(ids, behind_images=True), expected, atol=TOLERANCE)


# verl-project/verl 6523, huggingface/trl 7198: what older weights had made of an image stayed in vLLM's cache.
@pytest.mark.parametrize("on_update", ["keep", "interrupt"])
def test_numbers_follow_the_weights_of_the_tower_too(running: Running, on_update: Any) -> None:
    own, engine = running.own, running.engine
    a, b, _ = own.images
    engine.on_update = on_update
    underway = [own.request(7, 0, a, new=200), own.request(7, 1, b, a, new=200)]
    engine.submit(underway)
    engine.step()
    running.publish(1.05)
    while engine.num_unfinished:  # they go on
        engine.step()
    running.check(own.request(0, 0, a), own.request(1, 0, b), own.request(2, 0, b, a), own.request(3, 0))
    running.publish(1 / 1.05)
    running.check(own.request(0, 0, a), own.request(2, 0, b, a))


def test_a_set_without_the_tower_leaves_it_as_it_is(running: Running) -> None:
    own = running.own
    a, b, _ = own.images
    tower = tower_parameters(own.model)
    for factor in (1.05, 1 / 1.05):
        running.publish(factor, tower)
        running.check(own.request(0, 0, a), own.request(1, 0, b), own.request(2, 0, b, a), own.request(3, 0))


def test_adapters_alone_leave_the_tower_as_it_is(running: Running) -> None:
    own, named = running.own, dict(running.own.model.named_parameters())
    name = next(name for name in named if name.endswith("self_attn.o_proj.weight"))
    if name not in Base(own.directory).names:
        pytest.skip("its files have other names, and adapters alone are refused before a run")
    weight = named[name]
    a, b = torch.randn(2, weight.shape[1]), 0.05 * torch.randn(weight.shape[0], 2)
    with torch.no_grad():
        weight += b @ a
    running.engine.load_weights(running.engine.version + 1, {f"{name}.lora_A": raw(a), f"{name}.lora_B": raw(b)})
    running.check(own.request(0, 0, own.images[0]), own.request(2, 0, own.images[1], own.images[0]), own.request(3, 0))
    with torch.no_grad():
        weight -= b @ a
    running.publish(1.0)


def test_a_prompt_with_other_places_than_vllm_fills_is_refused(running: Running) -> None:
    own = running.own
    asked = own.request(0, 0, own.images[0], own.images[2])
    at = asked.prompt_ids.index(own.processor.place_id)
    more = (*asked.prompt_ids[: at + 1], *asked.prompt_ids[at:])
    for wrong in (more, asked.prompt_ids[: at + 1] + asked.prompt_ids[at + 2 :], asked.prompt_ids[:at]):
        with pytest.raises(EngineError, match="places of 2 images, and vLLM fills"):
            running.engine._images.prompt(wrong, asked.images, "x")


def test_an_engine_of_other_numbers_is_refused(running: Running) -> None:
    own = running.own
    other = ImageTower(own.model, own.processor)
    check_behind_images(running.engine, other, 5e-3, ConfigError)
    with torch.no_grad():
        own.model.get_output_embeddings().weight.mul_(2)
    try:
        with pytest.raises(ConfigError, match="behind images log-probabilities differ from plain passes by"):
            check_behind_images(running.engine, other, 5e-3, ConfigError)
    finally:
        with torch.no_grad():
            own.model.get_output_embeddings().weight.div_(2)


def test_an_engine_without_the_store_refuses_images(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.engine, "_images", None)
    with pytest.raises(EngineError, match="has 1 images, and this engine was started without their store"):
        running.engine.submit([running.own.request(0, 0, running.own.images[0])])


def test_gemma_3_is_refused_by_name_as_long_as_tokens_of_an_image_cannot_see_each_other(tmp_path: Path) -> None:
    attention = pytest.importorskip("vllm.v1.attention.backends.cpu_attn").CPUAttentionBackend
    assert not attention.supports_mm_prefix()
    own = Served("gemma3", tmp_path)
    with pytest.raises(ConfigError, match=r"smolvlm, not gemma3 \(vLLM's attention on a CPU hides .*; 'torch' can"):
        VLLMEngineConfig(kind="vllm").start(str(tmp_path), on_update="keep", version=0, images=own.processor)
