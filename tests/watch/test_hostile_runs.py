"""Whatever stands in the files of one run, the page shows the others, and marks that one."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_runs import made_run
from typer.testing import CliRunner

from async_rlhf.cli.commands import app
from async_rlhf.launch.run_lock import RunLock
from async_rlhf.watch.document import METRICS, listing, page, snapshot
from async_rlhf.watch.prometheus import exposition
from async_rlhf.watch.runs import Runs, as_json

NUMBERS = ["9" * 400, "-" + "9" * 400, "9" * 5000, "1e999", "NaN", "-Infinity", "9007199254740993", "-1", "0.5", "1e300"]
LEAVES = [
    *NUMBERS, "null", "true", '""', '"\\ud800"', '"\\u0000"', '"9999999999999999999999"', '"<img src=x>"', "[]", "{}", "[1]",
    '[["a"]]', '{"a": 1}', '{"version": 1}', "[" * 300 + "]" * 300, "[[0, -1], [1, 1]]", '[{"text": "t"}]', '"1"',
]  # fmt: skip
NAMES = [
    "config.toml", "metrics.jsonl", "evaluations.jsonl", "rollouts.jsonl", "events.jsonl", "changes.jsonl", "quarantine.jsonl",
    "spans/actor-0.jsonl", "ledger.json", "restarts.json", "placement.json", "manifest.json", "run.json", "lock",
]  # fmt: skip


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a good run, and a pattern of one to spoil, which has every file that is read."""
    directory = tmp_path_factory.mktemp("watched")
    made_run(directory / "runs" / "good", 4)
    pattern = made_run(directory / "pattern", 4)
    (pattern / "quarantine.jsonl").write_text('{"group": 3, "prompt": 1, "attempts": 3, "reasons": ["lost"]}\n')
    (pattern / "events.jsonl").write_text('{"time": 1.0, "event": "best", "run_dir": "x", "text": "better"}\n')
    (pattern / "placement.json").write_text('{"slots": {}}')
    (pattern / "manifest.json").write_text('{"format": 1}')
    (pattern / "run.json").write_text('{"sockets": "/nowhere"}')
    return directory


def quiet(run: Path, *verbs: str) -> dict[str, str]:
    """What each command says of a run, which ends in order and speaks to no terminal."""
    said = {}
    for verb in verbs:
        result = CliRunner().invoke(app, [*verb.split(), str(run)])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert result.exit_code in (0, 3, 8), (verb, result.exit_code, result.output)
        assert all(line.isprintable() for line in result.output.split("\n")) and "Traceback" not in result.output
        said[verb] = result.output
    return said


def seen(runs: Path, bad: str) -> None:
    """Every answer of the page, a saved one, and what commands say of the bad run, also while it lives."""
    found = Runs(runs)
    assert set(found.names()) == {"good", bad}
    for name in found.names():
        as_json({**found.state(name), "history": found.curves(name, METRICS)})
        as_json(found.completions(name))
    found.refresh()
    listed = {run["name"]: run for run in json.loads(as_json(listing(found)))["runs"]}
    assert listed["good"]["step"] == 4 and bad in listed
    assert b'async_rlhf_steps_total{run="good"} 4.0' in exposition(found)
    page(snapshot(found)).encode()
    quiet(runs / bad, "status", "stop", "rollouts show")
    if not (runs / bad / "lock").exists():
        lock = RunLock.take(runs / bad / "lock")
        quiet(runs / bad, "status")
        lock.release()


@contextmanager
def bad_run(watched: Path, name: str = "bad") -> Iterator[Path]:
    """Beside the good one, until the end of the block; then everything that is shown is looked at."""
    bad = shutil.copytree(watched / "pattern", watched / "runs" / name)
    try:
        yield bad
        seen(watched / "runs", name)
    finally:
        shutil.rmtree(bad)


@given(st.sampled_from(NAMES), st.integers(0, 1 << 32), st.integers(1, 3))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_value_in_a_file_of_one_run_blinds_the_page(watched: Path, name: str, seed: int, blows: int) -> None:
    chance = random.Random(seed)
    with bad_run(watched) as bad:
        (bad / "lock").write_text('{"host": "x", "pid": 7}') if name == "lock" else None
        text = (bad / name).read_text()
        for _ in range(blows):
            text = spoilt(text, chance, chance.choice(LEAVES))
        (bad / name).write_text(text)


def spoilt(text: str, chance: random.Random, leaf: str) -> str:
    """One value of a line, or of the file, is another; or its bytes are cut and turned."""
    if chance.random() < 0.15:
        at = chance.randrange(len(text) + 1)
        return (
            text[:at]
            + chance.choice(["", "\0", "[" * 50_000, "\udcff".encode(errors="replace").decode(), "\n{"])
            + text[at + 3 :]
        )
    lines = text.split("\n")
    number = chance.randrange(len(lines))
    if " = " in lines[number]:
        lines[number] = f"{lines[number].partition(' = ')[0]} = {leaf}"
        return "\n".join(lines)
    try:
        value = json.loads(lines[number])
        assert isinstance(value, dict | list)
    except (ValueError, AssertionError, RecursionError):
        return "\n".join([*lines[:number], leaf, *lines[number:]])
    at, mark = value, "the leaf"
    while True:  # down to some value
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key: Any = chance.choice(keys) if keys else None
        if key is None:
            break
        if not isinstance(at[key], dict | list) or chance.random() < 0.4:
            at[key] = mark
            break
        at = at[key]
    lines[number] = json.dumps(value).replace(f'"{mark}"', leaf)
    return "\n".join(lines)


@pytest.mark.parametrize("name", [*NAMES, "checkpoints/latest/model/tokenizer.json", "queue/00000001.log"])
@pytest.mark.parametrize("kind", ["pipe", "directory", "bytes"])
def test_what_is_no_file_is_marked_and_waited_for_by_nothing(watched: Path, name: str, kind: str) -> None:
    with bad_run(watched) as bad:
        path = bad / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        {"pipe": os.mkfifo, "directory": Path.mkdir, "bytes": lambda path: path.write_bytes(b"\xff\xfe\0" * 50)}[kind](path)


@pytest.mark.parametrize("name", ['"><img src=x onerror=alert(1)>{}\\', "a b", "é😀", "..a", "%2e", "run=1,b"])
def test_any_name_of_a_run_is_shown(watched: Path, name: str) -> None:
    with bad_run(watched, name):
        pass


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("= no toml", "config.toml is damaged: "),
        (f"max_steps = {'9' * 5000}\n", "config.toml is damaged: max_steps (line 1): numbers are integers from"),
    ],
)
def test_a_damaged_configuration_marks_its_run_and_names_the_place(watched: Path, content: str, problem: str) -> None:
    with bad_run(watched) as bad:
        (bad / "config.toml").write_text(content)
        summary = Runs(watched / "runs").summaries()["bad"]
        assert summary["state"] == "cannot be read" and summary["problems"][0].startswith(problem)
