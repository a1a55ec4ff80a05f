"""Prompts with images are sampled from as plain transformers passes say, whatever runs beside them and however often they are
computed again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_rlhf.actors.engine import Completion, Request, RolloutKey
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.actors.torch_engine.llama_invariant import can_be_invariant
from async_rlhf.actors.torch_engine.loading import load_engine
from async_rlhf.actors.torch_engine.model_check import check_reading
from async_rlhf.actors.torch_engine.settings import TorchEngineConfig
from async_rlhf.buffers.errors import ConfigError, EngineError, WeightsError
from async_rlhf.buffers.images.processor import ImageProcessor
from async_rlhf.buffers.images.store import ImageStore
from async_rlhf.buffers.images.tower import ImageTower, tower_parameters
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.learner.config import LearnerConfig, LossConfig
from async_rlhf.learner.step.controller import Controller, make_backend
from async_rlhf.learner.step.torch_machine import raw
from tests import image_models
from tests.actors.torch_models import finished

NORM = "model.language_model.norm.weight"


class Served:
    """A family's tiny model, its processor, and three images of different shapes."""

    def __init__(self, family: str, directory: Path, *, wide: bool = False) -> None:
        self.directory = directory
        self.model = image_models.make(family, directory, wide=wide)
        self.store = ImageStore(directory / "images")
        self.images = [self.store.add(image_models.drawn(*size)) for size in ((30, 20), (16, 44), (24, 24))]
        self.processor = ImageProcessor(directory, self.store)
        self.tower = ImageTower(self.model, self.processor)

    def engine(self, **settings: Any) -> TorchEngine:
        return TorchEngine(self.model, **{"slots": 3, "stop_ids": set(), "tower": self.tower, **settings})

    def request(self, group: int, member: int, *images: str, new: int = 8, text: str = "what?", **rest: Any) -> Request:
        ids = tuple(self.processor.encode(image_models.asking(*images, text=text), {}).ids)
        return Request(
            RolloutKey(group, 0, member), ids, new, Sampling(), seed=7 * group + member, images=tuple(images), **rest
        )

    def assert_plain(self, asked: Sequence[Request], ended: Mapping[RolloutKey, Completion], tolerance: float = 1e-5) -> None:
        for request in asked:
            completion = ended[request.key]
            sampled = completion.token_ids.tolist()
            if self.processor.place_id in sampled:
                sampled = sampled[: sampled.index(self.processor.place_id)]
            ids = torch.tensor([*request.prefix_ids, *sampled])
            if request.images:
                logits = ImageTower(self.model, self.processor).plain(
                    ids[:-1].tolist(), len(request.prompt_ids), request.images
                )
            else:
                with torch.no_grad():
                    logits = self.model(input_ids=ids[None, :-1], use_cache=False).logits[0]
            logp = torch.log_softmax(logits.float(), -1).gather(-1, ids[1:, None])[len(request.prefix_ids) - 1 :, 0]
            np.testing.assert_allclose(completion.logprobs[: len(sampled)], logp.numpy(), rtol=0, atol=tolerance)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def served(tmp_path: Path) -> Callable[[str], Served]:
    return lambda family: Served(family, tmp_path)


@pytest.mark.parametrize("family", image_models.MAKERS)
def test_sampled_log_probabilities_are_those_of_plain_passes(served: Callable[[str], Served], family: str) -> None:
    own = served(family)
    a, b, c = own.images
    asked = [
        own.request(0, 0, a), own.request(0, 1, a), own.request(1, 0, b), own.request(2, 0, b, a, c), own.request(3, 0),
        own.request(2, 1, b, a, c),
    ]  # fmt: skip
    # Fewer slots than requests, and less room for a pass than a prompt takes.
    own.assert_plain(asked, finished(own.engine(prefill_tokens=24), asked))


def test_equal_texts_with_other_images_share_nothing(served: Callable[[str], Served]) -> None:
    own = served("gemma3")  # whose images all have as many tokens
    a, b, _ = own.images
    asked = [own.request(0, 0, a), own.request(1, 0, b), own.request(0, 1, a), own.request(1, 1, b)]
    assert len({request.prompt_ids for request in asked}) == 1
    own.assert_plain(asked, finished(own.engine(slots=4), asked))


