"""A run with actors and a learner rank on other hosts: agents that a command starts, here as processes of this machine; what a
process there is given, and which address it is told."""

from __future__ import annotations

import os
import socket
import stat
import sys
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rlhf.actors.data.rows import load_rows
from async_rlhf.actors.rewards import resolve
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.files import content_digest
from async_rlhf.buffers.transport import keys, link
from async_rlhf.launch import connection, depot
from async_rlhf.launch.connection import NodeFiles
from async_rlhf.launch.orders import Start
from async_rlhf.launch.program import Node, actor_node, rank_node, role_of
from async_rlhf.launch.sockets import LOOPBACK, free_port, interface_towards, own_address
from async_rlhf.preparation import prepare
from async_rlhf.run.config import Config
from async_rlhf.run.hosts.connections import connect, found_by
from async_rlhf.run.hosts.node_files import pack
from async_rlhf.run.hosts.placement import inventory_of, placement_of
from async_rlhf.run.loading import load, override
from async_rlhf.run.processes.agreement import shared
from async_rlhf.run.run_data import RunData
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.supervision.supervisor import Supervisor
from tests.actors.scored import Bench
from tests.async_rlhf.test_agreement import machine
from tests.async_rlhf.test_supervisor import Heard
from tests.conftest import has_ended, output_of
from tests.hosts.cluster import assert_nothing_lost

AGENT = (sys.executable, "-m", "async_rlhf.launch.agent")
# On one of two hosts there is no model, and its clock is five minutes ahead.
DIFFERENT = """
import os, sys
from async_rlhf.launch import agent, depot
if "{host}" == "127.0.0.1":
    depot.Depot._is_at = lambda *_: False
    os.environ["PYTHONPATH"] = PATH
    exec(open(PATH.split(":")[0] + "/sitecustomize.py").read())
sys.exit(agent.main())
"""
# Two hosts with a driver; one of them is this machine.
WITH_DEVICES = """
import os, socket, sys
os.environ["PATH"] = "{folder}:" + os.environ["PATH"]
if "{host}" == "localhost":
    socket.gethostname = lambda: "another"
from async_rlhf.launch import agent
sys.exit(agent.main())
"""
ANOTHER_VERSION = "import sys; from async_rlhf.launch import agent; agent.installed = lambda: '0.0.1'; sys.exit(agent.main())"


AHEAD_S = 300.0


