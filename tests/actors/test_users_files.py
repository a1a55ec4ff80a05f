"""Files of users: what each imports is of its own folder, and its children are started as in plain Python."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.actors.config import ScoringConfig
from async_rlhf.actors.environments import EnvironmentConfig
from async_rlhf.actors.environments.server import EnvironmentServer
from async_rlhf.actors.rewards import load, resolve
from async_rlhf.actors.scoring.server import ScoringServer
from async_rlhf.buffers.user_files import import_file
from async_rlhf.learner.registry import load as load_kind
from tests.actors.environments.played import Bench as Episodes
from tests.actors.scored import Bench as Completions
from tests.actors.served import running

JUDGE = """
import helper

def judge(completion):
    return helper.value()

def later(completion):
    import helper
    from importlib import import_module
    return 10 * helper.value() + import_module("helper").value()

def play(prompt):
    yield prompt
    from async_rlhf import Score
    from helper import value
    yield Score(value())
"""


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """a, b and c, with a judge each, whose helper has a helper, of one name in all; their values are 1, 2 and 3."""
    for number, name in enumerate("abc", 1):
        (tmp_path / name / "parts").mkdir(parents=True)
        (tmp_path / name / "judge.py").write_text(JUDGE)
        (tmp_path / name / "helper.py").write_text("def value():\n    from parts.inner import VALUE\n    return VALUE\n")
        (tmp_path / name / "parts" / "inner.py").write_text("import calendar\nVALUE = calendar.VALUE\n")
        (tmp_path / name / "calendar.py").write_text(f"VALUE = {number}.0\n")
    return tmp_path


TARGETS = [f"{name}={name}/judge.py:judge" for name in "abc"] + [f"{name}_later={name}/judge.py:later" for name in "abc"]
VALUES = {"a": 1.0, "b": 2.0, "c": 3.0, "a_later": 11.0, "b_later": 22.0, "c_later": 33.0}


def test_neighbours_of_one_name_live_beside_each_other(folders: Path) -> None:
    specs = resolve(TARGETS, folders)
    assert {spec.name: load(spec)("") for spec in specs} == VALUES
    with Completions(specs) as bench:
        assert {name: score.value for name, score in bench.score("?")[0].items()} == VALUES
    with running(ScoringServer(specs, ScoringConfig(), "tcp://127.0.0.1:*")) as server:
        options = {name: {"address": server.address, "reward_name": name} for name in VALUES}
        with Completions(resolve([f"{name}=remote" for name in VALUES], folders, options)) as bench:
            assert {name: score.value for name, score in bench.score("?")[0].items()} == VALUES


def test_an_environment_and_a_loss_see_their_own_folder(folders: Path) -> None:
    (folders / "c" / "losses.py").write_text(
        "from async_rlhf import loss\nimport helper\n@loss()\ndef own(inputs, weight_N): return helper.value(), {}\n"
    )
    assert load(resolve(["a/judge.py:judge"], folders)[0])("") == 1.0
    with Episodes(folders / "b" / "judge.py", "play") as bench:
        assert bench.play("!")[-1].score.value == 2.0
    assert load_kind("loss", f"{folders}/c/losses.py:own")(None, None)[0] == 3.0


def test_threads_that_import_files_at_once_get_each_its_own(folders: Path) -> None:
    found: dict[str, float] = {}
    begin = threading.Barrier(3)

    def work(name: str) -> None:
        begin.wait(60)
        found[name] = import_file(folders / name / "judge.py").judge("")

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {"a": 1.0, "b": 2.0, "c": 3.0}


def test_a_file_is_found_as_a_script_would_find_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "json").mkdir()  # a folder without modules: the library is meant
    (tmp_path / "time.py").write_text("raise SystemExit\n")  # a module of the interpreter itself comes first
    (tmp_path / "judge.v2.py").write_text("def version(): return 2\n")
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "__init__.py").write_text("NAME = 'package'\n")
    (tmp_path / "judge.py").write_text(
        "import json, time, judge\nfrom . import beside\nassert json.dumps and time.time\nNAMES = (judge.NAME, beside.NAME)\n"
    )
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    assert import_file(tmp_path / "judge.py").NAMES == ("package", "beside")
    assert import_file(tmp_path / "judge.v2.py").version() == 2
    found = pickle.loads(pickle.dumps(import_file(tmp_path / "judge.v2.py").version))
    assert found is import_file(tmp_path / "judge.v2.py").version


def test_a_module_that_pythons_path_has_too_is_imported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_one_of_it.py").write_text("PLACES = []\n")
    (tmp_path / "judge.py").write_text("import only_one_of_it\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_one_of_it  # type: ignore[import-not-found]

    assert import_file(tmp_path / "judge.py").only_one_of_it is only_one_of_it


STARTS = """
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import helper

