"""The stages with a model of their own: the reward `reward_model` and the stage `reference`, by name and options.

No torch here: the supervisor checks them before a run, worker processes load the models. They run in worker processes of their
own, beside the engine and never in the actor's loop, where one forward pass would delay the decoding of every sequence. Several
actors share one model through the scorer process, or through a reward server (`async-rlhf serve reward reward_model`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from async_rlhf.actors.reference import is_address
from async_rlhf.actors.rewards.answer import Logprobs
from async_rlhf.actors.rewards.settings import Stream, reward
from async_rlhf.buffers.attention import FAMILIES, angle_limit, attention
from async_rlhf.buffers.errors import ConfigError, RewardError
from async_rlhf.buffers.model_directory import check_numbers, check_own_code
from async_rlhf.buffers.score import Score

if TYPE_CHECKING:
    from async_rlhf.actors.scoring.incremental import IncrementalJudge, TextSample
    from async_rlhf.actors.scoring.models import ReferenceModel, RewardModel
    from async_rlhf.buffers.record import Float32Array, SamplingMask

# Files any of which holds a tokenizer.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_CACHE_BYTES, _MAX_LENGTH = 1 << 30, 2048


def check_incremental(path: str, of: str) -> None:
    """Raises ConfigError for a model directory that is unfit for incremental scoring. of: the setting that asks for it."""
    config = json.loads((Path(path) / "config.json").read_text())
    if attention(config) is None:
        raise ConfigError(
            f"{of}: {path!r} is of type {config.get('model_type')!r}, which is not known to read from left to right and to "
            "keep nothing but keys and values, so it has no incremental scoring; set stream_tokens = 0, or use one of "
            f"{', '.join(sorted(FAMILIES))}"
        )


def _forgets(stage: Callable[..., _RewardOptions | _ReferenceOptions]) -> Callable[..., object]:
    return lambda stream_ids, **options: stage(**options).judge().forget(stream_ids)


# -- reward_model ----------------------------------------------------------------------------------------------------------


class _RewardOptions(NamedTuple):
    """Options of `reward_model`, for which a process has one model and one judge."""

    path: str
    label: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    max_length: int = _MAX_LENGTH
    cache_bytes: int = _CACHE_BYTES

    @functools.cache  # noqa: B019  a process has few, for all its life
    def model(self) -> RewardModel:
        from async_rlhf.actors.scoring.models import RewardModel

        return RewardModel(Path(self.path), label=self.label, device=self.device, dtype=self.dtype, threads=self.threads)

    @functools.cache  # noqa: B019  a process has few, for all its life
    def judge(self) -> IncrementalJudge[Score]:
        from async_rlhf.actors.scoring.incremental import IncrementalJudge, RewardHead

        return IncrementalJudge(RewardHead(self.model(), self.max_length), self.cache_bytes)


def check(path: str = "", label: int = 0, max_length: int = _MAX_LENGTH, **others: Any) -> None:
    """Raises ConfigError for a directory without a sequence-classification model and its tokenizer, and for a model whose
    scores would depend on the other texts of a batch."""
    directory = Path(path)
    if not path or not (directory / "config.json").is_file() or not list(directory.glob("*.safetensors")):
        raise ConfigError(f"reward_model: path = {path!r} is no Hugging Face model: it needs config.json and *.safetensors")
    if not any((directory / name).is_file() for name in _TOKENIZERS):
        raise ConfigError(f"reward_model: path = {path!r} has no tokenizer; save one there (tokenizer.save_pretrained)")
    check_own_code(directory, "reward_model: path")
    config = json.loads((directory / "config.json").read_text())
    _check_head(config, path, label)
    check_numbers(directory)
    if (limit := angle_limit(config)) is not None and limit < max_length:
        raise ConfigError(
            f"reward_model: max_length = {max_length}: beyond {limit} tokens the positions of this model depend on how long "
            f"the other texts of a batch are, and so would its scores. Highest: {limit}"
        )


def _check_head(config: Mapping[str, Any], path: str, label: int) -> None:
    architectures = config.get("architectures") or []
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        raise ConfigError(
            f"reward_model: path = {path!r} holds {', '.join(architectures) or 'nothing known'}, not a model with a "
            "sequence-classification head; train one with async_rlhf.experiments.reward_model"
        )
    num_labels = len(config.get("id2label") or "12")
    if not 0 <= label < num_labels:
        raise ConfigError(f"reward_model: label = {label}, the model has {num_labels}; highest: {num_labels - 1}")


def _check_stream(path: str = "", cache_bytes: int = _CACHE_BYTES, **others: Any) -> None:
    check_incremental(path, "reward_model: path")
    if cache_bytes < 1:
        raise ConfigError(
            f"reward_model: cache_bytes = {cache_bytes}; lowest: 1. To switch incremental scoring off set stream_tokens = 0"
        )


def _read(prompts: list[Any], completions: list[Any], model_prompt: list[Any] | None) -> tuple[list[Any], list[Any]]:
    """The policy's input, and its output: for an episode, all before its last turn, and that turn."""
    if model_prompt is None:
        return prompts, completions
    return model_prompt, [each if isinstance(each, str) else each[-1:] for each in completions]