def clock_ahead(folder: Path, seconds: float) -> str:
    """A value of PYTHONPATH with which the clock of a Python process, and of all that it starts, is so far ahead."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(f"import time\n_time = time.time\ntime.time = lambda: _time() + {seconds}\n")
    return ":".join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


@pytest.fixture
def on_hosts(small: Any, tmp_path: Path) -> Any:
    """`on_hosts(**overrides)`: the small run with two actors, each on a host of its own."""

    def make(**overrides: Any) -> Any:
        launch = {"launch.kind": "hosts", "launch.hosts": ["localhost", "127.0.0.1"], "launch.command": AGENT}
        return small(**{**launch, "launch.directory": str(tmp_path / "there"), "actors.count": 2, **overrides})

    return make


def agents() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # a zombie, or gone since
            line = " ".join(child.cmdline())
            if "async_rlhf.launch" in line and "fork_server" not in line:
                found.append(child)
    return found


@pytest.mark.rest
def test_a_run_on_hosts_goes_on_while_a_relay_and_a_host_are_lost_and_uses_them_again(on_hosts: Any, tmp_path: Path) -> None:
    """Three actors: two and a relay on the first host, one and a learner rank on the second; a scorer on each."""
    relays: list[psutil.Process] = []
    lost: list[psutil.Process] = []
    ranks: list[psutil.Process] = []
    back: list[bool] = []

    def step() -> None:
        first, relay = supervisor._children["actor-0"], supervisor._children["relay-1"]
        if not relays and times_relayed(run) == 1:
            relays.append(psutil.Process(relay.process.pid))
            relays[0].kill()
        elif relays and not lost and times_relayed(run) == 2:
            victim = next(each for each in agents() if first.process.pid in {child.pid for child in each.children()})
            (other,) = (each for each in agents() if each != victim)
            ranks.extend(each for each in other.children() if role_of(each.cmdline()) == "learner_rank")
            lost.extend([victim, *victim.children(recursive=True)])
            victim.kill()
        elif (
            lost
            and not back
            and any("lost" in text for text in heard.events)
            and first._progressed
            and all(map(has_ended, lost))
        ):
            back.append(ranks[0].is_running())
            supervisor.drain()

    path = f"PATH = {clock_ahead(tmp_path / 'clock', AHEAD_S)!r}\n"
    own = {"cpus": 1}  # the hub's: no actor fits there
    overrides = {
        "max_steps": 100_000, "actors.count": 3, "scoring.placement": "process",
        "launch.command": [sys.executable, "-c", path + DIFFERENT], "launch.interface": "lo",
        "placement.hosts": [own, {"name": "localhost", "cpus": 2}, {"name": "127.0.0.1", "cpus": 1}],
        "learner.ranks": 2, "placement.learner_hosts": ["", "127.0.0.1"],
    }  # fmt: skip
    heard = Heard(step)
    supervisor: Supervisor
    supervisor, run = prepare(on_hosts(**overrides), progress=heard)
    assert not supervisor.run()
    assert len(lost) >= 5 and len(ranks) == 1 and back == [True]  # the agent, its roles, and what they have started
    assert "relay-1 ended by signal 9 (SIGKILL); starting it again in 0.5 s" in heard.events
    assert not any("learner" in text for text in heard.events)
    assert "rank 1 of 2, which meet at 127.0.0.1:" in run.log("learner-rank-1").read_text()
    assert sorted(text for text in heard.events if "lost" in text) == [
        f"{name} is lost: host 'localhost': its command ({sys.executable}) ended with code -9: no output; it is tried "
        "again from 0.5 s on"
        for name in ("actor-0", "actor-1", "relay-1", "scorer-1")
    ]
    assert_nothing_lost(run)
    for name in ("actor-0", "actor-2"):  # the other one may be starting still
        assert "ended: drained" in run.log(name).read_text() and run.spans(name).read_text()
    written = run.config()
    assert written.address.startswith("tcp://127.0.0.1:") and written.security.keys == str(run.path / "keys")
    secrets = [path.read_text().strip() for path in run.path.rglob("*.secret")]
    shown = [path.read_text() for path in (run.path / "config.toml", *(run.path / "logs").iterdir())]
    assert {path.parent.name for path in run.path.rglob("*.secret")} == {"keys", "for-relay-1", "for-actor-2"}
    assert len(secrets) == 4 and not any(secret in text for secret in secrets for text in (*shown, *heard.events))
    there = tmp_path / "there"
    assert not agents() and [path.name for path in there.iterdir()] == ["contents"]
    assert (there / "contents" / content_digest(Path(written.model) / "model.safetensors")).exists()


def times_relayed(run: RunDir) -> int:
    """Lives of the relay in which both actors of its host came to it."""
    log = run.log("relay-1")
    return log.read_text().count("2 actors are relayed") if log.exists() else 0


def test_actors_fill_the_devices_that_agents_find_and_must_fit_into_them(on_hosts: Any, tmp_path: Path) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho '0, GPU-a, Small, 64'\necho '1, GPU-b, Small, 64'\n")
    driver.chmod(driver.stat().st_mode | stat.S_IXUSR)
    command = [sys.executable, "-c", WITH_DEVICES.replace("{folder}", str(tmp_path))]
    wanted = {"engine.device": "cuda", "actors.count": "fill", "launch.command": command}
    config, connections = connect(on_hosts(**wanted))
    hosts, _ = found_by(connections)
    assert connections is not None
    connections.close()
    found = [(host.name, host.devices, host.device_memory, host.own) for host in hosts]
    assert found == [("localhost", 2, 64 << 20, False), ("127.0.0.1", 2, 64 << 20, True)]
    slots = placement_of(config, inventory_of(config, hosts)).slots
    assert [(slots[f"actor-{number}"].host, slots[f"actor-{number}"].devices) for number in range(4)] == [
        ("localhost", (0,)), ("127.0.0.1", (0,)), ("localhost", (1,)), ("127.0.0.1", (1,)),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"actor-0 needs about actor .* of device 0 of localhost \(64 MiB\)"):
        prepare(on_hosts(**wanted))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"launch.command": ["no-such-program", "{host}"]}, r"host 'localhost': .*no-such-program"),
        ({"launch.command": [sys.executable, "-c", "exit('no route to {host}')"]}, "code 1: no route to localhost"),
        ({"launch.command": [sys.executable, "-c", "print('Welcome to {host}')"]}, "may pass on nothing.*It is b'Welcome to"),
        ({"launch.command": [sys.executable, "-c", "import sys; sys.stdin.read()"], "launch.lost_after_s": 2}, "within 5 s"),
        ({"launch.command": [sys.executable, "-c", ANOTHER_VERSION]}, "async-rlhf 0.0.1 is installed there, and .* here"),
    ],
)
def test_a_host_that_is_not_fit_is_named_before_the_run_begins(
    on_hosts: Any, overrides: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "within 5 s" in message:
        monkeypatch.setattr(connection, "START_S", 5.0)
    with pytest.raises(ConfigError, match=f"the run cannot be started: .*{message}"):
        prepare(on_hosts(**overrides))
    assert not (tmp_path / "runs").exists()


LAUNCH = {"launch.kind": "hosts", "launch.hosts": ["gpu1"]}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Of a folder with model, teacher, data, environment, and a reward that imports its neighbour, which imports another and a
    package."""
    folder = machine(tmp_path)
    (folder / "judge.py").write_text("import near\n\ndef judge(completion):\n    return near.ONE\n")
    (folder / "near.py").write_text("import package.deep.part\nfrom far import ONE\n")
    (folder / "package" / "deep").mkdir(parents=True)
    (folder / "package" / "deep" / "part.py").write_text("from . import other\n")
    (folder / "package" / "deep" / "other.py").touch()
    (folder / "package" / ".hidden.py").touch()
    (folder / "package" / "old.py").write_text("print 'of Python 2'\n")
    (folder / "far.py").write_text("import json\nimport near\nONE = 1.0\n")
    (folder / "other.py").write_text("raise SystemExit\n")
    (folder / "model" / "._config.json").touch()  # of a copy made on a Mac: no host is given it
    (folder / "played.py").write_text("def play(prompt):\n    yield prompt\n")
    keys.create(folder / "keys", ["actor-0"], link.new_pair)
    taught = {"loss.kl_coef": 0.1, "scoring.reference.path": "tiny-speller", "scoring.reference.by_source.code": "http://t/v1"}
    played = {"environment.by_source": {"games": str(folder / "played.py:play")}}
    own = {"output_dir": str(folder / "runs"), "security.keys": str(folder / "keys")}
    return load(folder / "config.toml", {**own, **taught, **played, **LAUNCH})


