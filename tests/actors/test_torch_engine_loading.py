"""From a directory to an engine: what is read, and what is refused before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.actors.config import EngineConfig
from async_rlhf.actors.engine import Request, RolloutKey
from async_rlhf.actors.torch_engine.loading import load_engine
from async_rlhf.buffers.errors import ConfigError, EngineError
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.experiments.doctor import families
from tests.actors.torch_models import finished


@pytest.fixture
def saved(tmp_path: Path) -> str:
    families.model("llama", vocab_size=16, max_position_embeddings=32).save_pretrained(tmp_path)
    return str(tmp_path)


def request(number: int, num_new: int = 30) -> Request:
    return Request(RolloutKey(0, 0, number), (1, 5), num_new, Sampling(), number)


def test_a_saved_model_is_served_with_its_stop_token_version_and_limits(saved: str) -> None:
    engine = load_engine(saved, EngineConfig(slots=8), version=4)
    assert engine.version == 4
    done = finished(engine, [request(number) for number in range(32)]).values()
    assert {c.finish_reason for c in done} == {"stop", "length"}
    assert all((c.token_ids[-1] == 2) == (c.finish_reason == "stop") for c in done)
    assert all(2 not in c.token_ids[:-1] for c in done)
    with pytest.raises(EngineError, match="the model holds 32"):
        engine.submit([request(0, num_new=31)])


def test_every_end_token_of_the_generation_config_stops(saved: str) -> None:
    settings = Path(saved) / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token_id": list(range(1, 16))}))
    done = finished(load_engine(saved, EngineConfig(slots=4)), [request(number) for number in range(4)]).values()
    assert all(set(c.token_ids[:-1].tolist()) <= {0} and c.token_ids[-1] != 0 for c in done)


def test_a_directory_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_engine(str(tmp_path), EngineConfig())
    (tmp_path / "config.json").write_text('{"model_type": "no-such-architecture"}')
    with pytest.raises(ConfigError, match="no causal language model"):
        load_engine(str(tmp_path), EngineConfig())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "warp:9"}, r"engine\.device = 'warp:9'"),
        ({"cuda_graphs": True}, r"engine\.cuda_graphs = true with engine\.device = 'cpu'"),
    ],
)
def test_a_device_that_is_not_there_and_graphs_without_a_gpu_are_refused(
    saved: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_engine(saved, EngineConfig(**settings))
