"""Packing changes nothing: a row of many completions says of each what a plain forward pass of it alone says."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from making import CONFIGS, assert_same_gradients, begun_anew, make_backend, make_group, make_model, make_rollout
from torch import Tensor
from transformers import PreTrainedModel

from async_rlhf.buffers.attention import Reach
from async_rlhf.buffers.record import Group, Rollout, SamplingMask, Span
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.learner.batch.micro_batch import MicroBatch, attention_mask
from async_rlhf.learner.batch.packing import Packing, Sharing, make_micro_batches, padding_batch
from async_rlhf.learner.batch.rows import make_rows, split_updates
from async_rlhf.learner.config import LossConfig

# Prompts of 1 to 9 tokens; single-token completions first, last and alone; one group of a single member, four of episodes, the
# rows of three of which begin anew, and of one of them the first prompts go on behind the group's. Each with its advantages.
BATCH: list[tuple[Group, list[float | None]]] = [
    (make_group(0, [1, 7, 3, 1], prompt_length=4), [1.0, -0.5, None, 0.25]),
    (make_group(1, [12], prompt_length=9, temperature=0.7), [2.0]),
    (make_group(2, [5, 1, 2, 9, 6], prompt_length=1), [-1.0, 0.5, 1.5, None, -0.75]),
    (make_group(3, [1], prompt_length=3, temperature=1.3), [0.5]),
    (make_group(4, [11, 4, 13], prompt_length=3, temperature=0.8, observed=[(2, 6), (7, 9)]), [-1.5, 0.75, 1.25]),
    (make_group(5, [11, 3, 14], prompt_length=4, temperature=0.8, observed=[(2, 6), (7, 9)], anew=[0]), [1.0, -0.5, 0.75]),
    (make_group(6, [12], prompt_length=2, observed=[(1, 4), (6, 10)], anew=[0, 1]), [-1.25]),
    (make_group(7, [10, 13, 2], prompt_length=3, observed=[(0, 2), (4, 7), (8, 9)], anew=[1]), [0.5, -0.75, 1.0]),
]


def gradient(path: Path, model: PreTrainedModel, batch: Any = BATCH, **settings: Any) -> dict[str, Tensor]:
    """Of one step that itself changes next to nothing; read off the parameters that the backend leaves it on."""
    model.save_pretrained(path)
    backend = make_backend(path, LossConfig(is_cap=2.0), learning_rate=1e-12, max_grad_norm=1e6, **settings)
    groups, advantages = zip(*batch, strict=True)
    assert backend.step([make_rows(groups, advantages)], 0).applied
    return {name: p.grad for name, p in backend.machine.policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_gradient_is_that_of_one_plain_forward_pass_per_completion(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    groups, advantages = zip(*BATCH, strict=True)
    oracles.loss(model, groups, advantages, LossConfig(is_cap=2.0)).backward()  # type: ignore[no-untyped-call]
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_same_gradients(gradient(tmp_path, model, micro_batch_tokens=8192), expected)


@pytest.mark.parametrize(("micro_batch_tokens", "row_tokens"), [(1, 1), (30, None), (8192, 10), (8192, 1), (1, None)])
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut_and_ordered(
    tmp_path: Path, micro_batch_tokens: int, row_tokens: int | None
) -> None:
    cut = {"micro_batch_tokens": micro_batch_tokens, "row_tokens": row_tokens}
    mixed = random.Random(1).sample(BATCH, len(BATCH))
    whole = gradient(tmp_path, make_model("llama"), micro_batch_tokens=8192)
    assert_same_gradients(gradient(tmp_path, make_model("llama"), mixed, **cut), whole)


def test_a_token_behind_older_keys_or_cut_from_an_unknown_distribution_is_not_comparable() -> None:
    def comparable(group: Group) -> list[bool]:
        (batch,) = make_micro_batches(make_rows([group], [[1.0, -1.0]]), Packing(8192))
        assert batch.comparable_N.dtype == torch.bool
        return batch.comparable_N.tolist()

    group = make_group(0, [5, 2])
    spans = (Span(0, 1), Span(None, 1), Span(1, 2, cache_version=0), Span(1, 1))
    first = replace(group.rollouts[0], spans=spans, logprobs=group.rollouts[0].logprobs[:4])
    mixed = replace(group, rollouts=(first, group.rollouts[1]))
    assert comparable(mixed) == [True, False, False, True, True, True]
    masked = replace(first, sampling_mask=SamplingMask(np.ones(4, np.int32), first.sampled_ids))
    cut = replace(mixed, rollouts=(masked, group.rollouts[1]), sampling=Sampling(top_k=3))
    assert comparable(cut) == [True, False, False, True, False, False]


# what is sampled, then what is read before it is gone on, and whether the row begins anew
turns = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.booleans()), max_size=3)
# tokens of the first turn, the others, what is read before them, and the advantage
members = st.tuples(st.integers(1, 6), st.just([]) | turns, st.integers(0, 3), st.none() | st.floats(-2, 2))
lengths = st.lists(st.integers(1, 6), min_size=1, max_size=5)


def episode(version: int, first: int, later: list[tuple[int, int, bool]], before: int) -> Rollout:
    spans: list[tuple[int | None, int]] = [(None, before)] * (before > 0) + [(version, first)]
    for sampled, read, _ in later:
        spans += [(None, read), (version, sampled)]
    whole = make_rollout(sum(count for _, count in spans), seed=version, spans=spans)
    return begun_anew(whole, [at for at, (_, _, restarts) in enumerate(later, before > 0) if restarts])


def pasts(group: Group, rollout: Rollout) -> Iterator[tuple[int, list[int]]]:
    """Of the record: each token that was sampled, and what stood before it since the row last began."""
    past, ids = group.prompt_ids.tolist(), iter(rollout.completion_ids.tolist())
    for span in rollout.spans:
        past = [] if span.restarts else past
        for token in islice(ids, span.num_tokens):
            if span.version is not None:
                yield token, past
            past = [*past, token]


def assert_within_limits(batch: MicroBatch, packing: Packing, everyone: list[tuple[Group, Rollout]]) -> None:
    """Beyond the limit there is one completion, or completions of one prompt that have within it what they do not share; blocks
    have no padding, and no pair of tokens twice."""
    size, most = batch.ids_RL.numel(), packing.micro_batch_tokens
    mine = [everyone[member] for member in batch.member_N.unique_consecutive().tolist()]
    prompts = {group.number: len(group.prompt_ids) for group, _ in mine}
    if size > most and not packing.whole_groups:
        assert len(prompts) == 1
        prompt = sum(prompts.values())
        assert len(mine) == 1 or size <= prompt + most
    if packing.sharing == "blocks":
        pairs = torch.zeros(size, size, dtype=torch.int64)
        for query, end, key, stop in batch.blocks_B4.tolist():
            square = torch.ones(end - query, stop - key, dtype=torch.int64)
            pairs[query:end, key:stop] += square.tril() if query == key else square
        assert pairs.bool().equal(attention_mask(batch.blocks_B4, batch.positions_RL)[0]) and int(pairs.max()) == 1
        if packing.row_tokens is None and packing.token_cost == math.inf and most >= size:
            assert size == sum(prompts.values()) + sum(rollout.num_read for _, rollout in mine)


@given(
    shape=st.lists(st.tuples(st.integers(1, 5), st.lists(members, min_size=1, max_size=5)), min_size=1, max_size=4),
    packing=st.builds(
        Packing,
        st.integers(1, 80),
        st.sampled_from(get_args(Sharing)),
        row_tokens=st.none() | st.integers(1, 30),
        token_cost=st.floats(0, 200) | st.just(math.inf),
        whole_groups=st.booleans(),
    ),
    window=st.none() | st.integers(1, 6),
)
def test_every_token_that_counts_is_there_once_and_sees_its_piece_alone_as_far_back_as_a_layer_reaches(
    shape: list[tuple[int, list[Any]]], packing: Packing, window: int | None
) -> None:
    groups = [
        replace(make_group(n, [1], prompt_length=prompt), rollouts=tuple(episode(n, *each[:3]) for each in drawn))
        for n, (prompt, drawn) in enumerate(shape)
    ]
    flat = [advantage for _, drawn in shape for *_, advantage in drawn]
    rows = make_rows(groups, [[advantage for *_, advantage in drawn] for _, drawn in shape])
    batches = make_micro_batches(rows, packing)
    everyone = [(group, rollout) for group in groups for rollout in group.rollouts]
    seen: list[int] = []
    for batch in batches:
        num_rows, width = batch.ids_RL.shape
        of_row: Counter[int] = Counter()
        assert_within_limits(batch, packing, everyone)
        assert batch.positions_RL.shape == (num_rows, width)
        assert len({len(tensor) for name, tensor in batch.tensors().items() if name.endswith("_N")}) == 1
        mask = attention_mask(batch.blocks_B4, batch.positions_RL, Reach(window=window))
        assert bool(mask.any(-1).all())  # an empty softmax would be NaN, padding or not
        for member in batch.member_N.unique_consecutive().tolist():
            seen.append(member)
            group, rollout = everyone[member]
            own = batch.member_N == member
            of_row[int(batch.source_N[own][0]) // width] += 1
            sampled = list(pasts(group, rollout))
            assert batch.target_N[own].tolist() == [token for token, _ in sampled]
            assert batch.logp_behaviour_N[own].tolist() == rollout.logprobs.tolist()
            assert batch.version_N[own].tolist() == rollout.versions.tolist()
            assert batch.advantage_N[own].tolist() == pytest.approx([flat[member]] * len(sampled))
            for source, (_, past) in zip(batch.source_N[own].tolist(), sampled, strict=True):
                row, query = divmod(source, width)
                keys = mask[row, query].nonzero()[:, 0]
                # exactly what stood before it, in order, at positions 0, 1, 2, ...
                assert batch.ids_RL[row, keys].tolist() == (past if window is None else past[-window:])
                assert batch.positions_RL[row, keys].tolist() == list(range(len(past)))[-len(keys) :]
                assert query == keys[-1]
                if not batch.is_packed:  # without a mask of ours a query sees all before it
                    assert batch.ids_RL[row, : query + 1].tolist() == past
        # completions share all rows of it or none, unless it has all that a group was cut into
        assert packing.sharing == "blocks" or packing.whole_groups or len({count > 1 for count in of_row.values()}) == 1
    assert sorted(seen) == [index for index, advantage in enumerate(flat) if advantage is not None]


def test_the_host_reads_the_blocks_of_a_micro_batch_on_a_device_without_waiting_for_it() -> None:
    there = padding_batch().to(torch.device("meta"))
    assert {name for name, each in there.tensors().items() if each.device.type == "cpu"} == {"blocks_B4"}


@given(sizes=st.lists(lengths, max_size=8), num_updates=st.integers(1, 10))
def test_updates_are_made_of_whole_groups_in_order(sizes: list[list[int]], num_updates: int) -> None:
    groups = [make_group(n, each) for n, each in enumerate(sizes)]
    rows = make_rows(groups, [[1.0] * len(each) for each in sizes])
    updates = split_updates(rows, num_updates)
    assert [row for update in updates for row in update] == rows
    assert len(updates) <= num_updates and all(updates)
    homes = [{row.group.number for row in update} for update in updates]
    assert sum(map(len, homes)) == len(groups)
    assert len({len(home) for home in homes[:-1]}) <= 1
