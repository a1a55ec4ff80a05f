"""A checkpoint on the Hub: one commit with a card of what its run has written, nothing secret, and no accident. Real HTTP to a
stand-in on this machine. And data sets from there, whose commit a run keeps."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tomllib import loads as parse_toml
from typing import Any

import pytest
from huggingface_hub import constants

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.push.card import card
from async_rlhf.push.folders import without_folders
from async_rlhf.run.loading import changed
from async_rlhf.run.manifest import published
from async_rlhf.run.processes.evaluation import record_evaluation
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_data import RunData
from async_rlhf.run.run_dir import RunDir, keep_config
from tests.conftest import invoke, output_of
from tests.formats.sample import copied
from tests.hub_server import TOKEN, Answering, Hub, hub, serving

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # between huggingface_hub and httpx2
FILE = "/{repo_id}/resolve/{revision}/{filename}"
BASE = "/cache/hub/models--owner--base/snapshots/" + "c" * 40


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return copied(tmp_path, 3)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with hub() as made:
        monkeypatch.setattr(constants, "ENDPOINT", made.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", made.address + FILE)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setattr("huggingface_hub._commit_api.is_xet_available", lambda: False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield made


@pytest.fixture
def quick_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_rlhf.push.upload.draw", lambda runs, out: out.write_bytes(b"picture"))


def test_a_checkpoint_is_one_commit_and_what_is_there_is_only_added_to_when_that_is_asked(run: RunDir, server: Hub) -> None:
    said = output_of(0, "push", run.path, "me/speller", "--private")
    assert f"{server.address}/me/speller has 8 files at commit" in said
    [files] = server.commits["me/speller"]
    assert server.private["me/speller"] and server.messages == ["Step 2 of run run-3"]
    model = run.path / "checkpoints" / "step_000002" / "model"
    assert {name: files[name] for name in files if name not in ("README.md", "plot.png")} == {
        path.name: path.read_bytes() for path in model.iterdir()
    }
    assert files["plot.png"].startswith(b"\x89PNG")
    said = output_of(3, "push", run.path, "me/speller")
    assert "me/speller exists with other content (README.md, " in said and "--update" in said
    output_of(0, "push", model.parent, "me/speller", "--update", "--private")
    assert len(server.commits["me/speller"]) == 2
    server.private["me/speller"] = False
    assert "is public" in output_of(3, "push", run.path, "me/speller", "--update", "--private")
    assert len(server.commits["me/speller"]) == 2


def test_a_dry_run_shows_the_card_and_the_files_and_contacts_nobody(run: RunDir, server: Hub) -> None:
    record_evaluation(run, {"label": "end", "step": 2, "num_prompts": 200, "accuracy": 0.78, "mean_reward": 0.8585})
    record_evaluation(run, {"label": "end", "step": 3, "num_prompts": 200, "accuracy": 0.9, "mean_reward": 0.9})
    RunDir.reopen(run.config()).retire()  # it goes on with the code of this version
    said = output_of(0, "push", run.path / "checkpoints" / "latest", "me/speller", "--dry-run")
    assert server.requests == [] and "nothing was sent" in said
    assert "| 2 | 200 | 0.780 (0.718 to 0.832) | 0.859 |" in said and "0.900" not in said, "it is of step 2"
    assert "Oldest token trained on: 1. Tokens over the bound: 0." in said and "| 1 | 48 | 50.0% |" in said
    assert RunData(run.path, run.config().data).digest in said and "transformers 5.19.0" in said
    assert "sources a115e3cfded5 |" in said and "| versions since 2" in said
    assert f"{(run.path / 'checkpoints/step_000002/model/model.safetensors').stat().st_size:,} bytes  model.safetensors" in said
    assert str(run.path) not in said and 'function = "thrice.py:thrice"' in said
    assert said.startswith("---\nlibrary_name: transformers\n")


def test_what_came_from_the_hub_is_named_with_its_commit(run: RunDir) -> None:
    assert str(published(f"{BASE}/model.safetensors")) == f"hub:owner/base@{'c' * 40}/model.safetensors"
    assert published("/data/words.jsonl").commit == ""
    text = (run.path / "config.toml").read_text()
    (run.path / "config.toml").write_text(re.sub(r'model = ".*"', f'model = "{BASE}"', text, count=1))
    made = card(Reading(run), run.path / "checkpoints" / "step_000002", "me/x", is_adapter=False, has_picture=False)
    named = f"owner/base@{'c' * 40}"
    assert "base_model: owner/base\n" in made and f"from {named}." in made and f'model = "{named}"\n' in made


def test_a_card_names_teachers_and_each_environment_and_neither_folders_nor_who_asks_a_server(run: RunDir) -> None:
    more = {
        "scoring.reference.by_source": {"words": BASE.replace("base", "teacher")},
        "environment.by_source": {"words": {"function": "trl:/srv/tasks/words.py:Words"}},
        "rewards.by_source": {"words": ["judge"]},
        "rewards.options": {"judge": {"url": "http://me:key@host:8000/v1"}},
    }
    keep_config(changed(run.config(), more), run.path / "config.toml")
    made = card(Reading(run), run.path / "checkpoints" / "step_000002", "me/x", is_adapter=False, has_picture=False)
    assert f'words = "owner/teacher@{"c" * 40}"' in made and 'url = "http://**********@host:8000/v1"' in made
    assert "thrice.py:thrice, trl:words.py:Words" in made and "/srv" not in made
    assert parse_toml(made.partition("```toml\n")[2].partition("```")[0])["rewards"]["by_source"] == {
        "words": {"judge": "none"}
    }


def test_no_folder_of_any_name_stands_in_a_card(run: RunDir, tmp_path: Path) -> None:
    for folder in ("First Last", "[ACME] 2, Ltd", "a=b:c", "o'neil & co", "日本"):
        (secret := tmp_path / folder / "projects").mkdir(parents=True)
        gone = f"/mnt/{folder}/gone"
        more = {
            "model": f"{secret}/model",
            "data.source": f"{gone}/rows.jsonl",
            "evaluation.source": f"{secret}/held out.jsonl",
            "rewards.functions": [f"mine=verl:{secret}/judge.py:f", f"{gone}/judge.py:g"],
            "rewards.options": {"mine": {"path": f"{secret}/scorer", "run": ["sh", "-c", f"cd '{secret}' && ./judge"]}},
            "environment.by_source": {"words": {"function": f"trl:{secret}/words.py:Words"}},
            "loss.kind": f"{secret}/loss.py:own",
        }
        keep_config(changed(run.config(), more), run.path / "config.toml")
        made = card(Reading(run), run.path / "checkpoints" / "step_000002", "me/x", is_adapter=False, has_picture=False)
        assert folder not in made and str(tmp_path) not in made and "/mnt" not in made, made
        settings = parse_toml(made.partition("```toml\n")[2].partition("```")[0])
        assert settings["model"] == "model" and settings["data"]["source"] == "rows.jsonl"
        assert settings["rewards"]["functions"] == ["mine=verl:judge.py:f", "judge.py:g"]
        assert settings["rewards"]["options"]["mine"] == {"path": "scorer", "run": ["sh", "-c", "cd 'projects' && ./judge"]}


@pytest.mark.parametrize(
    "text",
    [
        "/no_think Solve 3/4 of it: {prompt}", "https://host/a b/v1", "hub:owner/name/file.jsonl", "yes/no, and/or",
        "a </think> b/c",
    ],
)  # fmt: skip
def test_what_is_no_path_stands_in_a_card_as_it_is(text: str) -> None:
    assert without_folders({"template": [text]}) == {"template": [text]}


@pytest.mark.usefixtures("quick_picture")
def test_an_adapter_names_its_base_and_goes_without_the_model(run: RunDir, server: Hub) -> None:
    checkpoint = run.path / "checkpoints" / "step_000002"
    assert "learner.lora.rank = 0" in output_of(3, "push", run.path, "me/adapter", "--adapter")
    (checkpoint / "adapter").mkdir()
    (checkpoint / "adapter" / "adapter_config.json").write_text('{"r": 4, "base_model_name_or_path": null}')
    (checkpoint / "adapter" / "adapter_model.safetensors").write_bytes(b"weights")
    assert "its base model is not on the Hub" in invoke("push", run.path, "me/adapter", "--adapter")[1]
    text = (run.path / "config.toml").read_text()
    (run.path / "config.toml").write_text(re.sub(r'model = ".*"', f'model = "{BASE}"', text, count=1))
    output_of(0, "push", run.path, "me/adapter", "--adapter")
    [files] = server.commits["me/adapter"]
    assert json.loads(files["adapter_config.json"]) == {"r": 4, "base_model_name_or_path": "owner/base", "revision": "c" * 40}
    assert "adapter_model.safetensors" in files and "tokenizer.json" in files and "model.safetensors" not in files
    assert b"base_model_relation: adapter" in files["README.md"]


@pytest.mark.usefixtures("quick_picture")
@pytest.mark.parametrize(
    ("file", "secret"),
    [("tokenizer_config.json", "hf_" + "Z9" * 17), ("model.safetensors", "in-the-environment"), ("config.json", "a path")],
)
def test_a_file_with_a_secret_stays_here(
    run: RunDir, server: Hub, monkeypatch: pytest.MonkeyPatch, file: str, secret: str
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "in-the-environment")
    path = run.path / "checkpoints" / "step_000002" / "model" / file
    path.write_bytes(path.read_bytes() + (f"{run.path}/" if secret == "a path" else secret).encode())
    monkeypatch.setattr("async_rlhf.push.upload.verified", lambda checkpoint: None)
    said = output_of(3, "push", run.path, "me/speller")
    assert f"{file} would hold " in said and "nothing is sent" in said
    assert server.requests == [] and secret not in said.replace("the path", "")


@pytest.mark.usefixtures("quick_picture")
def test_what_cannot_be_pushed_is_refused_with_the_reason(
    run: RunDir, server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("speller", "a/b/c", "me/../x", "me/", "me/a b"):
        assert "give OWNER/NAME" in output_of(3, "push", run.path, name)
    said = output_of(3, "push", tmp_path / "none", "me/speller")
    assert "is no run directory (it has no config.toml), and no checkpoint" in said
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    assert "set HF_TOKEN" in output_of(3, "push", run.path, "me/speller") and server.requests == []
    monkeypatch.setenv("HF_TOKEN", "hf_" + "0" * 34)
    said = output_of(1, "push", run.path, "me/speller")
    assert "me/speller is not pushed: " in said and "401" in said and "hf_" not in said
    (run.path / "checkpoints" / "step_000002" / "model" / "config.json").write_text("{}")
    output_of(8, "push", run.path, "me/speller")  # a torn checkpoint
    (run.path / "checkpoints" / "step_000002").rename(run.path / "checkpoints" / "left")
    assert "has no checkpoint yet" in output_of(3, "push", run.path, "me/speller")


@pytest.mark.usefixtures("quick_picture")
@pytest.mark.parametrize(
    ("parts", "pause_s", "reason"),
    [
        ([b"{}"], 0.0, "answers what no Hub does (KeyError('id'))"),
        ([b"[1]"], 0.0, "answers what no Hub does"),
        ([b" " * 1000] * 100, 0.0, "answers with more than"),
        ([b" "] * 100, 0.1, "for more than 1 s"),
        ([], 0.0, "timed out"),
    ],
    ids=["an empty object", "a list", "without an end", "in drops", "never"],
)
def test_a_server_that_is_no_hub_is_an_error_within_a_limit(
    parts: list[bytes], pause_s: float, reason: str, run: RunDir, server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    class Handler(Answering):
        def do_GET(self) -> None:
            if not parts:
                over.wait(60)
                return
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                for part in parts:
                    self.wfile.write(part)
                    over.wait(pause_s)

    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(run.path / "harnesses.json"))  # the library keeps what it reads
    monkeypatch.setattr("huggingface_hub.utils._detect_agent._registry", None)
    monkeypatch.setattr("async_rlhf.push.upload._ANSWER_S", 1.0)
    monkeypatch.setattr("async_rlhf.push.upload._ANSWER_BYTES", 50_000)
    with serving(Handler) as liar:
        monkeypatch.setattr(constants, "ENDPOINT", liar)
        said = output_of(1, "push", run.path, "me/speller")
        over.set()
    assert "me/speller is not pushed: " in said and reason in said


def test_a_data_set_of_the_hub_is_read_at_the_commit_that_the_run_keeps(server: Hub, small: Any) -> None:
    def rows(word: str) -> dict[str, bytes]:
        return {"data/train.jsonl": b"".join(json.dumps({"prompt": f"{word} {n}"}).encode() + b"\n" for n in range(40))}

    settings = {"data.options": {}, "rewards.functions": ["thrice.py:thrice"]}
    first = server.add("datasets/me/words", rows("one"))
    config = small(**settings, **{"data.source": "hub:me/words/data/train.jsonl"})
    assert str(published(config.data.source)) == f"hub:me/words@{first}/data/train.jsonl"
    run = RunDir.create(config)
    run.retire()
    kept = json.loads((run.path / "manifest.json").read_text())["published"]
    assert kept == [{"name": "me/words", "commit": first, "file": "/data/train.jsonl"}]
    second = server.add("datasets/me/words", rows("two"))
    RunDir.reopen(small(**settings, **{"data.source": "hub:me/words/data/train.jsonl"})).retire()
    with pytest.raises(ConfigError, match=f"belongs to another configuration: data.source: .*{second}"):
        RunDir.reopen(small(**settings, **{"data.source": f"hub:me/words@{second}/data/train.jsonl"}))
    for wrong, why in (("hub:me/words", "give hub:OWNER/NAME/FILE"), ("hub:me/words/none.csv", "cannot be fetched: ")):
        with pytest.raises(ConfigError, match=why):
            small(**settings, **{"data.source": wrong})
