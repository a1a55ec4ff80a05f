"""One call of one reward: what is sent to a worker, and how the worker gets ready for it. Plain data both ways."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from async_rlhf.actors.rewards import Answer, RewardSpec, Signature, Stream, failed, load, settings_of

# Longest time a worker may take to import its rewards, models they load at import included.
START_LIMIT_S = 300.0
# Workers that end before they are ready will not do better the next time.
MAX_FAILED_STARTS = 3


class Call(NamedTuple):
    """Asks one reward for one completion, or for those of one list.

    members: of each completion, what the reward can use: its fields and the columns of its prompt's row.
    timeout_s: seconds it may run. prefetch: the completions are still being written and only to be read. forgotten: streams
    nobody waits for any more, told with a prefetch.
    """

    id: int
    spec: RewardSpec
    members: tuple[Mapping[str, Any], ...]
    timeout_s: float
    prefetch: bool = False
    forgotten: tuple[int, ...] = ()


Answers = tuple[Answer, ...]
"""One for each member of a call; one alone speaks for all of them."""

# Hands the answers of a call to the dispatcher, from any thread.
Answered = Callable[[int, Answers], None]

# Tells which completions a reward has been shown, and when that ran.
Shown = Callable[[str, tuple[int, ...], Answer], None]


class Ready(NamedTuple):
    """A loaded reward and how to call it."""

    function: Callable[..., Any]
    signature: Signature
    retry_on: tuple[type[BaseException], ...]
    stream: Stream | None = None

    def arguments(self, call: Call) -> dict[str, Any]:
        return self.signature.arguments(call.members, call.spec.options)

    def prefetch(self, call: Call) -> None:
        """Only a reward that reads along is asked to."""
        assert self.stream is not None, f"{call.spec.name} cannot read along"
        if call.forgotten:
            self.stream.forget(list(call.forgotten), **call.spec.options)
        if call.members:
            self.stream.prefetch(**self.arguments(call))

    def read(self, call: Call, result: Any, began: float) -> Answers:
        """What the function returned, or raises what reading it raises."""
        ended = time.time()
        return tuple(a._replace(began=began, ended=ended) for a in self.signature.read(result, len(call.members)))

    def failed(self, error: BaseException, began: float) -> Answers:
        """Call it while the exception is being handled."""
        return (failed(error, self.retry_on)._replace(began=began, ended=time.time()),)


@functools.cache
def ready(spec: RewardSpec) -> Ready | Answer:
    """Load a reward once per process; a reward that cannot be loaded answers every call with the reason."""
    try:
        function = load(spec)
        settings = settings_of(function)
        if settings.prepare is not None:
            settings.prepare(**spec.options)
        return Ready(function, Signature.of(function), settings.retry_on, settings.stream)
    except BaseException as error:  # noqa: BLE001  loading runs the user's module; its failure must not end the worker
        return failed(error)


def timed_out(timeout_s: float) -> Answer:
    """The cause may pass, so it may be asked again."""
    now = time.time()
    reason = f"timed out after {timeout_s:g} s (scoring.timeout_s)"
    return Answer(None, reason, began=now - timeout_s, ended=now, retry_after_s=0.0)
