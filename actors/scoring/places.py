"""Where each reward runs: in processes, on an event loop or in threads of this process, or at a server.

Rewards of one place share its processes and its thread (`calls`). A `remote` reward is not called in a process of the actor:
its calls go to its server, and stages of the scorer to that of this machine.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from async_rlhf.actors.config import ScoringConfig
from async_rlhf.actors.rewards import RewardFunction, RewardSpec
from async_rlhf.actors.scoring.calls import RewardCalls, Shown
from async_rlhf.actors.scoring.remote import RemoteRewards
from async_rlhf.actors.scoring.reward_worker import Answers, RewardKind
from async_rlhf.actors.workers.client import RemoteSessions
from async_rlhf.actors.workers.messages import Shown as ShownThere
from async_rlhf.actors.workers.messages import to_answers
from async_rlhf.actors.workers.pool import WorkerPool
from async_rlhf.actors.workers.sessions import Happened, Sessions
from async_rlhf.buffers.errors import RewardError

# Of plain functions of the calling process at once: they share an interpreter, and gain where they wait for something.
_CALLER_THREADS = 16
Place = tuple[str, ...]
"""("scorer",), ("server", ADDRESS, KEYS), ("event loop",), ("workers", its reward if it has its own); of what only this process
has with a last "caller"."""
_SCORER: Place = ("scorer",)


class RewardPlaces:
    """The places of a run's rewards. answered, shown, stopped: as of `RewardCalls`, each from several threads.

    scorer: address of the scoring server of this machine, which runs the stages placed there; "" runs every stage here.
    functions: by reward, those that only this process has.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        config: ScoringConfig,
        answered: Callable[[int, Answers], object],
        shown: Shown,
        stopped: Callable[[], object],
        scorer: str = "",
        functions: Mapping[str, RewardFunction] | None = None,
    ) -> None:
        self._config, self._scorer, self._functions, self._shown = config, scorer, functions or {}, shown
        places = {spec.name: self._place(spec) for spec in specs}
        self._calls: dict[Place, RewardCalls] = {}
        for place in dict.fromkeys(places.values()):
            own = tuple(spec for spec in specs if places[spec.name] == place)
            run = partial(self._sessions, place, own)
            self._calls[place] = RewardCalls(own, config.timeout_s, run, answered, shown, stopped, place == _SCORER)
        self._of = {name: self._calls[place] for name, place in places.items()}

    def __iter__(self) -> Iterator[RewardCalls]:
        return iter(self._calls.values())

    def of(self, name: str) -> RewardCalls:
        """Where this reward runs."""
        return self._of[name]

    @property
    def num_resent(self) -> int:
        """Requests that were sent to a server again."""
        return sum(each.sessions.num_resent for each in self if isinstance(each.sessions, RemoteSessions))

    def forget(self, streams: Collection[int]) -> None:
        for calls in self:
            calls.forget(streams)

    def discard(self, task_ids: Collection[int]) -> None:
        for calls in self:
            calls.discard(task_ids)

    def check(self) -> None:
        """Raises RewardError when a place cannot recover."""
        for calls in self:
            calls.sessions.check()

    def close(self, deadline_s: float) -> None:
        """Raises DeadlineError if a process is left after `deadline_s`."""
        end_s = time.monotonic() + deadline_s
        with contextlib.ExitStack() as closing:  # One that fails to close does not keep the others open.
            for calls in self:
                closing.callback(_close, calls.sessions, end_s)

    def _place(self, spec: RewardSpec) -> Place:
        if self._scorer and self._config.in_process(spec.name):
            return _SCORER
        if spec.target == "remote":
            return "server", str(spec.options["address"]), str(spec.options.get("keys", ""))
        own = ("caller",) if spec.name in self._functions else ()
        return ("event loop", *own) if spec.kind == "async" else ("workers", spec.name if spec.workers else "", *own)

    def _sessions(self, place: Place, specs: tuple[RewardSpec, ...], happened: Happened) -> Sessions:
        if place == _SCORER:
            kind = RemoteRewards({spec.name: spec.name for spec in specs}, is_scorer=True)
            return RemoteSessions(self._scorer, "", kind, happened, self._read_there)
        if place[0] == "server":
            kind = RemoteRewards({spec.name: str(spec.options.get("reward_name", "")) for spec in specs})
            return RemoteSessions(place[1], place[2], kind, happened)
        memory_mb = None if any(spec.holds_model for spec in specs) else self._config.worker_memory_mb
        functions = self._functions if specs[0].name in self._functions else None
        here = RewardKind(specs, self._config.max_concurrency, memory_mb, functions)
        workers = specs[0].workers or (self._config.workers if functions is None else _CALLER_THREADS)
        what = f"the worker processes of {', '.join(f'{spec.name} ({spec.target})' for spec in specs)}"
        return WorkerPool(here, 1 if specs[0].kind == "async" else workers, what, RewardError, happened)

    def _read_there(self, message: ShownThere) -> None:
        (answer,) = to_answers([message.answer])
        self._shown(message.stage, message.streams, answer)


def _close(sessions: Sessions, end_s: float) -> None:
    sessions.close(max(0.0, end_s - time.monotonic()))