def test_the_tower_reads_an_image_once_for_all_who_ask_about_it(served: Callable[[str], Served]) -> None:
    own = served("qwen2_5_vl")
    a, b, _ = own.images
    engine = own.engine(slots=2)
    finished(engine, [own.request(group, member, a, text="abc"[group]) for group in range(3) for member in range(4)])
    assert own.tower.num_read == 1
    finished(engine, [own.request(9, member, b) for member in range(4)])
    assert own.tower.num_read == 2


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "internvl"])
@pytest.mark.parametrize("on_update", ["keep", "interrupt"])
def test_rows_go_on_behind_their_images_when_weights_change(
    served: Callable[[str], Served], family: str, on_update: Any
) -> None:
    own = served(family)
    a, b, _ = own.images
    asked = [own.request(0, 0, a), own.request(1, 0, b, a)]
    engine = own.engine(on_update=on_update, version=0)
    engine.submit(asked)
    for _ in range(4):
        engine.step()
    tower = tower_parameters(own.model)
    engine.load_weights(1, {name: raw(p.detach().clone()) for name, p in own.model.named_parameters() if name not in tower})
    read = own.tower.num_read
    ended = {}
    while engine.num_unfinished:
        ended |= {completion.key: completion for completion in engine.step()}
    own.assert_plain(asked, ended)
    assert own.tower.num_read == read  # a set without it leaves the tower as it is
    changed = {name: raw(p.detach() * 1.1) for name, p in own.model.named_parameters()}
    engine.load_weights(2, changed)
    asked = [own.request(2, 0, a)]
    own.assert_plain(asked, finished(engine, asked))
    assert own.tower.num_read > read


def test_a_set_with_a_part_of_the_tower_is_refused(served: Callable[[str], Served]) -> None:
    own = served("internvl")
    named, tower = dict(own.model.named_parameters()), sorted(tower_parameters(own.model))
    engine = own.engine(version=0)
    for left_out, first in ((tower[1:], tower[1]), ([*tower, NORM], NORM)):
        tensors = {name: raw(p.detach().clone()) for name, p in named.items() if name not in left_out}
        with pytest.raises(WeightsError, match=rf"or all but the {len(tower)} of what reads images; missing: {first}"):
            engine.load_weights(1, tensors)
    assert engine.version == 0


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "smolvlm"])
def test_rows_that_were_sent_back_for_want_of_room_go_on_as_they_were(served: Callable[[str], Served], family: str) -> None:
    own = served(family)
    a, b, _ = own.images
    asked = [own.request(0, 0, a, new=40), own.request(0, 1, a, new=40), own.request(1, 0, b, new=40)]
    longest = max(request.most_tokens for request in asked)
    engine = own.engine(max_places=int(1.7 * longest))
    own.assert_plain(asked, finished(engine, asked))
    assert engine.num_suspended > 0


def test_a_turn_that_is_continued_turns_on_behind_its_image(served: Callable[[str], Served]) -> None:
    own = served("qwen2_5_vl")
    first = own.request(0, 0, own.images[1], hold=True)
    engine = own.engine()
    ids = tuple(finished(engine, [first])[first.key].token_ids.tolist())
    for key in (first.key, RolloutKey(5, 0, 0)):  # held, and computed again
        again = Request(key, first.prompt_ids, 6, Sampling(), seed=3, images=first.images, context=(*ids, 9, 10, 11))
        own.assert_plain([again], finished(engine, [again]))


# StarsfieldAI/R1-V 91: a sampled token of an image was taken for a place, and there were fewer features than places.
def test_a_sampled_token_of_an_image_is_a_token_as_any_other(served: Callable[[str], Served]) -> None:
    own = served("qwen2_5_vl")
    place = own.processor.place_id
    first = own.request(0, 0, own.images[0])
    again = Request(RolloutKey(1, 0, 0), first.prompt_ids, 5, Sampling(), 0, images=first.images, context=(place, place, 9))
    ended = finished(own.engine(), [again])[again.key]
    # As if the token of images were another one with the same embedding.
    table = own.model.get_input_embeddings().weight
    with torch.no_grad():
        table[place] = table[20]
    engine = own.engine()
    twin = finished(engine, [again])[again.key]
    spelt = Request(again.key, again.prompt_ids, 5, Sampling(), 0, images=again.images, context=(20, 20, 9))
    other = finished(own.engine(), [spelt])[again.key]
    assert len(ended.token_ids) == 5
    assert twin.token_ids.tolist() == other.token_ids.tolist()
    np.testing.assert_allclose(twin.logprobs, other.logprobs, atol=1e-6)


