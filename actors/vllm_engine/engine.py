"""The real vLLM behind the seam of `actors/engine.py`: decoding runs in vLLM's processes, beside the actor's loop.

    submit -> waiting line -> session (thread) -> vLLM's core -> worker processes
    step   <- completions  <-        |
    load_weights -> an index of sealed memory -> pause (keep) -> workers map it -> resume

A continuation is a request whose prompt is the whole prefix: what vLLM's own prefix cache still has of it, computed by the
same weights, is not computed again, so `Request.hold` changes nothing here.

`step()` returns what ended since the last call and waits a moment for the first of it, so that the actor's loop does not
spin while vLLM decodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from async_rlhf.actors.engine import Completion, OnUpdate, Partial, Request, RolloutKey, check_requests
from async_rlhf.actors.torch_engine.weights import Base, check_weights
from async_rlhf.actors.vllm_engine.session import Session
from async_rlhf.actors.vllm_engine.weights import as_index
from async_rlhf.buffers.errors import ConfigError, EngineError
from async_rlhf.buffers.record import Float32Array
from async_rlhf.buffers.tensors import RawTensor

# How long a call of `step` may wait for a completion: the actor answers the hub this late at most.
_STEP_WAIT_S = 0.02
# vLLM raises a temperature below this to it.
_LEAST_TEMPERATURE = 0.01


class VLLMEngine:
    """`Engine` on vLLM.

    Owns: a session. Waits for completions, a moment. Woken by the session. On close: vLLM's processes end.
    """

    def __init__(
        self,
        session: Session,
        model: torch.nn.Module,
        *,
        vocabulary: int,
        max_length: int,
        has_tokenizer: bool,
        base: Base | None = None,
        on_update: OnUpdate = "keep",
        version: int = -1,
    ) -> None:
        """session: started. model: of the served architecture, for names, shapes and dtypes only (device `meta`).

        base: the weights that adapters are added to, where they come alone. on_update: may be changed between updates.
        """
        self._session, self._model, self._base = session, model, base
        self._vocabulary, self._max_length, self._has_tokenizer = vocabulary, max_length, has_tokenizer
        self.on_update, self._version = on_update, version
        self._unfinished: set[RolloutKey] = set()
        self._taken: list[Completion] = []
        self._num_answered = 0
        self._coming: tuple[int, Mapping[str, RawTensor]] | None = None

    @property
    def version(self) -> int:
        return self._version

    @property
    def progress(self) -> int:
        return self._num_answered

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    def submit(self, requests: Sequence[Request]) -> None:
        """As in `Engine.submit`; nothing is queued when one of the requests is refused.

        Raises ConfigError for a setting of sampling that the installed vLLM has not.
        """
        known = check_requests(requests, self._unfinished, self._check)
        self._session.submit(requests)
        self._unfinished = known

    def _check(self, request: Request) -> None:
        if request.most_tokens > self._max_length:
            raise EngineError(
                f"{request.key} needs {request.parts}, vLLM holds {self._max_length}; "
                "shorten the prompt, lower max_completion_length or raise engine.kv_bytes"
            )
        least, most = min(request.prefix_ids), max(request.prefix_ids)
        if not 0 <= least <= most < self._vocabulary:
            raise EngineError(
                f"{request.key} has token ids {least} to {most}, the model knows "
                f"0 to {self._vocabulary - 1}; use the tokenizer that belongs to the model"
            )
        if 0 < request.sampling.temperature < _LEAST_TEMPERATURE:
            raise EngineError(
                f"{request.key} has temperature {request.sampling.temperature}; vLLM takes a temperature of 0 (greedy) or at "
                f"least {_LEAST_TEMPERATURE}"
            )
        for name, value in request.sampling.model_dump(exclude=set(self._session.has.sampling), exclude_defaults=True).items():
            raise ConfigError(
                f"generation.{name} = {value}: the installed vLLM has no such setting; leave it out, or use 'torch'"
            )
        if request.partial_every and not self._session.has.partials:
            raise EngineError(
                f"{request.key} is to be scored while it is written, and this vLLM does not stream (it lacks "
                "SamplingParams.stream_interval); set stream_tokens = 0 in scoring.stages, or use the torch engine"
            )
        if request.stop and not self._has_tokenizer:
            raise EngineError(f"{request.key} has stop strings, but the model directory has no tokenizer to read text with")

    def abort(self, keys: Iterable[RolloutKey]) -> int:
        dropped = self._unfinished.intersection(keys)
        thrown_away = self._session.abort(dropped)
        self._taken += self._session.take(0)
        thrown_away += sum(len(completion.token_ids) for completion in self._taken if completion.key in dropped)
        self._taken = [completion for completion in self._taken if completion.key not in dropped]
        self._unfinished -= dropped
        return thrown_away

    def step(self) -> list[Completion]:
        """What ended since the last call. Raises EngineError when vLLM has died."""
        if self._coming is not None and not self._session.num_running:
            (version, tensors), self._coming = self._coming, None
            self._adopt(version, tensors)
        waits = bool(self._unfinished) and not self._taken
        ended = self._taken + self._session.take(_STEP_WAIT_S if waits else 0)
        self._taken = []
        self._num_answered += 1
        self._unfinished.difference_update(completion.key for completion in ended)
        return ended

    def partials(self, known: Mapping[RolloutKey, int]) -> list[Partial]:
        return self._session.partials(known)

    def load_weights(self, version: int, tensors: Mapping[str, RawTensor]) -> None:
        check_weights(self._model, tensors, self._base)
        self._coming = None
        if self.on_update == "finish" and self._session.hold():
            self._coming = (version, tensors)
        else:
            self._adopt(version, tensors)

    def _adopt(self, version: int, tensors: Mapping[str, RawTensor]) -> None:
        with as_index(tensors) as path:
            self._session.adopt(version, path, recompute=self.on_update == "interrupt")
        self._version = version

    def probe(self, token_ids: Sequence[int]) -> Float32Array:
        return self._session.probe(token_ids)

    def close(self) -> None:
        """End vLLM and its processes."""
        self._session.close()
