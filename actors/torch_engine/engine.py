"""The built-in generation engine: continuous batching over slots, in the process of its actor.

One `step()` plans (scheduler), computes (forward), samples (sampling) and notes (rows) one token in every running
sequence, with one transfer from the device. It never waits, reads no clock and opens no file (`loading` does). Built
by the actor's worker and by evaluation.

    submit -> waiting line -> row -> [ forward -> sample -> note ] per token -> Completion -> row is refilled
                                          ^ load_weights between two steps: the row goes on with its cache

Axes: `N` running rows, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from actors.engine import Completion, Request, RolloutKey
from actors.torch_engine.cache import RowCache
from actors.torch_engine.forward import Forward, ModelForward
from actors.torch_engine.llama import LlamaForward, can_serve
from actors.torch_engine.rows import Rows
from actors.torch_engine.sampling import sample
from actors.torch_engine.scheduler import Plan, Scheduler
from actors.torch_engine.weights import adopt_weights
from buffers.errors import EngineError
from buffers.record import Float32Array
from buffers.tensors import RawTensor


class TorchEngine:
    """`Engine` for a Hugging Face causal language model on the device the model is on.

    Owns: the model, its cache, the slots. Waits for nothing. Woken by `step()`. On close: nothing but memory.
    The same submissions, aborts and updates between the same steps give the same completions (bit for bit on a CPU).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        stop_ids: Iterable[int] = (),
        version: int = -1,
        max_length: int | None = None,
    ) -> None:
        """`stop_ids` end a completion; `max_length` is the longest prompt and completion together, None for no limit."""
        self._model = model.eval()
        self._version = version
        self._max_length = max_length
        self._vocabulary = int(model.get_input_embeddings().num_embeddings)
        self._device = model.device
        self._stop_ids = np.array(sorted(stop_ids), np.int64)
        self._scheduler = Scheduler(slots)
        self._rows = Rows(slots)
        self._cache = RowCache(slots, max_length)
        forward = LlamaForward if can_serve(model) else ModelForward
        self._forward: Forward = forward(model, self._cache)
        # int64 [R]: each row's last token, on the device from one step to the next.
        self._last = torch.zeros(slots, dtype=torch.int64, device=self._device)

    @property
    def version(self) -> int:
        return self._version

    @property
    def num_unfinished(self) -> int:
        return self._scheduler.num_unfinished

    def submit(self, requests: Sequence[Request]) -> None:
        """As in `Engine.submit`; nothing is queued when one of the requests is refused."""
        known = self._scheduler.unfinished_keys()
        for request in requests:
            self._check(request)
            if request.key in known:
                raise EngineError(f"{request.key} is already submitted; a key names one completion")
            known.add(request.key)
        self._scheduler.submit(requests)

    def _check(self, request: Request) -> None:
        num_prompt, num_new = len(request.prompt_ids), request.max_new_tokens
        if num_prompt == 0:
            raise EngineError(f"{request.key} has an empty prompt; give it at least one token (a begin token will do)")
        if num_new < 1:
            raise EngineError(f"{request.key} asks for max_new_tokens = {num_new}; at least 1 is needed")
        if request.temperature < 0 or request.seed < 0:
            raise EngineError(f"{request.key} has temperature {request.temperature}, seed {request.seed}; both are >= 0")
        if self._max_length is not None and num_prompt + num_new > self._max_length:
            raise EngineError(
                f"{request.key} needs {num_prompt} prompt + {num_new} new tokens, the model holds {self._max_length}; "
                "shorten the prompt or lower max_completion_length"
            )
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self._vocabulary:
            raise EngineError(
                f"{request.key} has token ids {min(request.prompt_ids)} to {max(request.prompt_ids)}, the model knows "
                f"0 to {self._vocabulary - 1}; use the tokenizer that belongs to the model"
            )

    def abort(self, keys: Iterable[RolloutKey]) -> int:
        rows = self._scheduler.abort(frozenset(keys))
        return int(self._rows.counts[rows].sum())

    def load_weights(self, version: int, tensors: Mapping[str, RawTensor]) -> None:
        adopt_weights(self._model, tensors)
        self._rows.close_spans(self._scheduler.num_rows, self._version)
        self._version = version

    def close(self) -> None:
        """Nothing but memory, which goes with the engine."""

    @torch.inference_mode()
    def probe(self, token_ids: Sequence[int]) -> Float32Array:
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self._device)
        logits = self._model(input_ids=ids[None, :-1], use_cache=False).logits[0].float()
        logprobs = torch.log_softmax(logits, dim=-1).gather(-1, ids[1:, None])[:, 0]
        return np.asarray(logprobs.cpu().numpy(), np.float32)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        plan = self._scheduler.plan(self._version)
        self._place(plan)
        num_rows = self._scheduler.num_rows
        if num_rows == 0:
            return []
        rows = self._rows
        positions = rows.positions[:num_rows]
        logits = self._forward(plan.prefills, self._last[:num_rows], self._on_device(positions), int(positions.max()) + 1)
        temperatures, greedy = rows.temperatures[:num_rows], rows.greedy[:num_rows]
        tokens, logprobs = sample(
            logits,
            self._on_device(rows.uniforms(num_rows)),
            None if (temperatures == 1).all() else self._on_device(temperatures),
            self._on_device(greedy) if greedy.any() else None,
        )
        self._last[:num_rows] = tokens
        # Token ids and float32 values are exact in float64, so one array brings both.
        sampled = torch.stack((tokens.double(), logprobs.double())).cpu().numpy()
        return self._note(sampled[0].astype(np.int64), sampled[1].astype(np.float32))

    def _place(self, plan: Plan) -> None:
        """Bring rows, cache and last tokens to where the plan wants them."""
        if plan.moves:
            sources, targets = (list(side) for side in zip(*plan.moves, strict=True))
            self._cache.copy_rows(sources, targets, int(self._rows.positions[sources].max()))
            self._last[targets] = self._last[sources]
            self._rows.move(plan.moves)
        if plan.copies:
            self._cache.copy_rows(
                [copy.source for copy in plan.copies],
                [copy.target for copy in plan.copies],
                max(copy.num_tokens for copy in plan.copies),
            )
        if plan.admitted:
            for row, request in plan.admitted:
                self._rows.admit(row, request)
            rows = [row for row, _ in plan.admitted]
            self._last[rows] = torch.tensor([request.prompt_ids[-1] for _, request in plan.admitted], device=self._device)

    def _note(self, tokens: np.ndarray, logprobs: np.ndarray) -> list[Completion]:
        """Record one token per row, and free the rows that ended."""
        num_rows = len(tokens)
        self._rows.record(tokens, logprobs)
        stopped = (tokens[:, None] == self._stop_ids).any(axis=1)
        full = self._rows.counts[:num_rows] == self._rows.limits[:num_rows]
        ended = np.flatnonzero(stopped | full).tolist()
        completions = [
            self._rows.completion(row, self._scheduler.request(row), self._version, "stop" if stopped[row] else "length")
            for row in ended
        ]
        self._scheduler.finish(ended)
        return completions

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        """A host array on the device; on a CPU it is the same memory, so the step uses it before it changes the array."""
        return torch.from_numpy(array).to(self._device)