def _prefetch(
    prompts: list[Any], completions: list[Any], stream_ids: list[int], model_prompt: list[Any] | None = None, **options: Any
) -> None:
    _RewardOptions(**options).judge().prefetch(stream_ids, _samples(*_read(prompts, completions, model_prompt)))


@reward(
    batch_size=16,
    batch_wait_s=0.02,
    workers=1,
    timeout_s=60.0,
    check=check,
    prepare=lambda **options: _RewardOptions(**options).model(),
    stream=Stream(_prefetch, _forgets(_RewardOptions), _check_stream),
)
def reward_model(
    prompts: list[Any],
    completions: list[Any],
    path: str,
    label: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
    threads: int = 1,
    max_length: int = _MAX_LENGTH,
    cache_bytes: int = _CACHE_BYTES,
    stream_ids: list[int | None] | None = None,
    model_prompt: list[Any] | None = None,
) -> list[float] | list[Score]:
    """The model's logit for each completion behind what the policy read (`model_prompt`; else behind its `prompt`).

    path: the directory. label: which logit, of a model with several. max_length: tokens; a longer text loses its beginning, so
    that the end, where the score is read, stays. cache_bytes: most memory for keys and values of unfinished completions; one
    without room is scored at its end (metric `given_up`).
    """
    own, read = (
        _RewardOptions(path, label, device, dtype, threads, max_length, cache_bytes),
        _read(prompts, completions, model_prompt),
    )
    if stream_ids is not None:
        return own.judge().score(stream_ids, _samples(*read))
    return own.model().score(*read, max_length)


# -- reference -------------------------------------------------------------------------------------------------------------


class _ReferenceOptions(NamedTuple):
    """Options of `reference`, for which a process has one model and one judge."""

    path: str
    temperature: float
    restricted: bool = True
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    cache_bytes: int = _CACHE_BYTES

    @classmethod
    def of(cls, **given: Any) -> _ReferenceOptions:
        """given: also what the stage is called with beside, of which an incremental one needs nothing."""
        return cls(**{name: value for name, value in given.items() if name in cls._fields})

    @functools.cache  # noqa: B019  a process has few, for all its life
    def model(self) -> ReferenceModel:
        from async_rlhf.actors.scoring.models import ReferenceModel

        return ReferenceModel(Path(self.path), device=self.device, dtype=self.dtype, threads=self.threads)

    @functools.cache  # noqa: B019  a process has few, for all its life
    def judge(self) -> IncrementalJudge[Logprobs]:
        from async_rlhf.actors.scoring.incremental import IncrementalJudge, ReferenceHead

        return IncrementalJudge(ReferenceHead(self.model(), self.temperature), self.cache_bytes)

    def logprobs(self, samples: Sequence[TextSample]) -> list[Float32Array]:
        """float32 [T] of each."""
        if not self.path:
            raise RewardError("there is no teacher for this source; add it to scoring.reference.by_source")
        model = self.model()
        read = zip(model.read([s.prompt for s in samples], [s.completion for s in samples]), samples, strict=True)
        return [model.logprobs(hidden, s.completion, self.temperature, s.sampling_mask) for hidden, s in read]


def _prepare_reference(path: str, by_source: Mapping[str, str] | None = None, api_key_env: str = "", **options: Any) -> None:
    for each in filter(None, (path, *(by_source or {}).values())):
        if not is_address(each):
            _ReferenceOptions(each, **options).model()


def _prefetch_reference(
    prompt_ids: list[list[int]], completion_ids: list[list[int]], stream_ids: list[int], **given: Any
) -> None:
    _ReferenceOptions.of(**given).judge().prefetch(stream_ids, _samples(prompt_ids, completion_ids))


