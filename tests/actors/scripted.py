"""An engine and environments whose every answer a test gives, and the episodes that are played with them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from async_rlhf.actors.engine import Completion, Engine, Partial, Request, RolloutKey
from async_rlhf.actors.environments import Call, Content, EnvironmentSpec, Message, Reply
from async_rlhf.actors.environments.pool import EpisodeCounters, EpisodePool, Event
from async_rlhf.actors.environments.rendering import Rendered, Renderer
from async_rlhf.actors.environments.yields import EpisodeEnd, Read, read_yield
from async_rlhf.actors.loop.context import Environment, Environments
from async_rlhf.actors.loop.episodes import Episodes
from async_rlhf.actors.loop.rollouts import FinishedRollout, behind_one_prompt
from async_rlhf.actors.prompts import Row
from async_rlhf.buffers.errors import EpisodeError
from async_rlhf.buffers.record import Group, Score, Span
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.learner.batch.packing import Packing, Sharing, make_micro_batches
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.config import LearnerConfig
from async_rlhf.learner.model.policy import Policy
from tests.actors.vllm_model import raw_weights

ROW = Row("row", {"answer": "4"})
PROMPT = (7, 8)
"""Of the row; what an environment says is encoded as its characters."""
RIGHT = Score(1.0)


class ScriptedEngine:
    """Ends the request that `end` names."""

    def __init__(self) -> None:
        self.requests: dict[RolloutKey, Request] = {}
        self.submitted: list[Request] = []
        self.held: set[RolloutKey] = set()
        self._ended: list[Completion] = []

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            assert request.key not in self.requests, "it is still being sampled"
            self.requests[request.key] = request
            self.submitted.append(request)
            self.held.discard(request.key)

    def end(self, key: RolloutKey, ids: Sequence[int], version: int = 0, reason: Any = "stop") -> None:
        """key: of the request, or of a rollout with one."""
        if key not in self.requests:
            (key,) = [each for each in self.requests if each.rollout == key]
        request = self.requests.pop(key)
        assert len(ids) <= request.max_new_tokens
        if request.hold:
            self.held.add(key)
        logprobs = np.full(len(ids), -1.0, np.float32)
        self._ended.append(Completion(key, np.array(ids, np.int32), logprobs, (Span(version, len(ids)),), reason))

    def step(self) -> list[Completion]:
        ended, self._ended = self._ended, []
        return ended

    def partials(self, known: Any) -> list[Partial]:
        return [Partial(key, np.array([9], np.int32)) for key, request in self.requests.items() if request.partial_every]

    def abort(self, keys: Sequence[RolloutKey]) -> int:
        self.held -= set(keys)
        return sum(3 for key in keys if self.requests.pop(key, None) is not None)


class ScriptedPool:
    """Environments that say what `says` and `ends` give."""

    def __init__(self) -> None:
        self.begun: list[tuple[RolloutKey, Mapping[str, Any]]] = []
        self.live: set[RolloutKey] = set()
        self.replies: list[tuple[RolloutKey, str | Reply]] = []
        self.events: list[Event[RolloutKey]] = []
        self.counters = EpisodeCounters()

    def begin(self, key: RolloutKey, fields: Mapping[str, Any]) -> None:
        assert key not in self.live
        self.begun.append((key, fields))
        self.live.add(key)

    def reply(self, key: RolloutKey, sent: str | Reply) -> None:
        assert key in self.live
        self.replies.append((key, sent))

    def num_turns(self, key: RolloutKey) -> int:
        return 1 + sum(replied == key for replied, _ in self.replies)

    def poll(self) -> list[Event[RolloutKey]]:
        events, self.events = self.events, []
        for event in events:
            if not isinstance(event.result, Read):
                self.live.discard(event.key)
        return events

    def discard(self, keys: Sequence[RolloutKey]) -> None:
        self.live -= set(keys)

    def says(self, key: RolloutKey, content: Content, score: float | None = None) -> None:
        self.events.append(Event(key, Read(content, score), 1.0, 2.0))

    def calls(self, key: RolloutKey, conversation: int, text: str, **more: Any) -> None:
        """An agent's call with one message."""
        asked: list[Message] = [{"role": "user", "content": text}]
        self.events.append(Event(key, Read(asked, call=Call(conversation, asked, **more)), 1.0, 2.0))

    def ends(self, key: RolloutKey, score: Score | None = RIGHT, reason: Any = "scored", **more: Any) -> None:
        self.events.append(Event(key, EpisodeEnd(reason, score, **more), 2.0, 3.0))


