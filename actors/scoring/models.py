"""The model behind the reward `reward_model`: texts in, one number each out.

Owns weights and tokenizer. Waits for nothing. Every completion's score is independent of what it is batched with, to the
precision of the arithmetic: padding stands on the right, and the head reads the last token that is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from async_rlhf.actors.prompts import token_ids
from async_rlhf.actors.rewards.answer import as_text
from async_rlhf.buffers.errors import RewardError
from async_rlhf.buffers.model_directory import from_pretrained, language_model, load_whole
from async_rlhf.buffers.record import Float32Array, SamplingMask

# B completions of a batch, T tokens, C model width.


class RewardModel:
    """Raises RewardError when the directory's model cannot be loaded."""

    def __init__(self, path: Path, *, label: int = 0, device: str = "cpu", dtype: str = "float32", threads: int = 1) -> None:
        torch.set_num_threads(threads)
        self._label, self.device = label, torch.device(device)
        self._tokenizer = _loaded(from_pretrained, AutoTokenizer, path, "reward model")
        model = _loaded(load_whole, AutoModelForSequenceClassification, path, "reward model", dtype=getattr(torch, dtype))
        self._model = model.to(self.device).eval()
        self.dtype: torch.dtype = model.dtype
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        # The head finds the last token by what is no padding.
        self._model.config.pad_token_id = self._tokenizer.pad_token_id
        self._tokenizer.padding_side, self._tokenizer.truncation_side = "right", "left"

    @torch.inference_mode()
    def score(self, prompts: Sequence[Any], completions: Sequence[Any], max_length: int) -> list[float]:
        """One logit for each completion, in float32. prompts, completions: texts, or lists of chat messages."""
        ids = self._ids(prompts, completions, truncation=True, max_length=max_length)
        batch_BT = self._tokenizer.pad({"input_ids": ids}, return_tensors="pt")
        inputs = {name: batch_BT[name].to(self.device) for name in ("input_ids", "attention_mask")}
        return self._of_label(self._model(**inputs).logits)

    def read(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[list[int]]:
        """Token ids of each, up to the one where the head reads. Not truncated."""
        padding = self._tokenizer.pad_token_id
        whole = self._ids(prompts, completions)
        return [ids[: max((i for i, token in enumerate(ids) if token != padding), default=0) + 1] for ids in whole]

    @torch.inference_mode()
    def judge(self, hidden_BC: torch.Tensor) -> list[float]:
        """The scores of what the model made of the tokens where the head reads."""
        return self._of_label(self._model.score(hidden_BC))

    @property
    def body(self) -> Any:
        """The model below the head. Raises AttributeError for one that is not built of these two."""
        return getattr(self._model, self._model.base_model_prefix)

    def some_tokens(self, count: int) -> list[int]:
        """Different tokens, none of them padding."""
        num_tokens = self._model.get_input_embeddings().num_embeddings
        return [token for token in range(num_tokens) if token != self._tokenizer.pad_token_id][-count:]

    def _of_label(self, logits_BL: torch.Tensor) -> list[float]:
        scores: list[float] = logits_BL[:, self._label].float().tolist()
        return scores

    def _ids(self, prompts: Sequence[Any], completions: Sequence[Any], **options: Any) -> list[list[int]]:
        """As the model was trained to read it: a chat through its template, plain text one behind the other."""
        found = []
        for prompt, completion in zip(prompts, completions, strict=True):
            if is_chat := not isinstance(prompt, str):
                written = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
                text = str(self._tokenizer.apply_chat_template([*prompt, *written], tokenize=False))
            else:
                text = prompt + as_text(completion)
            found.append(token_ids(text, self._tokenizer, is_rendered=is_chat, **options))
        return found


# Float32 logits of so many bytes are made at a time.
_LOGITS_BYTES = 16 << 20
# An output layer that is followed by nothing else agrees with the model's own logits to rounding: a share of the largest.
_SAME_LOGITS = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}
# Beyond every cap on logits that models have.
_LARGE = 1e4