def lay_out(given: NodeFiles, there: Path) -> None:
    for name, data in ({name: path.read_bytes() for name, path in given.files.items()} | dict(given.inline)).items():
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_bytes(data)
        (there / name).chmod(0o600)


def test_a_host_is_given_a_run_of_its_own_that_agrees_with_the_hub_s(config: Config, tmp_path: Path) -> None:
    run, there = RunDir.create(config, load_rows(config.data)), tmp_path / "there" / "actor-0"
    given = pack(config, actor_node(config.address, 0, run.log("actor-0")), str(there))
    Start(life=1, name="actor-0", role="actor", arguments=(), files=dict.fromkeys(given.files, "0" * 32),
          inline=dict(given.inline), returns=list(given.returns))  # fmt: skip
    own = {
        f"rewards/0/{name}.py"
        for name in ("judge", "near", "far", "played", "package/deep/part", "package/deep/other", "package/old")
    }
    assert {name for name in given.files if name.endswith(".py")} == own
    lay_out(given, there)
    # Nothing of here is left: the config there names only files that are there.
    (tmp_path / "judge.py").rename(tmp_path / "judge.away")
    (tmp_path / "near.py").rename(tmp_path / "near.away")
    its = RunDir.existing(there).config()
    assert its.model == f"{there}/model" and its.rewards.functions[0] == f"own={there}/rewards/0/judge.py:judge"
    assert (its.scoring.reference.path, its.scoring.reference.by_source) == (f"{there}/teachers/0", {"code": "http://t/v1"})
    assert (there / "teachers" / "0" / "model.safetensors").is_file()
    assert its.environment.by_source["games"].function == f"{there}/rewards/0/played.py:play"
    secret = (tmp_path / "keys" / "for-actor-0" / "peer.secret").read_text().strip()
    assert keys.load_peer(Path(its.security.keys or "")).secret.decode() == secret
    assert "hub.secret" not in {Path(name).name for name in (*given.inline, *given.files)}
    for name in ("judge", "near"):
        (tmp_path / f"{name}.away").rename(tmp_path / f"{name}.py")
    assert shared(its, RunData(there, its.data)) == shared(config, RunData(run.path, config.data))
    run.retire()


