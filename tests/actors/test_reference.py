"""The reference as a stage of the pool: its log-probabilities are the learner's own, with and without incremental scoring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rlhf.actors.prompts import Row
from async_rlhf.actors.rewards import RewardSpec, resolve
from async_rlhf.actors.scoring.model_stages import _prefetch_reference, reference
from async_rlhf.actors.scoring.models import ReferenceModel
from async_rlhf.actors.scoring.pool import Scored, _plain, fields_of
from async_rlhf.buffers.record import Float32Array, Group, Rollout, SamplingMask
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.config import LearnerConfig, LossConfig
from async_rlhf.learner.step.controller import make_backend
from tests.actors.scored import Bench
from tests.learner.making import make_group, make_model

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference")
    make_model("llama").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(directory: Path) -> ReferenceModel:
    return ReferenceModel(directory)


def supported(rollout: Rollout) -> Rollout:
    """As if each token had been chosen among three."""
    ids = [[token, (token + 1) % 24, (token + 7) % 24] for token in rollout.completion_ids.tolist()]
    sampling_mask = SamplingMask(np.full(len(ids), 3, np.int32), np.array(ids, np.int32).ravel())
    return replace(rollout, sampling_mask=sampling_mask)


def by_the_learner(directory: Path, group: Group) -> list[Float32Array]:
    backend = make_backend(directory, LearnerConfig(), LossConfig(kl_coef=0.1), reference=directory)
    seen = backend.evaluate(make_rows([group], [[1.0] * len(group.rollouts)]))
    return [found for each in seen.values() if (found := each.logp_reference) is not None]


def spec(directory: Path, stream_tokens: int = 0, **options: Any) -> tuple[RewardSpec, ...]:
    given = {"path": str(directory), "temperature": TEMPERATURE, **options}
    running = {"stream_tokens": stream_tokens, "batch_size": 4, "batch_wait_s": 0.0}
    targets = ["exact", "reference=async_rlhf.actors.scoring.model_stages:reference"]
    return resolve(targets, directory, {"reference": given}, {"reference": running})


def scored(specs: Sequence[RewardSpec], group: Group, cuts: Sequence[int] = ()) -> list[Scored[int]]:
    """The completions of a group through a real pool, shown before in parts that end at `cuts`."""
    with Bench(specs) as bench:
        for cut in cuts:
            for key, rollout in enumerate(group.rollouts):
                bench.pool.show(key, _fields(group, rollout, cut))
            bench.until(lambda: bench.pool.poll() or bench.pool.counters["reference"].shown >= len(group.rollouts))
        for key, rollout in enumerate(group.rollouts):
            mask = rollout.sampling_mask
            packed = None if mask is None else (mask.sizes.astype("<i4").tobytes(), mask.ids.astype("<i4").tobytes())
            bench.pool.submit(key, {**_fields(group, rollout, None), "sampling_mask": packed})
        found = bench.wait()
    return [found[key] for key in range(len(group.rollouts))]


def _fields(group: Group, rollout: Rollout, cut: int | None) -> dict[str, Any]:
    ids = rollout.completion_ids[:cut].tolist()
    return {"prompt_ids": group.prompt_ids.tolist(), "completion_ids": ids, "completion": "x", "answer": "x"}


def test_the_stage_says_what_the_learner_says_of_the_same_model(directory: Path) -> None:
    group = make_group(0, [1, 6, 3, 12, 2, 5], temperature=TEMPERATURE)
    rollouts = [*group.rollouts[:3], *map(supported, group.rollouts[3:])]
    group = Group(**{**vars(group), "rollouts": tuple(rollouts)})
    answers = scored(spec(directory), group)
    for answer, wanted in zip(answers, by_the_learner(directory, group), strict=True):
        assert answer.reference is not None and answer.reference.dtype == np.float32
        assert answer.reference == pytest.approx(wanted, abs=1e-4)
        assert answer.scores["reference"].state == "not_applicable" and answer.scores["exact"].value == 1.0
        assert answer.stages["reference"].ended >= answer.stages["reference"].began > 0


@pytest.mark.rest
def test_read_along_it_says_the_same_and_has_little_left_at_the_end(directory: Path) -> None:
    group = make_group(0, [16, 18, 20], prompt_length=9, temperature=TEMPERATURE)
    answers = scored(spec(directory, stream_tokens=2), group, cuts=[3, 9, 15])
    for answer, wanted in zip(answers, by_the_learner(directory, group), strict=True):
        assert answer.reference == pytest.approx(wanted, abs=1e-4)
        assert answer.scores["reference"].metrics["prefetched"] > 0 and answer.ahead_s["reference"] > 0


@pytest.mark.parametrize("shown", [[], [1, 2]])
def test_of_a_row_that_begins_anew_each_piece_is_read_alone(directory: Path, model: ReferenceModel, shown: list[int]) -> None:
    """Read ahead, where it is, is a part of the first piece."""
    plain = make_group(0, [9, 4, 12], temperature=TEMPERATURE, observed=[(2, 5), (7, 8)], anew=[0])
    rollouts = plain.rollouts if shown else [*plain.rollouts[:2], masked(plain.rollouts[2])]  # those are not read ahead
    fields = [fields_of(Row("", {}), plain.prompt_ids.tolist(), rollout, "") for rollout in rollouts]
    names = ("prompt_ids", "completion_ids", "sampling_mask", "row_pieces")
    asked = {name: [own[name] for own in fields] for name in names}
    streams = [7, 8, 9] if shown else None
    options = {"path": str(directory), "temperature": TEMPERATURE}
    for cut in shown:
        cuts = [own["completion_ids"][:cut] for own in fields]
        _prefetch_reference(asked["prompt_ids"], cuts, streams or [], **options)
    answers = reference(**asked, **options, stream_ids=streams)
    for answer, member in zip(answers, rollouts, strict=True):
        assert answer.values.shape == (member.length,)
        wanted = []
        for start, num_prompt, stop in member.pieces:
            prompt = member.completion_ids[start : start + num_prompt].tolist() or plain.prompt_ids.tolist()
            own = member.completion_ids[start + num_prompt : stop].tolist()
            (hidden,) = model.read([prompt], [own])
            sizes, kept = (np.frombuffer(part, "<i4") for part in _plain(member) or (b"", b""))
            ends = np.cumsum([0, *sizes])
            begin = start + num_prompt
            mask = SamplingMask(sizes[begin:stop], kept[ends[begin] : ends[stop]]) if len(sizes) else None
            wanted.append(model.logprobs(hidden, own, TEMPERATURE, mask)[member.sampled[begin:stop]])
        assert answer.values[member.sampled] == pytest.approx(np.concatenate(wanted), abs=1e-4)
        assert not shown or answer.metrics["prefetched"] > 0


def masked(rollout: Rollout) -> Rollout:
    """As if each sampled token had been chosen among two."""
    ids = [[token, (token + 1) % 24] for token in rollout.sampled_ids.tolist()]
    mask = SamplingMask(np.full(len(ids), 2, np.int32), np.array(ids, np.int32).ravel())
    return replace(rollout, sampling_mask=mask)


@pytest.mark.rest
def test_a_reference_that_fails_says_why_and_says_no_number(tmp_path: Path) -> None:
    broken = make_model("llama")
    broken.base_model.embed_tokens.weight.data[23] = float("nan")
    broken.save_pretrained(tmp_path)
    group = make_group(0, [3, 3])
    texts = [np.array(ids, np.int32) for ids in ([4, 23, 5], [4, 6, 5])]
    rollouts = tuple(replace(r, completion_ids=ids) for r, ids in zip(group.rollouts, texts, strict=True))
    failed, good = scored(
        spec(tmp_path), Group(**{**vars(group), "prompt_ids": np.array([1, 2], np.int32), "rollouts": rollouts})
    )
    assert failed.reference is None and good.reference is not None
    assert failed.scores["reference"].failure == "the reference's log-probabilities are not finite"
    assert good.scores["reference"].state == "not_applicable"