@dataclass
class Task:
    number: int

def work(task, queue):
    queue.put(helper.value() * task.number)

def double(number):
    return 2 * helper.value() * number

def graded(method):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=work, args=(Task(5), queue))
    child.start()
    value = queue.get(timeout=60)
    child.join(60)
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        value += sum(pool.map(double, (1, 2)))
    ended = context.Process(target=time.sleep, args=(1000,))
    ended.start()
    ended.terminate()
    ended.join(60)
    return value if (child.exitcode, ended.exitcode) == (0, -15) else -1.0

def judge(completion):
    return graded(completion)

async def slowly(completion):
    return graded(completion)

def by_default(completion):
    queue = multiprocessing.Queue()
    child = multiprocessing.Process(target=lambda: queue.put(6.0))
    child.start()
    return queue.get(timeout=60)

def play(prompt):
    from async_rlhf import Score
    yield Score(graded((yield prompt)))
"""
METHODS = ("fork", "spawn", "forkserver")


@contextmanager
def asking(folder: Path, how: str) -> Iterator[Any]:
    """What becomes of a text, by a reward or an environment in a process of its own or of a server."""
    place, name = how.split()
    if place == "here":
        if name == "play":
            with Episodes(folder / "starts.py", name, timeout_s=100) as episodes:
                yield lambda text: episodes.play(text)[-1].score
        else:
            with Completions(resolve([f"starts.py:{name}"], folder), timeout_s=100) as completions:
                yield completions.one
    elif name == "play":
        config = EnvironmentConfig(function=f"{folder}/starts.py:play", timeout_s=100)
        spec = config.spec(folder)
        assert spec is not None
        served = EnvironmentServer(spec, config, "tcp://127.0.0.1:*")
        with running(served), Episodes(folder, f"remote:{served.address}") as episodes:
            yield lambda text: episodes.play(text)[-1].score
    else:
        specs = resolve([f"starts.py:{name}"], folder)
        with running(ScoringServer(specs, ScoringConfig(timeout_s=100), "tcp://127.0.0.1:*")) as server:
            there = {"remote": {"address": server.address}}
            with Completions(resolve(["remote"], folder, there, {"remote": {"timeout_s": 100.0}})) as completions:
                yield completions.one


@pytest.mark.parametrize("how", ["here judge", "here slowly", "here play", "server judge", "server play"])
def test_processes_that_a_file_starts_work_as_in_plain_python(folders: Path, how: str) -> None:
    (folders / "c" / "starts.py").write_text(STARTS)
    with asking(folders / "c", how) as ask:
        for method in METHODS:
            score = ask(method)
            assert (score.value, score.failure) == (33.0, None), method


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="it was fork until 3.13")
def test_the_start_method_is_pythons_own_default(folders: Path) -> None:
    (folders / "c" / "starts.py").write_text(STARTS)
    with Completions(resolve(["c/starts.py:by_default"], folders), timeout_s=100) as bench:
        assert bench.one("?").value == 6.0
