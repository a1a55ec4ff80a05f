"""The model behind the reward `reward_model`: texts in, one number each out.

Owns weights and tokenizer. Waits for nothing. Every completion's score is independent of what it is batched with, to the
precision of the arithmetic: padding stands on the right, and the head reads the last token that is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from async_rlhf.buffers.errors import RewardError

# B completions of a batch, T tokens, C model width.


class RewardModel:
    """Raises RewardError when the directory's model cannot be loaded."""

    def __init__(self, path: Path, *, label: int = 0, device: str = "cpu", dtype: str = "float32", threads: int = 1) -> None:
        torch.set_num_threads(threads)
        self._label, self.device = label, torch.device(device)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            model = AutoModelForSequenceClassification.from_pretrained(
                path, local_files_only=True, trust_remote_code=False, dtype=getattr(torch, dtype)
            )
        except (OSError, ValueError) as error:
            raise RewardError(f"reward model {str(path)!r} cannot be loaded: {error}") from error
        self._model = model.to(self.device).eval()
        self.dtype: torch.dtype = model.dtype
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        # The head finds the last token by what is no padding.
        self._model.config.pad_token_id = self._tokenizer.pad_token_id
        self._tokenizer.padding_side, self._tokenizer.truncation_side = "right", "left"

    @torch.inference_mode()
    def score(self, prompts: Sequence[Any], completions: Sequence[str], max_length: int) -> list[float]:
        """One logit for each completion, in float32. prompts: texts, or lists of chat messages."""
        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        batch_BT = self._tokenizer(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
        inputs = {name: batch_BT[name].to(self.device) for name in ("input_ids", "attention_mask")}
        return self._of_label(self._model(**inputs).logits)

    def read(self, prompts: Sequence[Any], completions: Sequence[str]) -> list[list[int]]:
        """Token ids of each, up to the one where the head reads. Not truncated."""
        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        padding = self._tokenizer.pad_token_id
        whole: list[list[int]] = self._tokenizer(texts)["input_ids"]
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

    def _text(self, prompt: Any, completion: str) -> str:
        """As the model was trained to read it: a chat through its template, plain text one behind the other."""
        if isinstance(prompt, str):
            return prompt + completion
        chat = [*prompt, {"role": "assistant", "content": completion}]
        return str(self._tokenizer.apply_chat_template(chat, tokenize=False))
