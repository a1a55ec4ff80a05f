"""Episodes of an agent: its calls over several conversations, whatever their order, and what of them goes into the record."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rlhf.actors.engine import Request, RolloutKey
from async_rlhf.actors.environments import Call, Message, Reply
from async_rlhf.actors.environments.pool import Event
from async_rlhf.actors.environments.rendering import Renderer
from async_rlhf.actors.loop.context import Environments
from async_rlhf.actors.loop.episodes import Episodes
from async_rlhf.actors.loop.rollouts import FinishedRollout, behind_one_prompt
from async_rlhf.actors.prompts import turn_seed
from async_rlhf.actors.scoring.pool import fields_of
from async_rlhf.actors.torch_engine.loading import load_engine
from async_rlhf.actors.torch_engine.settings import TorchEngineConfig
from async_rlhf.buffers.record import Group, Piece, Rollout, Score, Span
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.inspect.episodes import _parts
from tests.actors.environments.test_environment_rendering import CHATML, tokenizer
from tests.actors.scripted import (
    PROMPT,
    RIGHT,
    ROW,
    Agency,
    Scene,
    ScriptedPool,
    assert_every_token_is_that_of_a_plain_pass,
    environment_of,
    played_with_updates,
    text_of,
)
from tests.actors.test_split_episodes import BRACKETS
from tests.actors.torch_models import own_model
from tests.actors.vllm_model import save_model

Shown = tuple[str, tuple[Span, ...], str]


def of(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


class Agents(Scene):
    """A group of agents."""

    def __init__(self, group_size: int = 1, max_length: int = 40, **of_spec: Any) -> None:
        super().__init__(group_size, max_length, calls=True, **of_spec)

    def asks(self, conversation: int, text: str, member: int = 0, **more: Any) -> list[FinishedRollout]:
        self.pool.calls(self.keys[member], conversation, text, **more)
        return self.poll()

    def answers(self, text: str, member: int = 0, conversation: int | None = None, **how: Any) -> list[FinishedRollout]:
        """conversation: of several that are being written."""
        key = self.keys[member]
        return self.writes(key if conversation is None else key._replace(row=conversation), *map(ord, text), **how)

    def turn_of(self, conversation: int, text: str, answer: str, member: int = 0, version: int = 0, **more: Any) -> None:
        """A call, and what the model writes."""
        assert self.asks(conversation, text, member, **more) == [] == self.answers(answer, member, version=version)

    def over(self, member: int = 0, score: Score | None = RIGHT, reason: Any = "scored", **more: Any) -> FinishedRollout:
        self.pool.ends(self.keys[member], score, reason, **more)
        (played,) = self.poll()
        return played

    @property
    def newest(self) -> Request:
        return self.engine.submitted[-1]


def shown(played: FinishedRollout) -> Shown:
    """Its prompt, spans, and tokens as text."""
    rollout = played.rollout
    return text_of(played.read[0]), rollout.spans, text_of(rollout.completion_ids.tolist())


def test_calls_of_two_conversations_are_one_rollout_whose_rows_follow_each_other() -> None:
    scene = Agents(max_turns=5)
    assert scene.asks(0, "ask", max_tokens=4, stop=("!",)) == []
    first = scene.newest
    assert (first.prompt_ids, first.context, first.max_new_tokens, first.stop, first.seed) == (of("ask"), (), 4, ("!",), 100)
    assert first.hold
    scene.answers("ab", version=1)
    scene.turn_of(1, "sub", "c", version=2)
    other = scene.newest
    assert (other.prompt_ids, other.context, other.seed, other.max_new_tokens) == (of("sub"), (), turn_seed(100, 1), 5)
    scene.turn_of(0, "xy", "d", version=3, max_tokens=99)
    again = scene.newest
    assert (again.prompt_ids, again.context, again.seed) == (of("ask"), of("abxy"), turn_seed(100, 2))
    scene.turn_of(1, "z", "e", version=4)
    assert (scene.newest.prompt_ids, scene.newest.context) == (of("sub"), of("cz"))
    scene.turn_of(0, "w", "f", version=5)
    assert not scene.newest.hold, "no turn follows"
    key = scene.keys[0]
    assert scene.pool.replies == [
        (key, Reply("ab", "stop", 3, 2)),
        (key, Reply("c", "stop", 3, 1, 1)),
        (key, Reply("d", "stop", 7, 1)),
        (key, Reply("e", "stop", 5, 1, 1)),
        (key, Reply("f", "stop", 9, 1)),
    ]
    played = scene.over(reason="max_turns", score=None)
    anew = Span(None, 3, restarts=True)
    read, one = Span(None, 2), Span(None, 1)
    spans = (Span(1, 2), read, Span(3, 1), one, Span(5, 1), anew, Span(2, 1), one, Span(4, 1))
    assert shown(played) == ("ask", spans, "abxydwfsubcze")
    assert (played.rollout.finish_reason, played.score, played.turns) == (
        "max_turns",
        Score(0.0),
        ("ab", "c", "d", "e", "f"),
    )
    assert played.rollout.text == "abxydwf\nsub\ncze" and played.answer == "f" and played.num_sampled == 6
    assert [each["content"] for each in played.messages] == ["ask", "ab", "xy", "d", "w", "f"]
    assert fields_of(ROW, played.read[0], played.rollout, "f")["row_pieces"] == [[0, 0, 7], [7, 3, 13]]
    parts = _parts(played, text_of, lambda ids: [])
    assert [part.content for part in parts][-4:] == [[{"role": "user", "content": "sub"}], "c", "z", "e"] and parts[6].anew == 3


def test_a_turn_that_is_not_trained_on_is_read_and_what_follows_the_last_that_is_leaves_the_record() -> None:
    scene = Agents()
    for conversation, text, answer, trained in (
        (0, "title", "t", False),  # a conversation that is never trained on
        (1, "ask", "u", False),
        (1, "v", "ab", True),
        (2, "sub", "c", True),
        (1, "w", "x", False),
        (1, "y", "d", True),
        (2, "z", "no", False),
        (1, "no", "no", False),
    ):
        scene.turn_of(conversation, text, answer, trained=trained)
    played = scene.over()
    spans = (Span(None, 2), Span(0, 2), Span(None, 3), Span(0, 1), Span(None, 3, restarts=True), Span(0, 1))
    assert shown(played) == ("ask", spans, "uvabwxydsubc") and len(played.rollout.logprobs) == 4
    assert (played.answer, played.num_sampled, len(played.turns), played.rollout.text) == ("d", 11, 8, "uvabwxyd\nsub\nc")
    assert [each["content"] for each in played.messages] == ["ask", "u", "v", "ab", "w", "x", "y", "d"]


def test_a_row_whose_first_turns_are_not_trained_on_begins_with_all_that_stands_before_its_first_trained_one() -> None:
    scene = Agents()
    scene.turn_of(0, "ask", "a")
    scene.turn_of(1, "sub", "b", trained=False)
    scene.turn_of(1, "c", "d")
    played = scene.over()
    assert shown(played) == ("ask", (Span(0, 1), Span(None, 5, restarts=True), Span(0, 1)), "asubbcd")
    assert played.rollout.pieces == [Piece(0, 0, 1), Piece(1, 5, 7)]


@pytest.mark.parametrize("given", [(9.0, 0.1, None, 0.3), (9.0, 0.1, None, 0.3, None, 8.0), ()])
def test_scores_of_calls_stand_in_the_order_of_the_record_and_those_of_what_is_not_trained_on_nowhere(
    given: tuple[float | None, ...],
) -> None:
    scene = Agents()
    scene.turn_of(0, "title", "t", trained=False)
    scene.turn_of(1, "ask", "a")
    scene.turn_of(2, "sub", "b")
    scene.turn_of(1, "c", "d")
    scene.turn_of(2, "e", "f")
    played = scene.over(turn_scores=given)
    assert shown(played)[2] == "acdsubbef"
    assert played.rollout.turn_scores == ((0.1, 0.3, None, None) if given else ())
    assert len(played.rollout.turn_lengths) == 4


def test_members_begin_by_themselves_and_their_first_prompts_may_differ() -> None:
    scene = Agents(3)
    assert scene.episodes.num_opening == 3
    scene.turn_of(0, "ask", "a", member=1)
    assert scene.episodes.num_opening == 2 and scene.engine.submitted[0].prompt_ids == of("ask")
    ended = [scene.over(1)]
    scene.turn_of(0, "ale", "b", member=0)
    ended.append(scene.over(0))
    assert scene.asks(0, "no", member=2) == [] and scene.keys[2] not in scene.pool.live
    assert (scene.newest.prompt_ids, scene.newest.max_new_tokens, scene.newest.hold) == (of("ask"), 1, False)
    (failed,) = scene.answers("?", member=2, reason="length")
    assert "its first prompt shares no token with that of its group" in str(failed.score)
    assert shown(failed) == ("ask", (Span(0, 1),), "?") and scene.episodes.num_opening == 0


@pytest.mark.parametrize(
    ("spoil", "failure"),
    [
        (lambda scene: scene.pool.ends(scene.keys[0], Score(failure="raised"), "failed"), "raised"),
        (lambda scene: scene.pool.ends(scene.keys[0], None, "returned"), "it ended before the model wrote anything"),
        (lambda scene: scene.pool.calls(scene.keys[0], 0, ""), "the prompt has no tokens"),
        (lambda scene: scene.pool.calls(scene.keys[0], 0, "much too long"), "its first call has 13 tokens, the limit is 6"),
        (lambda scene: scene.pool.calls(scene.keys[0], 1, "ask"), "of conversation 1, and the next one to begin is 0"),
    ],
)
def test_a_member_without_a_prompt_waits_for_one_of_its_group(spoil: Callable[[Agents], None], failure: str) -> None:
    for has_one in (True, False):
        scene = Agents(2)
        spoil(scene)
        assert scene.poll() == [] and not scene.engine.submitted and scene.keys[0] not in scene.pool.live
        if has_one:
            scene.asks(0, "ask", member=1)
            _, without = scene.engine.submitted
            assert (without.key, without.prompt_ids, without.max_new_tokens) == (scene.keys[0], of("ask"), 1)
        else:
            scene.pool.ends(scene.keys[1], Score(failure="too"), "failed")
            assert scene.poll() == [] and [each.prompt_ids for each in scene.engine.submitted] == [PROMPT] * 2
        (played,) = scene.answers("?", reason="length")
        assert failure in str(played.score) and played.rollout.completion_ids.tolist() == [ord("?")]


def test_an_episode_without_a_trained_turn_fails_and_has_no_say_in_how_its_group_begins() -> None:
    scene = Agents(2)
    scene.turn_of(0, "no", "a", trained=False)
    scene.pool.ends(scene.keys[0], RIGHT)
    assert scene.poll() == [] and len(scene.engine.submitted) == 1 and not scene.engine.held
    scene.turn_of(0, "title", "a", member=1, trained=False)
    scene.turn_of(1, "ask", "b", member=1)
    (failed,) = scene.answers("?", reason="length")
    assert failed.score == Score(failure="no call of it is trained") and shown(failed) == ("ask", (Span(0, 1),), "?")
    assert shown(scene.over(1))[0] == "ask"


@pytest.mark.parametrize(
    ("conversation", "text", "room"),
    [(0, "four", 1), (0, "fives", 0), (1, "four", 1), (1, "fives", 0), (1, "much too long", 0)],
)
def test_the_tokens_of_all_rows_count_into_the_length_of_the_episode(conversation: int, text: str, room: int) -> None:
    scene = Agents(max_length=8)
    scene.turn_of(0, "ask", "abc")
    ended = scene.asks(conversation, text)
    if room:
        assert ended == [] and scene.newest.max_new_tokens == room
    else:
        (full,) = ended
        assert shown(full) == ("ask", (Span(0, 3),), "abc")
        assert (full.rollout.finish_reason, full.score) == ("context", Score(0.0))
        assert scene.engine.held == set() and scene.keys[0] not in scene.pool.live


@pytest.mark.parametrize(
    ("call", "failure"),
    [
        ({"conversation": 2, "text": "x"}, "its call is of conversation 2, and the next one to begin is 1"),
        (
            {"conversation": 0, "text": "x", "tools": ({"function": {"name": "t"}},)},
            "gives conversation 0 other tools than",
        ),
        ({"conversation": 0, "text": ""}, "its observation is empty"),
    ],
)
def test_a_call_that_cannot_follow_fails(call: dict[str, Any], failure: str) -> None:
    scene = Agents()
    scene.turn_of(0, "ask", "a")
    (played,) = scene.asks(**call)
    assert failure in str(played.score) and scene.keys[0] not in scene.pool.live
    assert shown(played) == ("ask", (Span(0, 1),), "a")


def test_one_that_lost_its_process_in_its_second_conversation_begins_again_as_it_began() -> None:
    scene = Agents(2)
    scene.turn_of(0, "ask", "a", version=1)
    scene.asks(1, "sub")
    scene.pool.events.append(Event(scene.keys[0], None))
    scene.poll()
    assert not scene.engine.requests and scene.episodes.num_opening == 2
    scene.asks(0, "ask")
    assert scene.engine.submitted[-1] == scene.engine.submitted[0]
    scene.answers("b")
    assert shown(scene.over()) == ("ask", (Span(0, 1),), "b")


def test_a_member_that_was_lost_with_its_first_words_joins_its_group_once() -> None:
    """An environment that is no agent: the others have theirs later."""
    scene = Scene()
    one, other = scene.keys
    scene.pool.says(one, "go")
    scene.pool.events.append(Event(one, None))
    scene.pool.says(other, "go")
    scene.poll()
    assert scene.engine.submitted == []
    scene.pool.says(one, "go")
    scene.poll()
    assert [request.key for request in scene.engine.submitted] == [one, other]


def test_only_the_first_row_of_the_record_is_read_ahead_and_only_what_stays_in_it() -> None:
    scene = Agents()
    key = scene.keys[0]
    scene.asks(0, "no", trained=False)
    assert scene.episodes.partials({}) == []
    scene.answers("x")
    scene.asks(1, "ask")
    ((partial, prompt_ids),) = scene.episodes.partials({})
    assert (partial.token_ids.tolist(), prompt_ids) == ([9], of("ask"))
    scene.answers("ab")
    scene.asks(2, "sub")
    assert scene.episodes.partials({key: 1}) == []
    scene.answers("c")
    scene.asks(1, "d")
    ((partial, prompt_ids),) = scene.episodes.partials({key: 1})
    assert (partial.token_ids.tolist(), prompt_ids) == ([*of("abd"), 9], of("ask"))
    scene.answers("e")
    scene.asks(1, "f", trained=False)
    assert scene.episodes.partials({key: 3}) == []
    scene.pool.events.append(Event(key, None))
    scene.poll()
    assert scene.episodes.partials({key: 3}) == [], "it begins again"


PARTS = ("suba", "subb", "subc", "subd")


def burst(order: Sequence[int], first: str = "suba") -> tuple[list[Request], FinishedRollout]:
    """A call, then four at once whose order is chance but for the first of them, one that goes on, and one behind them."""
    scene = Agents(max_length=60)
    scene.turn_of(0, "ask", "go")
    texts = [first, *(PARTS[at] for at in order if PARTS[at] != first)]
    for conversation, text in enumerate(texts, 1):
        assert scene.asks(conversation, text, max_tokens=4) == []
    assert len(scene.engine.requests) == 4
    for conversation in sorted(range(1, 5), key=lambda conversation: order[conversation - 1]):
        assert scene.answers(texts[conversation - 1][-1] * 2, conversation=conversation) == []
    for conversation in sorted(range(1, 5), key=lambda conversation: -order[conversation - 1]):
        assert scene.asks(conversation, texts[conversation - 1][-1].upper(), max_tokens=2) == []
    for conversation in range(1, 5):
        scene.answers(texts[conversation - 1][-1], conversation=conversation)
    scene.turn_of(0, "end", "x")
    return scene.engine.submitted, scene.over()


def test_calls_at_the_same_time_are_sampled_at_the_same_time_and_their_order_changes_neither_record_nor_seeds() -> None:
    requests, played = burst((0, 1, 2, 3))
    seeds = {request.prefix_ids: request.seed for request in requests}
    assert len(set(seeds.values())) == len(requests) == 10
    assert seeds[of("ask")] == 100 and seeds[of("suba")] == turn_seed(100, 1), "until then calls came one after the other"
    assert shown(played)[2] == "goendx" + "".join(f"{text}{text[-1] * 2}{text[-1].upper()}{text[-1]}" for text in PARTS)
    for order in [(0, 3, 2, 1), (2, 0, 3, 1), (3, 1, 0, 2)]:
        again, other = burst(order)
        assert {request.prefix_ids: request.seed for request in again} == seeds and shown(other) == shown(played)
    again, other = burst((0, 1, 2, 3), first="subc")
    changed = {ids for request in again if request.seed != seeds[ids := request.prefix_ids]}
    assert changed == {of("suba"), of("subc")} and shown(other) == shown(played), "which of them had nothing beside it"


def test_equal_calls_at_the_same_time_have_seeds_of_their_own() -> None:
    scene = Agents()
    for conversation in range(3):
        scene.asks(conversation, "same", max_tokens=2)
    assert len({request.seed for request in scene.engine.submitted}) == len(scene.engine.requests) == 3


def test_a_call_waits_where_those_that_are_written_may_need_its_room_and_what_they_leave_is_its_own() -> None:
    scene = Agents(max_length=14)
    scene.asks(0, "ask", max_tokens=5)
    scene.asks(1, "sub", max_tokens=5)
    scene.asks(2, "one", max_tokens=1)
    scene.asks(3, "x", max_tokens=1)
    assert [request.key.row for request in scene.engine.requests.values()] == [0, 1], "the one that waits is not passed"
    scene.answers("a", conversation=0)
    assert [request.key.row for request in scene.engine.requests.values()] == [1, 2]
    scene.answers("b", conversation=1)
    scene.answers("c", conversation=2)
    assert scene.newest.key.row == 3 and scene.newest.max_new_tokens == 1
    scene.answers("d", conversation=3)
    assert scene.asks(0, "y", max_tokens=5) == [] and scene.newest.max_new_tokens == 2
    (full,) = (scene.answers("ef"), scene.asks(1, "z"))[1]
    assert (full.rollout.finish_reason, len(full.rollout.completion_ids)) == ("context", 14)


@pytest.mark.parametrize("how", ["scored", "failed", "max_turns", "context"])
def test_an_episode_that_ends_while_turns_are_written_has_them_whole_and_begins_none_that_waits(how: str) -> None:
    scene = Agents(max_length=19)
    for conversation, text in enumerate(("ask", "sub", "so")):
        scene.asks(conversation, text, max_tokens=5)
    assert len(scene.engine.requests) == 2
    if how == "context":
        scene.pool.calls(scene.keys[0], 3, "much too long")
        scene.answers("a", conversation=0)
        assert len(scene.engine.requests) == 2
        assert scene.answers("b", conversation=1) == [] and not scene.pool.live
        (played,) = scene.answers("c", conversation=2)
        texts = "asocsubb"
    else:
        scene.pool.ends(scene.keys[0], Score(failure="died") if how == "failed" else None, how)
        assert scene.poll() == [] and len(scene.engine.requests) == 2
        assert scene.answers("b", conversation=1) == [] == scene.pool.replies
        (played,) = scene.answers("a", conversation=0)
        texts = "asubb"
    assert shown(played)[2] == texts and not scene.engine.requests and not scene.engine.held
    assert (played.score, played.rollout.finish_reason) == {
        "scored": (None, "stop"),
        "failed": (Score(failure="died"), "stop"),
        "max_turns": (Score(0.0), "max_turns"),
        "context": (Score(0.0), "context"),
    }[how]


@pytest.mark.parametrize("how", ["lost", "discarded"])
def test_of_turns_that_are_written_when_their_episode_is_lost_or_given_up_nothing_is_left(how: str) -> None:
    scene = Agents()
    scene.turn_of(0, "ask", "ab")
    for conversation in (1, 2):
        scene.asks(conversation, "sub", max_tokens=5)
    if how == "discarded":
        assert scene.episodes.discard(scene.keys) == [2 + 3 + 3], "what was sampled, and what the engine says of each"
        return
    scene.pool.events += [Event(scene.keys[0], None)]
    scene.poll()
    assert not scene.engine.requests and not scene.engine.held and scene.episodes.num_opening == 1
    scene.asks(0, "ask")
    assert scene.newest == scene.engine.submitted[0]


class Crowd(ScriptedPool):
    """Agents with three conversations at the same time, each of which goes on as soon as it is answered."""

    def begin(self, key: RolloutKey, fields: Any) -> None:
        super().begin(key, fields)
        for conversation in range(3):
            self.calls(key, conversation, f"talk {key.member % 2} {conversation}", trained=conversation != 1)

    def reply(self, key: RolloutKey, sent: Any) -> None:
        super().reply(key, sent)
        own = [reply for replied, reply in self.replies if replied == key]
        if sum(reply.conversation == sent.conversation for reply in own) < 3:
            self.calls(key, sent.conversation, f"{sent.text[:2]!r}")
        elif len(own) == 9:
            self.ends(key)


@pytest.mark.parametrize("on_update", ["keep", "interrupt", "finish"])
def test_calls_at_the_same_time_have_the_logprobs_and_versions_of_plain_passes_of_their_rows(
    on_update: Any, tmp_path: Path
) -> None:
    made = tokenizer(CHATML)
    models = [own_model("llama", seed, vocab_size=len(made), max_position_embeddings=700) for seed in range(3)]
    engine = load_engine(
        str(save_model(models[0], tmp_path / "model")), TorchEngineConfig(slots=8), on_update=on_update, version=0
    )
    environment = environment_of(Crowd(), Renderer(made, chat=True), 80, 600, calls=True)
    episodes = Episodes(engine, lambda ids: str(made.decode(ids, skip_special_tokens=True)), Environments(environment))
    keys = [RolloutKey(0, 0, member) for member in range(4)]
    episodes.begin([(ROW, 1, [Request(key, PROMPT, 5, Sampling(temperature=0.8), seed=key.member) for key in keys])])
    episodes.poll()
    assert engine.num_unfinished == 12
    done = played_with_updates(episodes, engine, models, len(keys))
    assert_every_token_is_that_of_a_plain_pass(models, done, 0.8, on_update)


def talks(member: int) -> Generator[Any, Any, None]:
    """Over three conversations, of which the last begins as the second does; two of its turns are not trained on."""

    def user(text: str) -> list[Message]:
        return [{"role": "user", "content": text}]

    first = yield Call(0, user(f"go {member % 3}"), max_tokens=2 + member)
    assert isinstance(first, Reply) and first.num_tokens <= 2 + member
    sub = yield Call(1, user("sub"), stop=("q",))
    back = yield Call(0, user(sub.text))
    yield Call(1, user("note"), trained=False)
    yield Call(2, user("sub"))
    yield Call(1, user(back.text[:2]))
    yield Call(3, user("title"), trained=False)
    last = yield Call(0, user("end"))
    assert last.num_prompt > first.num_prompt
    yield Score(1.0)


@pytest.mark.parametrize("on_update", ["keep", "interrupt", "finish"])
@pytest.mark.parametrize("render", ["conversation", "split"])
def test_engine_and_learner_give_every_call_the_logprobs_of_a_plain_pass_of_its_row(
    render: Any, on_update: Any, tmp_path: Path
) -> None:
    made = tokenizer(BRACKETS if render == "split" else CHATML)
    models = [own_model("llama", seed, vocab_size=len(made), max_position_embeddings=700) for seed in range(3)]
    engine = load_engine(
        str(save_model(models[0], tmp_path / "model")), TorchEngineConfig(slots=4), on_update=on_update, version=0
    )
    environment = environment_of(Agency(talks), Renderer(made, chat=True, render=render), 80, 600, calls=True)
    episodes = Episodes(engine, lambda ids: str(made.decode(ids, skip_special_tokens=True)), Environments(environment))
    keys = [RolloutKey(0, 0, member) for member in range(6)]
    episodes.begin([(ROW, 1, [Request(key, PROMPT, 5, Sampling(temperature=0.8), seed=key.member) for key in keys])])
    done = played_with_updates(episodes, engine, models, len(keys))
    group = assert_every_token_is_that_of_a_plain_pass(models, done, 0.8, on_update)
    assert len(group.prompt_ids) < min(len(each.read[0]) for each in done)
    assert all(rollout.spans[0].version is None for rollout in group.rollouts)
    if render == "conversation":
        assert [rollout.turn_lengths[0] <= 2 + each.key.member for rollout, each in zip(group.rollouts, done, strict=True)]
        assert {len(rollout.restarts) for rollout in group.rollouts} == {2}


# -- laws ------------------------------------------------------------------------------------------------------------------


@dataclass
class Twin:
    """An episode as its engine and its agent see it. rows: of each conversation (text, trained; None: read). first: of each
    that is trained on (rank, prompt). asked: whether calls that have not begun are trained on, by conversation."""

    rows: list[list[tuple[str, bool | None]]] = field(default_factory=list)
    first: dict[int, tuple[int, str]] = field(default_factory=dict)
    asked: dict[int, bool] = field(default_factory=dict)
    writing: dict[int, bool] = field(default_factory=dict)
    begun: int = 0
    rank: int = 0
    parallel: bool = False

    @property
    def idle(self) -> list[int]:
        """Conversations that a call may be of, of three at most."""
        known = {*self.asked, *range(len(self.rows))}
        return sorted({*range(min(3, 1 + len(known)))} - self.asked.keys() - self.writing.keys())

    def begins(self, request: Request) -> None:
        conversation, text = request.key.row, text_of(request.prefix_ids)
        self.rows += [[]] * 0 if conversation < len(self.rows) else [[]]
        row, trained = self.rows[conversation], self.asked.pop(conversation)
        row.append((text.removeprefix("".join(each for each, _ in row)), None))
        self.parallel = self.parallel or bool(self.writing)
        self.rank = self.rank if self.parallel else self.begun
        self.begun += 1
        self.writing[conversation] = trained
        if trained:
            self.first.setdefault(conversation, (self.rank, row[0][0]))

    def record(self) -> tuple[str, str]:
        """The first prompt, and what stands behind it."""
        leading, *others = self.first
        kept = []
        for conversation in (leading, *sorted(others, key=lambda conversation: self.first[conversation])):
            last = max(at for at, (_, trained) in enumerate(self.rows[conversation]) if trained)
            kept.append([text for text, _ in self.rows[conversation][: last + 1]])
        return kept[0][0], "".join(kept[0][1:]) + "".join("".join(row) for row in kept[1:])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_call_stands_once_in_the_record_behind_its_own_conversation(data: st.DataObject) -> None:
    """Members that call, also several times at once, end, fail and lose their process in any order; against a twin that
    keeps each conversation as a text."""
    scene = Agents(data.draw(st.integers(1, 3)), max_length=60)
    ended: dict[RolloutKey, FinishedRollout] = {}
    twins = {key: Twin() for key in scene.keys}
    num_seen = 0
    for _ in range(400):
        for played in scene.poll():
            assert played.key not in ended
            ended[played.key] = played
        for request in scene.engine.submitted[num_seen:]:
            if request.key.rollout in scene.pool.live or request.hold:  # else it is one of a member without a prompt
                twins[request.key.rollout].begins(request)
        num_seen = len(scene.engine.submitted)
        if len(ended) == len(scene.keys):
            break
        able = [*(key for key in scene.keys if key in scene.pool.live and twins[key].idle), *scene.engine.requests.values()]
        chosen = data.draw(st.sampled_from(able))
        if isinstance(chosen, Request):
            text = data.draw(st.text("abc", min_size=1, max_size=min(3, chosen.max_new_tokens)))
            scene.engine.end(chosen.key, of(text), version=len(scene.engine.submitted))
            own, conversation = twins[chosen.key.rollout], chosen.key.row
            if conversation in own.writing:
                own.rows[conversation].append((text, own.writing.pop(conversation)))
            continue
        own = twins[chosen]
        what = data.draw(st.sampled_from(["call"] * 6 + ["end", "lost" if len(scene.pool.begun) < 9 else "end"]))
        if what == "lost":
            scene.pool.events.append(Event(chosen, None))
            twins[chosen] = Twin()
        elif what == "end":
            scene.pool.ends(chosen)
        else:
            conversation, trained = data.draw(st.sampled_from(own.idle)), data.draw(st.booleans())
            text = "g" * (conversation >= len(own.rows)) + data.draw(st.text("xyz", min_size=1, max_size=3))
            own.asked[conversation] = trained
            scene.pool.calls(chosen, conversation, text, trained=trained)
    assert ended.keys() == set(scene.keys)
    assert not scene.pool.live and not scene.engine.requests and not scene.engine.held and not scene.episodes.num_opening
    rollouts, prompts = [], []
    for key, played in ended.items():
        if played.score is None or played.score.failure is None:
            assert shown(played)[::2] == twins[key].record()
        rollouts.append(played.rollout)
        prompts.append(played.read)
    prompt_ids, _, made = behind_one_prompt(prompts, rollouts, text_of)
    Group(0, 0, prompt_ids, made, Sampling())


@st.composite
def members(draw: st.DrawFn) -> tuple[tuple[int, ...], Rollout]:
    prompt = (5, *draw(st.lists(st.integers(0, 2), max_size=4)))
    lead, counts = draw(st.integers(0, 2)), draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    spans = [Span(None, lead)] * (lead > 0)
    for at, count in enumerate(counts):
        spans += [Span(None, 2, restarts=draw(st.booleans()))] * (at > 0) + [Span(at, count)]
    length = sum(span.num_tokens for span in spans)
    ids = np.array(draw(st.lists(st.integers(0, 9), min_size=length, max_size=length)), np.int32)
    return prompt, Rollout(ids, np.full(sum(counts), -0.5, np.float32), tuple(spans), "stop", text="said")


@given(st.lists(members(), min_size=1, max_size=4))
def test_a_group_stands_behind_the_longest_prompt_that_all_share_and_nothing_of_a_member_is_lost(
    drawn: list[tuple[tuple[int, ...], Rollout]],
) -> None:
    prompts, before = zip(*drawn, strict=True)
    shared, _, after = behind_one_prompt([(each, ()) for each in prompts], before, lambda ids: "".join(map(str, ids)))
    assert shared.dtype == np.int32 and len(shared) >= 1
    least = min(map(len, prompts))
    assert len(shared) == least or len({prompt[len(shared)] for prompt in prompts}) > 1, "no longer one is shared"
    for prompt, one, other in zip(prompts, before, after, strict=True):
        extra = len(prompt) - len(shared)
        assert [*shared.tolist(), *other.completion_ids.tolist()] == [*prompt, *one.completion_ids.tolist()]
        assert other.sampled.tolist() == [False] * extra + one.sampled.tolist()
        assert other.versions.tolist() == one.versions.tolist() and other.logprobs is one.logprobs
        assert (other.turn_lengths, other.piece_lengths) == (one.turn_lengths, one.piece_lengths)
        first, *others = one.pieces
        further = [Piece(start + extra, own, stop + extra) for start, own, stop in others]
        assert other.pieces == [Piece(0, 0, first.stop + extra), *further]
        assert other.text == "".join(map(str, prompt[len(shared) :])) + "said"
        assert extra or other is one, "what is equal stays as it was"
