"""Rollouts as they are played: the model writes a turn, the environment answers, the model goes on, until there is an end.

    owns        the transcripts of unfinished rollouts; it alone talks to the engine and to the environment about them
    waits for   nothing: `step` decodes one token of what runs, and takes in what the environment has answered by then
    on close    nothing; engine and environment belong to the caller

Without an environment the prompt is the row's own and a rollout is one turn. With one, its first observation is the prompt: the
members of a group begin together when all have theirs, which must be equal, for a baseline compares them. An episode
is ended by its environment, or by a limit: its row is full (`context`), it has had its turns (`max_turns`); it then has the
score that the environment's settings name for that. An environment that fails before its first observation leaves a member
without a prompt: the member is sampled for one token, behind the row's own prompt where no other has one, and its score is a
failed one. So a group is always whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from async_rlhf.actors.engine import Completion, Engine, Partial, Request, RolloutKey
from async_rlhf.actors.environments import Content
from async_rlhf.actors.environments.rendering import Rendered, as_messages, conversation
from async_rlhf.actors.environments.yields import End, Read
from async_rlhf.actors.loop.work import Play, Played
from async_rlhf.actors.prompts import Row, turn_seed
from async_rlhf.actors.rewards.answer import as_text
from async_rlhf.buffers.errors import EpisodeError
from async_rlhf.buffers.record import FinishReason, Int32Array, SamplingMask, Score, Span, pieces


@dataclass(frozen=True)
class Answer:
    """Of an environment. content: as it gave it; ids: int32, what the engine reads of it; score: of the turn before it;
    restarts: as of a `Span`."""

    content: Content
    ids: Int32Array
    score: float | None = None
    restarts: bool = False


class Transcript:
    """One rollout as it grows; begins and ends with a turn; turns and answers alternate. texts: of the turns.

    What is here is never tokenised again: the tokens only get more, exactly as the engine saw them. Where the row begins anew,
    what was sampled before stays here, and the engine reads on from there. Axes as in `record.Rollout`: T tokens behind the
    prompt, N sampled ones.
    """

    def __init__(self) -> None:
        self.turns: list[Completion] = []
        self.texts: list[str] = []
        self.answers: list[Answer] = []
        self.length = 0
        """T so far."""

    @property
    def ids(self) -> Int32Array:
        """int32 [T] so far."""
        return np.concatenate([np.zeros(0, np.int32), *self._parts(0)])

    @property
    def restarted(self) -> bool:
        """Whether the row has begun anew."""
        return any(answer.restarts for answer in self.answers)

    @property
    def num_sampled(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)

    def row(self, prompt_ids: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the engine reads on from: the prompt of the row as it stands now, and the tokens behind it. prompt_ids: of the
        episode."""
        first = max((number for number, answer in enumerate(self.answers, 1) if answer.restarts), default=0)
        prompt = tuple(self.answers[first - 1].ids.tolist()) if first else prompt_ids
        return prompt, tuple(id for ids in self._parts(first) for id in ids.tolist())

    def add_turn(self, turn: Completion, text: str) -> None:
        assert len(self.turns) == len(self.answers)
        self.turns.append(turn)
        self.texts.append(text)
        self.length += len(turn.token_ids)

    def add_answer(self, answer: Answer) -> None:
        """At least one token: what follows is another turn."""
        assert len(answer.ids) and len(self.turns) == len(self.answers) + 1
        self.answers.append(answer)
        self.length += len(answer.ids)

    def completion(self, key: RolloutKey, finish_reason: FinishReason) -> Completion:
        """The whole of it; after a turn."""
        assert len(self.turns) == len(self.answers) + 1
        if len(self.turns) == 1 and self.turns[0].finish_reason == finish_reason:
            return self.turns[0]
        masks = [turn.sampling_mask for turn in self.turns if turn.sampling_mask is not None]
        spans = list(self.turns[0].spans)
        for answer, turn in zip(self.answers, self.turns[1:], strict=True):
            spans += (Span(None, len(answer.ids), restarts=answer.restarts), *turn.spans)
        return Completion(
            key=key,
            token_ids=self.ids,
            logprobs=np.concatenate([turn.logprobs for turn in self.turns]),
            spans=tuple(spans),
            finish_reason=finish_reason,
            sampling_mask=_joined(masks) if len(masks) == len(self.turns) else None,
        )

    def _parts(self, first: int) -> list[Int32Array]:
        """Tokens of the turns from number `first` on, and of the answers behind them."""
        own = [part for turn, answer in zip(self.turns, self.answers, strict=False) for part in (turn.token_ids, answer.ids)]
        own += [turn.token_ids for turn in self.turns[len(self.answers) :]]
        return own[2 * first :]


