"""What users of other systems reported of images in reinforcement learning, each a kind of failure that does not occur here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_rlhf.actors.engine import Request
from async_rlhf.buffers.images.processor import ImageProcessor
from async_rlhf.buffers.images.tower import PromptPlace
from async_rlhf.buffers.protocol.packing import pack_group
from async_rlhf.buffers.record import Group, Rollout, Span
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.learner.batch.packing import Packing, make_micro_batches
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.config import LearnerConfig
from async_rlhf.learner.model.policy import Policy
from tests import image_models
from tests.actors.test_torch_engine_images import Served
from tests.actors.torch_models import finished


@pytest.fixture
def served(tmp_path: Path) -> Callable[[str], Served]:
    torch.set_num_threads(1)
    return lambda family: Served(family, tmp_path)


def groups_of(own: Served) -> list[Group]:
    """Sampled by the engine: three completions of prompts with one image, another one, three, and none."""
    a, b, c = own.images
    found = []
    for number, images in enumerate(((a,), (b,), (c, a, b), ())):
        asked = [own.request(number, member, *images, new=4 + 3 * member) for member in range(3)]
        ended = finished(own.engine(), asked)
        completions = [ended[request.key] for request in asked]
        rollouts = tuple(Rollout(each.token_ids, each.logprobs, each.spans, each.finish_reason) for each in completions)
        found.append(Group(number, 0, np.array(asked[0].prompt_ids, np.int32), rollouts, Sampling(), images=images))
    return found


# huggingface/trl 5785: padding on another side shifted images; microsoft/agent-lightning 559: the learner saw none at all.
@pytest.mark.parametrize("family", image_models.MAKERS)
def test_a_learner_reads_behind_images_what_the_engine_sampled_in_padded_rows_and_in_shared_ones(
    served: Callable[[str], Served], family: str
) -> None:
    own = served(family)
    groups = groups_of(own)
    policy = Policy(own.model, LearnerConfig(), images=own.tower)
    sampled = [rollout.logprobs for group in groups for rollout in group.rollouts]
    for sharing in policy.sharings:
        policy.sharing = sharing
        for batch in make_micro_batches(make_rows(groups, [[0.0] * 3] * 4), Packing(300, sharing)):
            with torch.no_grad():
                logp = policy(batch).logp_N
            for member in batch.member_N.unique().tolist():
                np.testing.assert_allclose(logp[batch.member_N == member].numpy(), sampled[member], rtol=0, atol=1e-5)


# verl-project/verl 3653: positions of rows with images lost a dimension, and texts were read at other positions.
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_each_text_of_a_row_has_rotary_positions_by_the_images_of_its_own_prompt(
    served: Callable[[str], Served], family: str
) -> None:
    own = served(family)
    a, b, c = own.images
    texts = [own.request(0, 0, a), own.request(1, 0, c, a, b), own.request(2, 0), own.request(3, 0, b)]
    behind = 5
    ids = torch.tensor([[token for text in texts for token in (*text.prompt_ids, *range(9, 9 + behind))]])
    index, prompts, ends, expected, column = [], [], [], [], 0
    for text in texts:
        length = len(text.prompt_ids) + behind
        of_text = torch.tensor([[*text.prompt_ids, *range(9, 9 + behind)]])
        kinds = (of_text == own.processor.place_id).int()
        grid = torch.from_numpy(own.processor.inputs(text.images)["image_grid_thw"]) if text.images else None
        expected.append(own.model.model.get_rope_index(of_text, kinds, image_grid_thw=grid)[0][:, 0])
        if text.images:
            prompts.append(PromptPlace(0, column, text.prompt_ids, text.images))
            ends.append(column + length)
        index += range(length)
        column += length
    assert column == ids.shape[1]
    turned = own.tower.turned(torch.tensor([index]), prompts, ends)
    assert torch.equal(turned[:, 0], torch.cat(expected, dim=1))


# PrimeIntellect-ai/prime-rl 2006 and renderers 85: each turn carried all images again, and memory grew with their square.
def test_turns_and_completions_neither_send_nor_prepare_an_image_again(
    served: Callable[[str], Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = served("qwen2_5_vl")
    prepared = list[Any]()
    call = ImageProcessor._call
    monkeypatch.setattr(ImageProcessor, "_call", lambda self, *given: (prepared.append(given), call(self, *given))[1])
    engine, first = own.engine(), [own.request(0, member, own.images[0], hold=True) for member in range(3)]
    prepared.clear()  # the prompt's, by whom it was asked for
    context: dict[Any, tuple[int, ...]] = {request.key: () for request in first}
    for turn in range(4):
        asked = [
            Request(each.key, each.prompt_ids, 4, Sampling(), turn, images=each.images, context=context[each.key], hold=True)
            for each in first
        ]
        for key, completion in finished(engine, asked).items():
            context[key] = (*context[key], *completion.token_ids.tolist(), 9, 10)
    assert not prepared and own.tower.num_read == 1

    def sent(images: tuple[str, ...], num_completions: int) -> int:
        ids = np.arange(4, dtype=np.int32)
        rollout = Rollout(ids, np.zeros(4, np.float32), (Span(0, 4),), "stop")
        group = Group(0, 0, np.array(first[0].prompt_ids, np.int32), (rollout,) * num_completions, Sampling(), images=images)
        header, arrays = pack_group(group)
        return len(header.model_dump_json()) + sum(len(part) for part in arrays)

    images = tuple(own.images)
    for count in (1, 8):
        assert sent(images, count) - sent((), count) < 3 * 40
