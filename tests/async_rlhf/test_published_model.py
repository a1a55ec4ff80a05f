"""A model named as on the Hugging Face Hub: from the cache of huggingface_hub, whose layout is made here, or from nowhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from async_rlhf.run.config import load
from async_rlhf.run.shipped import is_name
from tests.conftest import QUICK

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """`owner/speller` in a cache, as huggingface_hub keeps it."""
    repository = tmp_path / "cache" / "models--owner--speller"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "snapshots").mkdir()
    directory = repository / "snapshots" / COMMIT
    directory.mkdir()
    for file in (QUICK.parent / "models" / "tiny-speller").iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


def check(tmp_path: Path, model: str) -> tuple[int, str]:
    """`check` of the quick configuration with this model, where no network leads anywhere."""
    done = subprocess.run(
        [sys.executable, "-m", "async_rlhf", "check", str(QUICK), "--set", f"model={model}"],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_ENDPOINT": "http://127.0.0.1:9"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_model_in_the_cache_is_used_without_a_network(tmp_path: Path, snapshot: Path) -> None:
    for name in ("owner/speller", f"owner/speller@{COMMIT}"):
        code, output = check(tmp_path, name)
        assert code == 0 and "good." in output and "fetching" not in output, output


def test_a_part_of_a_model_is_fetched_again_and_what_cannot_be_fetched_is_refused(tmp_path: Path, snapshot: Path) -> None:
    shards = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(shards))
    code, output = check(tmp_path, "owner/speller")
    assert code == 3 and "fetching owner/speller from the Hugging Face Hub" in output, output
    assert "or only a part of it could be fetched" in output
    code, output = check(tmp_path, "owner/other")
    assert code == 3 and "model = 'owner/other' is neither a directory nor a GGUF file" in output, output
    assert "cannot be fetched: " in output


def test_a_path_is_no_name(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    assert is_name("Qwen/Qwen3-0.6B", tmp_path) and is_name("owner/name@v1.0", tmp_path)
    for path in ("models/mistyped", "./models/x", "../x/y", "/x/y", "~/x", "x", "a/b/c", "Qwen/", "owner/na me"):
        assert not is_name(path, tmp_path), path


def test_a_name_that_is_overridden_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    values = tomllib.loads(QUICK.read_text()) | {"model": "owner/other"}
    assert load(values, {"model": "tiny-speller"}).model == load(QUICK).model