def _joined(masks: Sequence[SamplingMask]) -> SamplingMask:
    return SamplingMask(np.concatenate([mask.sizes for mask in masks]), np.concatenate([mask.ids for mask in masks]))


@dataclass(eq=False)
class _Group:
    """prompt: the first observation, None until all members have theirs; text: as the model reads it."""

    row: Row
    seed: int
    requests: Mapping[RolloutKey, Request]
    said: dict[RolloutKey, Content | Score] = field(default_factory=dict)
    prompt: Content | None = None
    text: str = ""


@dataclass(eq=False)
class _Episode:
    request: Request
    group: _Group
    transcript: Transcript = field(default_factory=Transcript)
    failed: Score | None = None
    """Why there is no environment any more."""
    steps: list[tuple[float, float]] = field(default_factory=list)


class Episodes:
    """See the module docstring. Raises what engine and environment raise."""

    def __init__(self, engine: Engine, decode: Callable[[Sequence[int]], str], play: Play | None = None) -> None:
        """decode: token ids to what the environment is given as the model's turn."""
        self._engine, self._decode, self._play = engine, decode, play
        self._episodes: dict[RolloutKey, _Episode] = {}
        self._opening: set[RolloutKey] = set()
        # What goes to the engine at the end of `poll`, all at once: turns that may begin, and keys that it may still hold.
        self._beginning: list[Request] = []
        self._over: list[RolloutKey] = []

    @property
    def num_opening(self) -> int:
        """Rollouts that wait for the first observations of their group."""
        return len(self._opening)

    def begin(self, groups: Iterable[tuple[Row, int, Sequence[Request]]]) -> None:
        """Begin the members of groups: of each its row, its environments' seed, and requests with the prompt of the row."""
        begun = [_Group(row, seed, {request.key: request for request in requests}) for row, seed, requests in groups]
        for group in begun:
            self._episodes |= {key: _Episode(request, group) for key, request in group.requests.items()}
        if self._play is None:
            self._submit([episode.request for group in begun for episode in self._members(group)])
            return
        for group in begun:
            self._open(group, group.requests)

    def step(self) -> list[Played]:
        """Decode a token of what runs; what has ended by then, and what the environment has ended."""
        played = [each for completion in self._engine.step() if (each := self._took(completion)) is not None]
        return played + self.poll()

    def poll(self) -> list[Played]:
        """What the environment has answered; nothing without one."""
        if self._play is None:
            return []
        played: list[Played | None] = []
        for event in self._play.pool.poll():
            if (episode := self._episodes.get(event.key)) is None:
                continue  # it was discarded
            if event.came is None:
                self._again(event.key, episode)
                continue
            episode.steps.append((event.began, event.ended))
            if isinstance(event.came, Read):
                played.append(self._observed(event.key, event.came, episode))
            else:
                played.append(self._ended(event.key, event.came, episode))
        self._submit(self._beginning)
        if self._over:
            self._engine.abort(self._over)
        self._beginning, self._over = [], []
        return [each for each in played if each is not None]

    def discard(self, keys: Sequence[RolloutKey]) -> list[int]:
        """Forget these; of each the tokens thrown away."""
        if self._play is not None:
            self._play.pool.discard(keys)
        self._opening.difference_update(keys)
        known = [self._episodes.pop(key, None) for key in keys]
        before = [0 if episode is None else episode.transcript.num_sampled for episode in known]
        return [count + self._engine.abort([key]) for key, count in zip(keys, before, strict=True)]

    def partials(self, known: Mapping[RolloutKey, int]) -> list[tuple[Partial, tuple[int, ...]]]:
        """As `Engine.partials`, of all there is behind the prompt, and the prompt; not of a row that has begun anew."""
        of_turn = {key: max(0, count - self._episodes[key].transcript.length) for key, count in known.items()}
        found = []
        for shown in self._engine.partials(of_turn):
            episode = self._episodes[shown.key]
            if episode.transcript.restarted:
                continue
            if episode.transcript.length:
                shown = replace(shown, token_ids=np.concatenate([episode.transcript.ids, shown.token_ids]))
            found.append((shown, episode.request.prompt_ids))
        return found

    # -- turns -----------------------------------------------------------------------------------------------------------

    def _submit(self, requests: Sequence[Request]) -> None:
        if requests:
            self._engine.submit(requests)

    def _took(self, turn: Completion) -> Played | None:
        """The model's turn ended."""
        episode, text = self._episodes[turn.key], self._decode(turn.token_ids.tolist())
        episode.transcript.add_turn(turn, text)
        if self._play is None or episode.failed is not None:
            return self._end(turn.key, episode, turn.finish_reason, episode.failed)
        self._play.pool.reply(turn.key, text)
        return None

    def _observed(self, key: RolloutKey, read: Read, episode: _Episode) -> Played | None:
        assert self._play is not None
        transcript = episode.transcript
        if not transcript.turns:
            self._opened(key, episode, read.content)
            return None
        try:
            _, ids, restarts = self._rendered(episode, read.content)
            if not ids:
                raise EpisodeError("its observation is empty: the model has nothing to read")
        except EpisodeError as error:
            self._play.pool.discard([key])
            return self._end(key, episode, "stop", Score(failure=str(error)))
        room = self._play.max_length - transcript.length - len(ids)
        if room < 1:
            self._play.pool.discard([key])
            return self._end(key, episode, "context", self._play.at_limit)
        transcript.add_answer(Answer(read.content, np.array(ids, np.int32), read.score, restarts))
        first = episode.request
        prompt_ids, context = transcript.row(first.prompt_ids)
        following = replace(
            first,
            prompt_ids=prompt_ids,
            context=context,
            max_new_tokens=min(first.max_new_tokens, room),
            seed=turn_seed(first.seed, len(episode.transcript.turns)),
            hold=self._play.goes_on(len(transcript.turns)),
        )
        self._beginning.append(following)
        return None

    def _rendered(self, episode: _Episode, content: Content) -> Rendered:
        """What the model is to read, behind its last turn or instead of all before it. Raises EpisodeError."""
        assert self._play is not None and episode.group.prompt is not None
        prompt, rendering, transcript = episode.group.prompt, self._play.rendering, episode.transcript
        if rendering.splits(prompt):
            read = [*(answer.content for answer in transcript.answers), content]
            prompt_ids, context = transcript.row(episode.request.prompt_ids)
            return rendering.whole(prompt, list(zip(transcript.texts, read, strict=True)), [*prompt_ids, *context])
        return rendering.observation(prompt, content, transcript.turns[-1].token_ids.tolist())

    def _ended(self, key: RolloutKey, end: End, episode: _Episode) -> Played | None:
        assert self._play is not None
        if not episode.transcript.turns:
            self._opened(key, episode, end.score or Score(failure="it ended before the model wrote anything"))
            return None
        if end.reason == "max_turns":
            return self._end(key, episode, "max_turns", end.score or self._play.at_limit)
        return self._end(key, episode, episode.transcript.turns[-1].finish_reason, end.score)

    def _again(self, key: RolloutKey, episode: _Episode) -> None:
        """Its process ended, and the environment with it: the same from the beginning."""
        self._beginning = [request for request in self._beginning if request.key != key]
        self._engine.abort([key])
        episode.transcript, episode.steps = Transcript(), []
        self._open(episode.group, [key])

    def _end(self, key: RolloutKey, episode: _Episode, reason: FinishReason, score: Score | None) -> Played:
        del self._episodes[key]
        if self._play is not None:
            self._over.append(key)  # what is held for a turn that will not come
        transcript, prompt = episode.transcript, episode.group.prompt or ""
        completion, turns = transcript.completion(key, reason), tuple(transcript.texts)
        read = tuple(answer.content for answer in transcript.answers)
        said = () if self._play is None else conversation(prompt, zip(turns, [*read, None], strict=True))
        return Played(
            completion,
            episode.request.prompt_ids,
            turns[0] if len(turns) == 1 else self._text(completion, transcript.answers),
            turns,
            prompt=episode.group.text,
            read=read,
            messages=said,
            num_prompt=len(as_messages(prompt)),
            is_chat=self._play is not None and self._play.rendering.is_chat(prompt),
            score=score,
            turn_scores=tuple(answer.score for answer in transcript.answers),
            steps=tuple(episode.steps),
        )

    def _text(self, completion: Completion, answers: Sequence[Answer]) -> str:
        """For people: where a row begins anew, the answer there, and not the conversation once more."""
        ids, (first, *anew) = completion.token_ids.tolist(), pieces(completion.spans)
        said = [as_text(answer.content) for answer in answers if answer.restarts]
        further = [self._decode(ids[piece.start + piece.num_prompt : piece.stop]) for piece in anew]
        return self._decode(ids[: first.stop]) + "".join(f"\n{one}\n{other}" for one, other in zip(said, further, strict=True))

    # -- the prompt ------------------------------------------------------------------------------------------------------

    def _open(self, group: _Group, keys: Iterable[RolloutKey]) -> None:
        assert self._play is not None
        for key in keys:
            self._opening.add(key)
            self._play.pool.begin(key, {**group.row.columns, "prompt": group.row.prompt, "seed": group.seed})

    def _members(self, group: _Group) -> list[_Episode]:
        return [self._episodes[key] for key in group.requests]

    def _opened(self, key: RolloutKey, episode: _Episode, said: Content | Score) -> None:
        """A member has its first observation; with the last of its group all of them begin."""
        group = episode.group
        group.said[key] = said
        if group.prompt is not None:  # it was begun again, the others are on their way
            self._begin_turns(group, [key])
        elif len(group.said) == len(group.requests):
            self._begin_turns(group, list(group.requests))

    def _begin_turns(self, group: _Group, keys: Sequence[RolloutKey]) -> None:
        assert self._play is not None
        if group.prompt is None:
            group.prompt = next((said for said in group.said.values() if not isinstance(said, Score)), "")
        self._opening.difference_update(keys)
        ids, failure = self._rendered_prompt(group)
        for key in keys:
            episode, said = self._episodes[key], group.said[key]
            if isinstance(said, Score):
                episode.failed = said
            elif said != group.prompt:
                episode.failed = Score(failure="its first observation differs from that of its group: let the row decide it")
            elif failure:
                episode.failed = Score(failure=failure)
            episode.request = replace(episode.request, prompt_ids=ids or episode.request.prompt_ids)
            if episode.failed is not None:
                self._play.pool.discard([key])
                self._beginning.append(replace(episode.request, max_new_tokens=1))
            else:
                self._beginning.append(replace(episode.request, hold=self._play.goes_on(0)))

    def _rendered_prompt(self, group: _Group) -> tuple[tuple[int, ...], str]:
        """Tokens of the group's prompt, or none and the reason."""
        assert self._play is not None and group.prompt is not None
        try:
            text, ids, _ = self._play.rendering.prompt(group.prompt)
        except EpisodeError as error:
            return (), str(error)
        if len(ids) > self._play.max_prompt_length:
            return (), f"its first observation has {len(ids)} tokens, the limit is {self._play.max_prompt_length}"
        group.text = text
        return tuple(ids), ""
