"""The built-in generation engine: continuous batching over slots, in the process of its actor.

One `step()` plans (scheduler), computes (forward), samples (sampling) and notes (rows) one token in every running
sequence, with one transfer from the device. It never waits, reads no clock and opens no file (`loading` does). Built
by the actor's worker and by evaluation.

    submit -> waiting line -> row -> [ forward -> sample -> note ] per token -> Completion -> row is refilled
                  ^            |          ^ load_weights between two steps: keep | interrupt | finish
                  +-- sent back, to make room or interrupted; goes on where it was
                  +-- held, when a turn ends; goes on where it was when it is continued

Axes: `N` running rows, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from async_rlhf.actors.engine import Bits, Completion, OnUpdate, Partial, Request, RolloutKey, check_requests
from async_rlhf.actors.served_model.weights import Base, adopt_weights, changes_tower, check_weights
from async_rlhf.actors.torch_engine.cache import COLUMNS_STEP, RowCache
from async_rlhf.actors.torch_engine.forward import Forward, GraphedForward, Recorder
from async_rlhf.actors.torch_engine.images import ImageForward
from async_rlhf.actors.torch_engine.kept import KeptCache, KeptForward, KeptLlamaForward
from async_rlhf.actors.torch_engine.kv_policy import KVPolicy
from async_rlhf.actors.torch_engine.llama import LlamaForward, can_serve
from async_rlhf.actors.torch_engine.llama_invariant import CACHE_STEP, InvariantLlamaForward
from async_rlhf.actors.torch_engine.reserved import ReservedCache
from async_rlhf.actors.torch_engine.rows import Decode, Rows, Stopping
from async_rlhf.actors.torch_engine.sampling import sample
from async_rlhf.actors.torch_engine.scheduler import NO_ROWS, PassPlan, Scheduler, Size
from async_rlhf.buffers.errors import EngineError
from async_rlhf.buffers.images.tower import ImageTower, PromptPlace
from async_rlhf.buffers.record import Float32Array
from async_rlhf.buffers.tensors import RawTensor

# Tokens that each row may take before a newest one is sent back.
_ROOM = 16


class TorchEngine:
    """`Engine` for a Hugging Face causal language model on the device the model is on.

    Owns: the model, its cache, the slots. Waits for nothing. Woken by `step()`. On close: nothing but memory.
    The same submissions, aborts and updates between the same steps give the same completions (bit for bit on a CPU).
    A request's tokens depend on what else is in the batch only through rounding: a token differs when its random number
    lies within about 1e-6 (bfloat16: 1e-2) of a border between two tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        stop_ids: Iterable[int] = (),
        decode: Decode | None = None,
        version: int = -1,
        max_length: int | None = None,
        on_update: OnUpdate = "keep",
        prefill_tokens: int = 2048,
        max_places: int | None = None,
        recorder: Recorder | None = None,
        base: Base | None = None,
        batch_invariant: bool = False,
        kv_policy: KVPolicy | None = None,
        record_routing: bool = False,
        tower: ImageTower | None = None,
    ) -> None:
        """`stop_ids` end a completion; `decode` (tokens to text) is needed for stop strings.

        max_length: the longest prompt and completion together, None for no limit. prefill_tokens: the most tokens of
        prefixes computed in one step, padding included. max_places: tokens the cache may have room for, None for
        `slots` sequences of any length. recorder: replay decode passes instead of computing them anew (see `graphs`).
        base: the weights that adapters are added to, where they come alone. batch_invariant: a completion's bits do not
        depend on its batch (on a CPU with one thread, of a model that `llama_invariant.can_be_invariant`). kv_policy: which
        keys and values stay, None for all (not together with `recorder` or `batch_invariant`). record_routing: completions
        carry the experts of each position (not together with `kv_policy`). tower: of the images of prompts (not together with
        `kv_policy` or `recorder`). Raises ConfigError where experts cannot be recorded.
        """
        self._model, self._base, self.tower = model.eval(), base, tower
        self.version, self._on_update = version, on_update
        self._max_length, self._device = max_length, model.device
        self._vocabulary = int(model.get_input_embeddings().num_embeddings)
        self._stopping = Stopping(stop_ids, decode)
        self._scheduler = Scheduler(slots, prefill_tokens, evicts=kv_policy is not None)
        self._rows = Rows(slots)
        self._is_bounded = max_places is not None
        kind = ReservedCache if self._device.type == "cpu" and recorder is None else RowCache
        self._cache = kind(slots, max_length, max_places, CACHE_STEP if batch_invariant else COLUMNS_STEP)
        self.kv_policy = kv_policy
        self._forward: Forward
        if kv_policy is not None:
            self._cache = kept = KeptCache(kv_policy, slots, max_places)
            self._forward = (KeptLlamaForward if can_serve(model) else KeptForward)(model, kept)
        elif recorder is not None:
            self._forward = GraphedForward(model, self._cache, slots, recorder)
        else:
            self._forward = self._plain_forward(batch_invariant)
        if record_routing:
            self._cache.record_routing(model)
        # int64 [R]: each row's last token, on the device from one step to the next.
        self._last = torch.zeros(slots, dtype=torch.int64, device=self._device)
        self._coming: tuple[int, Mapping[str, RawTensor]] | None = None
        self.bits = Bits(obstacle="engine.batch_invariant = false")
        # Since the start: tokens sampled, and times a sequence was sent back.
        self.num_sampled = self.num_suspended = 0

    def _plain_forward(self, batch_invariant: bool) -> Forward:
        if can_serve(self._model):
            return (InvariantLlamaForward if batch_invariant else LlamaForward)(self._model, self._cache, self.tower)
        if self.tower is not None:
            return ImageForward(self._model, self._cache, self.tower, self._rows.shifts)
        return Forward(self._model, self._cache)

    @property
    def is_batch_invariant(self) -> bool:
        return isinstance(self._forward, InvariantLlamaForward)

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values of all rows, without those held between turns."""
        return self._cache.num_bytes

    @property
    def progress(self) -> int:
        return self.num_sampled

    @property
    def num_unfinished(self) -> int:
        return self._scheduler.num_unfinished

    def submit(self, requests: Sequence[Request]) -> None:
        """As in `Engine.submit`; nothing is queued when one of the requests is refused."""
        check_requests(requests, self._scheduler.unfinished_keys(), self._check, self._vocabulary, self._max_length)
        self._cache.expect(max((request.most_tokens for request in requests), default=0))
        self._scheduler.submit(requests)

    def _check(self, request: Request) -> None:
        if request.images and self.tower is None:
            raise EngineError(
                f"{request.key} has {len(request.images)} images, and this engine was started without their store"
            )
        if not self._cache.fits(NO_ROWS.plus(request.most_tokens)):
            raise EngineError(
                f"{request.key} needs room for {request.parts}, engine.kv_bytes has less for a single sequence; raise it, or "
                "lower max_prompt_length or max_completion_length"
            )
        if request.stop and (self._stopping.decode is None or not all(request.stop)):
            raise EngineError(f"{request.key} has stop strings {request.stop}; none may be empty, and a tokenizer is needed")

    def abort(self, keys: Iterable[RolloutKey]) -> int:
        rows, num_suspended = self._scheduler.abort(frozenset(keys))
        return int(self._rows.counts[rows].sum()) + num_suspended

    def partials(self, known: Mapping[RolloutKey, int]) -> list[Partial]:
        counts = self._rows.counts.tolist()
        grown = [
            (row, request.key)
            for row, request in self._scheduler.running()
            if request.partial_every and counts[row] - known.get(request.key, 0) >= request.partial_every
        ]
        return [Partial(key, self._rows.tokens(row)) for row, key in grown]

    def load_weights(self, version: int, tensors: Mapping[str, RawTensor]) -> None:
        check_weights(self._model, tensors, self._base)
        self._coming = (version, tensors)
        if self._on_update != "finish" or not self._scheduler.num_begun:
            self._adopt(version, tensors)

    def _adopt(self, version: int, tensors: Mapping[str, RawTensor]) -> None:
        if self._on_update == "interrupt":
            self._suspend(self._scheduler.rows_by_age())
        else:
            self._rows.close_spans(self._scheduler.num_rows, self.version)
        if self._on_update != "keep" or version < self.version:
            # Going back, "the oldest weights" would not describe what is mixed in a held cache.
            self._scheduler.release_caches()
        if self.tower is not None and changes_tower(self._model, tensors):
            self.tower.forget()
        adopt_weights(self._model, tensors, self._base)
        self._forward.refresh()
        self.version, self._coming = version, None

    def _suspend(self, rows: Sequence[int]) -> None:
        """Send rows back; what they have sampled stays."""
        self._scheduler.suspend([(row, self._rows.progress(row, self.version)) for row in rows])
        self.num_suspended += len(rows)

    def close(self) -> None:
        """Nothing but memory, which goes with the engine."""

    @torch.inference_mode()
    def probe(self, token_ids: Sequence[int], *, behind_images: bool = False) -> Float32Array:
        prompt = self._sample() if behind_images else None
        before = prompt.ids if prompt else ()
        ids = torch.tensor([*before, *token_ids], dtype=torch.int64, device=self._device)
        logits = self._forward.logits(ids[:-1], prompt)[len(before) :]
        logprobs = torch.log_softmax(logits.float(), dim=-1).gather(-1, ids[len(before) + 1 :, None])[:, 0]
        return np.asarray(logprobs.cpu().numpy(), np.float32)

    def _sample(self) -> PromptPlace:
        if self.tower is None:
            raise EngineError("a probe has images, and this engine was started without their store")
        return self.tower.sample

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        if self._coming is not None and not self._scheduler.num_begun:
            self._adopt(*self._coming)
            return []  # so that the caller sees the new version before anything is sampled from it
        plan = self._plan()
        self._place(plan)
        num_rows = self._scheduler.num_rows
        if num_rows == 0:
            return []
        rows = self._rows
        positions = rows.positions[:num_rows]
        logits = self._forward(plan.chunks, self._last[:num_rows], self._on_device(positions), int(positions.max()) + 1)
        greedy = rows.greedy[:num_rows]
        tokens, logprobs, kept = sample(
            logits,
            self._on_device(rows.uniforms(num_rows)),
            self._on_device(greedy) if greedy.any() else None,
            bool(rows.truncated[:num_rows].any()),
            **{name: self._on_device(values) for name, values in rows.settings(num_rows).items()},
        )
        ready = np.arange(num_rows)
        if plan.filling:
            ready = np.setdiff1d(ready, plan.filling)
            self._last[ready] = tokens[ready]
        else:
            self._last[:num_rows] = tokens
        # Token ids and float32 values are exact in float64, so one array brings both.
        sampled = torch.stack((tokens.double(), logprobs.double())).cpu().numpy()[:, ready]
        self.num_sampled += len(ready)
        self._rows.record(sampled[0].astype(np.int64), sampled[1].astype(np.float32), ready)
        if kept is not None:
            self._record_supports(kept, ready)
        return self._end(sampled[0].astype(np.int64), ready)

    def _plan(self) -> PassPlan:
        """Make room where memory is counted, then let requests in; while weights wait, only those that had begun."""
        size = NO_ROWS
        if self._is_bounded:
            rows = self._scheduler.rows_by_age()
            for length in (self._rows.positions[rows] + 1).tolist():
                if not self._cache.fits(size.plus(length)):
                    break
                size = size.plus(length)
            self._suspend(rows[size.num_rows :])
        return self._scheduler.plan(
            self.version,
            size=size,
            fits=self._has_room if self._is_bounded else None,
            only_begun=self._coming is not None,
        )

    def _has_room(self, size: Size) -> bool:
        """Whether another row may enter: not one that is sent back a few steps later."""
        return self._cache.fits(size if size.num_rows == 1 else size.later(_ROOM))

    def _place(self, plan: PassPlan) -> None:
        """Bring rows, cache and last tokens to where the plan has them."""
        if plan.moves:
            sources, targets = (list(side) for side in zip(*plan.moves, strict=True))
            self._cache.clear_rows(targets)
            self._cache.copy_rows(sources, targets, int(self._rows.positions[sources].max()))
            self._last[targets] = self._last[sources]
            self._rows.move(plan.moves)
        self._cache.release(self._scheduler.num_rows)
        if plan.admitted:
            for admission in plan.admitted:
                self._rows.admit(admission.row, admission.request, admission.version, admission.progress)
                self._rows.shifts[admission.row] = self._shift(admission.request)
            rows = [admission.row for admission in plan.admitted]
            self._cache.clear_rows(rows)
            self._last[rows] = torch.tensor([admission.last_token for admission in plan.admitted], device=self._device)
            num_rows = self._scheduler.num_rows
            self._cache.reserve(int(self._rows.positions[:num_rows].max()) + 1, num_rows)
            for admission in plan.admitted:
                if admission.cache:
                    self._cache.put_row(admission.row, admission.cache)
        if plan.copies:
            self._cache.copy_rows(
                [copy.source for copy in plan.copies],
                [copy.target for copy in plan.copies],
                max(copy.num_tokens for copy in plan.copies),
            )

    def _shift(self, request: Request) -> int:
        return 0 if self.tower is None else self.tower.positions(*request.prompt)[1]

    def _record_supports(self, kept: torch.Tensor, ready: np.ndarray) -> None:
        """Note which tokens the rows that cut some off have just chosen from; bool [N, V]."""
        rows = ready[self._rows.truncated[ready]]
        if not len(rows):
            return
        row, ids = kept[torch.from_numpy(rows).to(self._device)].nonzero(as_tuple=True)
        borders = np.cumsum(np.bincount(row.cpu().numpy(), minlength=len(rows)))[:-1]
        for index, part in zip(rows.tolist(), np.split(ids.int().cpu().numpy(), borders), strict=True):
            self._rows.record_support(index, part)

    def _end(self, tokens: np.ndarray, ready: np.ndarray) -> list[Completion]:
        """Free the rows that ended with the token just recorded; hold what may be continued."""
        stopped = self._stopping.stopped(self._rows, tokens, ready, lambda row: self._scheduler.request(row).stop)
        full = self._rows.counts[ready] == self._rows.limits[ready]
        ended = [(int(ready[index]), bool(stopped[index])) for index in np.flatnonzero(stopped | full)]
        completions = [
            replace(
                self._rows.completion(row, self._scheduler.request(row), self.version, "stop" if stops else "length"),
                routing=self._cache.routing_of(row, int(self._rows.positions[row])),
            )
            for row, stops in ended
        ]
        for (row, _), completion in zip(ended, completions, strict=True):
            if self._scheduler.request(row).hold:
                length = int(self._rows.positions[row])
                places = length if self.kv_policy is None else self.kv_policy.budget + 1
                cache = self._cache.keep_row(row, length)
                self._scheduler.hold(row, completion.token_ids.tolist(), cache, places, self._cache.num_places)
        self._scheduler.finish(row for row, _ in ended)
        return completions

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        """A host array on the device; on a CPU it is the same memory, so the step uses it before it changes the array."""
        return torch.from_numpy(array).to(self._device)
