"""Images that come in the first and in later turns, from environments and from agents over HTTP: what is sampled behind them
has the log-probabilities of plain transformers passes over each piece, in the engine and in the learner."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from async_rlhf.actors.engine import Completion, Request, RolloutKey
from async_rlhf.actors.environments.config import EnvironmentConfig
from async_rlhf.actors.environments.pool import EpisodePool
from async_rlhf.actors.environments.rendering import Renderer
from async_rlhf.actors.environments.worker import EpisodeImages
from async_rlhf.actors.loop.context import Environment, Environments
from async_rlhf.actors.loop.episodes import Episodes
from async_rlhf.actors.loop.rollouts import FinishedRollout, behind_one_prompt
from async_rlhf.actors.loop.transcript import Transcript, Turn
from async_rlhf.actors.prompts import Row
from async_rlhf.buffers.errors import EpisodeError
from async_rlhf.buffers.images import images_of
from async_rlhf.buffers.images.decoding import decoded, digest_of
from async_rlhf.buffers.record import Group, Rollout, Span
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.learner.batch.packing import Packing, make_micro_batches
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.config import LearnerConfig
from async_rlhf.learner.model.policy import Policy
from tests import image_models
from tests.actors.test_torch_engine_images import Served
from tests.conftest import wait_for

MEMBERS = 3
WROTE = np.array([4], np.int32), np.array([-1.0], np.float32), (Span(0, 1),)
CODE = '''
import base64, io, itertools
from PIL import Image
from async_rlhf import Score, environment
from tests import image_models
from tests.actors.agents.by_hand import post

NUMBER = itertools.count()  # of members, which one process plays

def url(number):
    return "data:image/png;base64," + base64.b64encode(drawn(number)).decode()

def drawn(number):
    return image_models.drawn(*((30, 20), (16, 44), (24, 24))[number % 3], seed=number)

def asked(*parts):
    return [{"role": "user", "content": [{"type": "text", "text": each} if isinstance(each, str) else each for each in parts]}]

@environment(max_turns=8)
def looks(act):
    yield asked("look", {"type": "image", "image": Image.open(io.BytesIO(drawn(0)))}, "what?")
    yield "and now?"
    yield asked({"type": "image", "image": drawn(1)})
    yield "so?"
    with open(f"{act}{(number := next(NUMBER))}", "wb") as file:
        file.write(drawn(2))
    yield asked("a", {"type": "image", "image": f"{act}{number}"}, {"type": "image_url", "image_url": {"url": url(3)}})
    yield Score(1.0)

@environment(max_turns=4)
def begins_with_text():
    yield "what?"
    yield asked({"type": "image", "image": drawn(0)}, "see?")
    yield Score(1.0)

@environment
def keeps(prompt, images):
    yield prompt
    yield asked({"type": "image", "image": images[0].rotate(90, expand=True)}, "turned?")
    yield Score(1.0)

def agent(llm):
    """Each member's first image is its own; each call sends the whole conversation again."""
    number, said = next(NUMBER), []
    refused = post(llm, {"messages": asked({"type": "image_url", "image_url": {"url": __file__}}, "?")})
    assert refused.status == 400 and "image 1" in refused.text and "a data URL was expected" in refused.text
    for turn in range(3):
        image = {"type": "image_url", "image_url": {"url": url(number + turn)}}
        said += asked("look", image, "what?") if turn != 1 else asked("and?")
        got = post(llm, {"model": "m", "messages": said, "max_tokens": 6})
        assert got.status == 200, got.text
        said.append({"role": "assistant", "content": got.data["choices"][0]["message"]["content"] or ""})
    post(llm, {"model": "m", "messages": asked("alone", {"type": "image_url", "image_url": {"url": url(7)}}, "?")})
    return 1.0
