"""Rollouts as they are played: the model writes a turn, the environment answers, the model goes on, until there is an end.

    owns        the transcripts of unfinished rollouts; it alone talks to the engine and to the environment about them
    waits for   nothing; `step` decodes one token of what runs, and takes in what the environment has answered by then
    on close    nothing; engine and environment belong to the caller

It moves data: what follows on which event is decided in `lifecycle`, what a turn reads and whether it has room in `reading`.

Without an environment the prompt is the row's own and a rollout is one turn. With one, its first observation is the prompt,
equal for the members of a group, for a baseline compares them. Those of an agent's group begin each by itself, and their first
prompts may differ behind a first token that all share. An agent's calls are turns of one rollout, whichever conversation they
are of. Those of several conversations are written at the same time as long as there is room for all that they may have; one for
which there is not waits until another has ended.

An episode is ended by its environment, or by a limit: there is no room (`context`: in all rows together, or for the prompt of
one), it has had its turns (`max_turns`); it then has the score that the environment's settings name for that. Turns that are
being written then go on to their ends, so what is in a record depends on no moment; those that wait do not begin. A member of
which no turn is trained on, because its environment failed before that or made no such call, is sampled for one token, behind
the prompt of its group, or of the row where no other has one; its score is a failed one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from async_rlhf.actors.engine import NO_PROMPT, Completion, Engine, Partial, Prompt, Request, RolloutKey
from async_rlhf.actors.environments import Content, Reply
from async_rlhf.actors.environments.pool import Event
from async_rlhf.actors.environments.rendering import as_messages
from async_rlhf.actors.environments.yields import EpisodeEnd, Read
from async_rlhf.actors.loop.context import NO_ENVIRONMENTS, Environment, Environments
from async_rlhf.actors.loop.lifecycle import PLAYED, WAITING, Members, State
from async_rlhf.actors.loop.lifecycle import Event as LifeEvent
from async_rlhf.actors.loop.reading import NoRoomError, first_prompt, next_turn
from async_rlhf.actors.loop.rollouts import FinishedRollout
from async_rlhf.actors.loop.transcript import Transcript, Turn
from async_rlhf.actors.prompts import Row, turn_seed
from async_rlhf.buffers.errors import ConfigError, EpisodeError
from async_rlhf.buffers.images import IMAGES
from async_rlhf.buffers.record import FinishReason, Score


@dataclass(eq=False)
class _StartedGroup:
    """A group whose members are being sampled."""

    row: Row
    seed: int
    environment: Environment | None
    members: Members[RolloutKey]
    prompt: Content | None = None
    """The first observation of members that begin together."""
    text: str = ""
    """That, as the model reads it."""
    read: Prompt = NO_PROMPT
    """Its tokens and images."""

    @property
    def played_by(self) -> Environment:
        assert self.environment is not None
        return self.environment


@dataclass(eq=False)
class _Episode:
    """A member of a group, until its end."""

    request: Request
    group: _StartedGroup
    transcript: Transcript = field(default_factory=Transcript)
    observed: Content = ""
    """Its first observation."""
    waiting: deque[Read] = field(default_factory=deque)
    """Input of the model, until there is room."""
    reason: FinishReason | None = None
    """Why it ended; None: the reason of the last turn."""
    score: Score | None = None
    """The score at its end, None for none."""
    steps: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of its environment's steps."""

    @property
    def key(self) -> RolloutKey:
        return self.request.key

    @property
    def state(self) -> State:
        return self.group.members.state(self.key)

    @property
    def engine_keys(self) -> set[RolloutKey]:
        """Those by which the engine may hold something of it."""
        return {self.key, *(self.key._replace(row=turn.row) for turn in self.transcript.turns)}


