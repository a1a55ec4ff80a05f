"""A configuration's processes on pretended machines: what children see, what `check` prints, what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.launch.local import LocalLauncher, LocalProcess
from async_rlhf.launch.machine import parse, shown_devices, this_machine, visible
from async_rlhf.launch.placement import Host
from async_rlhf.launch.program import Node
from async_rlhf.preparation import prepare
from async_rlhf.run.checks.memory import check_memory
from async_rlhf.run.hosts.connections import meeting_address
from async_rlhf.run.hosts.placement import inventory_of, nodes_of, placement_of, table
from async_rlhf.run.loading import load
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.supervision.evaluator import Evaluator
from async_rlhf.run.supervision.hooks import Events
from tests.async_rlhf.test_supervisor import Heard
from tests.conftest import QUICK, SPELLER, output_of, sets

GIB = 1 << 30
BOX = {"devices": 8, "device_memory": 80 * GIB, "cpus": 64}
TWO = [BOX, {**BOX, "name": "b"}]
CUDA: dict[str, Any] = {"learner.device": "cuda", "engine.device": "cuda", "actors.count": "fill"}


def test_processes_on_two_boxes_see_their_own_devices_and_no_other(small: Any) -> None:
    config = small(**CUDA, **{"learner.ranks": 2, "placement.hosts": TWO, "evaluation.at_end": True})
    placement = placement_of(config)
    seen: dict[str, list[str]] = {"": [], "b": []}
    for name, slot in placement.slots.items():
        (found,) = visible(slot.devices, {}).values()
        if name.startswith(("learner", "actor")):
            seen[slot.host].append(found)
        else:
            assert found == ("0" if name == "evaluation" else "")
    assert seen == {"": list("01234567"), "b": list("01234567")}
    assert visible(placement.placed(Node("tracker", "tracker", (), Path("log"))).devices, {}) == {}


def test_numbers_count_what_is_shown_to_the_supervisor(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5e,MIG-7")
    slots = placement_of(small(**CUDA, **{"learner.ranks": 2}), (Host(devices=3, cpus=8),)).slots
    found = [visible(slots[name].devices, os.environ) for name in ("learner", "learner-rank-1", "actor-0")]
    assert found == [{"CUDA_VISIBLE_DEVICES": each} for each in ("3", "GPU-5e", "MIG-7")]


def test_devices_beyond_those_that_are_shown_are_refused_before_a_start(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    with pytest.raises(ConfigError, match=r"device 2 of this machine, but CUDA_VISIBLE_DEVICES = '3,5' shows 2 devices"):
        prepare(small(**CUDA, **{"placement.hosts": [BOX]}))


@pytest.mark.parametrize(
    ("listed", "shown", "found"),
    [
        ("0, GPU-a1, H200, 143771\n1, GPU-b2, L4, 23034\n", None, [("H200", 143771 << 20), ("L4", 23034 << 20)]),
        ("0, GPU-a1, H200, 143771\n1, GPU-b2, L4, 23034\n", "1", [("L4", 23034 << 20)]),
        ("0, GPU-a1, H200, 143771\n1, GPU-b2, L4, 23034\n", "GPU-b,0", [("L4", 23034 << 20), ("H200", 143771 << 20)]),
        ("0, GPU-a1, H200, 143771\n", "MIG-77", [("", None)]),
        ("0, GPU-a1, H200, [N/A]\n", "0,9,0", [("H200", None)]),
        ("0, GPU-a1, H200, 143771\n", "", []),
        ("0, GPU-a1, H200, 143771\n", "-1", []),
        ("", "0", []),
        ("", None, []),
    ],
)
def test_the_drivers_list_is_read_as_cuda_shows_it(listed: str, shown: str | None, found: list[Any]) -> None:
    assert parse(listed, shown) == found


def test_this_machine_is_looked_at_through_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho '0, GPU-a, NVIDIA H200, 143771'\necho '1, GPU-b, NVIDIA H200, 143771'\n")
    driver.chmod(driver.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    host = this_machine({})
    assert (host.devices, host.device_memory) == (2, 143771 << 20)
    assert shown_devices({}) == [("NVIDIA H200", 143771 << 20)] * 2
    assert host.cpus >= 1 and host.memory and host.memory > GIB
    assert this_machine({"CUDA_VISIBLE_DEVICES": "1"}).devices == 1
    assert this_machine({}, look_for_devices=False).devices == 0
    driver.write_text("#!/bin/sh\nexit 9\n")
    assert this_machine({}).devices == 0


@pytest.mark.parametrize("preset", ["quick", "zero3", "ppo_rlhf"])
def test_a_cpu_preset_stays_on_the_cpu_of_a_machine_with_devices(preset: str, tmp_path: Path) -> None:
    placement = placement_of(load(QUICK.parent / f"{preset}.toml"), (Host(devices=8, cpus=8),))
    assert {slot.devices for slot in placement.slots.values()} == {()}
    assert visible((), {"CUDA_VISIBLE_DEVICES": "0,1"})["CUDA_VISIBLE_DEVICES"] == ""


def test_a_model_that_judges_on_a_device_brings_the_actor_or_the_scorer_there(small: Any) -> None:
    own: dict[str, Any] = {
        "rewards.functions": ["reward_model"],
        "rewards.options": {"reward_model": {"path": str(QUICK.parent / "models/tiny-judge"), "device": "cuda"}},
    }
    box = (Host(devices=4, device_memory=80 * GIB, cpus=8),)
    beside = placement_of(small(**own), box)
    assert beside.slots["actor-0"].devices == (0,) and beside.slots["learner"].devices == ()
    config = small(**own, **{"scoring.placement": "process"})
    alone = placement_of(config, box)
    assert alone.slots["actor-0"].devices == () and alone.slots["scorer"].devices == (0,)
    device = next(line for line in check_memory(config, box, alone) if "device 0" in line)
    assert "scorer" in device and "reward_model weights" in device


def test_a_device_is_chosen_once(small: Any) -> None:
    with pytest.raises(ConfigError, match=r"engine\.device = 'cuda:1': the placement decides .* set 'cuda'"):
        placement_of(small(**{"engine.device": "cuda:1"}), (Host(devices=2),))


def test_check_says_what_a_run_will_do_where_each_process_is_and_what_it_takes(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,answer\n" + "é,a\n" * 20)
    own = {"data.source": str(tmp_path / "rows.csv"), "data.options": {}, "data.held_out": 0, "rewards.functions": ["exact"]}
    hosts = [{**BOX, "devices": 3}, {**TWO[1], "devices": 2}]
    boxes = {**CUDA, "placement.hosts": hosts, "learner.ranks": 2, "scoring.placement": "process"}
    spool = {
        **own, "data.source": f"spool:{tmp_path / 'spool'}", "data.held_out": "none", "data.epochs": 3, "max_steps": "none",
    }  # fmt: skip
    for settings, expected in (
        ({"queue.max_staleness": 4}, ["16 groups a step: at most 80 groups are generated ahead"]),
        ({"actors.count": 2}, ["memory of this machine: about .* learner .*actor 2 x "]),
        (own, ["good. 20 training prompts, 0 held out", "20 prompts have characters .* no token for, and does not see: é"]),
        (spool, ["training prompts come into", "each for 3 groups", "until it is stopped", "makes it, and waits for"]),
    ):
        output = " ".join(output_of(0, "check", QUICK, *sets(settings)).split())
        assert all(re.search(each, output) for each in expected), output
    assert not (tmp_path / "spool").exists()
    refused = "places processes on b, but launch.kind = 'local' reaches this machine only"
    assert refused in output_of(3, "check", QUICK, *sets(boxes))
    config = load(QUICK, boxes)
    inventory = inventory_of(config, ())
    placement = placement_of(config, inventory)
    shown = " ".join(" ".join([*table(config, inventory, placement), *check_memory(config, inventory, placement)]).split())
    for each in (
        "learner-rank-1 this machine 1 ",
        "actor-0 this machine 2 ",
        "actor-1 b 0 ",
        "scorer-1 b none ",
        "relay-1 b none ",
        r"evaluation this machine 0 \(when the run's processes have ended\)",
        "memory of this machine, device 0: about .* of 80.0 GiB: learner .* 1 more alike",
    ):
        assert re.search(each, shown), shown


def test_on_each_host_actors_have_a_scorer_and_where_they_are_several_a_relay(small: Any, tmp_path: Path) -> None:
    hosts = [{"cpus": 3}, {"name": "b", "cpus": 2}, {"name": "c", "cpus": 1}]
    settings = {"scoring.placement": "process", "address": "tcp://127.0.0.1:5555"}
    config = small(**settings, **{"placement.hosts": hosts, "actors.count": 4})
    run = RunDir(tmp_path)
    nodes = {node.name: node for node in nodes_of(config, placement_of(config), run, Path("/s"))}
    assert {name: (node.host, node.arguments) for name, node in nodes.items() if node.role not in ("hub", "learner")} == {
        "scorer": ("", ("ipc:///s/scorer",)),
        "scorer-1": ("b", ("ipc://{sockets}/scorer",)),
        "scorer-2": ("c", ("ipc://{sockets}/scorer",)),
        "actor-0": ("", ("ipc:///s/hub", "actor-0", "ipc:///s/scorer")),
        "actor-1": ("b", ("ipc://{sockets}/relay", "actor-1", "ipc://{sockets}/scorer")),
        "actor-2": ("b", ("ipc://{sockets}/relay", "actor-2", "ipc://{sockets}/scorer")),
        "actor-3": ("c", ("tcp://127.0.0.1:5555", "actor-3", "ipc://{sockets}/scorer")),
        "relay-1": ("b", ("tcp://127.0.0.1:5555", "ipc://{sockets}/relay")),
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"placement.hosts": [{"devices": 1, "device_memory": 1 * GIB}, {"name": "b", "devices": 1}]},
            r"learner needs about learner .*weights .* of device 0 of this machine \(1\.0 GiB\), where 1\.0 GiB are left; ",
        ),
        (
            {"placement.hosts": [{"devices": 2, "device_memory": 2 * GIB}], "engine.slots": 4096},
            r"actor-0 needs about actor .*keys and values .* of device 1 .*; nearest that fits: engine\.kv_bytes = \d+",
        ),
        ({"placement.hosts": [{"devices": 1}, {"name": "b"}, {"name": "b"}]}, "placement.hosts.*two hosts are called 'b'"),
        ({"placement.hosts": [{"name": "me@a"}, {"name": "-v"}]}, r"placement.hosts.*'-v'"),
        ({"placement.hosts": [{"devices": 1}, {"devices": 1}]}, "host 2 has no name; only the first may go without"),
        ({"actors.count": "all"}, "actors.count = 'all': it is a whole number from 1 to 1024, or \"fill\""),
    ],
)
def test_what_collides_or_does_not_fit_is_refused_with_what_does(settings: dict[str, Any], message: str) -> None:
    assert re.search(message, " ".join(output_of(3, "check", QUICK, *sets({**CUDA, **settings})).split()))


def test_vllm_gets_the_share_of_a_device_that_it_has_beside_the_learner(small: Any) -> None:
    shares = {"engine.kind": "vllm", "placement.colocate": True, "placement.actor_share": 0.4}
    box = (Host(devices=1, device_memory=80 * GIB, cpus=8),)
    config = small(**{**CUDA, **shares})
    assert config.served_engine.model_dump()["arguments"] == {"gpu_memory_utilization": 0.4}
    (line,) = [line for line in check_memory(config, box, placement_of(config, box)) if "device 0" in line]
    assert "actor 32.0 GiB" in line and "learner" in line
    config = small(**{**CUDA, **shares, "engine.arguments": {"gpu_memory_utilization": 0.6}})
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization = 0\.6 is more than placement\.actor_share = 0\.4"):
        check_memory(config, box, placement_of(config, box))


def test_an_engine_that_does_not_fit_is_offered_what_does(small: Any, tmp_path: Path) -> None:
    """By the headers of a model of 8 billion numbers: a file with a hole holds no byte of them."""
    header = json.dumps({"w": {"dtype": "BF16", "shape": [8_000_000, 1000], "data_offsets": [0, 16_000_000_000]}}).encode()
    shutil.copytree(SPELLER, model := tmp_path / "model")
    with (model / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 16_000_000_000)
    own = {"model": str(model), "engine.device": "cuda", "engine.kind": "vllm", "engine.dtype": "bfloat16"}
    config = small(**own)

    def refusal(gib: int) -> str:
        box = (Host(devices=4, device_memory=gib * GIB, cpus=8, memory=512 * GIB),)
        with pytest.raises(ConfigError) as raised:
            check_memory(config, box, placement_of(config, box))
        return str(raised.value)

    assert "actor-0 needs about actor 15.4 GiB" in (found := refusal(12)), found
    assert found.endswith("nearest that fits: engine.tensor_parallel_size = 2")
    small_machine = (Host(devices=1, device_memory=80 * GIB, cpus=8, memory=64 * GIB),)
    with pytest.raises(
        ConfigError, match=r"weights, gradients and optimizers on this machine need 119\.2 GiB, it has 64\.0 GiB"
    ):
        check_memory(config, small_machine, placement_of(config, small_machine))
    config = small(
        **{**own, "engine.device": "cpu", "engine.kind": "torch", "learner.device": "cuda", "learner.dtype": "bfloat16"}
    )
    found = refusal(80)
    assert found.startswith("learner needs about learner 1") and "where 80.0 GiB are left; nearest that fits: " in found
    assert 'learner.backend = "deepspeed", learner.zero_stage = 3, learner.ranks = 2' in found


def test_with_an_environment_its_processes_are_counted_and_what_is_held_between_turns(small: Any, tmp_path: Path) -> None:
    (tmp_path / "say.py").write_text("def say(prompt):\n    yield prompt\n")
    own = {"environment.function": str(tmp_path / "say.py:say"), "environment.workers": 2, "actors.count": 2}
    config = small(**own)
    (line,) = check_memory(config, box := (Host(cpus=8, memory=8 * GIB),), placement_of(config, box))
    assert "environment 4 x 27 MiB (each at most 4.0 GiB)" in line
    config = small(**own, **{"environment.worker_memory_mb": "none", "evaluation.every": 5})
    (line,) = check_memory(config, box, placement_of(config, box))
    assert "environment 6 x 27 MiB" in line and "at most" not in line
    on_device = {**own, "engine.device": "cuda", "engine.slots": 4096, "actors.count": 1}
    box = (Host(devices=1, device_memory=2 * GIB, cpus=8, memory=8 * GIB),)
    with pytest.raises(
        ConfigError, match=r"actor-0 needs .*held between turns .*; nearest that fits: engine\.kv_bytes"
    ) as raised:
        check_memory(config := small(**on_device), box, placement_of(config, box))
    fitting = int(str(raised.value).rpartition(" = ")[2])
    check_memory(small(**on_device, **{"engine.kv_bytes": fitting}), box, placement_of(config, box))
    with pytest.raises(ConfigError, match="held between turns"):
        check_memory(small(**on_device, **{"engine.kv_bytes": fitting + 1}), box, placement_of(config, box))


def test_an_evaluation_that_waits_begins_when_the_runs_processes_have_ended(small: Any) -> None:
    """At the first look after them, on devices that were theirs."""
    started: list[Node] = []

    class Full(LocalLauncher):
        def start(self, run_dir: Path, node: Node) -> LocalProcess:
            started.append(node)
            raise OSError("no room")

    config = small(**{**CUDA, "placement.hosts": [{**BOX, "devices": 2}], "evaluation.at_start": True})
    run, progress = RunDir.create(config), Heard()
    placement = placement_of(config)
    evaluator = Evaluator(config, run, Full(), placement, progress, Events(config, run, progress.event), lambda: 0.0)
    assert not evaluator.look() and not started
    evaluator.look(finished=True)
    assert [(node.name, node.devices) for node in started] == [("evaluation", (0,))]
    assert progress.events == ["no evaluation of the start: it cannot be started: no room"]
    run.retire()


def test_a_run_on_another_host_is_refused_where_nothing_can_start_it(small: Any) -> None:
    with pytest.raises(ConfigError, match=r"\[\[placement.hosts\]\] places processes on b, but"):
        prepare(small(**{"placement.hosts": [{"cpus": 2}, {"name": "b", "cpus": 4}], "actors.count": "fill"}))


@pytest.mark.parametrize(
    ("on", "interface", "message"),
    [
        (["", "b"], None, "learner-rank-1 is placed on b, and launch.interface names no network: .* has no keys"),
        (["b", ""], "lo", "the learner's rank 0 is placed on b: .* let placement.learner_hosts begin with the first host"),
    ],
)
def test_ranks_leave_this_machine_for_a_network_that_is_named_and_rank_0_never(
    small: Any, on: list[str], interface: str | None, message: str
) -> None:
    hosts = [{"cpus": 4}, {"name": "b", "cpus": 4}]
    config = small(
        **{"placement.hosts": hosts, "placement.learner_hosts": on, "learner.ranks": 2, "launch.interface": interface}
    )
    with pytest.raises(ConfigError, match=message):
        meeting_address(config, placement_of(config))
