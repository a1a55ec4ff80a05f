"""The learner's log-probabilities behind images are those of plain transformers passes, however completions are packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_rlhf.actors.loop.rollouts import behind_one_prompt
from async_rlhf.buffers.errors import ConfigError, RecordError
from async_rlhf.buffers.images.processor import ImageProcessor
from async_rlhf.buffers.images.store import ImageStore
from async_rlhf.buffers.images.tower import ImageTower, tower_parameters
from async_rlhf.buffers.record import Group, Rollout, Score, Span
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.learner.batch.micro_batch import as_numbers, digests
from async_rlhf.learner.batch.packing import Packing, Sharing, make_micro_batches
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.config import LearnerConfig, LossConfig
from async_rlhf.learner.model.check import check_policy
from async_rlhf.learner.model.files import load_model
from async_rlhf.learner.model.policy import Policy, _places
from async_rlhf.learner.step import controller
from async_rlhf.learner.step.controller import Controller
from tests import image_models

LENGTHS = (6, 3, 9)


class Learning:
    """A family's tiny model and the images of a run."""

    def __init__(self, family: str, directory: Path) -> None:
        self.directory, self.path = directory, directory / "images"
        image_models.make(family, directory)
        store = ImageStore(self.path)
        self.images = [store.add(image_models.drawn(*size)) for size in ((30, 20), (16, 44), (24, 24))]
        self.processor = ImageProcessor(directory, store)

    def policy(self, **settings: Any) -> Policy:
        model: Any = load_model(self.directory, torch.device("cpu"))
        return Policy(model, LearnerConfig(**settings), images=ImageTower(model, self.processor))

    def backend(self, loss: LossConfig | None = None, **settings: Any) -> Controller:
        reference = self.directory if (loss or LossConfig()).needs_reference else None
        config = LearnerConfig(**{"learning_rate": 1e-2, **settings})
        return controller.make_backend(self.directory, config, loss or LossConfig(), reference=reference, images=self.path)

    def group(self, number: int, *images: str, lengths: Sequence[int] = LENGTHS) -> Group:
        prompt = self.processor.encode(image_models.asking(*images, text="what is it?"[: 11 - number]), {}).ids
        random = np.random.default_rng(number)
        texts = [random.integers(3, 30, length).astype(np.int32) for length in lengths]
        texts = [np.where(ids == self.processor.place_id, 2, ids).astype(np.int32) for ids in texts]
        rollouts = tuple(
            Rollout(ids, np.full(len(ids), -2.0, np.float32), (Span(0, len(ids)),), "stop", scores={"judge": Score(1.0)})
            for ids in texts
        )
        return Group(number, 0, np.array(prompt, np.int32), rollouts, Sampling(), images=images)

    def groups(self) -> list[Group]:
        a, b, c = self.images
        return [self.group(0, a), self.group(1, b), self.group(2, c, a, b), self.group(3)]

    def episodes(self, number: int) -> Group:
        """Members whose first prompts have other images each, or none, and to whom others come later: a row begins anew with
        each, and an observation of text goes on with it."""
        a, b, c = self.images
        conversations = [[(a,), (a, b), (a, b, c)], [(b, c), (b, c, b)], [(), (c,)], [(a,)]]
        random, place = np.random.default_rng(number), self.processor.place_id
        prompts, rollouts = [], []
        for member, conversation in enumerate(conversations):
            asked = [image_models.asking(*images, text="what is it?"[: 11 - member]) for images in conversation]
            rows = [self.processor.encode(each, {}).ids for each in asked]
            ids, spans = list[int](), list[Span]()
            for row in rows:
                read, drawn = row if ids else [], random.integers(3, 30, 7)
                ids += [*read, *np.where(drawn == place, 2, drawn).tolist()]
                spans += [Span(None, len(read), restarts=True)] * bool(read) + [Span(0, 3), Span(None, 2), Span(0, 2)]
            own = ((), *conversation[1:]) if len(conversation) > 1 else ()
            logp = np.full(5 * len(conversation), -2.0, np.float32)
            rollouts.append(Rollout(np.array(ids, np.int32), logp, tuple(spans), "stop", images=own))
            prompts.append((tuple(rows[0]), conversation[0]))
        prompt, images, members = behind_one_prompt(prompts, rollouts, str, place)
        assert not images and place not in prompt and len(prompt) > 3
        return Group(number, 0, prompt, members, Sampling())


@pytest.fixture
def learning(tmp_path: Path) -> Callable[[str], Learning]:
    return lambda family: Learning(family, tmp_path)