'''


def drawn(number: int) -> bytes:
    """As in `CODE`."""
    return image_models.drawn(*((30, 20), (16, 44), (24, 24))[number % 3], seed=number)


class Played:
    """Members of one group, played by an environment of `CODE` with the built-in engine."""

    def __init__(self, own: Served, folder: Path, name: str, row: Row, **of_environment: Any) -> None:
        (folder / "code.py").write_text(CODE)
        self.own, render, takes = own, of_environment.pop("render", "conversation"), of_environment.pop("takes", True)
        config = EnvironmentConfig(function=f"{folder / 'code.py'}:{name}", **of_environment)
        spec, tokenizer = config.spec(folder), AutoTokenizer.from_pretrained(own.directory)
        self.decode: Callable[[Any], str] = lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
        pool = EpisodePool[RolloutKey](spec, config, images=EpisodeImages.of(own.store.directory, takes))
        engine = own.engine(stop_ids={1}, slots=4)
        self.rendering = Renderer(tokenizer, True, render, images=own.processor)
        episodes = Episodes(engine, self.decode, Environments(Environment(spec, pool, self.rendering, 400, 1500)))
        prompt = (1,) if isinstance(row.prompt, str) else tuple(own.processor.encode(row.prompt, {}).ids)
        keys = [RolloutKey(0, 0, member) for member in range(MEMBERS)]
        requests = [Request(key, prompt, 6, Sampling(), seed=key.member, images=row.images) for key in keys]
        found: list[FinishedRollout] = []
        with closing(pool):
            episodes.begin([(row, 1, requests)])

            def steps() -> bool:
                found.extend(episodes.step())
                return len(found) == MEMBERS

            wait_for(steps, "the episodes")
        self.done = sorted(found, key=lambda each: each.key)

    @property
    def group(self) -> Group:
        rollouts = [played.rollout for played in self.done]
        made = behind_one_prompt([played.read for played in self.done], rollouts, self.decode, self.own.processor.place_id)
        prompt, images, members = made
        return Group(0, 0, prompt, members, Sampling(), images=images)

    def assert_plain(self) -> None:
        assert [played.score and played.score.failure for played in self.done] == [None] * MEMBERS
        group, own = self.group, self.own
        plain = image_models.plain(own.model, own.processor, group)
        rows = make_rows([group], [[0.0] * MEMBERS])
        policy = Policy(own.model, LearnerConfig(), images=own.tower)
        assert sum(int(logp.isfinite().sum()) for logp in plain) > 20
        for sharing in policy.sharings:
            policy.sharing = sharing
            learnt: dict[int, torch.Tensor] = {}
            for batch in make_micro_batches(rows, Packing(1 << 20, sharing)):
                with torch.no_grad():
                    logp = policy(batch).logp_N
                learnt |= {int(member): logp[batch.member_N == member] for member in batch.member_N.unique()}
            for member, (rollout, wanted) in enumerate(zip(group.rollouts, plain, strict=True)):
                sampled = torch.from_numpy(rollout.logprobs)
                torch.testing.assert_close(sampled, learnt[member], rtol=0, atol=1e-5)
                known = wanted.isfinite()
                torch.testing.assert_close(sampled[known], wanted[known], rtol=0, atol=1e-5)


@pytest.fixture
def served(tmp_path: Path) -> Callable[[str], Served]:
    torch.set_num_threads(1)
    return lambda family: Served(family, tmp_path / "model")


FAMILIES = ["qwen2_5_vl", "gemma3", "smolvlm", "llava_onevision"]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_environment_shows_images_in_its_first_and_in_later_turns(
    served: Callable[[str], Served], tmp_path: Path, family: str
) -> None:
    own = served(family)
    played = Played(own, tmp_path, "looks", Row("?", {"act": str(tmp_path / "seen.png")}))
    digests = [digest_of(decoded(drawn(number))) for number in range(4)]
    group = played.group
    assert group.images == (digests[0],)
    for rollout in group.rollouts:
        assert rollout.images == ((), (*digests[:2],), (*digests,)), "each row has the whole conversation's"
        assert len(rollout.turn_lengths) == 5
    played.assert_plain()
    assert set(own.store) == {*digests, *own.images}


@pytest.mark.parametrize("render", ["conversation", "split"])
def test_an_image_may_come_first_behind_text_and_what_was_written_stays_said(
    served: Callable[[str], Served], tmp_path: Path, render: str
) -> None:
    own = served("qwen3_vl")
    played = Played(own, tmp_path, "begins_with_text", Row("?", {}), render=render)
    for each, rollout in zip(played.done, played.group.rollouts, strict=True):
        _, anew = rollout.pieces
        assert rollout.images == ((), (own.store.add(image_models.drawn(30, 20)),))
        read = rollout.completion_ids[anew.start : anew.start + anew.num_prompt].tolist()
        said = [message["content"] for message in each.messages[:2]]
        assert said == ["what?", each.turns[0]] and read == own.processor.encode(each.messages[:3], {}).ids, "as a whole"
    played.assert_plain()


def test_a_row_with_images_is_played_by_an_environment_that_is_given_them_and_cuts_its_own(
    served: Callable[[str], Served], tmp_path: Path
) -> None:
    own = served("smolvlm")
    row = Row(image_models.asking(own.images[1]), {})
    played = Played(own, tmp_path, "keeps", row)
    turned = digest_of(own.store.open(own.images[1]).rotate(90, expand=True))
    for each in played.done:
        assert each.rollout.images == ((), (own.images[1], turned))
        assert each.fields(row)["images"] == [own.images[1], turned] == [*images_of(each.messages)], "as judges are given them"
    assert played.group.images == (own.images[1],)
    played.assert_plain()


def test_where_no_images_may_come_those_of_a_row_are_read_and_others_fail_by_name(
    served: Callable[[str], Served], tmp_path: Path
) -> None:
    own = served("smolvlm")
    before = set(own.store)
    played = Played(own, tmp_path, "keeps", Row(image_models.asking(own.images[1]), {}), takes=False)
    for each in played.done:
        assert each.score is not None and "this run takes none while it goes on: set data.images" in str(each.score.failure)
        assert each.read[1] == (own.images[1],) and not each.rollout.images
    assert set(own.store) == before


@pytest.mark.parametrize("family", FAMILIES[:3])
def test_an_agent_sends_images_over_http_in_its_first_and_in_later_calls(
    served: Callable[[str], Served], tmp_path: Path, family: str
) -> None:
    own = served(family)
    played = Played(own, tmp_path, "agent", Row("?", {}))
    group, digests = played.group, [digest_of(decoded(drawn(number))) for number in range(8)]
    assert not group.images and own.processor.place_id not in group.prompt_ids, "members have other images"
    assert {rollout.images[0] for rollout in group.rollouts} == {(digests[number],) for number in range(MEMBERS)}
    for rollout in group.rollouts:
        first, later, alone = rollout.images
        assert later == (*first, digests[digests.index(first[0]) + 2]) and alone == (digests[7],)
        assert len(rollout.turn_lengths) == 4, "the second call, of text, goes on with the row of the first"
    played.assert_plain()


def test_what_is_sampled_of_calls_at_once_follows_from_their_images_and_not_from_their_order() -> None:
    found = []
    for order in ((0, 1), (1, 0)):
        transcript = Transcript()
        for row, image in enumerate(order):
            transcript.begin(Turn(row, row, "", (5, 9, 9, 2), images=(f"{image}" * 32,)))
        found.append({turn.images: turn.digest for turn in transcript.turns})
        assert len({turn.digest for turn in transcript.turns}) == 2
        for turn in transcript.turns:
            transcript.end(turn.row, Completion(RolloutKey(0, 0, 0, turn.row), *WROTE, "stop"), "")
        first, second = transcript.recorded()
        assert transcript.rollout([first, second], "stop", str, True).images == ((), second[0].images)
    assert found[0] == found[1]


def test_members_share_what_stands_before_the_first_image_where_their_images_differ() -> None:
    place, rollout = 9, Rollout(*WROTE, "stop")
    cases: list[tuple[list[tuple[str, ...]], list[int], tuple[str, ...]]] = [
        ([("a",), ("b",)], [5, 1], ()), ([("a",), ("a",)], [5, 1, 9, 9, 2], ("a",)), ([("a",), ()], [5, 1], ())
    ]  # fmt: skip
    for images, wanted, shared in cases:
        prompts = [((5, 1, 9, 9, 2) if own else (5, 1, 2), own) for own in images]
        prompt, common, members = behind_one_prompt(prompts, [rollout, rollout], str, place)
        assert (prompt.tolist(), common) == (wanted, shared)
        for (ids, own), member in zip(prompts, members, strict=True):
            assert [*prompt.tolist(), *member.completion_ids.tolist()] == [*ids, 4]
            assert member.images == ((own,) if own and not shared else ())
        Group(0, 0, prompt, members, Sampling(), images=common)


@pytest.mark.parametrize("text", ["<eos>", "<|image_pad|>"])
def test_text_of_a_special_token_beside_an_image_is_refused_by_name(served: Callable[[str], Served], text: str) -> None:
    own = served("qwen2_5_vl")
    rendering = Renderer(AutoTokenizer.from_pretrained(own.directory), True, images=own.processor)
    plain, spelt = (image_models.asking(own.images[0], text=each) for each in ("what?", f"what {text}?"))
    reason = f"a message beside images has the text of {re.escape(text)}, which cannot be kept apart there".replace("|", "\\|")
    with pytest.raises(EpisodeError, match=reason):
        rendering.prompt(spelt, is_foreign=True)
    for wrote, answer in (("a", spelt), (f"a {text}", plain), ("a", f"so {text}?")):
        with pytest.raises(EpisodeError, match=reason):
            rendering.whole(plain, [(wrote, answer)], [])


def test_images_are_refused_by_name_where_none_are_taken_and_beyond_the_limit(served: Callable[[str], Served]) -> None:
    own = served("qwen2_5_vl")
    tokenizer, messages = AutoTokenizer.from_pretrained(own.directory), image_models.asking(own.images[0])
    with pytest.raises(EpisodeError, match=r"this run takes none while it goes on; set data\.images = true"):
        Renderer(tokenizer, True).whole([{"role": "user", "content": "a"}], [("a", messages)], [])
    rendering = Renderer(tokenizer, True, images=own.processor)
    with pytest.raises(EpisodeError, match="its conversation has 65 images, the limit is 64"):
        rendering.prompt(image_models.asking(*own.images[:1] * 65))
    with pytest.raises(EpisodeError, match="is missing or damaged"):
        rendering.prompt(image_models.asking("f" * 32))
    with pytest.raises(EpisodeError, match="it yielded chat messages in an episode that began as text"):
        Renderer(tokenizer, False, images=own.processor).whole("text", [("a", messages)], [])
