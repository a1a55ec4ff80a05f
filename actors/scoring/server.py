"""The scoring server: rewards and stages in one process for many clients.

    scorer          the stages that a machine runs once for all its actors, on a private ipc socket
    reward server   one reward for actors on any machine (`async-rlhf serve reward FILE:NAME`), with keys or on this machine

Beside its loop (`service`) it owns the places where its stages run. Queues are here, so completions of
several clients share a batch, and limits are those of the server.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from async_rlhf.actors.config import ScoringConfig
from async_rlhf.actors.rewards import Answer, RewardFunction, RewardSpec
from async_rlhf.actors.scoring.places import RewardPlaces
from async_rlhf.actors.scoring.pool import STREAM, RewardCounters, num_tokens, usable
from async_rlhf.actors.scoring.reward_queue import ScoringTask
from async_rlhf.actors.scoring.reward_worker import Answers
from async_rlhf.actors.workers.messages import NUM_IDS, SessionStep, Show, Shown, Stepped, to_fields
from async_rlhf.actors.workers.service import ServedSession, ServiceClient, WorkerService
from async_rlhf.buffers.errors import RewardError, WireError


class ScoringServer(WorkerService):
    """See the module docstring."""

    what = "a reward"

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        config: ScoringConfig,
        address: str,
        key_dir: Path | None = None,
        functions: Mapping[str, RewardFunction] | None = None,
        **service: Any,
    ) -> None:
        """functions: by reward, where only this process has them. service: as of `WorkerService`. Raises ConfigError."""
        super().__init__(address, key_dir, **service)
        self._specs = {spec.name: spec for spec in specs}
        self._rewards = {spec.name: RewardCounters() for spec in specs}
        self._places = RewardPlaces(specs, config, self._answered, self._read, self._wake, functions=functions)

    def _advance(self) -> None:
        """Raises RewardError when the workers of a stage do not come up."""
        self._places.check()

    def _close(self) -> None:
        self._places.close(10.0)

    def _begin(self, client: ServiceClient, session: ServedSession, step: SessionStep) -> None:
        spec = self._spec(step.stage)
        if not step.members:
            raise WireError("a call of a reward has no members")
        session.stage, key = spec.name, client.key(step.id)
        stream = session.stream = None if step.stream is None else client.key(step.stream)
        shown = [{**member, STREAM: stream} if STREAM in member else member for member in step.members]
        try:
            tokens = step.tokens or (0 if spec.tokens_per_minute is None else sum(map(num_tokens, shown)))
        except TypeError as error:
            raise RewardError(f"a completion's tokens are no list: {error}") from error
        client.streams.discard(-1 if stream is None else stream)
        members = tuple(usable(spec, member) for member in shown)
        self._places.of(spec.name).submit(spec.name, ScoringTask(key, members, tokens, stream=stream))

    def _show(self, client: ServiceClient, show: Show) -> None:
        spec, stream = self._spec(show.stage), client.key(show.stream)
        if not spec.stream_tokens:
            raise RewardError(f"stage {spec.name!r} has no incremental scoring")
        client.streams.add(stream)
        self._places.of(spec.name).show(spec.name, stream, usable(spec, {**show.member, STREAM: stream}))

    def _end(self, keys: Collection[int], streams: Collection[int]) -> None:
        self._places.discard(keys)
        if streams:
            self._places.forget(sorted(streams))

    def _spec(self, stage: str) -> RewardSpec:
        """Raises RewardError for a stage that is not here."""
        if not stage and len(self._specs) == 1:
            return next(iter(self._specs.values()))
        if stage not in self._specs:
            raise RewardError(f"there is no stage {stage[:100]!r} here; there is: {', '.join(sorted(self._specs))}")
        return self._specs[stage]

    def _answered(self, key: int, answers: Answers) -> None:
        """Called from the threads of the places."""
        self._do(partial(self._answer, key, partial(self._stepped, answers)))

    def _stepped(self, answers: Answers, client: ServiceClient, id: int, session: ServedSession) -> Stepped:
        for answer in answers:
            self._rewards[session.stage].count(session.stage, answer)
        return Stepped(id=id, turn=0, answers=list(map(to_fields, map(_final, answers))))

    def _read(self, stage: str, streams: Collection[int], answer: Answer) -> None:
        """Called from the threads of the places; not urgent, so it wakes nothing."""
        self._do(partial(self._send_read, stage, streams, answer), wakes=False)

    def _send_read(self, stage: str, streams: Collection[int], answer: Answer) -> None:
        """To each client its own streams, with their share of the seconds."""
        by_number: dict[int, list[int]] = {}
        for stream in streams:
            number, own = divmod(stream, NUM_IDS)
            by_number.setdefault(number, []).append(own)
        for number, own_streams in by_number.items():
            if (client := self._by_number.get(number)) is not None:
                seconds = answer.seconds * len(own_streams) / len(streams)
                part = to_fields(answer._replace(ended=answer.began + seconds))
                self._send(client.peer, Shown(stage=stage, streams=own_streams, answer=part))


def _final(answer: Answer) -> Answer:
    """Retries were made here."""
    return answer if answer.failure is None else answer._replace(failure=answer.failure._replace(retry_after_s=None))
