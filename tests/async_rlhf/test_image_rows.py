"""A run with images in its prompts keeps them beside its rows: all open the same, and what cannot take them says so first."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from async_rlhf import try_rewards
from async_rlhf.actors.data.rows import load_rows
from async_rlhf.actors.data.tokens import PromptLengths
from async_rlhf.actors.environments import EnvironmentConfig
from async_rlhf.actors.environments.server import EnvironmentServer
from async_rlhf.actors.prompts import Row, from_json
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.images.decoding import digest_of
from async_rlhf.buffers.images.store import ImageStore
from async_rlhf.buffers.spool.claims import RejectedLine
from async_rlhf.inspect.rollouts import records
from async_rlhf.launch.program import Node
from async_rlhf.preparation import rows_of
from async_rlhf.run.checks.evaluation import check_prompts
from async_rlhf.run.checks.rows import check_all_columns, check_images
from async_rlhf.run.checks.spool import RowCheck
from async_rlhf.run.checks.subject import Subject
from async_rlhf.run.config import Config
from async_rlhf.run.hosts import node_files
from async_rlhf.run.processes.evaluation import evaluated_rows
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_data import RunData
from async_rlhf.run.run_dir import RunDir
from async_rlhf.watch.run import WatchedRun
from tests.actors.served import running
from tests.conftest import output_of

MANY = 12
CODE = """
from async_rlhf import Score, environment, reward

@environment
def plays(prompt):
    yield prompt
    yield Score(1.0)

def looks(completion, images, answer): return float(len(images))
def looks_at_one(completions, image, **kwargs): return [1.0] * len(completions)
"""


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (20, 30, 3), np.uint8))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Rows with two images each, of three in all, beside their file, and code."""
    folder = tmp_path / "data"
    folder.mkdir()
    for seed in range(3):
        picture(seed).save(folder / f"{seed}.png")
    rows = [{"prompt": f"q{n}", "images": [f"{n % 3}.png", "0.png"], "answer": "a"} for n in range(MANY)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "code.py").write_text(CODE)
    return folder


@pytest.fixture
def config(small: Any, data: Path) -> Callable[..., Config]:
    def make(**overrides: Any) -> Config:
        own = {"data.source": str(data / "rows.jsonl"), "data.options": {}, "data.held_out": 2}
        made: Config = small(**{**own, "rewards.functions": ["exact"], **overrides})
        return made

    return make


@pytest.fixture
def run(config: Callable[..., Config]) -> Any:
    made = RunDir.create(config(), load_rows(config().data))
    yield made
    made.retire()


def test_a_run_keeps_each_image_once_and_its_rows_name_it(run: RunDir, data: Path) -> None:
    wanted = [digest_of(picture(seed)) for seed in range(3)]
    assert sorted(run.images) == sorted(wanted)
    kept = RunData(run.path, run.config().data)
    assert [row.images for row in kept.rows[0]] == [(wanted[n % 3], wanted[0]) for n in range(MANY - 2)]
    assert [row.columns for row in kept.rows[1]] == [{"answer": "a"}] * 2
    assert kept.images.directory == run.images.directory == run.path / "data" / "images"
    lines = (run.path / "data" / "training.jsonl").read_text()
    assert "png" not in lines and max(map(len, lines.splitlines())) < 300


def test_a_run_that_goes_on_reads_the_same_images_whatever_became_of_their_files(run: RunDir, data: Path) -> None:
    before = RunData(run.path, run.config().data)
    digest, rows = before.digest, list(before.rows[0])
    picture(9).save(data / "0.png")
    (data / "1.png").unlink()
    again = RunData(run.path, run.config().data)
    assert again.digest == digest and list(rows_of(run.config(), None, True)[0]) == rows
    assert run.images.open(rows[1].images[1]).tobytes() == picture(0).tobytes()
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: image 1: '1.png': there is no file"):
        load_rows(run.config().data)


def test_a_host_that_loads_the_rows_itself_has_the_same_digest_only_where_it_has_the_same_pixels(
    run: RunDir, tmp_path: Path, data: Path
) -> None:
    kept = RunData(run.path, run.config().data).digest
    elsewhere = RunData(tmp_path / "elsewhere", run.config().data)
    picture(0).save(data / "0.png", compress_level=0)
    assert elsewhere.digest == kept and elsewhere.images.open(elsewhere.rows[0][0].images[0]).size == (30, 20)
    picture(7).save(data / "0.png")
    assert RunData(tmp_path / "elsewhere", run.config().data).digest != kept