@reward(
    batch_size=16,
    batch_wait_s=0.02,
    workers=1,
    timeout_s=60.0,
    prepare=_prepare_reference,
    stream=Stream(_prefetch_reference, _forgets(_ReferenceOptions.of)),
)
def reference(
    prompt_ids: list[list[int]],
    completion_ids: list[list[int]],
    path: str,
    temperature: float,
    restricted: bool = True,
    device: str = "cpu",
    dtype: str = "float32",
    threads: int = 1,
    cache_bytes: int = _CACHE_BYTES,
    by_source: Mapping[str, str] | None = None,
    api_key_env: str = "",
    source: list[Any] | None = None,
    sampling_mask: list[Sequence[bytes] | None] | None = None,
    row_pieces: list[Sequence[Sequence[int]] | None] | None = None,
    stream_ids: list[int | None] | None = None,
) -> list[Logprobs]:
    """Log-probabilities under the frozen initial model, or a teacher: of each completion float32 [T] at `temperature`.

    path: the model's directory, or a server (`served_teacher`) with the key in the variable `api_key_env`. by_source: another
    one for completions of a `source`. restricted: over each token's `sampling_mask`, where it is known; else over the whole
    vocabulary. cache_bytes: most memory for keys and values of unfinished completions. row_pieces: of a completion whose row
    begins anew, (start, num_prompt, stop) as in `record.Piece`; each is read alone, and 0 stands for the tokens of its prompt.
    """
    given = sampling_mask if restricted and sampling_mask is not None else [None] * len(completion_ids)
    masks = [None if own is None else _sampling_mask(*own) for own in given]
    cut = list(map(_cut, _samples(prompt_ids, completion_ids, masks), row_pieces or [None] * len(completion_ids)))
    samples = [sample for own in cut for sample in own]
    if stream_ids is not None:  # prefetches belong to the first piece
        streams = [stream for first, own in zip(stream_ids, cut, strict=True) for stream in (first, *(None for _ in own[1:]))]
        found = (
            _ReferenceOptions(path, temperature, restricted, device, dtype, threads, cache_bytes)
            .judge()
            .score(streams, samples)
        )
    else:
        chosen = [(by_source or {}).get(str(each), path) for each in source or [None] * len(cut)]
        models = [model for model, own in zip(chosen, cut, strict=True) for _ in own]

        def ask(model: str, own: list[TextSample]) -> list[Float32Array]:
            if is_address(model):
                from async_rlhf.actors.scoring.served_teacher import logprobs

                return logprobs(model, own, api_key_env)
            return _ReferenceOptions(model, temperature, restricted, device, dtype, threads, cache_bytes).logprobs(own)

        by_model = {m: iter(ask(m, [s for s, own in zip(samples, models, strict=True) if own == m])) for m in {*models}}
        found = [Logprobs(next(by_model[model])) for model in models]
    each = iter(found)
    return [_joined([next(each) for _ in own], own) for own in cut]


def _sampling_mask(sizes: bytes, ids: bytes) -> SamplingMask:
    from async_rlhf.buffers.record import SamplingMask

    return SamplingMask(np.frombuffer(sizes, "<i4"), np.frombuffer(ids, "<i4"))


def _cut(sample: TextSample, row_pieces: Sequence[Sequence[int]] | None) -> list[TextSample]:
    """The pieces of a completion, each behind its own prompt."""
    from async_rlhf.buffers.record import SamplingMask

    if row_pieces is None:
        return [sample]
    found, mask, ids = [], sample.sampling_mask, sample.completion
    ends = None if mask is None else np.cumsum([0, *mask.sizes])
    for start, num_prompt, stop in row_pieces:
        begin, own = start + num_prompt, None
        if mask is not None and ends is not None:
            own = SamplingMask(mask.sizes[begin:stop], mask.ids[ends[begin] : ends[stop]])
        found.append(sample._replace(prompt=ids[start:begin] or sample.prompt, completion=ids[begin:stop], sampling_mask=own))
    return found


def _joined(found: Sequence[Logprobs], pieces: Sequence[TextSample]) -> Logprobs:
    """The log-probabilities of the whole completion, joined from its pieces."""
    values = [found[0].values]
    for each, piece in zip(found[1:], pieces[1:], strict=True):
        values += [np.zeros(len(piece.prompt), np.float32), each.values]
    return found[0] if len(found) == 1 else Logprobs(np.concatenate(values), found[0].metrics)


def _samples(
    prompts: Sequence[Any], completions: Sequence[Any], masks: Sequence[SamplingMask | None] | None = None
) -> list[TextSample]:
    from async_rlhf.actors.scoring.incremental import TextSample

    return list(map(TextSample, prompts, completions, masks or [None] * len(completions)))
