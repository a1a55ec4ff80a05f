"""The real vLLM behind the seam of `actors/engine.py`: decoding runs in vLLM's processes, beside the actor's loop.

    owns        AsyncLLM and its processes; a thread with an event loop; requests that wait for a place, and what has ended
    waits for   vLLM's outputs: `step` a moment; every other call has a deadline and a name
    woken by    vLLM, and calls of the actor's loop
    on close    vLLM is shut down, its processes end; when the actor is killed they end by themselves (`worker`)

    submit -> waiting line -> vLLM's core -> worker processes
    step   <- completions  <-      |
    load_weights -> an index of sealed memory -> pause (keep) -> workers map it -> resume

Everything of vLLM is touched in that thread only. A place that is freed is filled there at once, so vLLM never waits for the
actor's loop. A continuation is a request whose prompt is the whole prefix: what vLLM's own prefix cache still has of it,
computed by the same weights, is not computed again, so `Request.hold` changes nothing here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedModel

from async_rlhf.actors.engine import Bits, Completion, OnUpdate, Partial, Request, RolloutKey, check_requests
from async_rlhf.actors.served_model.weights import Base, changes_tower, check_weights
from async_rlhf.actors.vllm_engine.images import ImagePrompts
from async_rlhf.actors.vllm_engine.outputs import completion_of, read_probe, sampling_arguments
from async_rlhf.actors.vllm_engine.weights import as_index
from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError, DeadlineError, EngineError
from async_rlhf.buffers.images.processor import ImageProcessor
from async_rlhf.buffers.record import Float32Array
from async_rlhf.buffers.tensors import RawTensor

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# Loading a large model from a slow disk takes minutes.
_START_S = 1800.0
_CALL_S = 120.0
_CLOSE_S = 20.0
# How long a call of `step` may wait for a completion: the actor answers the hub this late at most.
_STEP_WAIT_S = 0.02
# vLLM raises a temperature below this to it.
_LEAST_TEMPERATURE = 0.01


@dataclass
class _RunningRequest:
    """A request vLLM works on, by its name in vLLM."""

    name: str
    oldest: int
    """The oldest weights its cache may come from."""
    every: int
    task: asyncio.Task[int]
    tokens: Sequence[int] = ()
    """The tokens that vLLM has reported; only of a request with `partial_every`."""


class VLLMEngine:
    """`Engine` on vLLM. See the module docstring; methods are called from one thread."""

    bits = Bits(obstacle="engine.kind = 'vllm'; only 'torch' can")

    def __init__(
        self,
        make: Callable[[], Any],
        model: PreTrainedModel,
        *,
        slots: int,
        stop_ids: Sequence[int],
        has_tokenizer: bool,
        base: Base | None = None,
        on_update: OnUpdate = "keep",
        version: int = -1,
        images: ImageProcessor | None = None,
    ) -> None:
        """Start vLLM: `make` gives the AsyncLLM, in the engine's thread.

        model: of the served architecture, for names, shapes and dtypes only (device `meta`). base: the weights that adapters
        are added to, where they come alone. on_update: may be changed between updates. images: prepares those of prompts.
        Raises ConfigError when vLLM refuses its arguments, EngineError when it does not come up.
        """
        self._model, self._base, self._slots, self._stop_ids = model, base, slots, stop_ids
        self._vocabulary = int(model.get_input_embeddings().num_embeddings)
        self._has_tokenizer, self.on_update = has_tokenizer, on_update
        self._unfinished: set[RolloutKey] = set()
        self._coming: tuple[int, Mapping[str, RawTensor]] | None = None
        self.progress = 0
        # From here on, what belongs to the loop's thread.
        self._loop = asyncio.new_event_loop()
        self._llm: Any = None
        self._images: ImagePrompts | None = None
        self._failure: AsyncRLHFError | None = None
        self._waiting: deque[Request] = deque()
        self._running: dict[RolloutKey, _RunningRequest] = {}
        self._ended: list[Completion] = []
        self._news = asyncio.Event()
        self._admits = True
        self.version, self._adoptions, self._names = version, 0, 0
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        try:
            self._max_length = self._call(self._start(make, images), "vLLM to start", _START_S)
        except BaseException:  # an interrupt too: vLLM's processes must not outlive a start that was given up
            self.close()
            raise

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    def submit(self, requests: Sequence[Request]) -> None:
        """As in `Engine.submit`; nothing is queued when one of the requests is refused."""
        known = check_requests(requests, self._unfinished, self._check, self._vocabulary, self._max_length)
        self._call(self._submit(requests), "requests to be taken by vLLM")
        self._unfinished = known

    def _check(self, request: Request) -> None:
        if 0 < request.sampling.temperature < _LEAST_TEMPERATURE:
            raise EngineError(
                f"{request.key} has temperature {request.sampling.temperature}; vLLM takes a temperature of 0 (greedy) or at "
                f"least {_LEAST_TEMPERATURE}"
            )
        if request.images and self._images is None:
            raise EngineError(
                f"{request.key} has {len(request.images)} images, and this engine was started without their store"
            )
        if request.stop and not self._has_tokenizer:
            raise EngineError(f"{request.key} has stop strings, but the model directory has no tokenizer to read text with")

    def abort(self, keys: Iterable[RolloutKey]) -> int:
        dropped = self._unfinished.intersection(keys)
        self._unfinished -= dropped
        return self._call(self._abort(dropped), "vLLM to abort requests") if dropped else 0

    def step(self) -> list[Completion]:
        """The completions since the last call, or within a moment, so that the actor's loop does not spin while vLLM decodes.
        Raises EngineError when vLLM has died."""
        if self._coming is not None and not self._running:
            (version, tensors), self._coming = self._coming, None
            self._load(version, tensors)
        ended = self._call(self._take(_STEP_WAIT_S if self._unfinished else 0), "what vLLM has ended")
        self.progress += 1
        self._unfinished.difference_update(completion.key for completion in ended)
        return ended

    def partials(self, known: Mapping[RolloutKey, int]) -> list[Partial]:
        """As in `Engine.partials`; reads what vLLM's thread last wrote, and waits for nothing."""
        return [
            Partial(key, np.array(tokens, np.int32))
            for key, each in list(self._running.items())
            if each.every and len(tokens := each.tokens) - known.get(key, 0) >= each.every
        ]

    def load_weights(self, version: int, tensors: Mapping[str, RawTensor]) -> None:
        check_weights(self._model, tensors, self._base)
        self._coming = None
        if self.on_update == "finish" and self._call(self._hold(), "vLLM to admit nothing more"):
            self._coming = (version, tensors)
        else:
            self._load(version, tensors)

    def _load(self, version: int, tensors: Mapping[str, RawTensor]) -> None:
        with as_index(tensors) as path:
            adopted = self._adopt(version, path, changes_tower(self._model, tensors))
            self._call(adopted, f"vLLM to adopt version {version}")

    def probe(self, token_ids: Sequence[int], *, behind_images: bool = False) -> Float32Array:
        return self._call(self._probe(token_ids, behind_images), "vLLM's log-probabilities of the canary's probe")

    def close(self) -> None:
        """End vLLM, its processes and the thread; harmless when done twice."""
        if not self._thread.is_alive():
            return
        try:
            self._call(self._close(), "vLLM to end", 2 * _CLOSE_S, heed_death=False)
        except AsyncRLHFError as error:
            _log.warning("%s", error)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _call(
        self, work: Coroutine[Any, Any, _Result], what: str, timeout_s: float = _CALL_S, heed_death: bool = True
    ) -> _Result:
        """Its result. vLLM leaves calls unanswered when it dies while they wait, hence the look every second."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        deadline = time.monotonic() + timeout_s
        try:
            while not future.done() and time.monotonic() < deadline:
                wait([future], timeout=1.0)
                if heed_death and not future.done():
                    self._check_alive()
            if not future.done():
                raise DeadlineError(f"waited {timeout_s:.0f} s for {what}")
        finally:
            future.cancel()  # nothing where it is done
        return future.result()

    def _check_alive(self) -> None:
        """Raises the error that ended vLLM."""
        if self._failure is None and self._llm is not None and self._llm.errored:
            self._failure = EngineError("vLLM's processes have ended; the reason is in the log above")
        if self._failure is not None:
            raise self._failure

    # -- in the loop's thread --------------------------------------------------------------------------------------------

    async def _start(self, make: Callable[[], Any], images: ImageProcessor | None) -> int:
        """The longest sequence it can hold."""
        try:
            self._llm = make()
        except (ValueError, TypeError) as error:
            raise ConfigError(f"vLLM refuses the configuration: {error}") from error
        except (RuntimeError, OSError) as error:
            raise EngineError(f"vLLM did not start: {error}. The reason is in the log above.") from error
        if images is not None:
            self._images = ImagePrompts(self._llm.renderer.get_mm_processor(), images)
        await self._label(self.version)
        return int(self._llm.model_config.max_model_len)

    async def _label(self, version: int) -> None:
        self.version = version
        self._adoptions += 1
        await self._llm.update_weight_version(str(version))

    async def _submit(self, requests: Sequence[Request]) -> None:
        self._waiting.extend(requests)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._slots and self._admits and self._failure is None:
            request = self._waiting.popleft()
            self._names += 1
            name = str(self._names)
            task = asyncio.ensure_future(self._generate(request, name))
            self._running[request.key] = _RunningRequest(name, self.version, request.partial_every, task)

    async def _generate(self, request: Request, name: str) -> int:
        """Run one request to its end; returns its tokens when it was aborted, else 0."""
        try:
            arguments = sampling_arguments(request, self._stop_ids)
            final = await self._final(request.prefix_ids, arguments, name, request.key, request.images)
            output = final.outputs[0]
            if output.finish_reason == "abort":
                return len(output.token_ids)
            self._ended.append(completion_of(request, output, self._running[request.key].oldest))
        except AsyncRLHFError as error:
            self._failure = self._failure or error
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises ends the engine, with its name
            self._failure = self._failure or EngineError(f"vLLM failed: {type(error).__name__}: {error}")
        finally:
            self._news.set()
            del self._running[request.key]
            self._admit()
        return 0

    async def _final(
        self,
        token_ids: Sequence[int],
        arguments: Mapping[str, Any],
        name: str,
        key: RolloutKey | None = None,
        images: tuple[str, ...] = (),
    ) -> Any:
        """vLLM's outputs of a request, joined; key: of whose tokens are noted as they come. images: of its prompt."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # A prefix is reused only among requests of the same weights: two adoptions never share a name, versions may.
        weights = f"adoption-{self._adoptions}"
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": list(token_ids)}
        if images:
            assert self._images is not None
            prompt = await asyncio.to_thread(self._images.prompt, token_ids, images, weights)
        prompt["cache_salt"] = weights
        kind = RequestOutputKind.DELTA if "stream_interval" in arguments else RequestOutputKind.FINAL_ONLY
        # Of images whose places it finds in its cache vLLM drops the arrays, and dies when it has to compute them again.
        skips = {"skip_reading_prefix_cache": True} if images else {}
        params = SamplingParams(**arguments, **skips, output_kind=kind)
        final = None
        async for output in self._llm.generate(prompt, params, name):
            if final is None:
                final = output
            else:
                final.add(output, aggregate=True)
            if key is not None:
                self._running[key].tokens = final.outputs[0].token_ids
        assert final is not None, "vLLM ended a request without an output"
        return final

    async def _take(self, timeout_s: float) -> list[Completion]:
        """The finished completions; waits up to `timeout_s` for the first."""
        self._news.clear()
        if timeout_s and not self._ended and self._failure is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), timeout_s)
        self._check_alive()
        ended, self._ended = self._ended, []
        return ended

    async def _abort(self, keys: set[RolloutKey]) -> int:
        """Forget these requests, whether they wait, run or have ended; returns their tokens."""
        self._waiting = deque(request for request in self._waiting if request.key not in keys)
        running = [self._running[key] for key in keys if key in self._running]
        if running:
            await self._llm.abort([each.name for each in running])
        thrown_away = sum(await asyncio.gather(*(each.task for each in running)))
        thrown_away += sum(len(each.token_ids) for each in self._ended if each.key in keys)
        self._ended = [each for each in self._ended if each.key not in keys]
        return thrown_away

    async def _hold(self) -> int:
        """Give vLLM nothing more until weights were adopted; returns how many requests still run."""
        self._admits = False
        return len(self._running)

    async def _adopt(self, version: int, index: str, changes_images: bool) -> None:
        """Generation goes on with the weights of `index`; changes_images: whether they read images otherwise. Raises
        EngineError when vLLM cannot."""
        recompute = self.on_update == "interrupt"
        try:
            # Without a mode vLLM aborts everything. With its caches cleared it computes the running prefixes again.
            await self._llm.pause_generation(mode="keep", clear_cache=recompute)
            await self._llm.collective_rpc("receive_weights", args=(index,))
            if changes_images:
                await self._llm.reset_encoder_cache()
            await self._label(version)
            await self._llm.resume_generation()
        except Exception as error:
            self._failure = EngineError(f"vLLM could not adopt version {version}: {type(error).__name__}: {error}")
            raise self._failure from error
        if recompute:
            for sequence in self._running.values():
                sequence.oldest = version
        self._admits = True
        self._admit()

    async def _probe(self, token_ids: Sequence[int], behind_images: bool) -> Float32Array:
        self._names += 1
        arguments = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False, "ignore_eos": True}
        try:
            prompt, images = self._images.sample if self._images and behind_images else ([], ())
            final = await self._final([*prompt, *token_ids], arguments, f"probe-{self._names}", images=images)
        except Exception as error:
            raise EngineError(f"vLLM could not compute a probe: {type(error).__name__}: {error}") from error
        return read_probe(final.prompt_logprobs[len(prompt) :], token_ids)

    async def _close(self) -> None:
        self._admits = False
        await _cancelled([each.task for each in self._running.values()])
        if self._llm is not None:
            self._llm.shutdown(timeout=_CLOSE_S)
            self._llm = None
        await _cancelled(asyncio.all_tasks() - {asyncio.current_task()})


async def _cancelled(tasks: Collection[asyncio.Task[Any] | None]) -> None:
    for task in tasks:
        if task is not None:
            task.cancel()
    await asyncio.gather(*filter(None, tasks), return_exceptions=True)
