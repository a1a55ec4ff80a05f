"""Episodes as the actor's loop plays them: a scripted engine and environment, whatever the order of their answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rlhf.actors.engine import Engine, Request, RolloutKey
from async_rlhf.actors.environments.pool import Event
from async_rlhf.actors.loop.context import Environments
from async_rlhf.actors.loop.episodes import Episodes
from async_rlhf.actors.loop.rollouts import FinishedRollout
from async_rlhf.actors.prompts import Row, turn_seed
from async_rlhf.actors.rewards.builtins.text import length, overlong
from async_rlhf.actors.scoring.pool import Scored, fields_of
from async_rlhf.actors.torch_engine.loading import load_engine
from async_rlhf.actors.torch_engine.settings import TorchEngineConfig
from async_rlhf.buffers.record import Rollout, SamplingMask, Score, Span
from async_rlhf.buffers.sampling import Sampling
from tests.actors.scripted import (
    PROMPT,
    RIGHT,
    ROW,
    Characters,
    Scene,
    ScriptedEngine,
    ScriptedPool,
    Talker,
    environment_of,
    plain_passes,
    played_with_updates,
    text_of,
)
from tests.actors.torch_models import own_model
from tests.actors.vllm_model import save_model


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_members_begin_together_with_what_their_environment_says_first(scene: Scene) -> None:
    one, other = scene.keys
    assert scene.pool.begun == [(key, {"answer": "4", "prompt": "row", "seed": 42}) for key in scene.keys]
    scene.pool.says(other, "go")
    assert scene.poll() == [] and scene.engine.submitted == []
    scene.pool.says(one, "go")
    scene.poll()
    assert [request.key for request in scene.engine.submitted] == [one, other]
    assert all(r.prompt_ids == (ord("g"), ord("o")) and r.hold and not r.context for r in scene.engine.submitted)


def test_rows_of_each_source_are_played_by_their_own_environment_or_by_none() -> None:
    engine, pools = ScriptedEngine(), {"a": ScriptedPool(), "b": ScriptedPool()}
    environments = Environments(by_source={name: environment_of(pool, Characters(), 6, 20) for name, pool in pools.items()})
    episodes = Episodes(cast(Engine, cast(Any, engine)), text_of, environments)
    keys = {name: RolloutKey(number, 0, 0) for number, name in enumerate("abc")}
    rows = {name: Row(name, {"source": name}) for name in keys}
    episodes.begin([(rows[name], 1, [Request(key, PROMPT, 5, Sampling(), seed=0)]) for name, key in keys.items()])
    assert [pool.begun[0][0] for pool in pools.values()] == [keys["a"], keys["b"]] and episodes.num_opening == 2
    assert [request.key for request in engine.submitted] == [keys["c"]], "a prompt of its own needs nobody's answer"
    pools["b"].says(keys["b"], "go")
    assert episodes.step() == []
    engine.end(keys["b"], [65])
    engine.end(keys["c"], [66])
    (alone,) = episodes.step()
    assert alone.key == keys["c"] and alone.score is None and not pools["a"].replies
    assert pools["b"].replies == [(keys["b"], "A")]
    pools["b"].ends(keys["b"], RIGHT)
    (scored,) = episodes.step()
    assert scored.key == keys["b"] and scored.score == RIGHT
    episodes.discard([keys["a"]])
    assert not pools["a"].live and not episodes.num_opening
    none = Score()
    assert environments.scores(environments.of(rows["a"].columns), RIGHT) == {"game": RIGHT} and environments.scores(
        None, None
    ) == {"game": none}


def test_an_observation_is_read_and_what_was_sampled_keeps_its_place_and_its_version(scene: Scene) -> None:
    one, other = scene.keys
    scene.all_hear()
    assert scene.writes(one, 1, 2, version=4) == [] and scene.pool.replies == [(one, "\x01\x02")]
    scene.pool.says(one, "xyz", score=0.5)
    scene.poll()
    again = scene.engine.submitted[-1]
    assert (again.key, again.prompt_ids, again.context) == (one, (103, 111), (1, 2, 120, 121, 122))
    assert again.seed == turn_seed(100, 1) != 100 and again.max_new_tokens == 5 and again.hold
    scene.writes(one, 9, version=5, reason="length")
    scene.pool.ends(one)
    (played,) = scene.poll()
    rollout = played.rollout
    assert rollout.completion_ids.tolist() == [1, 2, 120, 121, 122, 9] and len(rollout.logprobs) == 3
    assert rollout.spans == (Span(4, 2), Span(None, 3), Span(5, 1))
    assert (rollout.finish_reason, played.score, played.rollout.turn_scores) == ("length", RIGHT, (0.5,))
    assert (played.rollout.text, played.turns, played.prompt) == ("\x01\x02xyz\t", ("\x01\x02", "\t"), "go")
    fields = played.fields(ROW)
    contents = [(message["role"], message["content"]) for message in fields["messages"]]
    assert fields["messages"][played.num_prompt :] == fields["completion_messages"]
    assert fields["completion_messages"][0]["role"] == "assistant"
    assert contents == [("user", "go"), ("assistant", "\x01\x02"), ("user", "xyz"), ("assistant", "\t")]
    assert fields["model_prompt"] == "go\x01\x02xyz", "an episode of text is read as one"
    assert replace(played, is_chat=True).fields(ROW)["model_prompt"] == fields["messages"][:-1]
    assert played.steps == ((1.0, 2.0), (1.0, 2.0), (2.0, 3.0))
    assert scene.engine.held == set() and other in scene.engine.requests


def test_what_a_limit_ends_has_the_score_of_the_limit() -> None:
    scene = Scene(max_length=6, max_turns=2)
    one, other = scene.keys
    scene.all_hear()
    for key in scene.keys:
        scene.writes(key, 1, 2)
    scene.pool.says(one, "four")  # leaves no room for a token
    scene.pool.says(other, "abc")
    (full,) = scene.poll()
    assert (full.rollout.finish_reason, full.score, full.rollout.completion_ids.tolist()) == ("context", Score(0.0), [1, 2])
    assert one not in scene.pool.live and scene.engine.held == set()
    (*_, first, last) = scene.engine.submitted
    assert last.max_new_tokens == 1 and first.hold and not last.hold, "nothing is held of the last turn that there may be"
    scene.writes(other, 5, reason="length")
    scene.pool.ends(other, None, "max_turns")
    (late,) = scene.poll()
    assert (late.rollout.finish_reason, late.score) == ("max_turns", Score(0.0))


@pytest.mark.parametrize(
    ("spoil", "failure"),
    [
        (lambda pool, key: pool.ends(key, Score(failure="raised"), "failed"), "raised"),
        (lambda pool, key: pool.ends(key, None, "returned"), "before the model wrote"),
        (lambda pool, key: pool.says(key, "no"), "must see the same first observation"),
    ],
)
def test_a_member_without_a_prompt_is_sampled_for_one_token_and_failed(
    scene: Scene, spoil: Callable[[ScriptedPool, RolloutKey], None], failure: str
) -> None:
    one, other = scene.keys
    scene.pool.says(one, "go")
    spoil(scene.pool, other)
    scene.poll()
    first, second = scene.engine.submitted
    assert (first.prompt_ids, first.max_new_tokens) == (second.prompt_ids, 5) and second.max_new_tokens == 1
    (played,) = scene.writes(other, 1, reason="length")
    assert played.score is not None and played.score.failure is not None and failure in played.score.failure
    assert scene.pool.live == {one}


@pytest.mark.parametrize("said", ["much too long", ""])
def test_where_no_member_has_a_usable_prompt_they_have_that_of_the_row(scene: Scene, said: str) -> None:
    scene.all_hear(said)
    assert [(r.prompt_ids, r.max_new_tokens) for r in scene.engine.submitted] == [(PROMPT, 1)] * 2
    for key in scene.keys:
        scene.engine.end(key, [1], reason="length")
    failures = [played.score.failure for played in scene.poll() if played.score is not None]
    assert len(failures) == 2 and all("tokens" in str(failure) for failure in failures)


@pytest.mark.parametrize(("content", "failure"), [("", "empty"), ("?", "no template takes")])
def test_an_observation_that_cannot_be_read_fails(scene: Scene, content: str, failure: str) -> None:
    scene.all_hear()
    scene.writes(scene.keys[0], 1)
    scene.pool.says(scene.keys[0], content)
    (played,) = scene.poll()
    assert played.score is not None and failure in str(played.score.failure) and scene.keys[0] not in scene.pool.live


def test_one_that_lost_its_process_begins_again_as_it_began(scene: Scene) -> None:
    one, other = scene.keys
    scene.all_hear()
    scene.writes(one, 1, 2)
    scene.pool.events.append(Event(one, None))
    scene.poll()
    assert scene.pool.begun[-1] == scene.pool.begun[0]
    scene.pool.says(one, "go")
    scene.poll()
    assert scene.engine.submitted[-1] == scene.engine.submitted[0], "the same seeds, the same prompt"
    scene.writes(one, 1)
    scene.pool.ends(one)
    assert [played.rollout.completion_ids.tolist() for played in scene.poll()] == [[1]] and other in scene.engine.requests


def test_one_that_is_lost_before_its_turn_has_gone_to_the_engine_has_one_turn(scene: Scene) -> None:
    """Its group begins, and its process ends, in what is heard at once."""
    one, other = scene.keys
    scene.pool.says(one, "go")
    scene.poll()
    scene.pool.says(other, "go")
    scene.pool.events.append(Event(one, None))
    scene.poll()
    assert [request.key for request in scene.engine.submitted] == [other]
    scene.pool.says(one, "go")
    scene.poll()
    assert [request.key for request in scene.engine.submitted] == [other, one]


def test_what_is_discarded_is_not_heard_of_again(scene: Scene) -> None:
    one, _ = scene.keys
    scene.all_hear()
    scene.writes(one, 1, 2)
    scene.pool.says(one, "late")
    assert scene.episodes.discard(scene.keys) == [2, 3], "tokens of turns that had ended, and of one that was being sampled"
    assert scene.poll() == [] and scene.pool.live == set() and scene.engine.held == set() and not scene.engine.requests


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_member_ends_once_with_its_own_turns_whatever_the_order(data: st.DataObject) -> None:
    """Members whose environments talk, end, fail and lose their process in any order."""
    scene = Scene(group_size=data.draw(st.integers(1, 4)), max_length=12)
    ended: dict[RolloutKey, FinishedRollout] = {}
    answered = dict.fromkeys(scene.keys, -1)  # the turns that the environment has heard of
    for _ in range(200):
        for played in scene.poll():
            assert played.key not in ended
            ended[played.key] = played
        if len(ended) == len(scene.keys):
            break
        turns = {key: sum(which == key for which, _ in scene.pool.replies) for key in scene.keys}
        waiting = [key for key in sorted(scene.pool.live) if answered[key] < turns[key]]
        able = sorted(waiting + list(scene.engine.requests))
        for key in data.draw(st.lists(st.sampled_from(able), min_size=1, unique=True)):
            if key in scene.engine.requests:
                most = min(3, scene.engine.requests[key].max_new_tokens)
                scene.engine.end(key, [key.member + 1] * data.draw(st.integers(1, most)), version=len(scene.engine.submitted))
                continue
            answered[key] = turns[key]
            what = data.draw(st.sampled_from(["says", "says", "ends", "fails", "lost"]))
            if what == "says" or (what == "lost" and len(scene.pool.begun) > 12):
                scene.pool.says(key, "go" if answered[key] == 0 else "a" * data.draw(st.integers(1, 3)))
            elif what == "lost":
                answered[key] = -1
                scene.pool.replies = [reply for reply in scene.pool.replies if reply[0] != key]
                scene.pool.events.append(Event(key, None))
            else:
                is_end = what == "ends"
                scene.pool.ends(key, RIGHT if is_end else Score(failure="raised"), "scored" if is_end else "failed")
    assert ended.keys() == set(scene.keys)
    assert not scene.pool.live and not scene.engine.requests and not scene.engine.held
    for key, played in ended.items():
        tokens, at = played.rollout.completion_ids.tolist(), 0
        assert len(tokens) <= 12 and played.rollout.spans[-1].version is not None
        for span in played.rollout.spans:
            given, at = tokens[at : at + span.num_tokens], at + span.num_tokens
            assert all((token == key.member + 1) == (span.version is not None) for token in given)
        assert at == len(tokens)


@pytest.mark.parametrize("on_update", ["keep", "interrupt", "finish"])
@pytest.mark.parametrize(("kind", "top_k"), [("llama", 0), ("qwen3", 5), ("gemma3_text", 5)])
def test_what_is_recorded_is_what_plain_passes_say_whenever_weights_change(
    kind: str, on_update: Any, top_k: int, tmp_path: Path
) -> None:
    """The real engine. An independent reading of the whole row, which is longer than the window of the families that have
    one."""
    models = [own_model(kind, seed) for seed in range(3)]
    engine = load_engine(
        str(save_model(models[0], tmp_path / "model")), TorchEngineConfig(slots=6), on_update=on_update, version=0
    )
    environment = environment_of(Talker(["and on", "and on"]), Characters(64), 6, 40)
    episodes = Episodes(engine, lambda ids: " ".join(map(str, ids)), Environments(environment))
    sampling = Sampling(temperature=0.8, top_k=top_k)
    for group in range(2):
        keys = [RolloutKey(group, 0, member) for member in range(3)]
        own = [Request(key, PROMPT, 4 + key.member, sampling, seed=key.member + 9 * group) for key in keys]
        episodes.begin([(ROW, 1, own)])
    done = played_with_updates(episodes, engine, models, 6)
    assert len({span.version for played in done for span in played.rollout.spans} - {None}) > 1
    for played in done:
        rollout = played.rollout
        assert (rollout.sampling_mask is not None) == (top_k > 0)
        assert [span.version is None for span in rollout.spans].count(True) == 2
        expected, exact = plain_passes(models, played, 0.8)
        np.testing.assert_allclose(rollout.logprobs[exact], expected[exact], rtol=0, atol=2e-4)
        assert exact[0] and (on_update == "keep" or exact.all())


def test_lengths_count_what_was_sampled() -> None:
    sampled = [True, False, False, True]
    assert length([1, 2, 3, 4], target=2, tolerance=2, sampled=sampled).value == 1.0
    assert overlong([1, 2, 3, 4], max_length=4, buffer=2, sampled=sampled) == 0.0 > overlong([1, 2, 3, 4], 4, 2)


def test_every_token_of_an_episode_has_a_sampling_mask_on_its_way_to_the_reference() -> None:
    mask = SamplingMask(np.array([2, 1], np.int32), np.array([5, 6, 7], np.int32))
    spans = (Span(0, 1), Span(None, 2), Span(0, 1))
    ids = np.array([5, 90, 91, 7], np.int32)
    rollout = Rollout(ids, np.zeros(2, np.float32), spans, "stop", sampling_mask=mask)
    sizes, kept = fields_of(ROW, [1], rollout, "")["sampling_mask"]
    assert np.frombuffer(sizes, "<i4").tolist() == [2, 1, 1, 1] and np.frombuffer(kept, "<i4").tolist() == [5, 6, 90, 91, 7]
    scored = Scored(RolloutKey(0, 0, 0), {}, reference=np.array([-1, -2, -3, -4], np.float32))
    judged = FinishedRollout(scored.key, rollout, ((1,), ()), ("",), score=RIGHT).judged(scored, {}, {}).rollout
    assert judged.reference is not None and judged.reference.tolist() == [-1, -4]
