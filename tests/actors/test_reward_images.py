"""A reward sees the images of its prompt: the right ones, in TRL's shape, opened where it is called, or its call fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from async_rlhf.actors.config import ScoringConfig
from async_rlhf.actors.data.config import DataConfig
from async_rlhf.actors.data.rows import load_rows
from async_rlhf.actors.engine import Partial, RolloutKey
from async_rlhf.actors.rewards import RewardSpec, resolve
from async_rlhf.actors.scoring.pool import fields_of, usable
from async_rlhf.actors.scoring.remote import is_elsewhere
from async_rlhf.actors.scoring.server import ScoringServer
from async_rlhf.actors.workers.messages import SessionStep
from async_rlhf.buffers.images.decoding import encoded
from async_rlhf.buffers.images.store import ImageStore
from async_rlhf.buffers.record import Score
from tests.actors.scored import Bench
from tests.actors.served import Peer, running

JUDGES = """
from async_rlhf.actors.rewards import reward

def value(image): return float(image.getpixel((0, 0))[0])

def trl(prompts, completions, images, **kwargs):  # as TRL's examples are written
    assert all(isinstance(each, list) for each in images) and len(images) == len(prompts)
    return [sum(map(value, each)) for each in images]

@reward(batch_size=4, batch_wait_s=60)
def batch(completions, images): return [sum(map(value, each)) for each in images]

def trl_single(completions, image, **kwargs): return [-1.0 if each is None else value(each) for each in image]

def one(completion, images): return sum(map(value, images))

@reward(scope="group")
def group(completions, images): return [value(images[0])] * len(completions)

async def waits(completion, images): return value(images[0])

def columns(completion, **columns): return float(sorted(columns) == NAMES) + len(columns["images"])

def optional(completion, images=(7,) * 7): return float(len(images))

def draws(completion, images):
    found = value(images[0])
    images[0].putpixel((0, 0), (0, 0, 0))
    return found

def blind(completion, answer): return 1.0