class Talker(ScriptedPool):
    """Begins with `go`, answers each turn at once, and ends behind the last answer."""

    def __init__(self, answers: Sequence[Content]) -> None:
        super().__init__()
        self._answers = answers

    def begin(self, key: RolloutKey, fields: Mapping[str, Any]) -> None:
        super().begin(key, fields)
        self.says(key, "go")

    def reply(self, key: RolloutKey, sent: str | Reply) -> None:
        super().reply(key, sent)
        at = self.num_turns(key) - 2
        if at < len(self._answers):
            self.says(key, self._answers[at], 0.5)
        else:
            self.ends(key)


class Agency(ScriptedPool):
    """Agents in this process: generators of Calls, made of the number of the member."""

    def __init__(self, function: Callable[[int], Generator[Any, Any, None]]) -> None:
        super().__init__()
        self._function = function
        self._agents: dict[RolloutKey, Generator[Any, Any, None]] = {}

    def begin(self, key: RolloutKey, fields: Mapping[str, Any]) -> None:
        super().begin(key, fields)
        self._agents[key] = self._function(key.member)
        self._yielded(key, next(self._agents[key]), 0)

    def reply(self, key: RolloutKey, sent: str | Reply) -> None:
        super().reply(key, sent)
        self._yielded(key, self._agents[key].send(sent), self.num_turns(key) - 1)

    def _yielded(self, key: RolloutKey, value: Any, turns: int) -> None:
        self.events.append(Event(key, read_yield(value, turns, 1000, calls=True), 1.0, 2.0))


class Characters:
    """A token is the code of a character, below `vocabulary`."""

    place_id = None

    def __init__(self, vocabulary: int = 256) -> None:
        self._vocabulary = vocabulary

    def _encode(self, content: Content) -> Rendered:
        text = content if isinstance(content, str) else "".join(message["content"] for message in content)
        return Rendered(text, [ord(letter) % self._vocabulary for letter in text])

    def prompt(self, content: Content, is_foreign: bool = False) -> Rendered:
        if not (found := self._encode(content)).ids:
            raise EpisodeError("the prompt has no tokens")
        return found

    def given(self, tools: Any) -> Characters:
        return self

    def is_chat(self, prompt: Content) -> bool:
        return False

    def splits(self, prompt: Content) -> bool:
        return False

    def observation(self, prompt: Content, content: Content, turn: Sequence[int]) -> Rendered:
        if content == "?":
            raise EpisodeError("no template takes a question mark")
        return self._encode(content)


def environment_of(
    pool: object, rendering: object, max_prompt_length: int, max_length: int, max_turns: int = 1000, calls: bool = False
) -> Environment:
    """Of a scripted environment."""
    own = cast(EpisodePool[RolloutKey], pool), cast(Renderer, rendering)
    spec = EnvironmentSpec("game", "game", "sync", max_turns=max_turns, calls=calls)
    return Environment(spec, *own, max_prompt_length, max_length)