@pytest.mark.parametrize("family", image_models.MAKERS)
def test_the_canary_finds_a_tower_of_other_weights(served: Callable[[str], Served], family: str) -> None:
    own = served(family)
    config = LearnerConfig(train_vision=True)
    backend = make_backend(own.directory, config, LossConfig(), images=own.store.directory)
    engine = own.engine()
    engine.load_weights(1, backend.tensors())
    canary = backend.canary(range(5, 25))
    assert canary.behind_images

    def drift() -> float:
        return float(np.abs(engine.probe(canary.ids, behind_images=True) - np.array(canary.logprobs)).max())

    assert drift() < 1e-4
    text, tower = engine.probe(canary.ids), tower_parameters(own.model)
    engine.load_weights(2, {name: raw(p.detach() * (1.2 if name in tower else 1)) for name, p in own.model.named_parameters()})
    assert drift() > 1e-3
    np.testing.assert_array_equal(engine.probe(canary.ids), text)
    with pytest.raises(EngineError, match="a probe has images, and this engine was started without their store"):
        own.engine(tower=None).probe(canary.ids, behind_images=True)


@pytest.mark.parametrize("family", ["idefics3", "smolvlm", "qwen3_vl"])
def test_adapters_alone_leave_the_tower_and_are_added_behind_images(served: Callable[[str], Served], family: str) -> None:
    own = served(family)
    config = LearnerConfig.model_validate({"lora": {"rank": 2, "publish": "adapter"}})
    backend = make_backend(own.directory, config, LossConfig(), images=own.store.directory)
    assert isinstance(backend, Controller)
    engine = load_engine(str(own.directory), TorchEngineConfig(slots=2), images=own.processor)
    before, read = backend.canary(range(5, 25)), engine.tower.num_read
    with torch.no_grad():
        for name, p in backend.machine.policy.model.named_parameters():
            p += 0.1 * (".lora_" in name)
    canary = backend.canary(range(5, 25))
    assert np.abs(np.array(canary.logprobs) - np.array(before.logprobs)).max() > 0.01
    engine.load_weights(1, backend.tensors())
    np.testing.assert_allclose(engine.probe(canary.ids, behind_images=True), canary.logprobs, atol=1e-4)
    assert engine.tower.num_read == read


def test_an_engine_without_the_store_refuses_images(served: Callable[[str], Served]) -> None:
    own = served("internvl")
    with pytest.raises(EngineError, match="has 1 images, and this engine was started without their store"):
        own.engine(tower=None).submit([own.request(0, 0, own.images[0])])


@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
def test_a_completion_behind_images_has_the_same_bits_in_any_company(served: Callable[[str], Served], family: str) -> None:
    own = served(family)
    a, b, c = own.images
    asked = [
        own.request(0, 0, a, new=90), own.request(0, 1, a, new=80), own.request(1, 0, b, a, c), own.request(2, 0, b, new=90),
        own.request(3, 0, new=95), own.request(2, 1, b, new=85), own.request(1, 1, b, a, c, new=33),
    ]  # fmt: skip
    assert can_be_invariant(own.model)

    def told(engine: TorchEngine, requests: Sequence[Request]) -> dict[RolloutKey, bytes]:
        ended = finished(engine, requests)
        return {key: each.token_ids.tobytes() + each.logprobs.tobytes() for key, each in ended.items()}

    alone = [told(own.engine(slots=1, batch_invariant=True), [request]) for request in asked]
    expected = {key: bits for each in alone for key, bits in each.items()}
    for settings in ({"slots": 7}, {"slots": 4, "prefill_tokens": 24}, {"slots": 7, "max_places": 350}):
        own.tower.forget()
        engine = own.engine(batch_invariant=True, **settings)
        assert told(engine, asked[::-1]) == expected
        own.assert_plain(asked, finished(engine, asked))
    assert engine.num_suspended > 0


def test_an_engine_is_loaded_with_its_images_and_held_to_plain_passes(
    served: Callable[[str], Served], monkeypatch: Any
) -> None:
    own = served("qwen3_vl")
    config = TorchEngineConfig(slots=2)
    load_engine(str(own.directory), config, images=own.processor)
    monkeypatch.setattr(ImageTower, "positions", lambda self, ids, images: (None, 0))
    with pytest.raises(ConfigError, match=r"'qwen3_vl_text' cannot be served .* behind images log-probabilities differ"):
        load_engine(str(own.directory), config, images=own.processor)


def test_an_engine_whose_images_do_not_see_themselves_is_refused(served: Callable[[str], Served]) -> None:
    own = served("gemma3")
    engine = own.engine()
    check_reading(engine, own.model)
    own.tower.is_bidirectional = False
    with pytest.raises(ConfigError, match="behind images log-probabilities differ"):
        check_reading(own.engine(), own.model)
