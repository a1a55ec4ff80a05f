"""One running vLLM: its processes, the thread and event loop it lives in, and the requests it has been given.

    owns        AsyncLLM and its processes; a thread; requests that wait for a place, and completions not taken yet
    waits for   vLLM's outputs
    woken by    vLLM, and calls from the engine's thread; each call has a deadline and a name
    on close    vLLM is shut down, its processes end; when the actor is killed they end by themselves (`worker`)

Everything of vLLM is touched in this thread only. A place that is freed is filled here at once, so vLLM never waits for
the actor's loop.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from async_rlhf.actors.engine import Completion, Partial, Request, RolloutKey
from async_rlhf.actors.vllm_engine.arguments import Capabilities
from async_rlhf.actors.vllm_engine.outputs import completion_of, read_probe, sampling_arguments
from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError, DeadlineError, EngineError
from async_rlhf.buffers.record import Float32Array

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# Loading a large model from a slow disk takes minutes.
START_S = 1800.0
CALL_S = 120.0
_CLOSE_S = 20.0


@dataclass
class _Running:
    """A request vLLM works on, by its name in vLLM. oldest: the oldest weights its cache may come from.

    tokens: what vLLM has reported of it; only of a request with `partial_every`.
    """

    name: str
    oldest: int
    every: int
    task: asyncio.Task[int]
    tokens: Sequence[int] = ()


class Session:
    """See the module docstring. Made by `start`; methods may be called from one other thread."""

    def __init__(self, slots: int, stop_ids: Sequence[int]) -> None:
        self._slots, self._stop_ids = slots, stop_ids
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._waiting: deque[Request] = deque()
        self._running: dict[RolloutKey, _Running] = {}
        self._ended: queue.SimpleQueue[Completion | None] = queue.SimpleQueue()
        self._holds = False
        self._version, self._adoptions, self._names = -1, 0, 0
        self._failure: AsyncRLHFError | None = None
        self._llm: Any = None
        self.has = Capabilities(False, False)

    @property
    def num_running(self) -> int:
        """Requests vLLM works on."""
        return len(self._running)

    def start(self, make: Callable[[], Any], has: Capabilities, version: int) -> int:
        """Start vLLM: `make` gives the AsyncLLM, in the session's thread. Returns the longest sequence it can hold.

        Raises ConfigError when vLLM refuses its arguments, EngineError when it does not come up.
        """
        self._thread.start()
        self.has = has
        try:
            return self._call(self._start(make, version), "vLLM to start", START_S)
        except BaseException:  # an interrupt too: vLLM's processes must not outlive a start that was given up
            self.close()
            raise

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, in order."""
        self._call(self._submit(requests), "requests to be taken by vLLM")

    def abort(self, keys: Collection[RolloutKey]) -> int:
        """Forget these requests, whether they wait, run or have ended; returns their tokens."""
        return self._call(self._abort(frozenset(keys)), "vLLM to abort requests")

    def take(self, timeout_s: float) -> list[Completion]:
        """What ended; waits so long for the first. Raises the error that ended vLLM."""
        ended = []
        try:
            ended.append(self._ended.get(timeout=timeout_s) if timeout_s else self._ended.get_nowait())
            while True:
                ended.append(self._ended.get_nowait())
        except queue.Empty:
            pass
        self.check()
        return [completion for completion in ended if completion is not None]

    def partials(self, known: Mapping[RolloutKey, int]) -> list[Partial]:
        """As in `Engine.partials`; reads what vLLM's thread last wrote, and waits for nothing."""
        return [
            Partial(key, np.array(tokens, np.int32))
            for key, each in list(self._running.items())
            if each.every and len(tokens := each.tokens) - known.get(key, 0) >= each.every
        ]

    def hold(self) -> int:
        """Give vLLM nothing more until weights were adopted; returns how many requests still run."""
        return self._call(self._hold(), "vLLM to admit nothing more")

    def adopt(self, version: int, index: str, recompute: bool) -> None:
        """Generation goes on with the weights of `index`: with `recompute` it computes running prefixes again.

        Raises EngineError when vLLM cannot.
        """
        self._call(self._adopt(version, index, recompute), f"vLLM to adopt version {version}")

    def probe(self, token_ids: Sequence[int]) -> Float32Array:
        """As in `Engine.probe`."""
        return self._call(self._probe(token_ids), "vLLM's log-probabilities of the canary's probe")

    def check(self) -> None:
        """Raises EngineError when vLLM has died."""
        if self._failure is None and self._llm is not None and self._llm.errored:
            self._failure = EngineError("vLLM's processes have ended; the reason is in the log above")
        if self._failure is not None:
            raise self._failure

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
        self, work: Coroutine[Any, Any, _Result], what: str, timeout_s: float = CALL_S, heed_death: bool = True
    ) -> _Result:
        """Its result. vLLM leaves calls unanswered when it dies while they wait, hence the look every second."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        deadline = time.monotonic() + timeout_s
        try:
            while not future.done() and time.monotonic() < deadline:
                wait([future], timeout=1.0)
                if heed_death and not future.done():
                    self.check()
            if not future.done():
                raise DeadlineError(f"waited {timeout_s:.0f} s for {what}")
        finally:
            future.cancel()  # nothing where it is done
        return future.result()

    async def _start(self, make: Callable[[], Any], version: int) -> int:
        try:
            self._llm = make()
        except (ValueError, TypeError) as error:
            raise ConfigError(f"vLLM refuses the configuration: {error}") from error
        except (RuntimeError, OSError) as error:
            raise EngineError(f"vLLM did not start: {error}. The reason is in the log above.") from error
        await self._label(version)
        return int(self._llm.model_config.max_model_len)

    async def _label(self, version: int) -> None:
        self._version = version
        self._adoptions += 1
        if self.has.names_versions:
            await self._llm.update_weight_version(str(version))

    async def _submit(self, requests: Sequence[Request]) -> None:
        self._waiting.extend(requests)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._slots and not self._holds and self._failure is None:
            request = self._waiting.popleft()
            self._names += 1
            name = str(self._names)
            self._running[request.key] = _Running(
                name,
                self._version,
                request.partial_every,
                asyncio.ensure_future(self._generate(request, name, self._version)),
            )

    async def _generate(self, request: Request, name: str, admitted: int) -> int:
        """Run one request to its end; returns its tokens when it was aborted, else 0."""
        try:
            arguments = sampling_arguments(request, self._stop_ids, self.has)
            final = await self._final(request.prefix_ids, arguments, name, request.key)
            output = final.outputs[0]
            if output.finish_reason == "abort":
                return len(output.token_ids)
            self._ended.put(completion_of(request, output, admitted, self._running[request.key].oldest))
        except AsyncRLHFError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises ends the engine, with its name
            self._fail(EngineError(f"vLLM failed: {type(error).__name__}: {error}"))
        finally:
            del self._running[request.key]
            self._admit()
        return 0

    async def _final(
        self, token_ids: Sequence[int], arguments: Mapping[str, Any], name: str, key: RolloutKey | None = None
    ) -> Any:
        """vLLM's outputs of a request, joined; key: of whose tokens are noted as they come."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # A prefix is reused only among requests of the same weights: two adoptions never share a name, versions may.
        prompt = {"type": "token", "prompt_token_ids": list(token_ids), "cache_salt": f"adoption-{self._adoptions}"}
        kind = RequestOutputKind.DELTA if "stream_interval" in arguments else RequestOutputKind.FINAL_ONLY
        params = SamplingParams(**arguments, output_kind=kind)
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

    def _fail(self, error: AsyncRLHFError) -> None:
        self._failure = self._failure or error
        self._ended.put(None)  # wakes the engine

    async def _abort(self, keys: frozenset[RolloutKey]) -> int:
        self._waiting = deque(request for request in self._waiting if request.key not in keys)
        running = [self._running[key] for key in keys if key in self._running]
        if not running:
            return 0
        await self._llm.abort([each.name for each in running])
        return sum(await asyncio.gather(*(each.task for each in running)))

    async def _hold(self) -> int:
        self._holds = True
        return len(self._running)

    async def _adopt(self, version: int, index: str, recompute: bool) -> None:
        try:
            # Without a mode vLLM aborts everything. With its caches cleared it computes the running prefixes again.
            await self._llm.pause_generation(mode="keep", clear_cache=recompute)
            await self._llm.collective_rpc("receive_weights", args=(index,))
            await self._label(version)
            await self._llm.resume_generation()
        except Exception as error:
            self._failure = EngineError(f"vLLM could not adopt version {version}: {type(error).__name__}: {error}")
            raise self._failure from error
        if recompute:
            for each in self._running.values():
                each.oldest = version
        self._holds = False
        self._admit()

    async def _probe(self, token_ids: Sequence[int]) -> Float32Array:
        self._names += 1
        arguments = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False, "ignore_eos": True}
        try:
            final = await self._final(token_ids, arguments, f"probe-{self._names}")
        except Exception as error:
            raise EngineError(f"vLLM could not compute a probe: {type(error).__name__}: {error}") from error
        return read_probe(final.prompt_logprobs, token_ids)

    async def _close(self) -> None:
        self._holds = True
        tasks = [each.task for each in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._llm is not None:
            self._llm.shutdown(timeout=_CLOSE_S)
            self._llm = None
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