def assert_plain(own: Learning, sharing: Sharing, groups: Sequence[Group]) -> None:
    """Of these groups log-probabilities are those of plain passes, in one micro-batch and in several."""
    policy = own.policy()
    if sharing not in policy.sharings:
        pytest.skip("this family's images see themselves as a whole, which blocks do not compute")
    policy.sharing = sharing
    rows = make_rows(groups, [[0.0] * len(group.rollouts) for group in groups])
    plain = [logp for group in groups for logp in image_models.plain(policy.model, own.processor, group)]
    for tokens in (1 << 20, 150):
        for batch in make_micro_batches(rows, Packing(tokens, sharing)):
            with torch.no_grad():
                logp = policy(batch).logp_N
            for member in batch.member_N.unique().tolist():
                torch.testing.assert_close(logp[batch.member_N == member], plain[member], rtol=0, atol=1e-5)


@pytest.mark.parametrize("sharing", ["blocks", "rows", "none"])
@pytest.mark.parametrize("family", image_models.MAKERS)
def test_log_probabilities_are_those_of_plain_passes(
    learning: Callable[[str], Learning], family: str, sharing: Sharing
) -> None:
    own = learning(family)
    assert_plain(own, sharing, own.groups())


@pytest.mark.parametrize("sharing", ["blocks", "rows", "none"])
@pytest.mark.parametrize("family", image_models.MAKERS)
def test_images_that_come_later_are_read_as_plain_passes_over_each_piece_read_them(
    learning: Callable[[str], Learning], family: str, sharing: Sharing
) -> None:
    own = learning(family)
    groups = [own.episodes(0), own.group(1, own.images[1], lengths=(4, 5, 2, 1)), own.episodes(2)]
    assert_plain(own, sharing, groups)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_a_policy_is_held_to_plain_passes_over_images(learning: Callable[[str], Learning], family: str) -> None:
    own = learning(family)
    policy = own.policy()
    check_policy(policy)
    assert policy.packs
    assert policy.images is not None
    policy.images.turns = policy.images.is_bidirectional = False
    with pytest.raises(ConfigError, match="differ from plain passes"):
        check_policy(policy)


def test_the_tower_is_read_once_for_all_updates_unless_it_trains(learning: Callable[[str], Learning]) -> None:
    own = learning("smolvlm")
    rows = make_rows(own.groups()[:2], [[1.0, -1.0, 0.5]] * 2)
    for trains in (False, True):
        backend = own.backend(train_vision=trains, gradient_checkpointing=not trains)
        tower = backend.machine.policy.images
        assert tower is not None
        weights = {name: p.detach().clone() for name, p in tower_parameters(tower.model).items()}
        before = tower.num_read
        for step in range(2):
            assert backend.step([rows, rows], step).applied
        assert tower.num_read - before == (2 if not trains else 12)  # with a gradient in each pass, and before the first
        same = [torch.equal(weights[name], p.detach()) for name, p in tower_parameters(tower.model).items()]
        assert all(same) if not trains else not all(same)
        sent = {name for name, _ in tower.model.named_parameters() if trains or name not in weights}
        assert set(backend.tensors()) == sent


@pytest.mark.parametrize("sharing", ["blocks", "rows", "none"])
def test_a_micro_batch_counts_the_patches_of_a_tower_that_learns_once(
    learning: Callable[[str], Learning], sharing: Sharing
) -> None:
    own = learning("qwen3_vl")
    a, b, c = own.images
    rows = make_rows([own.group(number, (a, b)[number % 2]) for number in range(6)], [[1.0, -1.0, 0.5]] * 6)
    frozen, trained = (own.backend(train_vision=trains)._packing.patches for trains in (False, True))
    assert frozen is None and trained is not None
    patches = {images: trained(images) for images in ((a,), (b,))}
    places = {row.group.images: row.group.prompt_ids.tolist().count(own.processor.place_id) for row in rows}
    assert patches == {images: 4 * count for images, count in places.items()}  # four are merged into a place
    limit = 200
    cut = make_micro_batches(rows, Packing(limit, sharing, patches=trained))
    assert len(cut) > len(make_micro_batches(rows, Packing(limit, sharing)))
    for batch in cut:
        read = {each.images for each in _places(batch)}
        assert batch.ids_RL.numel() + sum(map(patches.__getitem__, read)) <= limit
    assert any(len(_places(batch)) > len({each.images for each in _places(batch)}) for batch in cut)
    later, read = make_rows([own.episodes(6)], [[1.0] * 4]), {(a, b), (a, b, c), (b, c), (b, c, b), (c,)}
    assert Packing(limit, sharing, patches=trained).of_images(later, rows) == sum(map(trained, read)), "and (a,), as rows have"


def test_a_step_with_a_reference_and_a_critic_learns_from_images(learning: Callable[[str], Learning]) -> None:
    own = learning("qwen3_vl")
    backend = own.backend(LossConfig(kl_coef=0.1), critic={"kind": "model"})
    rows = make_rows(own.groups(), [[1.0, -1.0, 0.5]] * 4)
    found = backend.evaluate(rows)
    for evaluation in found.values():
        assert evaluation.logp_reference is not None and evaluation.logp_proximal is not None
        np.testing.assert_allclose(evaluation.logp_reference, evaluation.logp_proximal, atol=1e-5)
    assert backend.step([rows], 0).applied


