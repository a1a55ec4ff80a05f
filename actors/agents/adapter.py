"""An agent as a generator of ours: it yields what each call asks of the model, and answers the call with the model's turn.

    the agent's thread or task -> its SDK -> endpoint -> session -> `next` -> yield Call ... Reply -> the call's answer

A plain function runs in a thread of its own, which ends only with its process; an asynchronous one is a task on the process'
loop. A step is the time from an answer to the next call, or to the agent's end. While other calls are unanswered, the generator
does not block: it yields `Beside`, and the next call, or the agent's end, starts a new step. Calls at the same time reach the
model at the same time, and an agent that waits for several has its time from the last answer on. However an episode ends, its
session ends first, so that the agent's clients fail at once, and then the agent is waited for; one that goes on is a cleanup
that hangs.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from async_rlhf.actors.agents.endpoint import endpoint
from async_rlhf.actors.agents.sessions import IncomingCall, PendingCall
from async_rlhf.actors.agents.turns import RESPONSE_TEMPLATE, Turns
from async_rlhf.actors.environments.from_trl import plain
from async_rlhf.actors.environments.loading import MAX_TURNS, Adapted
from async_rlhf.actors.environments.settings import (
    Beside,
    EnvironmentDeclaration,
    EnvironmentFunction,
    Reply,
    Scores,
    settings_of,
)
from async_rlhf.actors.environments.tool_calls import TEMPLATE, checked
from async_rlhf.actors.rewards.signature import Signature
from async_rlhf.actors.workers.watchdog import watched
from async_rlhf.buffers.errors import ConfigError

STEP_S = 120.0
"""Of an agent that sets no `timeout_s` itself: between two calls it may run a program."""


def from_function(target: str, function: EnvironmentFunction, signature: Signature, options: Mapping[str, Any]) -> Adapted:
    """A function with a parameter `llm` and without a yield. options: its own, and `response_template`, by which what the model
    writes is read. Raises ConfigError."""
    declared = settings_of(function, max_turns=MAX_TURNS, timeout_s=STEP_S)
    if declared.tools:
        raise ConfigError(
            f"environment {target!r}: an agent's tools are those of its requests; leave out @environment(tools=...)"
        )
    template = checked(options.get(RESPONSE_TEMPLATE, TEMPLATE))  # ours too: what reads it is imported here
    required = tuple(name for name in signature.required if name != "llm")
    fields = None if signature.any_column else (*required, *signature.optional, RESPONSE_TEMPLATE)
    runner: Callable[[_Inbox], _Runner] = _AgentTask if signature.is_async else _Thread
    play = functools.partial(played, runner, function, template)
    return Adapted(play if signature.is_async else plain(play), replace(declared, calls=True), required, fields=fields)


def agent_of(solve: Callable[..., Any], declared: EnvironmentDeclaration, template: Mapping[str, Any]) -> Adapted:
    """An asynchronous agent of ours around a foreign object, which takes any column."""
    return Adapted(functools.partial(played, _AgentTask, solve, checked(template)), replace(declared, calls=True))


class _Runner(Protocol):
    """An agent that runs, and what it has come to, whatever it left behind."""

    @property
    def outcome(self) -> Future[Any] | asyncio.Task[Any]: ...

    def start(self, function: Callable[..., Any], fields: Mapping[str, Any]) -> None: ...

    async def wait(self) -> None:
        """Until its inbox has something."""

    async def end(self) -> None:
        """Until nothing of the function runs."""


class _Inbox:
    """The calls of an agent, from any thread, and None for its end."""

    def __init__(self) -> None:
        self._lock, self._calls = threading.Lock(), deque[IncomingCall | None]()
        self._more: Future[None] | None = None

    def put(self, call: IncomingCall | None) -> None:
        with self._lock:
            self._calls.append(call)
            more, self._more = self._more, None
        if more is not None and more.set_running_or_notify_cancel():
            more.set_result(None)

    def take(self) -> IncomingCall | None:
        """None where there is no call."""
        with self._lock:
            return self._calls.popleft() if self._calls else None

    def more(self) -> Future[None]:
        """Done once there is something."""
        future = Future[None]()
        with self._lock:
            if not self._calls:
                self._more = future
                return future
        future.set_result(None)
        return future


async def played(
    run: Callable[[_Inbox], _Runner], function: Callable[..., Any], template: Mapping[str, Any], /, **fields: Any
) -> AsyncGenerator[Beside | Scores, Reply | None]:
    """run: `_Thread` or `_AgentTask`. fields: of the episode."""
    fields.pop(RESPONSE_TEMPLATE, None)
    inbox, server, answering = _Inbox(), endpoint(), dict[int, PendingCall]()
    runner, (session, llm) = run(inbox), server.open(inbox.put)
    turns = Turns(template, session)
    try:
        runner.start(function, {**fields, "llm": replace(llm, reward=turns.reward)})
        while True:
            if not answering:
                await runner.wait()
            incoming, call = inbox.take(), None
            if runner.outcome.done():
                break
            if incoming is not None and session.begins(incoming.pending):
                call = turns.call(incoming.request)
                answering[call.conversation] = incoming.pending
            if answering and (reply := (yield Beside(call, inbox.more()))) is not None:
                answering.pop(reply.conversation).answer.set_result(turns.wrote(reply))
        scores = turns.end(runner.outcome.result())
    finally:
        server.end(session)
        await runner.end()
    yield scores


class _Thread:
    """A plain function, in a thread of its own. Its methods block, where those of a task wait."""

    def __init__(self, inbox: _Inbox) -> None:
        self._inbox = inbox
        self.outcome: Future[Any] = Future()

    def start(self, function: Callable[..., Any], fields: Mapping[str, Any]) -> None:
        self._thread = threading.Thread(target=self._run, args=(function, fields), name="agent", daemon=True)
        self._thread.start()

    async def wait(self) -> None:
        self._inbox.more().result()  # the step's time-out ends the process

    async def end(self) -> None:
        if self._thread.ident is not None:  # None: the system had no thread left
            self._thread.join()  # the cleanup's time-out ends the process, too

    def _run(self, function: Callable[..., Any], fields: Mapping[str, Any]) -> None:
        try:
            self.outcome.set_result(function(**fields))
        except BaseException as error:  # noqa: BLE001  the user's code may raise anything, SystemExit included
            self.outcome.set_exception(error)
        self._inbox.put(None)


class _AgentTask:
    """An asynchronous function, as a task on the loop of its process."""

    def __init__(self, inbox: _Inbox) -> None:
        self._inbox = inbox

    def start(self, function: Callable[..., Any], fields: Mapping[str, Any]) -> None:
        async def run() -> Any:
            return await watched(function(**fields))

        self.outcome = asyncio.create_task(run(), name="agent")
        self.outcome.add_done_callback(lambda _: self._inbox.put(None))

    async def wait(self) -> None:
        await asyncio.wrap_future(self._inbox.more())

    async def end(self) -> None:
        """A task that does not end keeps this from ending, also where this is cancelled: it is then seen to run on."""
        self.outcome.cancel()
        while not self.outcome.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({self.outcome})
        if not self.outcome.cancelled():
            self.outcome.exception()  # marks the exception as retrieved
