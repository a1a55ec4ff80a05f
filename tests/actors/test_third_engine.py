"""A third engine is one folder (`tests/third_engine/`) and one line: no file of the product is changed for it."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest

from async_rlhf.actors.engine import load_engine
from async_rlhf.actors.engine_config import ENGINES
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.cli.reference import reference
from async_rlhf.launch.placement import Host
from async_rlhf.preparation import evaluate
from async_rlhf.run.checks.memory import check_memory
from async_rlhf.run.checks.preflight import preflight
from async_rlhf.run.hosts.placement import placement_of
from async_rlhf.run.loading import dump, load
from tests.actors.test_worker import ScriptedHub, credit, worker
from tests.actors.vllm_model import SHIPPED
from tests.conftest import QUICK
from tests.third_engine.settings import ParrotEngineConfig

PARROT = {"engine": {"kind": "parrot", "says": [5, 6, 7]}}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "parrot", "tests.third_engine.settings:ParrotEngineConfig")


def test_its_keys_are_those_of_a_configuration(small: Any) -> None:
    config = small(**PARROT)
    assert isinstance(config.engine, ParrotEngineConfig) and config.engine.says == (5, 6, 7)
    assert config.engine.slots == 16, "what all engines have stays as the file and others set it"
    assert 'kind = "parrot"\nslots = 16\n' in dump(config) and load(config, {"engine.perches": 3}).engine.num_devices == 3
    assert load(config, {"engine.kind": "torch"}).engine == small().engine
    assert re.search(
        r'(?m)^`engine.kind = "parrot"`: Repeats one text.*\n\n\|.*\n\|.*\n\| `engine.says` list of int \|', reference()
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"engine.syas": [1]}, r"'engine.syas' = \[1\]: engine.kind = 'parrot' has the keys perches, says; .* 'engine.says'\?"),
        ({"engine.cuda_graphs": True}, r"engine.kind = 'parrot' has the keys perches, says; it is one of 'torch'$"),
        ({"engine.perches": 0}, r"^engine.perches = 0: Input should be greater than or equal to 1$"),
        ({"engine.says": list(range(999))}, r"^engine.says has 999 tokens, a row 108 at most: say less$"),
        ({"engine.kind": "parot"}, r"^engine.kind = 'parot': there is no such engine; did you mean 'parrot'\?$"),
        ({"generation.top_p": 0.9}, r"top_p = 0.9 cuts off .* a parrot leaves nothing out. Set generation.top_p = 1.0, or"),
    ],
)
def test_what_it_has_not_got_is_refused_with_the_nearest_choice(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(load(QUICK, PARROT), changed)


def test_a_run_asks_it_for_devices_memory_packages_and_bits(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(**PARROT, **{"engine.device": "cuda", "queue.max_staleness": 0})
    box = (Host(devices=2, device_memory=80 << 30, cpus=8),)
    placement = placement_of(config, box)
    assert placement.slots["actor-0"].devices == (0, 1)
    (_, line) = check_memory(config, box, placement)
    assert re.search(r"device 0: about .*: actor .* \(.*weights.*keys and values.*activations.*\); 1 more alike$", line)
    assert config.bits_obstacle == "engine.kind = 'parrot'; only 'torch' can"
    assert preflight(small(**PARROT)).num_prompts > 0
    monkeypatch.setattr(ParrotEngineConfig, "needs", ("feathers",))
    assert importlib.util.find_spec("feathers") is None
    with pytest.raises(
        ConfigError, match=r"engine.kind = 'parrot' needs the package feathers: pip install 'async-rlhf\[parrot\]'"
    ):
        preflight(small(**PARROT))


def test_a_worker_makes_rollouts_with_it_and_an_evaluation_judges_them(small: Any) -> None:
    config = small(**PARROT, **{"evaluation.at_end": True})
    hub = ScriptedHub([[credit(0)]], wanted=1)
    with worker(hub, load_engine(str(SHIPPED), config.served_engine, version=0)) as actor:
        assert actor.run() == "enough"
    (group,) = hub.groups
    assert [rollout.completion_ids.tolist() for rollout in group.rollouts] == [[5, 6, 7]] * 2
    assert all(rollout.versions.tolist() == [0, 0, 0] for rollout in group.rollouts)
    result = evaluate(config, model=SHIPPED)
    assert (result["num_prompts"], result["failed"], result["accuracy"]) == (8, 0, 0.0)
    assert {sample["completion"] for sample in result["samples"]} == {"234"}
