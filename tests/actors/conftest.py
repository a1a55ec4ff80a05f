"""The real vLLM, started once for all tests that use it; rewards of a test file, scored in real processes."""

from __future__ import annotations

import gc
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from async_rlhf.actors.rewards import resolve
from tests.actors.scored import Bench
from tests.actors.vllm_model import SHIPPED, make_model, save_model
from tests.workers import starts_vllm

_running: list[Any] = []


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    """`bench("one other", timeout_s=4.0)`: these rewards of the test file's JUDGES."""
    (tmp_path / "judges.py").write_text(request.module.JUDGES)
    with ExitStack() as made:

        def make(rewards: str, by_source: Mapping[str, Sequence[str]] | None = None, **settings: Any) -> Bench:
            targets = [f"judges.py:{name}" for name in rewards.split()]
            return made.enter_context(Bench(resolve(targets, tmp_path), by_source, **settings))

        yield make


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """With the test file's SOURCE as `tasks.py`."""
    (tmp_path / "tasks.py").write_text(request.module.SOURCE)
    return tmp_path


@pytest.fixture(scope="session")
def judge_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model with a random head of one number."""
    directory = tmp_path_factory.mktemp("judge")
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(SHIPPED, num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def vllm_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with the weights of `make_model(0)`."""
    return save_model(make_model(0), tmp_path_factory.mktemp("vllm") / "model")


@pytest.fixture(scope="session")
def vllm_engine(vllm_directory: Path) -> Iterator[Any]:
    """A running vLLM that serves version 0, `make_model(0)`; whoever loads other weights or leaves requests puts it right."""
    if importlib.util.find_spec("vllm") is None:  # the CPU build exists for Linux only: elsewhere there is nothing to test
        pytest.skip("vLLM is not installed (`make test` installs its CPU build on Linux)")
    from async_rlhf.actors.vllm_engine.loading import load_engine
    from async_rlhf.actors.vllm_engine.settings import VLLMEngineConfig

    engine = load_engine(str(vllm_directory), VLLMEngineConfig(kind="vllm", slots=32), version=0)
    _running.append(engine)
    yield engine
    _close()


@pytest.hookimpl(trylast=True)  # after what the test's own fixtures still ask of it
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """vLLM's processes are not left to take time from tests that do not ask for them."""
    if nextitem is None or not starts_vllm(nextitem.nodeid):
        _close()


def _close() -> None:
    while _running:
        with warnings.catch_warnings():  # this may run in the teardown of any test
            warnings.simplefilter("ignore")
            _running.pop().close()
            gc.collect()  # vLLM leaves a socket context to the collector, which warns of it
