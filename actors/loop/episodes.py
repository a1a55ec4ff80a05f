"""Rollouts as they are played: the model writes a turn, the environment answers, the model goes on, until there is an end.

    owns        the transcripts of unfinished rollouts; it alone talks to the engine and to the environment about them
    waits for   nothing; `step` decodes one token of what runs, and takes in what the environment has answered by then
    on close    nothing; engine and environment belong to the caller

Without an environment the prompt is the row's own and a rollout is one turn. With one, its first observation is the prompt:
the members of a group begin together when all have theirs, which must be equal, for a baseline compares them. Those of an
agent's group begin each by itself, and their first prompts may differ behind a first token that all share. An agent's calls are
turns of one rollout, whichever conversation they are of. Those of several conversations are written at the same time as long as
there is room for all that they may have; one for which there is not waits until another has ended.

An episode is ended by its environment, or by a limit: there is no room (`context`: in all chains together, or for the prompt of
one), it has had its turns (`max_turns`); it then has the score that the environment's settings name for that. Turns that are
being written then go on to their ends, so what is in a record depends on no moment; those that wait do not begin. An episode
without a turn that is trained on, because its environment failed before that or made no such call, leaves a member without a
prompt: the member is sampled for one token, behind that of its group, or of the row where no other has one, and its score is a
failed one. So a group is always whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from async_rlhf.actors.engine import Completion, Engine, Partial, Request, RolloutKey
from async_rlhf.actors.environments import Content, Reply
from async_rlhf.actors.environments.rendering import as_messages
from async_rlhf.actors.environments.yields import End, Read
from async_rlhf.actors.loop.reading import check_prompt, next_turn, room_for
from async_rlhf.actors.loop.transcript import Transcript, Turn
from async_rlhf.actors.loop.work import NO_PLAYS, Play, Played, Plays
from async_rlhf.actors.prompts import Row, turn_seed
from async_rlhf.buffers.errors import ConfigError, EpisodeError
from async_rlhf.buffers.record import FinishReason, Score

_NO_TURN = "it ended before the model wrote anything"
_UNTRAINED = "no call of it is trained"


@dataclass(eq=False)
class _Group:
    """play: its environment.

    said, prompt, text, failure: of members that begin together: their first observations, the one of the group (None until all
    members have theirs), as the model reads it, and why it cannot. prompt_ids: of the first member that has a prompt, empty
    until then. without: members that have none and wait for one of their group.
    """

    row: Row
    seed: int
    play: Play | None
    requests: Mapping[RolloutKey, Request]
    said: dict[RolloutKey, Content | Score] = field(default_factory=dict)
    prompt: Content | None = None
    text: str = ""
    failure: str = ""
    prompt_ids: tuple[int, ...] = ()
    without: list[RolloutKey] = field(default_factory=list)


class _End(NamedTuple):
    """reason: None for that of the last turn."""

    reason: FinishReason | None
    score: Score | None


@dataclass(eq=False)
class _Episode:
    request: Request
    group: _Group
    transcript: Transcript = field(default_factory=Transcript)
    failed: Score | None = None
    """Why there is no environment any more."""
    waiting: deque[Read] = field(default_factory=deque)
    """Calls that wait for room."""
    end: _End | None = None
    """It has ended, but for turns that are still being written."""
    steps: list[tuple[float, float]] = field(default_factory=list)


class Episodes:
    """See the module docstring. Raises what engine and environment raise."""

    def __init__(self, engine: Engine, decode: Callable[[Sequence[int]], str], plays: Plays = NO_PLAYS) -> None:
        """decode: token ids to what the environment is given as the model's turn. plays: the environments of the rows."""
        self._engine, self._decode, self._plays = engine, decode, plays
        self._episodes: dict[RolloutKey, _Episode] = {}
        self._opening: set[RolloutKey] = set()
        # What goes to the engine at the end of `poll`, all at once: turns that may begin, and keys that it may still hold.
        self._beginning: list[Request] = []
        self._over: list[RolloutKey] = []

    @property
    def num_opening(self) -> int:
        """Rollouts that wait for first observations, their own or others of their group."""
        return len(self._opening)

    def begin(self, groups: Iterable[tuple[Row, int, Sequence[Request]]]) -> None:
        """Begin the members of groups: of each its row, its environments' seed, and requests with the prompt of the row."""
        of = self._plays.of
        begun = [_Group(row, seed, of(row.columns), {each.key: each for each in requests}) for row, seed, requests in groups]
        for group in begun:
            self._episodes |= {key: _Episode(request, group) for key, request in group.requests.items()}
        alone = [self._episodes[key] for group in begun if group.play is None for key in group.requests]
        for episode in alone:
            episode.transcript.begin(Turn(0, 0, "", episode.request.prompt_ids))
        self._submit([episode.request for episode in alone])
        for group in begun:
            if group.play is not None:
                self._open(group, group.play, group.requests)

    def step(self) -> list[Played]:
        """Decode a token of what runs; what has ended by then, and what the environment has ended."""
        played = [each for completion in self._engine.step() if (each := self._took(completion)) is not None]
        return played + self.poll()

    def poll(self) -> list[Played]:
        """What the environment has answered; nothing without one."""
        played: list[Played | None] = []
        for play, event in [(each, event) for each in self._plays.all for event in each.pool.poll()]:
            if (episode := self._episodes.get(event.key)) is None or episode.end is not None:
                continue  # it was discarded
            if event.came is None:
                self._again(event.key, play, episode)
                continue
            episode.steps.append((event.began, event.ended))
            if isinstance(event.came, Read):
                played.append(self._observed(event.key, event.came, play, episode))
            else:
                played.append(self._ended(event.key, event.came, play, episode))
        self._submit(self._beginning)
        if self._over:
            self._engine.abort(self._over)
        self._beginning, self._over = [], []
        return [each for each in played if each is not None]

    def discard(self, keys: Sequence[RolloutKey]) -> list[int]:
        """Forget these; of each the tokens thrown away."""
        for play in self._plays.all:
            play.pool.discard(keys)
        self._opening.difference_update(keys)
        known = [(key, self._episodes.pop(key)) for key in keys if key in self._episodes]
        thrown_away = {key: each.transcript.num_sampled + self._engine.abort(_keys(key, each)) for key, each in known}
        return [thrown_away.get(key, 0) for key in keys]

    def partials(self, known: Mapping[RolloutKey, int]) -> list[tuple[Partial, tuple[int, ...]]]:
        """As `Engine.partials`, of all behind the prompt, and the prompt; of the chain that is first in the record, while a
        turn of it is written that is trained on."""
        of_turn = {}
        for key, count in known.items():
            if (first := self._episodes[key].transcript.first) is not None:
                newest = self._episodes[key].transcript.chain(first.chain)[-1]
                of_turn[key._replace(chain=first.chain)] = max(0, count - newest.behind)
        found = []
        for shown in self._engine.partials(of_turn):
            prompt_ids, behind = self._episodes[shown.key.rollout].transcript.row(shown.key.chain)
            token_ids = np.concatenate([np.array(behind, np.int32), shown.token_ids])
            found.append((Partial(shown.key.rollout, token_ids), prompt_ids))
        return found

    # -- turns -----------------------------------------------------------------------------------------------------------

    def _submit(self, requests: Sequence[Request]) -> None:
        if requests:
            self._engine.submit(requests)

    def _took(self, completion: Completion) -> Played | None:
        """The model's turn ended."""
        key, ids = completion.key.rollout, completion.token_ids.tolist()
        episode, text = self._episodes[key], self._decode(ids)
        turn, play = episode.transcript.end(completion.key.chain, completion, text), episode.group.play
        if episode.end is not None:
            return self._close(key, episode, episode.end)
        if play is None or episode.failed is not None:
            return self._end(key, episode, completion.finish_reason, episode.failed)
        if not play.spec.calls:
            play.pool.reply(key, text)
            return None
        num_prompt = len(episode.transcript.chain(turn.chain)[0].ids) + turn.behind
        reason: Literal["stop", "length"] = "length" if completion.finish_reason == "length" else "stop"
        play.pool.reply(key, Reply(text, reason, num_prompt, len(ids), turn.conversation))
        return self._go_on(key, play, episode)

    def _observed(self, key: RolloutKey, read: Read, play: Play, episode: _Episode) -> Played | None:
        if read.call is None and not episode.transcript.turns:
            self._opened(key, play, episode, read.content)
            return None
        episode.waiting.append(read)
        return self._go_on(key, play, episode)

    def _go_on(self, key: RolloutKey, play: Play, episode: _Episode) -> Played | None:
        """Begin the turns that there is room for, in the order in which they were asked for."""
        while episode.waiting:
            if (end := self._begins(key, episode.waiting[0], play, episode)) == "waits":
                return None
            if end is not None:
                play.pool.discard([key])
                return self._close(key, episode, end)
            episode.waiting.popleft()
        return None

    def _begins(self, key: RolloutKey, read: Read, play: Play, episode: _Episode) -> _End | Literal["waits"] | None:
        """A turn; or why the episode ends before it."""
        transcript, call = episode.transcript, read.call
        try:
            turn = next_turn(transcript, read, play)
            if (room := room_for(transcript, turn, play)) <= 0:
                return _End("context", play.at_limit)
            turn.most = min(room, episode.request.max_new_tokens, (call and call.max_tokens) or room)
            if turn.most > room - sum(each.most for each in transcript.unfinished):
                return "waits"
            if turn.trained and transcript.first is None:
                is_new = turn.chain == transcript.num_chains
                self._joins(episode.group, play, turn.ids if is_new else transcript.row(turn.chain)[0])
        except (EpisodeError, ConfigError) as error:  # the latter of a template that does not take the tools of a call
            return _End("stop", Score(failure=str(error)))
        if transcript.turns:
            transcript.turns[-1].score = read.score
        self._begin_turn(key, play, episode, turn, () if call is None else call.stop)
        return None

    def _begin_turn(self, key: RolloutKey, play: Play, episode: _Episode, turn: Turn, stop: Sequence[str] = ()) -> None:
        first, transcript = episode.request, episode.transcript
        turn.most = turn.most or first.max_new_tokens
        prompt_ids, context = transcript.begin(turn)
        self._opening.discard(key)
        # Of the chain that is first in the record, what is trained on.
        is_shown = turn.trained and transcript.first is not None and transcript.first.chain == turn.chain
        following = replace(
            first,
            key=key._replace(chain=turn.chain),
            prompt_ids=prompt_ids,
            context=context,
            max_new_tokens=turn.most,
            seed=turn_seed(first.seed, turn.number),
            stop=tuple(dict.fromkeys((*first.stop, *stop))),
            hold=episode.failed is None and play.goes_on(len(transcript.turns) - 1),
            partial_every=first.partial_every if is_shown else 0,
        )
        self._beginning.append(following)

    def _ended(self, key: RolloutKey, end: End, play: Play, episode: _Episode) -> Played | None:
        turns = episode.transcript.turns
        for turn, score in zip(turns, end.turn_scores, strict=False):
            turn.score = score
        if not turns and not play.spec.calls:
            self._opened(key, play, episode, end.score or Score(failure=_NO_TURN))
            return None
        is_limit = end.reason == "max_turns"
        return self._close(key, episode, _End("max_turns", end.score or play.at_limit) if is_limit else _End(None, end.score))

    def _close(self, key: RolloutKey, episode: _Episode, end: _End) -> Played | None:
        """No turn of it begins any more."""
        episode.end, turns = end, episode.transcript.turns
        episode.waiting.clear()
        if episode.transcript.unfinished:
            return None
        last = "stop" if not turns or turns[-1].wrote is None else turns[-1].wrote.finish_reason
        return self._end(key, episode, end.reason or last, end.score)

    def _again(self, key: RolloutKey, play: Play, episode: _Episode) -> None:
        """Its process ended, and the environment with it: the same from the beginning."""
        self._beginning = [request for request in self._beginning if request.key.rollout != key]
        self._engine.abort(_keys(key, episode))
        episode.group.said.pop(key, None)
        episode.waiting.clear()
        episode.transcript, episode.steps = Transcript(), []
        self._open(episode.group, play, [key])

    def _end(self, key: RolloutKey, episode: _Episode, reason: FinishReason, score: Score | None) -> Played | None:
        transcript, play = episode.transcript, episode.group.play
        if transcript.first is None:
            is_failed = score is not None and score.failure is not None
            failure = _UNTRAINED if transcript.turns else _NO_TURN
            assert play is not None
            self._without_prompt(key, play, episode, score if is_failed and score is not None else Score(failure=failure))
            return None
        del self._episodes[key]
        if play is not None:
            self._over += _keys(key, episode)  # what is held for a turn that will not come
        completion, rows = transcript.completion(key, reason), transcript.recorded()
        said, prompt = ((), "") if play is None else transcript.messages()
        turn_scores = tuple(turn.score for row in rows for turn in row if turn.trained)
        is_agent = play is not None and play.spec.calls
        return Played(
            completion,
            rows[0][0].ids,
            transcript.text(completion, self._decode),
            tuple(turn.text for turn in transcript.turns),
            prompt=episode.group.text,
            anew=tuple(row[0].content for row in rows[1:]),
            messages=said,
            num_prompt=len(as_messages(prompt)),
            is_chat=play is not None and play.rendering.is_chat(prompt),
            score=score,
            turn_scores=turn_scores if is_agent else turn_scores[:-1],
            steps=tuple(episode.steps),
            last=max(number for number, turn in enumerate(transcript.turns) if turn.trained),
            num_sampled=transcript.num_sampled,
        )

    # -- the prompt ------------------------------------------------------------------------------------------------------

    def _open(self, group: _Group, play: Play, keys: Iterable[RolloutKey]) -> None:
        for key in keys:
            self._opening.add(key)
            play.pool.begin(key, {**group.row.columns, "prompt": group.row.prompt, "seed": group.seed})

    def _joins(self, group: _Group, play: Play, prompt_ids: tuple[int, ...]) -> None:
        """What stands before the first trained turn of a member that begins by itself. Raises EpisodeError."""
        if group.prompt_ids and prompt_ids[0] != group.prompt_ids[0]:
            raise EpisodeError("its first prompt shares no token with that of its group: let the row decide how it begins")
        if not group.prompt_ids:
            group.prompt_ids = prompt_ids
            self._begin_without(group, play)

    def _opened(self, key: RolloutKey, play: Play, episode: _Episode, said: Content | Score) -> None:
        """A member has its first observation; with the last of its group all of them begin."""
        group = episode.group
        group.said[key] = said
        if group.prompt is not None:  # it was begun again, the others are on their way
            self._begin_turns(group, play, [key])
        elif len(group.said) == len(group.requests):
            group.prompt = next((said for said in group.said.values() if not isinstance(said, Score)), "")
            _render_prompt(group, play, group.prompt)
            self._begin_turns(group, play, list(group.requests))

    def _begin_turns(self, group: _Group, play: Play, keys: Sequence[RolloutKey]) -> None:
        for key in keys:
            episode, said = self._episodes[key], group.said[key]
            if said == group.prompt and not group.failure:
                self._begin_turn(key, play, episode, Turn(0, 0, group.prompt, group.prompt_ids))
                continue
            differs = "its first observation differs from that of its group: let the row decide it"
            failure = Score(failure=group.failure if said == group.prompt else differs)
            self._without_prompt(key, play, episode, said if isinstance(said, Score) else failure)

    def _without_prompt(self, key: RolloutKey, play: Play, episode: _Episode, score: Score) -> None:
        """Nothing of this member is trained on: it is sampled behind a prompt of its group, once one has it or none will."""
        play.pool.discard([key])
        self._engine.abort(_keys(key, episode))
        self._opening.add(key)
        episode.failed, episode.transcript, episode.end = score, Transcript(), None
        group = episode.group
        group.without.append(key)
        if group.prompt_ids or len(group.without) == len(group.requests):
            self._begin_without(group, play)

    def _begin_without(self, group: _Group, play: Play) -> None:
        for key in group.without:
            episode = self._episodes[key]
            prompt_ids = group.prompt_ids or episode.request.prompt_ids
            self._begin_turn(key, play, episode, Turn(0, 0, group.prompt or "", prompt_ids, most=1))
        group.without = []


def _keys(key: RolloutKey, episode: _Episode) -> set[RolloutKey]:
    """Those by which the engine may hold something of it."""
    return {key, *(key._replace(chain=turn.chain) for turn in episode.transcript.turns)}


def _render_prompt(group: _Group, play: Play, content: Content) -> None:
    """The tokens of the group's prompt, or none and the reason."""
    try:
        group.text, ids, _ = play.rendering.prompt(content)
        check_prompt(len(ids), play, "observation")
    except EpisodeError as error:
        group.text, group.failure = "", str(error)
    else:
        group.prompt_ids = tuple(ids)