def text_of(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


class Scene:
    """One group whose engine and environments are scripted."""

    def __init__(self, group_size: int = 2, max_length: int = 20, rendering: object = None, **of_spec: Any) -> None:
        self.engine, self.pool = ScriptedEngine(), ScriptedPool()
        environment = environment_of(self.pool, rendering or Characters(), 6, max_length, **of_spec)
        self.episodes = Episodes(cast(Engine, cast(Any, self.engine)), text_of, Environments(environment))
        self.keys = [RolloutKey(3, 0, member) for member in range(group_size)]
        requests = [Request(key, PROMPT, 5, Sampling(), seed=100 + key.member, partial_every=1) for key in self.keys]
        self.episodes.begin([(ROW, 42, requests)])

    def poll(self) -> list[FinishedRollout]:
        return self.episodes.step()

    def all_hear(self, said: str = "go") -> None:
        """Every member's environment yields the same first observation."""
        for key in self.keys:
            self.pool.says(key, said)
        self.poll()

    def writes(self, key: RolloutKey, *ids: int, **how: Any) -> list[FinishedRollout]:
        """The model ends a turn with these tokens."""
        self.engine.end(key, ids, **how)
        return self.poll()

    def turn(self, text: str, answer: str, version: int = 0) -> list[FinishedRollout]:
        """The first member writes this, and is answered that."""
        self.writes(self.keys[0], *map(ord, text), version=version)
        self.pool.says(self.keys[0], answer, score=0.5)
        return self.poll()


# With a model


def played_with_updates(
    episodes: Episodes, engine: Engine, models: Sequence[PreTrainedModel], count: int
) -> list[FinishedRollout]:
    """What so many episodes become to which new weights come, between their turns and within them."""
    done: list[FinishedRollout] = []
    for step in range(400):
        if step in (6, 13):
            engine.load_weights(1 + (step == 13), raw_weights(models[1 + (step == 13)]))
        done += episodes.step()
        if len(done) == count:
            break
    assert len({played.key for played in done}) == count and engine.num_unfinished == 0
    return done


@torch.no_grad()
def plain_passes(
    models: Sequence[PreTrainedModel], played: FinishedRollout, temperature: float
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Of each sampled token: its log-probability by one pass of its version over the piece that it stands in, among those it
    was chosen from; whether this version had computed all of its prefix. Walks the spans by itself."""
    rollout, found, exact, at, text = played.rollout, list[float](), list[bool](), 0, list(played.read[0])
    mask = rollout.sampling_mask
    kept = None if mask is None else np.split(mask.ids, np.cumsum(mask.sizes)[:-1])
    for span in rollout.spans:
        own, at = rollout.completion_ids[at : at + span.num_tokens].tolist(), at + span.num_tokens
        text = [] if span.restarts else text
        if span.version is not None:
            logits = models[span.version](input_ids=torch.tensor([text + own]), use_cache=False).logits[0].float()
            for index, token in enumerate(own, len(text)):
                among = logits[index - 1] / temperature
                if kept is not None:
                    among = among.masked_fill(~torch.isin(torch.arange(len(among)), torch.tensor(kept[len(found)])), -torch.inf)
                found.append(float(torch.log_softmax(among, -1)[token]))
                exact.append(span.cache_version is None)
        text = text + own
    return np.array(found, np.float32), np.array(exact)


@torch.no_grad()
def assert_every_token_is_that_of_a_plain_pass(
    models: Sequence[PreTrainedModel], done: Sequence[FinishedRollout], temperature: float, on_update: str
) -> Group:
    """Engine and learner give each sampled token the log-probability of a plain pass of its version over its piece. The
    learner reads siblings in one row, and each for itself. Returns the group."""
    own = [played.rollout for played in done]
    prompt_ids, _, rollouts = behind_one_prompt([played.read for played in done], own, text_of)
    assert len({version for rollout in rollouts for version in rollout.versions.tolist()}) > 1
    group = Group(0, 0, prompt_ids, rollouts, Sampling(temperature=temperature))
    passes = [plain_passes(models, each, temperature) for each in done]
    wanted, exact = (np.concatenate(parts) for parts in zip(*passes, strict=True))
    assert exact.any() and (on_update == "keep" or exact.all())
    sampled = np.concatenate([rollout.logprobs for rollout in rollouts])
    np.testing.assert_allclose(sampled[exact], wanted[exact], atol=2e-4)
    versions = np.concatenate([rollout.versions for rollout in rollouts])
    starts = np.cumsum([0, *(rollout.num_tokens for rollout in rollouts)])
    for sharing in get_args(Sharing):
        batches = make_micro_batches(make_rows([group], [[1.0] * len(rollouts)]), Packing(1 << 20, sharing))
        for version, model in enumerate(models):
            policy, found = Policy(model, LearnerConfig()), np.full(len(wanted), np.nan)
            for batch in batches:
                logp = policy.exactly(batch).numpy()
                for member in set(batch.member_N.tolist()):
                    found[starts[member] : starts[member + 1]] = logp[batch.member_N.numpy() == member]
            mine = versions == version
            np.testing.assert_allclose(found[mine], wanted[mine], atol=2e-4)
    return group