def test_adapters_leave_what_reads_images_alone(learning: Callable[[str], Learning]) -> None:
    own = learning("smolvlm")
    tower = set(tower_parameters(own.policy().model))
    for targets in (["all-linear"], ["q_proj", "fc1", "down_proj"]):
        backend = own.backend(lora={"rank": 2, "targets": targets})
        before = {name: bytes(each.data) for name, each in backend.tensors().items()}
        assert backend.step([make_rows(own.groups(), [[1.0, -1.0, 0.5]] * 4)], 0).applied
        changed = {name for name, each in backend.tensors().items() if bytes(each.data) != before[name]}
        assert changed and not changed & tower


# hiyouga/EasyR1 48: checkpoints lacked the files of the processor.
def test_a_checkpoint_is_a_model_directory_that_reads_images(learning: Callable[[str], Learning], tmp_path: Path) -> None:
    own = learning("llava_onevision")
    backend, other = own.backend(train_vision=True), own.backend(train_vision=True)
    rows = make_rows(own.groups(), [[1.0, -1.0, 0.5]] * 4)
    backend.step([rows], 0)
    (tmp_path / "saved").mkdir()
    backend.snapshot()(tmp_path / "saved")
    other.load(tmp_path / "saved")
    ImageProcessor(tmp_path / "saved" / "model", ImageStore(own.path))
    for each in (backend, other):
        each.step([rows], 1)
    one, two = ({name: bytes(each.data) for name, each in backend.tensors().items()} for backend in (backend, other))
    assert one == two


def test_digests_travel_as_numbers() -> None:
    given = ["00" * 16, "ff" * 16, "0123456789abcdef" * 2]
    assert digests(as_numbers(given)) == given


def test_images_without_their_store_are_refused(learning: Callable[[str], Learning]) -> None:
    own = learning("internvl")
    backend = controller.make_backend(own.directory, LearnerConfig(), LossConfig())
    with pytest.raises(RecordError, match="a group has images, and this learner was given no store"):
        backend.step([make_rows([own.group(0, own.images[0])], [[1.0, -1.0, 0.5]])], 0)


def test_a_prompt_that_was_prepared_otherwise_is_refused(learning: Callable[[str], Learning]) -> None:
    own = learning("qwen2_5_vl")
    group = own.group(0, own.images[0])
    fewer = Group(
        0, 0, group.prompt_ids[group.prompt_ids != own.processor.place_id], group.rollouts, Sampling(), images=group.images
    )
    with pytest.raises(RecordError, match="has 0 places of images, and its images fill 8"):
        own.backend().step([make_rows([fewer], [[1.0, -1.0, 0.5]])], 0)


def test_a_sampled_token_of_an_image_is_a_token_as_any_other(learning: Callable[[str], Learning]) -> None:
    own = learning("qwen3_vl")
    policy, group, place = own.policy(), own.group(0, own.images[0]), own.processor.place_id
    twin = 20
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[place] = policy.model.get_input_embeddings().weight[twin]
    found = []
    for token in (place, twin):
        texts = [np.array([5, token, token, 6, 7], np.int32), np.array([token, 9], np.int32)]
        rollouts = tuple(Rollout(ids, np.full(len(ids), -2.0, np.float32), (Span(0, len(ids)),), "stop") for ids in texts)
        rows = make_rows([Group(0, 0, group.prompt_ids, rollouts, Sampling(), images=group.images)], [[1.0, 1.0]])
        (batch,) = make_micro_batches(rows, Packing(1 << 20, policy.sharing))
        with torch.no_grad():
            found.append(policy(batch).logp_N[batch.target_N != token])
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "llava_onevision"])
def test_the_gradient_of_a_tower_that_trains_is_that_of_plain_passes(learning: Callable[[str], Learning], family: str) -> None:
    own = learning(family)
    policy, group = own.policy(), own.group(2, *own.images[:2])
    tower = policy.images
    assert tower is not None
    tower.trains = True
    policy.sharing = policy.sharings[0]
    (batch,) = make_micro_batches(make_rows([group], [[1.0, 1.0, 1.0]]), Packing(1 << 20, policy.sharing))
    named = tower_parameters(policy.model)
    learnt = torch.autograd.grad(policy(batch).logp_N.sum(), list(named.values()), allow_unused=True)
    plain = torch.zeros(())
    for rollout in group.rollouts:
        ids = torch.tensor([*group.prompt_ids.tolist(), *rollout.completion_ids.tolist()])
        logits = ImageTower.plain.__wrapped__(tower, ids[:-1].tolist(), len(group.prompt_ids), group.images)
        logp = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]
        plain = plain + logp[len(group.prompt_ids) - 1 :].sum()
    for name, one, other in zip(
        named, learnt, torch.autograd.grad(plain, list(named.values()), allow_unused=True), strict=True
    ):
        assert (one is None) == (other is None), name
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=name)
    assert sum(each is not None for each in learnt) > 10
