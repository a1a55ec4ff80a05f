"""A run whose prompts have images, from its rows to a checkpoint; and what is refused before one begins."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from async_rlhf import api
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.images.store import ImageStore, scratch
from async_rlhf.launch.exit_codes import CONFIGURATION
from async_rlhf.run.checks.prompts import check_reading
from async_rlhf.run.checks.subject import Subject
from async_rlhf.run.loading import load
from async_rlhf.run.run_dir import RunDir
from tests import image_models
from tests.async_rlhf.test_synchronous import NUM_STEPS, drawn_kills, measured, trained
from tests.conftest import QUICK, SPELLER, Start, Training, assert_whole, output_of, sets

SHAPES = QUICK.parent / "shapes.toml"
NAMER = QUICK.parent / "models" / "tiny-namer"
FEW: dict[str, Any] = {
    "max_steps": 4, "data.held_out": 8, "generation.group_size": 4, "engine.slots": 16, "learner.batch_size": 16,
    "checkpoint.save_every": 2, "evaluation.at_start": False, "stall_timeout_s": 240.0, "queue.lease_s": 5.0,
}  # fmt: skip


@pytest.mark.parametrize("on_update", ["keep", "interrupt"])
def test_a_run_learns_from_images_and_its_checkpoint_reads_them(on_update: str, tmp_path: Path) -> None:
    trains = on_update == "interrupt"
    own = {"output_dir": str(tmp_path), "generation.on_update": on_update, "learner.train_vision": trains, "loss.kl_coef": 0.01}
    config = load(SHAPES, {**FEW, **own, "scoring.stages.reference.placement": "learner"})
    result = api.train(config, quiet=True)
    assert len(result.metrics) == 4 and result.checkpoint is not None
    for record in result.metrics:
        assert record["mismatch/abs_log_ratio"] is None or record["mismatch/abs_log_ratio"] < 1e-5
    before, after = (load_file(path / "model.safetensors") for path in (NAMER, result.checkpoint))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("vision_model" in name for name in changed) == trains and any("text_model" in name for name in changed)
    assert (result.checkpoint / "preprocessor_config.json").is_file()
    run = json.loads((tmp_path / "shapes" / "evaluations.jsonl").read_text().splitlines()[-1])
    assert run["step"] == 4


def told(tmp_path: Path, **overrides: Any) -> str:
    own = {**FEW, "output_dir": str(tmp_path / "runs"), **overrides}
    return " ".join(output_of(CONFIGURATION, "check", SHAPES, *sets(own)).split())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"engine.kv.policy": "window", "engine.kv.window": 8},
            "with engine.kv.policy = 'window'; set engine.kv.policy = 'full'",
        ),
        ({"learner.compile": True}, "prompts have images, with learner.compile = true, which is for text"),
        ({"model": str(SPELLER)}, "reads no images, and this run has some"),
        ({"generation.max_prompt_length": 10}, "prompt 0 has 11 tokens (1200 prompts are too long)"),
    ],
)
def test_what_cannot_read_images_is_refused_before_the_run(overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert message in told(tmp_path, **overrides)


def changed_model(tmp_path: Path, *without: str, template: str | None = None) -> str:
    model = shutil.copytree(NAMER, tmp_path / "model", ignore=shutil.ignore_patterns(*without))
    if template is not None:
        (model / "chat_template.jinja").write_text(template)
    return str(model)


def test_a_model_directory_that_cannot_prepare_images_is_refused_before_the_run(tmp_path: Path) -> None:
    model = changed_model(tmp_path, "preprocessor_config.json", "processor_config.json")
    assert "has no preprocessor_config.json, by which images are prepared" in told(tmp_path, model=model)


@pytest.mark.parametrize("family", ["idefics3", "qwen2_5_vl", "gemma3"])
def test_adapters_alone_that_find_no_weights_in_the_files_are_refused_before_the_run(family: str, tmp_path: Path) -> None:
    image_models.make(family, tmp_path / "model")
    own = {"model": str(tmp_path / "model"), "generation.max_prompt_length": 400, "output_dir": str(tmp_path / "runs")}
    arguments = sets({**FEW, **own, "learner.lora.rank": 2, "learner.lora.publish": "adapter"})
    printed = " ".join(output_of(0 if family == "idefics3" else CONFIGURATION, "check", SHAPES, *arguments).split())
    told = "have no tensor 'model.language_model.layers.0.self_attn.q_proj.weight', to which engines would add its adapter"
    assert (told in printed) == (family != "idefics3"), printed


def test_a_template_without_places_is_refused_before_the_run(tmp_path: Path) -> None:
    model = changed_model(tmp_path, template="{% for m in messages %}{{ m['role'] }}{% endfor %}?")
    assert "the model's chat template writes 0 places ('<image>') for 1 images" in told(tmp_path, model=model)


# hiyouga/EasyR1 267: a prompt was cut within its images.
def test_prompts_too_long_with_their_images_are_left_out(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (QUICK.parent / "shapes" / "drawings.jsonl").read_text().splitlines()[:40]]
    for row in rows[::2]:
        row["image"] = [row["image"]] * 3
    (file := tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {
        **FEW,
        "data.source": str(file),
        "data.on_overlong": "drop",
        "generation.max_prompt_length": 20,
        "output_dir": str(tmp_path / "runs"),
    }
    printed = output_of(0, "check", SHAPES, *sets(own))
    assert "20 prompts are left out: they are too long" in printed


def test_the_deep_check_holds_engine_and_learner_to_made_up_images() -> None:
    printed = output_of(0, "check", SHAPES, "--deep")
    assert "images: engine and learner give the log-probabilities of plain passes behind two made-up ones." in printed


def test_a_run_is_resumed_with_the_images_that_it_keeps(tmp_path: Path) -> None:
    config = load(SHAPES, {**FEW, "output_dir": str(tmp_path), "max_steps": 2})
    api.train(config, quiet=True)
    kept = ImageStore(tmp_path / "shapes" / "data" / "images")
    assert len([*kept]) == 1200
    for digest in scratch():
        scratch().path(digest).unlink()
    result = api.train(load(SHAPES, {**FEW, "output_dir": str(tmp_path), "max_steps": 3}), quiet=True, resume=True)
    assert [record["step"] for record in result.metrics][-1] == 3


PLAYS = '''
from async_rlhf import Score, environment

@environment(max_turns=4)
def turns(prompt, images, answer):
    """The drawing of the row, the same turned, and a question about both."""
    said = [(yield prompt)]
    turned = {"type": "image", "image": images[0].transpose(0)}
    said.append((yield [{"role": "user", "content": [turned, {"type": "text", "text": "What is it?"}]}]))
    said.append((yield "What is it?"))
    yield Score(sum(each.split()[:1] == answer.split()[:1] for each in said) / len(said))

def looks(completion, images, messages):
    assert len(images) == 2 and images[0].transpose(0).tobytes() == images[1].tobytes()
    return 0.0
'''


@pytest.mark.parametrize("engine", ["torch", pytest.param("vllm", marks=pytest.mark.rest)])
def test_a_run_learns_from_episodes_with_images_at_staleness_0_and_shows_them(engine: str, tmp_path: Path) -> None:
    (tmp_path / "plays.py").write_text(PLAYS)
    own: dict[str, Any] = {
        "output_dir": str(tmp_path), "environment.function": f"{tmp_path / 'plays.py'}:turns", "queue.max_staleness": 0,
        "rewards.functions": [f"{tmp_path / 'plays.py'}:looks"], "generation.max_episode_length": 96, "data.images": True,
    }  # fmt: skip
    if engine == "vllm":
        pytest.importorskip("vllm")
        image_models.make("idefics3", tmp_path / "model", wide=True)  # with heads that its CPU build computes
        own |= {"model": str(tmp_path / "model"), "engine.kind": "vllm", "engine.kv_bytes": 1 << 27}
        own |= {"generation.max_prompt_length": 512, "generation.max_episode_length": 1024}
    result = api.train(load(SHAPES, {**FEW, **own}), quiet=True)
    assert len(result.metrics) == 4
    for record in result.metrics:
        assert record["mismatch/abs_log_ratio"] is not None and record["mismatch/abs_log_ratio"] < 1e-5
        assert record["rewards/failed_ratio"] == record["staleness/max"] == 0 and record["episodes/mean_turns"] == 3
        assert record["episodes/mean_restarts"] == 1
    output = output_of(0, "rollouts", "show", result.run_dir, "--step", "1", "--json")
    group = json.loads(output.splitlines()[0])
    store = ImageStore(tmp_path / "shapes" / "data" / "images")
    for rollout in group["rollouts"]:
        row, again, turned = [*group["images"], *rollout["images"]]
        assert row == again and store.open(turned["digest"]).transpose(0).tobytes() == store.open(row["digest"]).tobytes()
    shown = output_of(0, "rollouts", "show", result.run_dir, "--step", "1")
    assert f"  image 2: 24 x 24, {store.path(turned['digest'])}" in shown


def test_a_run_learns_from_images_that_come_through_a_spool(tmp_path: Path) -> None:
    (spool := tmp_path / "spool").mkdir()
    rows = (SHAPES.parent / "shapes" / "drawings.jsonl").read_text().splitlines()[:8]
    broken = json.dumps({"prompt": "What is it?", "image": "data:image/png;base64,YWJj", "answer": "red cross"})
    (spool / "rows.jsonl").write_text("\n".join([*rows, broken]) + "\n")
    (spool / "END").touch()
    own = {"output_dir": str(tmp_path), "data.source": f"spool:{spool}", "data.images": True, "data.held_out": "none"}
    config = load(SHAPES, {**FEW, **own, "max_steps": 2, "evaluation.at_end": False})
    result = api.train(config, quiet=True)
    assert [record["rewards/failed_ratio"] for record in result.metrics] == [0, 0]
    run = tmp_path / "shapes" / "data"
    assert len(set(ImageStore(run / "images"))) <= 8 and "png" not in (run / "spool" / "stream.jsonl").read_text()
    (rejected,) = (run / "spool" / "rejected").iterdir()
    assert "image 1: 'data:image/png;base64,YWJj': it is no image" in rejected.read_text()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"launch.kind": "ray"},
            "with several machines (launch.kind, placement.hosts): those that come while it",
        ),
        ({"model": str(SPELLER)}, "reads no images, and this run has some"),
    ],
)
def test_where_images_cannot_come_while_a_run_goes_on_is_said_before_it_begins(
    overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "a"}\n' * 9)
    (tmp_path / "plays.py").write_text(PLAYS)
    text = {"data.source": str(tmp_path / "rows.jsonl"), "data.images": True, "data.held_out": 0, "rewards.functions": []}
    plays = {"environment.function": f"{tmp_path / 'plays.py'}:turns"}
    with pytest.raises(ConfigError) as refused:
        check_reading(Subject(load(SHAPES, {**FEW, **text, **plays, **overrides})))
    assert message in str(refused.value)


@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.rest)], ids=["frozen", "trained"])
def test_with_staleness_0_kills_change_no_bit_of_what_is_learned_from_images(
    trains: bool, command: Start, tmp_path: Path
) -> None:
    found, settings = [], {"max_steps": NUM_STEPS, "queue.max_staleness": 0, "learner.train_vision": trains}
    for name, kills in (("whole", []), ("killed", drawn_kills(0))):
        own = {**FEW, **settings, "name": name, "output_dir": str(tmp_path), "checkpoint.save_every": 3}
        started = command("train", str(SHAPES), *sets(own), kind=Training)
        assert isinstance(started, Training)
        started.run = run = RunDir(tmp_path / name)
        for step, role in kills:
            started.reach(step)
            started.end(role)
        output = started.ends_with(0)
        assert output.count("signal 9") == output.count("starting it again") == len(kills), output
        assert_whole(run.path, NUM_STEPS)
        bits = run.bits()
        assert bits is not None and bits.digest and not bits.obstacle
        found.append((trained(run.path), measured(run.path), bits))
    assert found[0] == found[1]
