"""Settings that may hold a key stand in files of this user alone, and no message, display, tracker or other host has them."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.experiments.staleness.archive import keep_sweep
from async_rlhf.experiments.staleness.cells import given
from async_rlhf.experiments.staleness.config import SweepConfig
from async_rlhf.launch.program import rank_node
from async_rlhf.run.config import Config
from async_rlhf.run.config_keys import masked, secret_keys
from async_rlhf.run.hosts.node_files import pack
from async_rlhf.run.loading import changed, differences, dump, load, override
from async_rlhf.run.run_dir import RunDir, keep_config
from async_rlhf.run.tracking import opened
from async_rlhf.serve.queue_dir import QueueDir
from tests.conftest import output_of

KEY = "T0-SECRET"
SECRETS: dict[str, Any] = {"hooks.url": f"https://hooks.example/{KEY}", "hooks.command": ["/bin/sh", "-c", f"echo {KEY}"]}


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def values(config: Config) -> tuple[str, list[str]]:
    return config.hooks.address, config.hooks.argv


def test_the_schema_says_by_their_type_which_settings_are_secret() -> None:
    assert secret_keys(Config) == set(SECRETS)
    assert masked("hooks.url", KEY, Config) == masked("hooks", {"url": KEY}, Config) == "**********"
    assert masked("hooks.events", KEY, Config) == masked("hook", KEY, Config) == masked("name", KEY, Config) == KEY


def test_a_secret_is_kept_by_files_and_overrides_and_shown_by_nothing_else(small: Any) -> None:
    config, there = small(**SECRETS), (SECRETS["hooks.url"], SECRETS["hooks.command"])
    for again in (config, override(config, {"seed": 7}), changed(config, {"seed": 7}), load(config)):
        assert values(again) == there
    assert values(load({"hooks": config.hooks}, {"model": config.model, "data.source": config.data.source})) == there
    assert KEY in dump(config)
    shown = (repr(config), str(config.hooks), config.model_dump_json(), str(config.model_dump()), str(given(config)))
    assert KEY not in str([*shown, *differences(small(), config)]) and differences(small(), config)


def test_a_file_that_holds_a_secret_can_be_read_by_this_user_alone(small: Any, tmp_path: Path) -> None:
    run = RunDir.create(small(**SECRETS))
    run.retire()
    assert mode(run.path / "config.toml") == 0o600 and values(run.config()) == values(small(**SECRETS))
    (run.path / "config.toml").chmod(0o644)  # as earlier versions left it
    RunDir.reopen(small(**SECRETS)).retire()
    assert mode(run.path / "config.toml") == 0o600
    queue = QueueDir.made(tmp_path / "serve")
    entry = queue.submit(small(name="queued", **SECRETS), tmp_path)
    assert mode(queue.folder(entry) / "config.toml") == 0o600
    keep_config(small(), tmp_path / "config.toml")
    (tmp_path / "other").touch()
    assert mode(tmp_path / "config.toml") == mode(tmp_path / "other")


def test_a_tracker_is_given_asterisks(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    got: dict[str, Any] = {}
    begun = types.SimpleNamespace(define_metric=lambda *a, **k: None)
    monkeypatch.setattr(pytest.importorskip("wandb"), "init", lambda **settings: (got.update(settings), begun)[1])
    own = {"api_key": KEY, "api_key_env": "MY_KEY", "max_tokens": 9, "url": f"http://me:{KEY}@host/v1"}
    options = {"rewards.options": {"judge": own}, "rewards.functions": ["judge.py:judge"]}
    run = RunDir.create(small(**SECRETS, **options))
    run.retire()
    monkeypatch.setenv("WANDB_MODE", "offline")
    opened("wandb", run, 1)
    assert KEY not in json.dumps(got["config"]) and got["config"]["hooks"]["url"] == "**********"
    shown = {**own, "api_key": "**********", "url": "http://**********@host/v1"}
    assert got["config"]["rewards"]["options"]["judge"] == shown


def test_another_host_is_given_none(small: Any) -> None:
    config = small(**SECRETS)
    given = pack(config, rank_node(1, "10.0.0.1:2222", config.run_dir / "log"), "/there")
    assert KEY.encode() not in b"".join(given.inline.values())


@pytest.mark.parametrize(
    "wrong", [{"hooks.url": f"htps://{KEY}"}, {"hooks.command": f"sh '{KEY}"}, {"hooks.command": [KEY]}, {"hooks.url": [KEY]}]
)
def test_what_is_wrong_with_a_secret_is_said_without_it(small_arguments: Any, wrong: dict[str, Any], small: Any) -> None:
    output = output_of(3, "check", *small_arguments(**wrong)[1:])
    assert f"{next(iter(wrong))}" in output and KEY not in output


def test_a_sweep_keeps_and_shows_asterisks(tmp_path: Path) -> None:
    sweep = SweepConfig(
        name="s", base="b.toml", results=str(tmp_path), seeds=(1,), overrides=dict(SECRETS), values={"seed": [1]}
    )
    keep_sweep(sweep, "async-rlhf sweep", 1)
    assert KEY not in (tmp_path / "sweep.json").read_text()
