"""An environment that only the calling process has: `train(environment=play)` where `play` was typed into a notebook.

Threads of the calling process play its episodes, each at the other end of a connection from its stand-in
(`actors/environments/stand_in.py`), which is the environment of the run's configuration. Nothing is pickled.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from async_rlhf.actors.environments import EnvironmentSpec, settings_of, spec_of
from async_rlhf.actors.environments.generators import AsyncSteps, Steps, ThreadSteps
from async_rlhf.actors.environments.loading import spec_in_process
from async_rlhf.actors.environments.messages import BeginEpisode, Message, Observed, Reply
from async_rlhf.actors.environments.stand_in import CALLER_SOCKET, STAND_IN, receive, send
from async_rlhf.actors.environments.worker import episode_ended
from async_rlhf.actors.environments.yields import End, Read, fails, raised, read_yield
from async_rlhf.actors.workers.watchdog import LoopWatchdog
from async_rlhf.buffers.errors import ConfigError, RewardError
from async_rlhf.launch.sockets import socket_directory
from async_rlhf.run.config import Config, override

Environment = Callable[..., Any]

_log = logging.getLogger(__name__)
_STOP_S = 10.0
# The stand-in ends an episode after its `max_turns`.
_ANY_TURNS = 1 << 62


def target_of(environment: Environment) -> tuple[str, Environment | None]:
    """The target of a configuration, and the function where only this process has it. Raises ConfigError for what is no
    generator of ours."""
    if inspect.isclass(environment) or not callable(environment):
        what = f"{environment.__name__} is a class" if inspect.isclass(environment) else f"it is a {type(environment).__name__}"
        name = getattr(environment, "__name__", "TOOLS")
        raise ConfigError(
            f"environment: {what}, and a generator function was expected. One that is written for TRL is played from a file: "
            f"overrides={{'environment.function': 'trl:my_environment.py:{name}'}}; in a notebook, begin its cell with "
            "'%%writefile my_environment.py'"
        )
    try:
        return spec_of(environment), None
    except RewardError:
        return f"{_name(environment)}={STAND_IN}", environment


@contextmanager
def played(
    environment: Environment | None, config: Config, columns: AbstractSet[str] | None
) -> Iterator[tuple[Config, dict[str, str]]]:
    """Plays its episodes until the end of the block, for a run of the configuration, with the variables, that it gives.

    columns: those of the data, None where they are not known yet. Raises ConfigError.
    """
    if environment is None:
        yield config, {}
        return
    settings, name = settings_of(environment), _name(environment)
    if settings.at_limit != 0.0:
        raise ConfigError(
            f"@environment(at_limit={settings.at_limit}): {name!r} cannot be imported by another process, and such a one has 0 "
            "at its limits; give it a file (begin its cell with '%%writefile my_environment.py'), or leave at_limit out"
        )
    if settings.tools:
        raise ConfigError(
            f"@environment(tools=...): {name!r} cannot be imported by another process, and the model would not be shown "
            "its tools; give it a file (begin its cell with '%%writefile my_environment.py')"
        )
    spec = spec_in_process(name, environment, config.environment.options, config.environment.given, columns)
    _log.warning(
        "%s: served by threads of this process, because no other can import it. A step cannot be killed and shares the "
        "interpreter; one that times out is a failed episode",
        name,
    )
    with socket_directory() as directory:
        server = _Server(spec, environment, config.environment.max_observation_bytes, directory / "environment")
        try:
            limits = {key: getattr(spec, key) for key in ("max_turns", "timeout_s", "episode_timeout_s")}
            changed = {f"environment.{key}": value for key, value in limits.items() if value is not None}
            yield override(config, changed), {CALLER_SOCKET: str(server.path)}
        finally:
            server.close()


class _Server:
    """owns        a thread with an event loop, a socket, the generators of the episodes
    waits for   connections, messages, steps
    on close    the loop ends; steps of a plain `def` run on, in threads that do not keep the process alive
    """

    def __init__(self, spec: EnvironmentSpec, environment: Environment, max_bytes: int, path: Path) -> None:
        self._spec, self._environment, self.path = spec, environment, path
        self._reads = partial(read_yield, max_turns=_ANY_TURNS, max_bytes=max_bytes)
        self._threads, self._watchdog = _Threads(), LoopWatchdog()
        self._closing, self._has_failed = asyncio.Event(), False
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(started),), name="environment", daemon=True)
        self._thread.start()
        self._loop = started.result(_STOP_S)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(_STOP_S)

    async def _run(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        async with await asyncio.start_unix_server(self._episode, self.path):
            started.set_result(asyncio.get_running_loop())
            await self._closing.wait()
            # What is left is cancelled here: closing the server would wait for it.
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    async def _episode(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        steps: Steps | None = None
        try:
            message, turn = await receive(reader), 0
            while isinstance(message, BeginEpisode | Reply):
                began = time.time()
                came: Read | End | None
                try:
                    steps = self._steps(message.fields) if isinstance(message, BeginEpisode) else steps
                    assert steps is not None, "a Reply follows a BeginEpisode"
                    came = await self._step(steps, message.text if isinstance(message, Reply) else None, turn)
                except Exception as error:  # noqa: BLE001  calling the user's function fails for arguments it does not take
                    came = raised(error)
                await send(writer, self._answer(came, began))
                if isinstance(came, End):
                    break
                message, turn = await receive(reader), turn + 1
        except OSError:
            pass  # The stand-in has gone.
        finally:
            writer.close()
            if steps is not None:
                await steps.close()

    def _steps(self, fields: Mapping[str, Any]) -> Steps:
        generator = self._environment(**self._spec.usable({**fields, **self._spec.options}))
        if self._spec.kind == "async":
            return AsyncSteps(generator, self._watchdog, 0)
        return ThreadSteps(generator, self._threads)

    async def _step(self, steps: Steps, text: str | None, turn: int) -> Read | End:
        """The stand-in has the same time-out: it does not read the answer of a step that exceeds it."""
        running = steps.step(text, turn, lambda value: self._reads(value, turn))
        done, _ = await asyncio.wait({running}, timeout=self._spec.timeout_s)
        if done:
            return running.result()
        running.cancel()
        return fails("timed out", f"timed out after {self._spec.timeout_s:g} s (timeout_s)")

    def _answer(self, came: Read | End, began: float) -> Message:
        if isinstance(came, Read):
            return Observed(id=0, content=came.content, score=came.score, began=began, ended=time.time())
        if came.traceback and not self._has_failed:
            self._has_failed = True
            _log.warning("an episode failed, later failures are only counted: %s\n%s", came.failure, came.traceback)
        return episode_ended(0, came, began, time.time())


class _Threads(Executor):
    """One for each call, so that a step that hangs takes no other's place and never keeps the process alive."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(function(*arguments, **named))

        threading.Thread(target=run, name="episode", daemon=True).start()
        return future


def _name(environment: Environment) -> str:
    name = str(settings_of(environment).name or getattr(environment, "__name__", type(environment).__name__))
    return name if name.isidentifier() else "environment"