NAMES = ["answer", "completion_ids", "finish_reason", "images", "prompt", "prompt_ids"]
"""


def shade(value: int) -> Image.Image:
    return Image.new("RGB", (3, 2), (value, 0, 0))


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "data" / "images")


@pytest.fixture
def judges(tmp_path: Path) -> Path:
    (tmp_path / "judges.py").write_text(JUDGES)
    return tmp_path


def specs(folder: Path, *names: str) -> tuple[RewardSpec, ...]:
    return resolve([f"judges.py:{name}" for name in names], folder)


def kept(store: ImageStore, *values: int) -> list[str]:
    return [store.add(encoded(shade(value))) for value in values]


def test_each_form_of_reward_sees_the_images_of_its_own_prompt(judges: Path, store: ImageStore) -> None:
    several = ("trl", "one", "group", "waits", "optional", "columns")
    with Bench(specs(judges, *several), images=store.directory) as bench:
        (scores,) = bench.score("a", images=kept(store, 10, 7))
    assert {name: score.value for name, score in scores.items()} == {
        "trl": 17.0, "one": 17.0, "group": 10.0, "waits": 10.0, "optional": 2.0, "columns": 3.0,
    }  # fmt: skip


def test_where_no_prompt_has_images_the_defaults_of_a_reward_hold(judges: Path) -> None:
    with Bench(specs(judges, "optional", "one")) as bench:
        (scores,) = bench.score("a")
    assert (scores["optional"].value, scores["one"].value) == (7.0, 0.0), "what asks for them gets an empty list"


def test_a_batch_has_a_list_for_each_completion_also_where_a_prompt_has_no_image(judges: Path, store: ImageStore) -> None:
    with Bench(specs(judges, "batch", "trl_single"), images=store.directory) as bench:
        bench.submit(0, "a", images=kept(store, 3))
        bench.submit(1, "b")
        bench.submit(2, "c", images=kept(store, 5))
        bench.submit(3, "d", images=kept(store, 3))
        found = bench.wait()
    assert [found[key].scores["batch"].value for key in range(4)] == [3.0, 0.0, 5.0, 3.0]
    assert [found[key].scores["trl_single"].value for key in range(4)] == [3.0, -1.0, 5.0, 3.0]


def test_a_prompt_of_several_images_is_not_judged_by_its_first(judges: Path, store: ImageStore) -> None:
    with Bench(specs(judges, "trl_single"), images=store.directory) as bench:
        failure = bench.one("a", images=kept(store, 3, 4)).failure
    assert "takes one `image`, and a prompt has 2: take `images`, a list" in str(failure)


def test_what_a_reward_draws_no_other_call_sees(judges: Path, store: ImageStore) -> None:
    with Bench(specs(judges, "draws"), images=store.directory, workers=1) as bench:
        scores = bench.score("a", "b", "c", images=kept(store, 9))
    assert [score["draws"].value for score in scores] == [9.0] * 3


def test_an_image_that_was_changed_or_lost_fails_the_call_and_no_other(judges: Path, store: ImageStore) -> None:
    (changed, lost, whole) = kept(store, 1, 2, 3)
    store.path(changed).write_bytes(encoded(shade(4)))
    store.path(lost).unlink()
    with Bench(specs(judges, "one", "blind"), images=store.directory) as bench:
        for key, digest in enumerate((changed, lost, whole)):
            bench.submit(key, "a", images=[digest])
        found = bench.wait()
    assert "it was changed" in str(found[0].scores["one"].failure) and "No such file" in str(found[1].scores["one"].failure)
    assert found[2].scores["one"].value == 3.0 and [found[key].scores["blind"].value for key in range(3)] == [1.0] * 3


def test_paths_travel_to_those_that_ask_and_pixels_to_none(judges: Path, store: ImageStore) -> None:
    fields = {"completion": "a", "answer": "b", "images": [str(store.path(digest)) for digest in kept(store, 1)]}
    blind, one, single = specs(judges, "blind", "one", "trl_single")
    assert usable(blind, fields) == {"completion": "a", "answer": "b"} and usable(one, fields)["images"] == fields["images"]
    assert usable(single, fields)["images"] == fields["images"], "a reward of one image finds it in the list"
    (far, near) = resolve(
        ["far=remote", "near=remote"], judges, {"far": {"address": "tcp://host:1"}, "near": {"address": "ipc:///tmp/near"}}
    )
    assert (is_elsewhere(far), is_elsewhere(near)) == (True, False)
    assert usable(far, fields)["images"] is None and usable(near, fields)["images"] == fields["images"]


def test_the_fields_of_a_row_with_images_have_their_digests() -> None:
    (row,) = load_rows(DataConfig(source="caller", held_out=0), [{"prompt": "q", "images": [shade(5)], "answer": "b"}])[0]
    partial = Partial(RolloutKey(0, 0, 0), np.array([1], np.int32))
    fields = fields_of(row, [1], partial, "a")
    assert fields["images"] == list(row.images) and fields["prompt"] == row.prompt
    (text,) = load_rows(DataConfig(source="caller", held_out=0), [{"prompt": "q"}])[0]
    assert "images" not in fields_of(text, [1], partial, "a")


@pytest.fixture
def server(judges: Path, socket_dir: Path) -> Iterator[str]:
    address = f"ipc://{socket_dir}/reward"
    with running(ScoringServer(specs(judges, "one"), ScoringConfig(), address)):
        yield address


def test_a_reward_served_on_this_machine_opens_them_there(server: str, store: ImageStore, judges: Path) -> None:
    with Bench(resolve(["remote"], judges, {"remote": {"address": server}}), images=store.directory) as bench:
        assert bench.one("a", images=kept(store, 8)) == Score(8.0)
        assert "missing or damaged" in str(bench.one("a", images=["0" * 32]).failure)


def test_a_served_reward_opens_nothing_that_is_no_image_of_a_store(server: str, store: ImageStore, judges: Path) -> None:
    """A client names paths: what is there is shown only where name and pixels agree."""
    secret, elsewhere = judges / ("a" * 32), str(store.path(*kept(store, 6)))
    secret.write_bytes(encoded(shade(1)))
    with Peer(server) as peer:
        for number, path in enumerate((str(secret), str(judges / "judges.py"), "/dev/zero", elsewhere)):
            peer.send(SessionStep(id=number, members=[{"completion": "a", "images": [path]}]))
        answered = {message.id: message.answers[0] for message in (peer.receive() for _ in range(4))}
    assert all(answered[number].value is None for number in range(3)) and answered[3].value == 6.0
    with Peer(server) as peer:
        peer.send(SessionStep(id=1, members=[{"completion": "a", "images": None}]))
        failure = str(peer.receive().answers[0].failure)
    assert "asks for 'images', and images go to no server on another machine" in failure
    assert "it was changed" in str(answered[0].failure) and "is no digest" in str(answered[1].failure)