def test_files_of_one_name_in_two_folders_are_themselves_on_a_host(config: Config, tmp_path: Path) -> None:
    for folder, value in (("one", 1.0), ("two", 2.0)):
        (tmp_path / folder / "calendar").mkdir(parents=True)
        (tmp_path / folder / "judge.py").write_text(
            "from importlib import import_module\nimport multiprocessing\nfrom . import beside\nimport calendar.days\n\n"
            "def child(queue): queue.put(beside.ONE * import_module('named').ONE * calendar.days.VALUE)\n"
            "def judge(completion):\n    spawn = multiprocessing.get_context('spawn')\n    queue = spawn.Queue()\n"
            "    child_of_it = spawn.Process(target=child, args=(queue,))\n    child_of_it.start()\n"
            "    return queue.get(timeout=60)\n"
        )
        (tmp_path / folder / "calendar" / "__init__.py").touch()
        (tmp_path / folder / "calendar" / "days.py").write_text(f"from ..inner import ONE\nVALUE = {value} * ONE\n")
        for name in ("beside", "named", "inner"):
            (tmp_path / folder / f"{name}.py").write_text("ONE = 1.0\n")
    functions = [f"{name}={tmp_path}/{name}/judge.py:judge" for name in ("one", "two")]
    config = override(config, {"rewards.functions": functions, "rewards.options": {}})
    run, there = RunDir.create(config, load_rows(config.data)), tmp_path / "there" / "actor-0"
    lay_out(pack(config, actor_node(config.address, 0, run.log("actor-0")), str(there)), there)
    for name in ("one", "two"):
        (tmp_path / name).rename(tmp_path / f"{name} as it was")
    its = RunDir.existing(there).config()
    with Bench(resolve(its.rewards.functions, there), timeout_s=100) as bench:
        assert {name: score.value for name, score in bench.score("?")[0].items()} == {"one": 1.0, "two": 2.0}
    run.retire()