class Episodes:
    """See the module docstring. Raises what engine and environment raise."""

    def __init__(
        self, engine: Engine, decode: Callable[[Sequence[int]], str], environments: Environments = NO_ENVIRONMENTS
    ) -> None:
        """decode: token ids to what the environment is given as the model's turn. environments: of the rows."""
        self._engine, self._decode, self._environments = engine, decode, environments
        self._episodes: dict[RolloutKey, _Episode] = {}
        self._waiting: set[RolloutKey] = set()
        # What goes to the engine all at once: keys of which it is to hold nothing, and behind them turns that begin.
        self._released: list[RolloutKey] = []
        self._beginning: list[Request] = []
        self._finished: list[FinishedRollout] = []

    @property
    def num_opening(self) -> int:
        """Rollouts that wait for first observations, their own or others of their group."""
        return len(self._waiting)

    def begin(self, groups: Iterable[tuple[Row, int, Sequence[Request]]]) -> None:
        """Begin the members of groups: of each its row, its environments' seed, and requests with the prompt of the row."""
        for row, seed, requests in groups:
            environment = self._environments.of(row.columns)
            members = Members([request.key for request in requests], is_played=environment is not None)
            group = _StartedGroup(row, seed, environment, members)
            episodes = {request.key: _Episode(request, group) for request in requests}
            self._episodes |= episodes
            if environment is not None:
                for episode in episodes.values():
                    self._open(episode)
            self._begin_due(group)
        self._flush()

    def step(self) -> list[FinishedRollout]:
        """Decode a token of what runs; what has ended by then, and what the environment has ended."""
        for completion in self._engine.step():
            episode = self._episodes[completion.key.rollout]
            self._wrote(episode, completion)
            self._begin_due(episode.group)
        return self.poll()

    def poll(self) -> list[FinishedRollout]:
        """The rollouts finished by the environments' answers; none without an environment."""
        for event in [event for environment in self._environments.all for event in environment.pool.poll()]:
            episode = self._episodes.get(event.key)
            if episode is not None and episode.state in PLAYED:  # others were discarded
                self._heard(episode, event)
                self._begin_due(episode.group)
        self._flush()
        finished, self._finished = self._finished, []
        return finished

    def discard(self, keys: Sequence[RolloutKey]) -> list[int]:
        """Forget these, whole groups; of each the tokens thrown away."""
        for environment in self._environments.all:
            environment.pool.discard(keys)
        self._waiting.difference_update(keys)
        known = [self._episodes.pop(key) for key in keys if key in self._episodes]
        thrown_away = {
            episode.key: episode.transcript.num_sampled + self._engine.abort(episode.engine_keys) for episode in known
        }
        return [thrown_away.get(key, 0) for key in keys]

    def partials(self, known: Mapping[RolloutKey, int]) -> list[tuple[Partial, tuple[int, ...]]]:
        """As `Engine.partials`, of all behind the prompt, and the prompt; of the row that is first in the record, while a turn
        of it is written that is trained on."""
        of_turn = {}
        for key, count in known.items():
            if (first := self._episodes[key].transcript.first) is not None:
                newest = self._episodes[key].transcript.turns_of(first.row)[-1]
                of_turn[key._replace(row=first.row)] = max(0, count - newest.behind)
        shown = []
        for partial in self._engine.partials(of_turn):
            prompt_ids, behind = self._episodes[partial.key.rollout].transcript.tokens(partial.key.row)
            token_ids = np.concatenate([np.array(behind, np.int32), partial.token_ids])
            shown.append((Partial(partial.key.rollout, token_ids), prompt_ids))
        return shown

    # -- what has happened -----------------------------------------------------------------------------------------------

    def _wrote(self, episode: _Episode, completion: Completion) -> None:
        """The model's turn ended."""
        key, ids, environment = episode.key, completion.token_ids.tolist(), episode.group.environment
        text = self._decode(ids)
        turn = episode.transcript.end(completion.key.row, completion, text)
        state = self._happened(episode, "wrote")
        if state != "playing" or environment is None:
            self._settle(episode, state)
        elif not turn.trained and environment.rendering.place_id in ids:  # in the record it would be one of an image
            self._stop(episode, "stop", Score(failure="a turn that is not trained on has a token that stands for an image"))
        elif not environment.spec.calls:
            environment.pool.reply(key, text)
        else:
            num_prompt = len(episode.transcript.turns_of(turn.row)[0].ids) + turn.behind
            reason: Literal["stop", "length"] = "length" if completion.finish_reason == "length" else "stop"
            environment.pool.reply(key, Reply(text, reason, num_prompt, len(ids), turn.conversation))
            self._go_on(episode)

    def _heard(self, episode: _Episode, event: Event[RolloutKey]) -> None:
        """Handles an event of the episode's environment."""
        if event.result is None:
            self._begin_again(episode)
            return
        episode.steps.append((event.began, event.ended))
        if isinstance(event.result, EpisodeEnd):
            self._ended(episode, event.result)
        elif episode.state == "opening" and event.result.call is None:
            episode.observed = event.result.content
            self._happened(episode, "observed")
        else:
            episode.waiting.append(event.result)
            self._go_on(episode)

    def _ended(self, episode: _Episode, end: EpisodeEnd) -> None:
        for turn, score in zip(episode.transcript.turns, end.turn_scores, strict=False):
            turn.score = score
        if end.reason == "max_turns":
            self._end(episode, "max_turns", end.score or episode.group.played_by.at_limit)
        else:
            self._end(episode, None, end.score)

    def _begin_again(self, episode: _Episode) -> None:
        """Its process ended, and the environment with it: the same from the beginning."""
        self._beginning = [request for request in self._beginning if request.key.rollout != episode.key]
        self._released += episode.engine_keys
        episode.waiting.clear()
        episode.transcript, episode.steps = Transcript(), []
        self._happened(episode, "lost")
        self._open(episode)

    # -- what follows ----------------------------------------------------------------------------------------------------

    def _happened(self, episode: _Episode, event: LifeEvent, prompt: Prompt = NO_PROMPT) -> State:
        """As `Members.happened`."""
        state = episode.group.members.happened(episode.key, event, prompt)
        (self._waiting.add if state in WAITING else self._waiting.discard)(episode.key)
        return state

    def _open(self, episode: _Episode) -> None:
        group = episode.group
        self._waiting.add(episode.key)
        fields = {**group.row.columns, "prompt": group.row.prompt, "seed": group.seed}
        fields |= {IMAGES: [*group.row.images]} if group.row.images else {}
        group.played_by.pool.begin(episode.key, fields)

    def _begin_due(self, group: _StartedGroup) -> None:
        while due := group.members.due():
            for key in due:
                self._begin_first(self._episodes[key], group)

    def _begin_first(self, episode: _Episode, group: _StartedGroup) -> None:
        """With the prompt of its group; without one of its own it has one turn, and with an environment that of one token."""
        if episode.state == "unprompted":
            most = episode.request.max_new_tokens if group.environment is None else 1
            ids, images = group.members.prompt if group.members.prompt[0] else episode.request.prompt
            self._begin_turn(episode, Turn(0, 0, group.prompt or "", ids, most=most, images=images))
            return
        group.prompt = episode.observed if group.prompt is None else group.prompt
        try:
            if episode.observed != group.prompt:
                raise EpisodeError("all members must see the same first observation: derive it from the row and `seed`")
            if not group.read[0]:
                group.text, group.read = first_prompt(group.prompt, group.played_by)
        except EpisodeError as error:
            self._stop(episode, "stop", Score(failure=str(error)))
        else:
            (ids, images), most = group.read, episode.request.max_new_tokens
            self._begin_turn(episode, Turn(0, 0, group.prompt, ids, most=most, images=images))

    def _go_on(self, episode: _Episode) -> None:
        """Begin the turns that there is room for, in the order in which they were asked for."""
        environment, transcript = episode.group.played_by, episode.transcript
        most, group_prompt = episode.request.max_new_tokens, episode.group.members.prompt
        while episode.waiting:
            read = episode.waiting[0]
            try:
                turn = next_turn(transcript, read, environment, most, group_prompt)
            except NoRoomError:
                self._stop(episode, "context", environment.at_limit)
            except (EpisodeError, ConfigError) as error:  # the latter of a template that does not take the tools of a call
                self._stop(episode, "stop", Score(failure=str(error)))
            else:
                if turn is None:
                    return
                episode.waiting.popleft()
                if transcript.turns:
                    transcript.turns[-1].score = read.score
                self._begin_turn(episode, turn, () if read.call is None else read.call.stop)

    def _begin_turn(self, episode: _Episode, turn: Turn, stop: Sequence[str] = ()) -> None:
        first, transcript, environment = episode.request, episode.transcript, episode.group.environment
        prompt, context = transcript.begin(turn)
        state = self._happened(episode, "begins", prompt if turn.trained else NO_PROMPT)
        # Of the row that is first in the record, what is trained on.
        is_shown = turn.trained and transcript.first is not None and transcript.first.row == turn.row
        following = replace(
            first,
            key=first.key._replace(row=turn.row),
            prompt_ids=prompt[0],
            images=prompt[1],
            context=context,
            max_new_tokens=turn.most,
            seed=turn_seed(first.seed, turn.number),
            stop=tuple(dict.fromkeys((*first.stop, *stop))),
            hold=state == "playing" and environment is not None and environment.goes_on(len(transcript.turns) - 1),
            partial_every=first.partial_every if is_shown else 0,
        )
        self._beginning.append(following)

    def _stop(self, episode: _Episode, reason: FinishReason, score: Score) -> None:
        """It ends, and not because its environment does."""
        episode.group.played_by.pool.discard([episode.key])
        self._end(episode, reason, score)

    def _end(self, episode: _Episode, reason: FinishReason | None, score: Score | None) -> None:
        """No turn of it begins any more."""
        episode.reason, episode.score = reason, score
        episode.waiting.clear()
        self._settle(episode, self._happened(episode, "ends"))

    def _settle(self, episode: _Episode, state: State) -> None:
        if state == "over":
            del self._episodes[episode.key]
            if episode.group.environment is not None:
                self._released += episode.engine_keys  # their next turn will not come
            self._finished.append(self._rollout(episode))
        elif state == "unprompted":
            self._released += episode.engine_keys
            if episode.score is None or episode.score.failure is None:
                has_turns = bool(episode.transcript.turns)
                failure = "no call of it is trained" if has_turns else "it ended before the model wrote anything"
                episode.score = Score(failure=failure)
            episode.reason, episode.transcript = None, Transcript()

    def _flush(self) -> None:
        if self._released:
            self._engine.abort(self._released)
        if self._beginning:
            self._engine.submit(self._beginning)
        self._released, self._beginning = [], []

    def _rollout(self, episode: _Episode) -> FinishedRollout:
        transcript, environment = episode.transcript, episode.group.environment
        last = transcript.turns[-1].wrote
        assert last is not None
        is_agent = environment is not None and environment.spec.calls
        rows = transcript.recorded()
        messages, prompt = ((), "") if environment is None else transcript.messages()
        return FinishedRollout(
            episode.key,
            transcript.rollout(rows, episode.reason or last.finish_reason, self._decode, is_agent),
            (rows[0][0].ids, rows[0][0].images),
            tuple(turn.text for turn in transcript.turns),
            prompt=episode.group.text,
            anew=tuple(row[0].content for row in rows[1:]),
            messages=messages,
            num_prompt=len(as_messages(prompt)),
            is_chat=environment is not None and environment.rendering.is_chat(prompt),
            score=episode.score,
            steps=tuple(episode.steps),
            last=max(number for number, turn in enumerate(transcript.turns) if turn.trained),
            num_sampled=transcript.num_sampled,
        )
