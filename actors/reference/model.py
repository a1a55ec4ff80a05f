"""The model behind the stage `reference`: token ids in, the log-probability of each completion token out.

Owns the weights. Waits for nothing. Numbers are those the learner computes of the same model (`learner/model/logprobs.py`): of
the distribution at the temperature of sampling, over the tokens that each was chosen among where that is known, in float32.

Axes: T tokens of a completion, R of them at a time, C model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from async_rlhf.buffers.errors import RewardError
from async_rlhf.buffers.record import Float32Array, SamplingMask

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
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path, local_files_only=True, trust_remote_code=False, dtype=getattr(torch, dtype)
            )
        except (OSError, ValueError) as error:
            raise RewardError(f"the reference {str(path)!r} cannot be loaded: {error}") from error
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
        """Of each completion [T, C]: what the model made of the token before each of its tokens."""
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