class ReferenceModel:
    """Raises RewardError when the directory's model cannot be loaded, or does something to what its output layer gives."""

    def __init__(self, path: Path, *, device: str = "cpu", dtype: str = "float32", threads: int = 1) -> None:
        torch.set_num_threads(threads)
        self.device = torch.device(device)
        model = _loaded(load_whole, language_model(path), path, "the reference", dtype=getattr(torch, dtype))
        self._model = model.to(self.device).eval()
        self.dtype: torch.dtype = model.dtype
        self._head = model.get_output_embeddings()
        self._check_head()

    @property
    def body(self) -> Any:
        """The model without its output layer."""
        return self._model.base_model

    def some_tokens(self, count: int) -> list[int]:
        """Different tokens."""
        return list(range(min(count, self._model.get_input_embeddings().num_embeddings)))

    @torch.inference_mode()
    def read(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The hidden states of each completion [T, C], each of the position before a token."""
        texts = [[*prompt, *completion[:-1]] for prompt, completion in zip(prompts, completions, strict=True)]
        width = max(map(len, texts))
        # Padding stands on the right, where nothing before it looks.
        ids = torch.tensor([text + [0] * (width - len(text)) for text in texts], device=self.device)
        hidden = self.body(input_ids=ids, use_cache=False).last_hidden_state
        ends = [len(text) for text in texts]
        return [row[end - len(own) : end] for row, end, own in zip(hidden, ends, completions, strict=True)]

    @torch.inference_mode()
    def logprobs(
        self, hidden_TC: torch.Tensor, ids: Sequence[int], temperature: float, sampling_mask: SamplingMask | None
    ) -> Float32Array:
        """float32 [T]: log softmax(logits / temperature) of each token, over its sampling mask where there is one."""
        rows = max(1, _LOGITS_BYTES // (4 * self._head.weight.shape[0]))
        target_T = torch.tensor(ids, device=self.device)
        sizes_T = None if sampling_mask is None else torch.from_numpy(sampling_mask.sizes.astype("int64"))
        ids_K = None if sampling_mask is None else torch.from_numpy(sampling_mask.ids.astype("int64")).to(self.device)
        found, start = [], 0
        for at in range(0, len(ids), rows):
            logits_RV = self._head(hidden_TC[at : at + rows]).float() / temperature
            if sizes_T is not None and ids_K is not None:
                sizes_R = sizes_T[at : at + rows]
                end = start + int(sizes_R.sum())
                logits_RV = _restricted(logits_RV, sizes_R.to(self.device), ids_K[start:end])
                start = end
            chosen_R = logits_RV.gather(-1, target_T[at : at + rows, None])[:, 0]
            found.append(chosen_R - torch.logsumexp(logits_RV, dim=-1))
        return torch.cat(found).numpy(force=True)

    @torch.inference_mode()
    def _check_head(self) -> None:
        ids = torch.tensor([self.some_tokens(8)], device=self.device)
        difference = torch.inf
        if isinstance(self._head, nn.Linear) and self.body is not self._model:
            plain = self._head(self.body(input_ids=ids, use_cache=False).last_hidden_state)
            scale = _LARGE / float(plain.abs().max().clamp(min=1e-30))
            with self._head.register_forward_hook(lambda module, inputs, logits: logits * scale):  # small ones show no cap
                own = self._model(input_ids=ids, use_cache=False).logits
            difference = float((own - plain * scale).abs().max()) / _LARGE
        if not difference < _SAME_LOGITS[self.dtype]:
            raise RewardError(
                "the reference scales or caps what its output layer gives, or is not built of two parts, which only the "
                'learner can follow; set scoring.stages.reference.placement = "learner"'
            )


def _restricted(logits_RV: torch.Tensor, sizes_R: torch.Tensor, ids_K: torch.Tensor) -> torch.Tensor:
    """-inf outside of each token's sampling_mask."""
    index = torch.repeat_interleave(sizes_R), ids_K
    restricted_RV = torch.full_like(logits_RV, -torch.inf)
    restricted_RV[index] = logits_RV[index]
    return restricted_RV


def _loaded(load: Callable[..., Any], kind: Any, path: Path, what: str, **options: Any) -> Any:
    """Raises RewardError."""
    try:
        return load(kind, path, **options)
    except (OSError, ValueError) as error:
        raise RewardError(f"{what} {str(path)!r} cannot be loaded: {error}") from error