def test_only_rows_say_whether_a_run_has_images_not_what_else_this_process_has_loaded(
    run: RunDir, small: Any, config: Callable[..., Config], tmp_path: Path
) -> None:
    own = RunData(run.path, run.config().data)
    kept_nowhere = [RunData(tmp_path / "elsewhere", each().data) for each in (config, small)]
    assert [each.has_images for each in (own, *kept_nowhere)] == [True, True, False]


def test_rows_given_again_to_a_run_that_goes_on_are_told_from_others_by_their_pixels(config: Any, run: RunDir) -> None:
    kept = RunData(run.path, run.config().data)
    rows = load_rows(config().data)
    assert kept.is_from(rows)
    other = [Row([{"role": "user", "content": [{"type": "image", "image": "0" * 32}]}], {"answer": "a"}), *rows[0][1:]]
    assert not kept.is_from((other, rows[1]))


def test_a_host_is_given_the_images_of_its_rows(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run.config()
    for role in ("actor", "learner_rank", "scorer"):
        given = node_files.pack(config, Node(role, role, ("ipc://{sockets}/relay",), tmp_path / "log"), str(tmp_path / "there"))
        sent = {name: path for name, path in given.files.items() if "images" in name}
        wanted = {f"data/images/{digest}": run.images.path(digest) for digest in run.images} if role != "scorer" else {}
        assert sent == wanted
    monkeypatch.setattr(node_files, "MAX_FILES", 2)
    with pytest.raises(ValueError, match=r"gets \d+ files, images of prompts among them; highest: 2"):
        node_files.pack(config, Node("actor", "actor", ("ipc://{sockets}/relay",), tmp_path / "log"), "/there")


def test_an_evaluation_with_rows_of_its_own_brings_its_images_into_the_run(config: Any, data: Path) -> None:
    picture(5).save(data / "5.png")
    (data / "test.jsonl").write_text(json.dumps({"prompt": "q", "image": "5.png", "answer": "a"}) + "\n")
    made = config(**{"evaluation.source": str(data / "test.jsonl")})
    run = RunDir.create(made, load_rows(made.data))
    (row,), _ = evaluated_rows(run, made)
    assert row.images == (digest_of(picture(5)),) and run.images.open(*row.images).tobytes() == picture(5).tobytes()
    run.retire()


def test_equal_text_about_other_images_is_another_prompt(config: Any, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one question about many pictures: none but those of the same picture repeat what is held out."""
    rows = [{"prompt": "What?", "image": f"{n % 3}.png", "answer": "a"} for n in range(3)] + [
        {"prompt": "What?", "image": "1.png", "answer": "a"}
    ]
    (data / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    subject = Subject(config(**{"data.held_out": 1}))
    monkeypatch.setattr(Subject, "texts", ["What?"] * 4)
    monkeypatch.setattr(Subject, "lengths", PromptLengths({}, [], [], 0))
    assert subject.repeated == {1}


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"rewards.functions": ["reward_model"]}, "prompt 0 has images, and the model of stage 'reward_model' reads text only"),
        (
            {"loss.kl_coef": 0.1, "scoring.stages.reference.placement": "actor"},
            "the model of stage 'reference' reads text only; set scoring.stages.reference.placement",
        ),
    ],
)
def test_what_reads_text_only_is_refused_before_the_run(config: Any, data: Path, overrides: Any, says: str) -> None:
    own = {
        key: value.replace("CODE", f"{data}/code.py") if isinstance(value, str) else value for key, value in overrides.items()
    }
    model = {"rewards.options.reward_model.path": "tiny-speller"} if "reward_model" in str(overrides) else {}
    with pytest.raises(ConfigError, match=says):
        list(check_images(Subject(config(**own, **model))))


@pytest.fixture
def server(data: Path) -> Iterator[str]:
    """The address at which `plays` is served."""
    own = EnvironmentConfig(function=f"{data}/code.py:plays")
    server = EnvironmentServer(own.spec(data), own, "tcp://127.0.0.1:*")
    with running(server):
        yield f"remote:{server.address}"


def test_rows_with_images_are_played_here_and_not_by_a_server_which_has_none(config: Any, data: Path, server: str) -> None:
    list(check_images(Subject(config(**{"environment.function": f"{data}/code.py:plays"}))))
    with pytest.raises(ConfigError, match="environment 'plays', which is served, plays it: a server has no images of a run"):
        list(check_images(Subject(config(**{"environment.function": server}))))


def test_rules_hold_for_the_rows_of_an_evaluation_too(config: Any, data: Path, server: str) -> None:
    (data / "text.jsonl").write_text('{"prompt": "q", "answer": "a"}\n{"prompt": "r", "answer": "a"}\n')
    own = {"data.source": str(data / "text.jsonl"), "data.held_out": 0, "evaluation.source": str(data / "rows.jsonl")}
    subject = Subject(config(**own, **{"environment.function": server}))
    with pytest.raises(ConfigError, match=r"evaluation\.source: prompt 0 has images, and environment 'plays', which is served"):
        check_prompts(subject)


def test_where_images_may_come_what_reads_text_only_is_refused(config: Any) -> None:
    reads_text = {"loss.kl_coef": 0.1, "scoring.stages.reference.placement": "actor"}
    text = json.dumps({"prompt": "q", "answer": "a"})
    Path(config().data.source).write_text(f"{text}\n" * 4)
    list(check_images(Subject(config(**reads_text))))
    with pytest.raises(ConfigError, match=r"data\.images = true, and the model of stage 'reference' reads text only"):
        list(check_images(Subject(config(**reads_text, **{"data.images": True}))))


def test_a_reward_that_asks_for_images_is_known_to_get_them(config: Any, data: Path) -> None:
    looks = {"rewards.functions": [f"{data}/code.py:looks"]}
    check_all_columns(Subject(config(**looks)))
    with pytest.raises(ConfigError, match="reward 'looks_at_one' asks for 'image', which is neither"):
        check_all_columns(Subject(config(**{"rewards.functions": [f"{data}/code.py:looks_at_one"]})))
    (data / "rows.jsonl").write_text('{"prompt": "q", "answer": "a"}\n' * 4)
    with pytest.raises(ConfigError, match="reward 'looks' asks for 'images', which is neither"):
        check_all_columns(Subject(config(**looks)))
    (data / "rows.jsonl").write_text('{"prompt": "q", "answer": "a"}\n{"prompt": "q", "answer": "a", "image": "0.png"}\n' * 2)
    check_all_columns(Subject(config(**{"rewards.functions": [f"{data}/code.py:looks", f"{data}/code.py:looks_at_one"]})))


def test_a_reward_of_episodes_is_known_to_get_images_where_they_may_come(config: Any, data: Path) -> None:
    (data / "rows.jsonl").write_text('{"prompt": "q", "answer": "a"}\n' * 4)
    own = {"rewards.functions": [f"{data}/code.py:looks"], "data.images": True}
    check_all_columns(Subject(config(**own, **{"environment.function": f"{data}/code.py:plays"})))
    with pytest.raises(ConfigError, match="reward 'looks' asks for 'images', which is neither"):
        check_all_columns(Subject(config(**own)))


def test_a_reward_on_another_machine_is_known_to_get_no_images(config: Any) -> None:
    remote = {"rewards.functions": ["far=remote"], "rewards.options.far.address": "tcp://10.0.0.1:5000"}
    assert list(check_images(Subject(config(**remote)))) == ["reward far is served on another machine: it gets no images."]
    near = {"rewards.functions": ["near=remote"], "rewards.options.near.address": "tcp://127.0.0.1:5000"}
    assert list(check_images(Subject(config(**near)))) == []


def test_rows_of_a_spool_bring_their_images_into_the_run_or_are_set_aside(config: Any, tmp_path: Path, data: Path) -> None:
    given = {
        "data.held_out": "none",
        "model": "tiny-namer",
        "rewards.functions": [f"{data}/code.py:looks"],
        "data.source": f"spool:{data}",
    }
    kept = ImageStore(tmp_path / "kept")

    def look(row: dict[str, Any], **more: Any) -> str | RejectedLine:
        (found,) = RowCheck(config(**given, **more), kept)([json.dumps({"answer": "a", **row}).encode()])
        return found

    taken, one = {"data.images": True}, {"prompt": "q", "image": "0.png"}
    (digest,) = from_json(str(look(one, **taken))).images
    assert kept.open(digest).tobytes() == picture(0).tobytes()
    inside = base64.b64encode((data / "1.png").read_bytes()).decode()
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{inside}"}}, {"type": "text", "text": "q"}]
    assert from_json(str(look({"prompt": [{"role": "user", "content": parts}]}, **taken))).images == (digest_of(picture(1)),)
    (data / "spoilt.png").write_bytes(b"spoilt")
    for row, more, reason in (
        (one, {}, "this run takes none while it goes on: set data.images = true"),
        ({"prompt": "q", "image": "spoilt.png"}, taken, "image 1: 'spoilt.png': it is no image of a known format"),
        ({"prompt": "q", "image": "https://a.com/a.png"}, taken, "nothing is fetched while a run goes on"),
        ({"prompt": "q", "images": ["0.png"] * 8}, {**taken, "generation.max_prompt_length": 8}, "tokens with its images, the"),
        ({"prompt": "q"}, taken, "asks for 'images', which is neither"),
    ):
        rejected = look(row, **more)
        assert isinstance(rejected, RejectedLine) and reason in rejected.reason, (row, rejected)
    assert len([*kept]) == 2


def sample(images: list[str]) -> dict[str, Any]:
    rollout = {"text": "a", "tokens": [1], "scores": {}, "spans": [[0, 1]], "finish_reason": "stop"}
    about = {"step": 1, "group": 0, "attempt": 0, "actor": "actor-0", "columns": {}}
    return {**about, "prompt": "q", "images": images, "rollouts": [rollout]}


def test_what_was_trained_on_is_shown_with_its_images(run: RunDir) -> None:
    digest, gone = digest_of(picture(0)), "0" * 32
    run.samples.write_text(json.dumps(sample([digest, gone])) + "\n")
    (record,) = records(Reading(run))
    files = [str(run.images.directory / name) for name in (digest, gone)]
    assert record["images"] == [
        {"digest": digest, "size": (30, 20), "file": files[0]},
        {"digest": gone, "size": None, "file": files[1]},
    ]
    as_json, *_ = output_of(0, "rollouts", "show", run.path, "--json").splitlines()
    assert json.loads(as_json)["images"][0]["size"] == [30, 20]
    output = output_of(0, "rollouts", "show", run.path)
    assert f"  image 1: 30 x 20, {files[0]}\n  image 2: missing, {files[1]}\n" in output


def test_rewards_are_tried_on_images_of_a_file_and_on_those_of_a_run(run: RunDir, data: Path) -> None:
    rewards = [f"{data}/code.py:looks", f"{data}/code.py:looks_at_one"]
    parts = [{"type": "image", "image": "1.png"}, {"type": "text", "text": "q"}]
    objects = [
        {"prompt": "q", "images": ["0.png"], "completion": "a", "answer": "b"},
        {"prompt": [{"role": "user", "content": parts}], "completion": "a", "answer": "b"},
    ]
    (data / "tried.jsonl").write_text("".join(json.dumps(each) + "\n" for each in objects))
    assert [each.mean for each in try_rewards(rewards, data / "tried.jsonl").rewards] == [1.0, 1.0]
    with pytest.raises(ConfigError, match=r"object 1 of the data: .*'7\.png': there is no file"):
        try_rewards(rewards, [{"image": "7.png", "completion": "a", "answer": "b"}])
    own = {**sample([digest_of(picture(seed)) for seed in range(2)]), "columns": {"answer": "b"}}
    run.samples.write_text(json.dumps(own) + "\n")
    (looks,) = try_rewards(rewards[0], run.path).rewards
    assert looks.mean == 2.0 and looks.num_scored == 1


def test_the_page_shows_small_copies_of_what_lies_in_the_store_and_of_nothing_else(run: RunDir) -> None:
    secret = run.path / "data" / "secret.png"
    picture(3).save(secret)
    named = [digest_of(picture(1)), "../secret.png", str(secret), "0" * 32, 3, None]
    shown = sample(named)  # type: ignore[arg-type]
    shown["rollouts"][0]["images"] = [named[0], digest_of(picture(2))]
    run.samples.write_text(json.dumps(shown) + "\n")
    watched = WatchedRun(run)
    watched.refresh()
    (group,) = watched.completions()
    assert [image["name"] for image in group["images"]][-1] == digest_of(picture(2)), "which came in an episode"
    first, *others, last = (image["source"] for image in group["images"])
    assert all(each.startswith("data:image/jpeg;base64,") and len(each) < 4000 for each in (first, last))
    assert set(others) == {""}
    run.samples.write_text(json.dumps(sample({"no": "list"})) + "\n")  # type: ignore[arg-type]
    watched.forget()
    watched.refresh()
    assert watched.completions() == []


def test_a_store_of_a_run_without_images_is_no_directory(small: Any) -> None:
    made = small()
    run = RunDir.create(made, ([Row("a", {})], []))
    assert [*run.images] == [] and not run.images.directory.exists() and isinstance(run.images, ImageStore)
    run.retire()
