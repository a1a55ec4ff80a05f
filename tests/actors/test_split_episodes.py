"""Episodes whose row begins anew: what the engine is asked, what is recorded, and what plain passes say of every token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rlhf.actors.engine import NO_PROMPT, Completion, Request, RolloutKey
from async_rlhf.actors.environments import Call, Content
from async_rlhf.actors.environments.pool import Event
from async_rlhf.actors.environments.rendering import Rendered, Renderer
from async_rlhf.actors.environments.yields import Read
from async_rlhf.actors.loop.context import Environments
from async_rlhf.actors.loop.episodes import Episodes
from async_rlhf.actors.loop.reading import NoRoomError, next_turn
from async_rlhf.actors.loop.rollouts import FinishedRollout
from async_rlhf.actors.loop.transcript import Transcript, Turn
from async_rlhf.actors.prompts import Row, turn_seed
from async_rlhf.actors.scoring.pool import fields_of
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.actors.torch_engine.loading import load_engine
from async_rlhf.actors.torch_engine.settings import TorchEngineConfig
from async_rlhf.buffers.record import Score, Span
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.inspect.episodes import EpisodePart, _parts, lines
from async_rlhf.inspect.episodes import EpisodeTrial as Shown
from tests.actors.environments.test_environment_rendering import tokenizer
from tests.actors.scripted import (
    RIGHT,
    ROW,
    Characters,
    Scene,
    Talker,
    assert_every_token_is_that_of_a_plain_pass,
    environment_of,
    played_with_updates,
    text_of,
)
from tests.actors.torch_models import chosen_experts, own_model
from tests.actors.vllm_model import save_model


class Anew(Characters):
    """What begins with `!` is read instead of all that was before it."""

    def splits(self, prompt: Content) -> bool:
        return True

    def whole(self, prompt: Content, turns: Sequence[tuple[str, Content]], row_ids: Sequence[int]) -> Rendered:
        self.asked = list(turns), list(row_ids)
        shown = self._encode(turns[-1][1])
        return shown._replace(restarts=str(turns[-1][1]).startswith("!"))


def of(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


class Whole(Characters):
    """Every turn begins a row."""

    def splits(self, prompt: Content) -> bool:
        return True

    def whole(self, prompt: Content, turns: Sequence[tuple[str, Content]], row_ids: Sequence[int]) -> Rendered:
        return self._encode(turns[-1][1])._replace(restarts=True)


def test_a_row_that_is_first_in_the_record_begins_with_no_more_than_a_prompt_may_have() -> None:
    environment, transcript = environment_of(object(), Whole(), 6, 60, calls=True), Transcript()
    wrote = Completion(RolloutKey(0, 0, 0), np.array([4], np.int32), np.array([-1.0], np.float32), (Span(0, 1),), "stop")

    def asks(text: str) -> Turn | None:
        asked = [{"role": "user", "content": text}]
        return next_turn(transcript, Read(asked, call=Call(0, asked)), environment, 5, NO_PROMPT)

    transcript.begin(Turn(0, 0, "ask", of("ask"), trained=False))
    transcript.end(0, wrote, "")
    with pytest.raises(NoRoomError):
        asks("seven c")
    turn = asks("six ch")
    assert turn is not None and turn.row == 1
    transcript.begin(turn)
    transcript.end(1, wrote, "")
    turn = asks("as many as there is room")
    assert turn is not None and turn.row == 2


def test_the_engine_reads_on_from_where_the_row_began_anew_and_the_record_keeps_all() -> None:
    scene = Scene(1, rendering=(rendering := Anew()))
    scene.all_hear()
    (key,) = scene.keys
    scene.turn("a", "xy", version=4)
    assert [len(shown.token_ids) for shown, _ in scene.episodes.partials({})] == [4]
    assert scene.turn("b", "!all", version=5) == []
    request = scene.engine.submitted[-1]
    assert (request.prompt_ids, request.context) == (of("!all"), ()) and request.hold
    assert (request.seed, request.max_new_tokens) == (turn_seed(100, 2), 5)
    assert rendering.asked == ([("a", "xy"), ("b", "!all")], [*of("goaxyb")])
    assert scene.episodes.partials({}) == [], "what is read ahead goes on from what was read"
    scene.turn("c", "z", version=6)
    assert (scene.engine.submitted[-1].prompt_ids, scene.engine.submitted[-1].context) == (of("!all"), of("cz"))
    assert rendering.asked[1] == [*of("!allc")]
    scene.engine.end(key, of("d"), 7)
    scene.poll()
    scene.pool.ends(key)
    (played,) = scene.poll()
    rollout = played.rollout
    assert text_of(rollout.completion_ids.tolist()) == "axyb!allczd" and played.read[0] == of("go")
    anew = Span(None, 4, restarts=True)
    assert rollout.spans == (Span(4, 1), Span(None, 2), Span(5, 1), anew, Span(6, 1), Span(None, 1), Span(7, 1))
    assert (rollout.text, rollout.turn_scores) == ("axyb\n!all\nczd", (0.5,) * 3) and played.turns == ("a", "b", "c", "d")
    assert [message["content"] for message in played.messages] == ["go", "a", "xy", "b", "!all", "c", "z", "d"]
    assert fields_of(ROW, played.read[0], rollout, "d")["row_pieces"] == [[0, 0, 4], [4, 4, 11]]
    parts = _parts(played, text_of, lambda ids: [])
    assert parts[4] == EpisodePart("environment", "!all", anew=4) and [part.content for part in parts[5:]] == ["c", "z", "d"]
    assert [part.score for part in parts if part.who == "model"] == [0.5, 0.5, 0.5, None]
    assert "  reads   '!all'   (in the whole conversation: 4 tokens)" in lines(Shown(0, parts, "stop", RIGHT))


def test_all_that_a_row_begins_anew_with_counts_into_the_length_of_the_episode() -> None:
    for answer, room in (("!four", 1), ("!fives", 0)):
        scene = Scene(1, max_length=8, rendering=Anew())
        scene.all_hear()
        ended = scene.turn("ab", answer)
        if room:
            assert ended == [] and scene.engine.submitted[-1].max_new_tokens == room
        else:
            (full,) = ended
            assert (full.rollout.finish_reason, full.score, full.rollout.text) == ("context", Score(0.0), "ab")
            assert scene.engine.held == set() and scene.keys[0] not in scene.pool.live


def test_one_that_lost_its_process_after_its_row_began_anew_begins_as_it_began() -> None:
    scene = Scene(1, rendering=Anew())
    scene.all_hear()
    (key,) = scene.keys
    scene.turn("a", "!all")
    scene.pool.events.append(Event(key, None))
    scene.poll()
    scene.pool.says(key, "go")
    scene.poll()
    assert scene.engine.submitted[-1] == scene.engine.submitted[0]
    assert [len(shown.token_ids) for shown, _ in scene.episodes.partials({})] == [1]


# Turns before the user's last message are put in brackets; a tool's answer is none.
BRACKETS = """{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role[0] }}
{{- '(' ~ m.content ~ ')' if m.role == 'assistant' and loop.index0 < ns.last else m.content }}<|im_end|>
{%- endfor %}{% if add_generation_prompt %}<|im_start|>a{% endif %}"""
ANSWERS: list[Content] = [[{"role": "tool", "content": "4"}], "no", "sure?"]
TEMPERATURE = 0.8


@pytest.mark.parametrize("on_update", ["keep", "interrupt", "finish"])
def test_engine_and_learner_say_of_every_token_what_a_plain_pass_of_its_piece_says(on_update: Any, tmp_path: Path) -> None:
    made = tokenizer(BRACKETS)
    models = [own_model("llama", seed, vocab_size=len(made), max_position_embeddings=512) for seed in range(3)]
    directory = str(save_model(models[0], tmp_path / "model"))
    engine = load_engine(directory, TorchEngineConfig(slots=4), on_update=on_update, version=0)
    renderer = Renderer(made, chat=True, render="split")
    renderer.check()
    environment = environment_of(Talker(ANSWERS), renderer, 20, 400)
    episodes = Episodes(engine, lambda ids: str(made.decode(ids, skip_special_tokens=True)), Environments(environment))
    keys = [RolloutKey(0, 0, member) for member in range(6)]
    own = [Request(key, (7, 8), 3 + key.member, Sampling(temperature=TEMPERATURE), seed=key.member) for key in keys]
    episodes.begin([(Row("row", {}), 1, own)])
    done = played_with_updates(episodes, engine, models, len(keys))
    rollouts = assert_every_token_is_that_of_a_plain_pass(models, done, TEMPERATURE, on_update).rollouts
    assert {len(rollout.turn_lengths) for rollout in rollouts} == {4}
    assert {2} <= {len(rollout.restarts) for rollout in rollouts} <= {2, 3}


@pytest.mark.rest
def test_experts_of_rows_that_begin_anew_are_those_of_plain_passes_over_their_pieces(tmp_path: Path) -> None:
    made = tokenizer(BRACKETS)
    model = own_model("qwen3_moe", 1, vocab_size=len(made), max_position_embeddings=512)
    engine = TorchEngine(model, slots=4, prefill_tokens=16, record_routing=True, version=0)
    environment = environment_of(Talker(ANSWERS), Renderer(made, chat=True, render="split"), 20, 400)
    episodes = Episodes(engine, lambda ids: str(made.decode(ids, skip_special_tokens=True)), Environments(environment))
    keys = [RolloutKey(0, 0, member) for member in range(3)]
    episodes.begin([(Row("row", {}), 1, [Request(key, (7, 8), 3 + key.member, Sampling(), seed=key.member) for key in keys])])
    done: list[FinishedRollout] = []
    for _ in range(400):
        done += episodes.step()
    assert len(done) == len(keys)
    for played in done:
        rollout, at = played.rollout, 0
        assert rollout.routing is not None and len(rollout.pieces) > 1
        for piece in rollout.pieces:
            head = list(played.read[0]) if piece.start == 0 else []
            ids = [*head, *rollout.completion_ids[piece.start : piece.stop - 1].tolist()]
            np.testing.assert_array_equal(np.sort(rollout.routing[at : at + len(ids)], axis=-1), chosen_experts(model, ids))
            at += len(ids)
        assert at == len(rollout.routing)