def test_each_role_is_given_the_loss_and_the_estimator_it_reads_and_keys_of_a_server(config: Config, tmp_path: Path) -> None:
    declared = "from async_rlhf import advantage, loss\n\n@{}()\ndef {}(inputs, weight_N):\n    ...\n"
    (tmp_path / "learned").mkdir()
    for kind in ("loss", "advantage"):
        (tmp_path / "learned" / f"{kind}.py").write_text(declared.format(kind, "own"))
    keys.create(tmp_path / "served", ["gpu1"], link.new_pair)
    served = {"keys": f"{tmp_path}/served/for-gpu1/"}
    own = {f"{kind}.kind": f"{tmp_path}/learned/{kind}.py:own" for kind in ("loss", "advantage")}
    config = override(config, {**own, "rewards.options.own": served, "environment.by_source.games.options": served})
    run = RunDir.create(config, load_rows(config.data))
    for role in ("relay", "scorer", "actor"):
        there = tmp_path / "there" / role
        given = pack(config, Node(role, role, ("ipc://{sockets}/relay",), tmp_path / "log"), str(there))
        lay_out(given, there)
        its = RunDir.existing(there).config()
        assert (its.loss.kind, its.advantage.kind) == (f"{there}/loss/0/loss.py:own", f"{there}/loss/0/advantage.py:own")
        chosen = [its.rewards.options["own"], its.environment.by_source["games"].options]
        for options, is_given in zip(chosen, (role != "relay", role == "actor"), strict=True):
            assert (options != served) == is_given
            if is_given:
                assert keys.load_peer(Path(options["keys"])).secret == keys.load_peer(Path(served["keys"])).secret
    assert shared(its, RunData(there, its.data)) == shared(config, RunData(run.path, config.data))
    run.retire()


def test_a_rank_on_another_host_is_given_the_teacher_that_it_holds(config: Config, tmp_path: Path) -> None:
    node = rank_node(1, "h:1", tmp_path / "log")
    for placement, has_teacher in (("learner", True), ("actor", False)):
        changed = {"scoring.reference.by_source": {}, "scoring.stages.reference.placement": placement}
        given = pack(override(config, changed), node, "/there")
        assert any(name.startswith("teachers/0/") for name in given.files) == has_teacher
        path = tomllib.loads(given.inline["config.toml"].decode())["scoring"]["reference"]["path"]
        assert (path == "/there/teachers/0") == has_teacher


def test_a_rank_is_given_the_model_and_the_loss_and_no_key_row_or_reward(config: Config, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import far\nfrom async_rlhf import loss\n\n@loss()\ndef plain(inputs, weight_N):\n    ...\n"
    )
    (tmp_path / "zero.json").write_text("{}")
    own = {"backend": "deepspeed", "deepspeed_config": str(tmp_path / "zero.json")}
    config = override(config, {"loss.kind": f"{tmp_path}/own.py:plain", "learner": own})
    given = pack(config, rank_node(1, "10.0.0.1:2222", tmp_path / "log"), "/own/rank")
    of_package = {f"loss/0/package/{name}.py" for name in ("deep/part", "deep/other", "old")}
    files = {"loss/0/own.py", "loss/0/far.py", "loss/0/near.py", "deepspeed/zero.json", *of_package}
    assert {name for name in given.files if not name.startswith("model/")} == files
    assert given.files["model/model.safetensors"] and list(given.inline) == ["config.toml"]
    its = tomllib.loads(given.inline["config.toml"].decode())
    assert (its["model"], its["loss"]["kind"]) == ("/own/rank/model", "/own/rank/loss/0/own.py:plain")
    assert its["learner"]["deepspeed_config"] == "/own/rank/deepspeed/zero.json"
    assert given.returns == {"logs/learner-rank-1.log": tmp_path / "log"}


def test_a_file_is_looked_for_on_another_host_at_its_path_or_in_the_host_s_own_cache_and_code_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model" / "model.safetensors"
    assert (depot.place_elsewhere(file), depot.place_elsewhere(tmp_path / "reward.py")) == (str(file), "")
    monkeypatch.setattr(depot, "HF_HUB_CACHE", str(tmp_path))
    assert depot.place_elsewhere(file) == "{hub}/model/model.safetensors"


