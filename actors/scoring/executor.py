"""The seam between the queues and whatever runs a reward: `Call` goes in, `Answers` come back.

    RewardWorkers     processes; plain rewards: one call at a time in each, asynchronous ones: many on an event loop
    ThreadExecutor    threads of this process, for functions that no other can import
    RemoteExecutor    the scoring server of this machine

`Ready` is a loaded reward inside the process that calls it. All of it is plain data between processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from async_rlhf.actors.rewards import Answer, RewardSpec, Signature, Stream, failed, load, settings_of


class Call(NamedTuple):
    """One call of one reward, by its name.

    members: of each completion, its fields and the columns of its prompt's row that the reward uses. timeout_s: longest run.
    prefetch: the completions are unfinished and only read, not scored. stream: of a single completion that was or is
    prefetched. forgotten: streams to drop, in a prefetch. tokens: expected cost.
    """

    id: int
    name: str
    members: tuple[Mapping[str, Any], ...]
    timeout_s: float
    prefetch: bool = False
    stream: int | None = None
    forgotten: tuple[int, ...] = ()
    tokens: int = 0


Answers = tuple[Answer, ...]
"""One for each member of a call, or one for all of them."""

Answered = Callable[[int, Answers], None]
"""Takes the answers of a call by its id; called from any thread."""

Shown = Callable[[str, tuple[int, ...], Answer], None]
"""Takes a finished prefetch: reward, streams, and when it ran or why it failed."""


class Executor(Protocol):
    """Runs calls and answers each once, through the `Answered` given at construction. Never blocks its caller."""

    def submit(self, call: Call) -> None: ...

    def discard(self, call_ids: set[int]) -> None:
        """The answers of these calls are no longer needed; those it can stop are answered at once."""
        ...

    def check(self) -> None:
        """Replaces what broke. Raises RewardError when it cannot recover."""
        ...

    def close(self, deadline_s: float) -> None:
        """Kills what runs; unanswered calls get no answer. Raises DeadlineError if something is left after `deadline_s`."""
        ...


class Ready(NamedTuple):
    """A loaded reward and how to call it."""

    function: Callable[..., Any]
    signature: Signature
    options: Mapping[str, Any]
    retry_on: tuple[type[BaseException], ...]
    stream: Stream | None = None

    def arguments(self, call: Call) -> dict[str, Any]:
        return self.signature.arguments(call.members, self.options)

    def prefetch(self, call: Call) -> None:
        assert self.stream is not None, "a reward without incremental scoring"
        if call.forgotten:
            self.stream.forget(list(call.forgotten), **self.options)
        if call.members:
            self.stream.prefetch(**self.arguments(call))

    def read(self, call: Call, result: Any, began: float) -> Answers:
        """The answers in what the function returned; raises what reading it raises."""
        ended = time.time()
        return tuple(a._replace(began=began, ended=ended) for a in self.signature.read(result, len(call.members)))

    def failed(self, error: BaseException, began: float) -> Answers:
        """Call it while the exception is being handled."""
        return (failed(error, self.retry_on)._replace(began=began, ended=time.time()),)


def ready(spec: RewardSpec) -> Ready | Answer:
    """Load a reward; one that cannot be loaded answers every call with the reason."""
    try:
        function = load(spec)
        settings = settings_of(function)
        if settings.prepare is not None:
            settings.prepare(**spec.options)
        return Ready(function, Signature.of(function), spec.options, settings.retry_on, settings.stream)
    except BaseException as error:  # noqa: BLE001  loading runs the user's module; its failure must not end the worker
        return failed(error)


def timed_out(timeout_s: float) -> Answer:
    """A transient failure: it may be retried."""
    now, reason = time.time(), why_timed_out(timeout_s)
    return Answer(None, reason, began=now - timeout_s, ended=now, retry_after_s=0.0)


def why_timed_out(timeout_s: float) -> str:
    return f"timed out after {timeout_s:g} s (scoring.timeout_s)"