def test_each_role_is_given_what_it_needs_and_only_who_reaches_the_hub_a_key(config: Config, tmp_path: Path) -> None:
    run = RunDir.create(config.model_copy(update={"address": "tcp://10.0.0.1:5555"}), load_rows(config.data))
    keys.add(config.security.directory or tmp_path, ["relay-1:relay"], link.new_pair)
    relay, scorer, log = "ipc://{sockets}/relay", "ipc://{sockets}/scorer", tmp_path / "log"
    nodes = [Node("relay-1", "relay", ("tcp://10.0.0.1:5555", relay), log), Node("scorer-1", "scorer", (scorer,), log)]
    given = {each.role: pack(run.config(), each, "/own/it") for each in (*nodes, actor_node(relay, 7, log, scorer))}
    run.retire()
    own_keys = {"keys/hub.public", "keys/peer.secret"}
    for role, inline, folders in (
        ("relay", {"config.toml", *own_keys}, set()),
        ("scorer", {"config.toml"}, {"rewards", "model", "teachers"}),
        ("actor", {"config.toml"}, {"rewards", "model", "teachers", "data"}),
    ):
        assert set(given[role].inline) == inline
        assert {name.partition("/")[0] for name in given[role].files} == folders
    assert 'keys = "none"' in given["actor"].inline["config.toml"].decode()
    assert 'keys = "/own/it/keys"' in given["relay"].inline["config.toml"].decode()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"launch.hosts": []}, "needs launch.hosts"),
        ({"launch.hosts": ["a", "a"]}, "each once"),
        ({"launch.hosts": ["-oProxyCommand=x"]}, "begins with '-'"),
        ({"launch.kind": "slurm"}, "launch.kind = 'slurm'"),
        ({"launch.command": []}, "names no program"),
        ({"launch.hosts": ["no.such.host.invalid"]}, "'no.such.host.invalid' cannot be reached.*choose launch.interface"),
        ({"launch.interface": "eth99"}, "launch.interface = 'eth99': no such interface"),
        ({"address": "tcp://*:5555", "security.keys": "keys"}, "hosts need one they can connect to"),
        ({"rewards.functions": ["mine=remote"], "rewards.options.mine": {"address": "ipc:///x"}}, "on this machine only"),
        ({"environment.function": "mine=remote:caller/environment"}, "served on this machine only"),
    ],
)
def test_a_run_that_hosts_could_not_reach_is_refused(
    small: Any, overrides: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys.create(tmp_path / "keys", [], link.new_pair)
    with pytest.raises(ConfigError, match=message):
        connect(small(**{**LAUNCH, **overrides}))


def test_an_override_names_a_launcher_and_check_says_which_host_is_not_fit() -> None:
    assert "launch.kind = 'slurm'" in output_of(3, "train", "quick", "--set", "launch.kind=slurm")
    hosts = ["--set", 'launch.hosts=["localhost"]', "--set", "launch.kind=hosts", "--set", 'launch.command=["false"]']
    assert "host 'localhost': its command (false) ended with code 1" in output_of(3, "check", "quick", *hosts)


def test_the_hub_s_address_is_the_one_that_reaches_the_hosts() -> None:
    assert own_address([LOOPBACK, "localhost"], None) == own_address([], "lo") == LOOPBACK
    assert interface_towards(LOOPBACK) == "lo"
    with socket.socket() as listening:
        listening.bind((LOOPBACK, free_port(LOOPBACK)))


def test_keys_are_added_for_the_actors_that_lack_them_and_no_others_change(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    keys.provide(directory, ["actor-0"], link.new_pair)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    keys.provide(directory, ["actor-0", "actor-1", "relay-1:relay"], link.new_pair)
    keys.provide(directory, ["relay-1:relay"], link.new_pair)
    assert all(path.read_bytes() == content for path, content in before.items())
    holders = {holder.name: holder.roles for holder in keys.load_hub(directory).allowed.values()}
    assert holders.keys() == {"local", "actor-0", "actor-1", "relay-1"} and holders["actor-1"] == {"actor"}
    assert holders["relay-1"] == {"relay"}
    assert (directory / "for-actor-1" / "peer.secret").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="actors of the machine 'actor-0' may be called so"):
        keys.provide(directory, ["actor-0-1"], link.new_pair)
