"""The agent of a host: a real process with real children, spoken to over its pipes; what it refuses, and how it ends."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest
import xxhash

from async_rlhf.buffers.errors import ConfigError, WireError
from async_rlhf.buffers.files import content_digest
from async_rlhf.buffers.protocol.message import CODEC_PROTOCOL
from async_rlhf.launch import orders
from async_rlhf.launch.agent import Agent, serve
from async_rlhf.launch.connection import Connections, NodeFiles
from async_rlhf.launch.depot import Depot
from async_rlhf.launch.exit_codes import FAILED, HOST_LOST
from async_rlhf.launch.hosts import CommandChannel, CommandHosts, Pipe
from async_rlhf.launch.local import LocalLauncher, LocalProcess
from async_rlhf.launch.machine import assigned_threads
from async_rlhf.launch.orders import EVENTS, ORDERS, ContentPiece, MissingContents, OpenAgent, Start, Want
from async_rlhf.launch.program import Node
from async_rlhf.launch.sockets import ON_HOST, is_private
from async_rlhf.run.loading import dump
from tests.async_rlhf.test_strategies import allowed
from tests.conftest import has_ended, wait_for


def opening(directory: Path, lost_after_s: float = 60.0) -> OpenAgent:
    return OpenAgent(directory=str(directory), lost_after_s=lost_after_s)


class Spoken:
    """An agent's process, and the supervisor's end of its channel."""

    def __init__(self, directory: Path, lost_after_s: float) -> None:
        self.channel = CommandChannel([sys.executable, "-m", "async_rlhf.launch.agent"])
        self.process = self.channel._process
        self.say(opening(directory, lost_after_s))
        self.opened = self.hear(orders.Opened)

    def say(self, order: orders.Order) -> None:
        self.channel.send(ORDERS.pack(order))

    def hear(self, kind: type[Any]) -> Any:
        """The next event of this kind."""

        def look() -> Any:
            frame = self.channel.receive(0.1)
            found = None if frame is None else EVENTS.unpack(frame)
            return found if isinstance(found, kind) else None

        return wait_for(look, kind.__name__)

    def end(self) -> str:
        """How it ended, and what it said last."""
        with pytest.raises(ConnectionAbortedError) as raised:
            wait_for(lambda: self.channel.receive(0.1) and None, "its end")
        return str(raised.value)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Callable[..., Spoken]]:
    started: list[Spoken] = []

    def start(lost_after_s: float = 60.0) -> Spoken:
        started.append(Spoken(tmp_path / "there", lost_after_s))
        return started[-1]

    yield start
    for each in started:
        each.channel.close()


def a_hub_without_a_run(life: int, **inline: bytes) -> Start:
    """It ends at once: its directory holds no run."""
    node = {"life": life, "name": "hub-0", "role": "hub", "arguments": ("ipc:///nowhere",)}
    return Start(**node, files={}, inline=inline, returns=["logs/hub-0.log"])  # type: ignore[arg-type]


def test_an_agent_reports_a_role_from_its_start_to_its_last_words_and_cleans_up(
    agent: Callable[..., Spoken], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    spoken = agent()
    assert spoken.opened.has["cpus"] >= 1 and spoken.opened.has["devices"] == 0  # it was not to query the driver
    content, snapshot = tmp_path / "rows", tmp_path / "cache/models--a--b/snapshots/c0"
    content.write_bytes(os.urandom(100))
    name = content_digest(content)
    snapshot.mkdir(parents=True)
    (snapshot / "rows").symlink_to(content)
    other = "0" * 32
    spoken.say(Want(places={name: str(content), other: str(content)}))
    assert spoken.hear(MissingContents).digests == [other]
    spoken.say(Want(places={name: "{hub}/models--a--b/snapshots/c0/rows"}))
    assert spoken.hear(MissingContents).digests == [], "the cache is that of its own user"
    code = Path(__file__)
    sent = content_digest(code)
    spoken.say(Want(places={name: str(content), sent: ""}))
    assert spoken.hear(MissingContents).digests == [sent]
    spoken.say(ContentPiece(digest=sent, data=code.read_bytes(), last=True))
    spoken.say(Want(places={name: str(content), sent: ""}))
    assert spoken.hear(MissingContents).digests == []

    files = {"data/rows": name, "data/code": sent}
    spoken.say(a_hub_without_a_run(7).model_copy(update={"files": files, "inline": {"keys/own": b"secret"}}))
    pid = spoken.hear(orders.Started).pid
    assert pid > 0 and pid != spoken.process.pid
    own = Path(spoken.opened.directory) / "hub-0"
    assert (own / "data/rows").readlink() == content and (own / "data/code").read_bytes() == code.read_bytes()
    assert (own / "keys/own").stat().st_mode & 0o777 == 0o600
    assert b"is no run directory" in spoken.hear(orders.Wrote).data
    ended = spoken.hear(orders.NodeEnded)
    assert (ended.life, ended.code) == (7, 3) and "is no run directory" in ended.words
    assert spoken.channel._pipe.end(1.0)
    assert "ended with code 0: the agent ends with its supervisor" in spoken.end()
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["contents"]


def test_what_an_agent_runs_ends_when_it_is_killed_and_the_next_removes_what_it_left(
    agent: Callable[..., Spoken], small: Any, tmp_path: Path
) -> None:
    first = agent()
    first.say(a_hub_without_a_run(1, **{"config.toml": dump(small()).encode()}).model_copy(
        update={"arguments": ["ipc://{sockets}/hub"]}))  # fmt: skip
    hub = psutil.Process(first.hear(orders.Started).pid)
    assert first.hear(orders.Beats).words
    left = Path(first.opened.directory)
    sockets = Path((left / ".sockets").read_text())
    wait_for(lambda: (sockets / "hub").is_socket(), "the hub to listen")
    first.process.kill()
    wait_for(lambda: has_ended(hub), "the hub to end with its agent")
    assert is_private(sockets) and left.exists()
    second = agent()
    assert not left.exists() and not sockets.exists() and Path(second.opened.directory).exists()


def test_an_agent_that_receives_nothing_ends(agent: Callable[..., Spoken]) -> None:
    said = agent(lost_after_s=5.0).end()
    assert "ended with code 0" in said and "no order for" in said


def test_an_agent_whose_output_is_not_read_ends(agent: Callable[..., Spoken]) -> None:
    spoken = agent(lost_after_s=5.0)
    spoken.say(Want(places={f"{number:032x}": "" for number in range(4096)}))  # the answer is more than a pipe holds
    wait_for(lambda: spoken.process.poll() is not None, "its end")
    assert "what it sends is not read" in spoken.end()


def test_an_agent_leaves_it_to_its_supervisor_when_signals_that_all_processes_of_a_job_receive_end_it(
    agent: Callable[..., Spoken],
) -> None:
    spoken = agent()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        spoken.process.send_signal(number)
    spoken.say(Want(places={}))
    assert spoken.hear(MissingContents).digests == []


def test_an_agent_that_reads_for_long_stays_connected_and_starts_a_node_at_its_place(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads for longer than after which it would end by itself."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5e")
    slow = "depot.Depot._is_at = lambda *_: time.sleep(8)"
    program = f"import time; from async_rlhf.launch import agent, depot; {slow}; agent.main()"
    (tmp_path / "rows").write_bytes(b"rows")
    given = NodeFiles({"rows": tmp_path / "rows"}, {"config.toml": dump(small()).encode()}, {"log": tmp_path / "log"})
    hosts = CommandHosts(("far",), [sys.executable, "-c", program])
    connections = Connections(hosts, opening(tmp_path / "there", 4.0), lambda node, directory: given)
    try:
        connections.check()
        assert [(host.name, host.cpus, host.own) for host in connections.inventory()] == [
            ("far", len(os.sched_getaffinity(0)), True)
        ]
        node = Node("hub", "hub", (f"ipc://{ON_HOST}/hub",), tmp_path / "log", host="far", devices=(1,), cpus=(0,), threads=3)
        hub = connections.start(tmp_path, node)
        wait_for(lambda: hub.pid, "the agent to start it")
        assert allowed(hub.pid) == {min(os.sched_getaffinity(0))}
        environment = psutil.Process(hub.pid).environ()
        assert assigned_threads(environment) == 3 and environment["CUDA_VISIBLE_DEVICES"] == "GPU-5e"
    finally:
        connections.close()


def test_a_command_that_has_ended_before_it_is_spoken_to_is_named_by_what_it_wrote(tmp_path: Path) -> None:
    class Late(CommandHosts):
        def connect(self, name: str) -> CommandChannel:
            channel = super().connect(name)
            channel._process.wait(60)
            return channel

    hosts = Late(("far",), [sys.executable, "-c", "print('Welcome to {host}')"])
    connections = Connections(hosts, opening(tmp_path), lambda node, directory: NodeFiles({}, {}, {}))
    with pytest.raises(ConfigError, match=r"may pass on nothing.*It is b'Welcome to far"):
        connections.check()
    connections.close()


def test_an_agent_takes_orders_while_a_start_waits_for_the_fork_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three is killed meanwhile: it is begun and ended. One is for a device that is not there, which counts as lost."""
    imported, begin = threading.Event(), LocalLauncher.start

    def slow(launcher: LocalLauncher, run_dir: Path, node: Node) -> LocalProcess:
        assert imported.wait(60)
        return begin(launcher, run_dir, node)

    monkeypatch.setattr(LocalLauncher, "start", slow)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    agent = Agent()
    agent.take(opening(tmp_path))
    assert isinstance(wait_for(agent.look, "it to open")[0], orders.Opened)
    for life, devices in ((1, None), (2, None), (3, (5,))):
        wanted = a_hub_without_a_run(life).model_copy(update={"name": f"hub-{life}", "devices": devices})
        assert agent.take(wanted) == []
    assert agent.take(orders.Kill(life=2)) == [] and agent.look() == []
    imported.set()
    events: list[orders.Event] = []
    wait_for(
        lambda: events.extend(agent.look()) or sum(isinstance(each, orders.NodeEnded) for each in events) == 3, "their ends"
    )
    started = [each.life for each in events if isinstance(each, orders.Started)]
    ends = {each.life: each for each in events if isinstance(each, orders.NodeEnded)}
    assert started == [1, 2] and ends[1].code == 3 and ends[2].code < 0 and ends[3].code == HOST_LOST
    assert "the run needs device 5 of this machine" in ends[3].words and "shows 2 devices" in ends[3].words
    agent.close()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xff\xff\xff", "a frame of 4294967295 bytes is announced; the limit is 33554432"),
        (b"Welcome to gpu1!\n", "It is b'Welcome to gpu1"),
        (b"\0\0\0\1\xc1", "what is no message"),
        (b"\0\0\0\1\x05", "what is no message"),
        ((99, {"type": "alive"}), "protocol 99"),
        ((CODEC_PROTOCOL, {"type": "erase"}), "'erase'"),
        ((CODEC_PROTOCOL, {"type": "want", "places": {"../../etc/passwd": ""}}), "pattern"),
        ((CODEC_PROTOCOL, {"type": "open_agent", "directory": "/tmp", "lost_after_s": 1.0}), "in the wrong place"),
        (
            (CODEC_PROTOCOL, {"type": "content_piece", "digest": "0" * 32, "data": b"other", "last": True}),
            "instead of " + "0" * 32,
        ),
    ],
)
def test_what_is_no_order_ends_the_agent_with_the_reason(data: bytes | tuple[int, Any], message: str, tmp_path: Path) -> None:
    reads, orders_to = os.pipe()
    events_from, writes = os.pipe()
    ours = Pipe(events_from, orders_to)
    ours.send(ORDERS.pack(opening(tmp_path)))
    if isinstance(data, tuple):
        ours.send(msgpack.packb(data))
    else:
        os.write(orders_to, data)
    agent = Agent()
    with pytest.raises(WireError) as raised:
        serve(agent, Pipe(reads, writes))
    assert message in str(raised.value)
    agent.close()


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../x", "a/../../x", "a//b", "", ".ssh/keys", "a\0b", "a\n", "x" * 1001, "~/x"]
)
def test_no_order_names_a_file_outside_the_agent_s_directory(name: str) -> None:
    good = a_hub_without_a_run(1)
    assert ORDERS.unpack(ORDERS.pack(good)) == good
    for field in ("files", "inline", "returns", "name"):
        values = {"files": {name: "0" * 32}, "inline": {name: b""}, "returns": [name], "name": name}
        with pytest.raises(WireError, match=rf"field 'start\.{field}"):
            ORDERS.unpack(msgpack.packb([CODEC_PROTOCOL, {"type": good.type, **good.model_dump(), field: values[field]}]))


def test_a_file_whose_name_cannot_be_sent_ends_its_node_and_not_the_host(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    names = {"far": "rewards/judge it (2).py", "unfit": "rewards/.judge.py"}
    hosts = CommandHosts(("far",), [sys.executable, "-m", "async_rlhf.launch.agent"])
    given = {name: NodeFiles({file: tmp_path / "log"}, {}, {"log": tmp_path / "log"}) for name, file in names.items()}
    connections = Connections(hosts, opening(tmp_path / "there"), lambda node, directory: given[node.name])
    try:
        fits, unfit = (connections.start(tmp_path, Node(name, "hub", (), tmp_path / "log", host="far")) for name in given)
        wait_for(lambda: fits.pid and unfit.poll(), "both starts")
        assert unfit.poll() == FAILED and "what it needs cannot be sent: " in unfit.failure_message()
    finally:
        connections.close()


def test_a_content_is_kept_only_when_it_is_whole(tmp_path: Path) -> None:
    depot = Depot(str(tmp_path))
    (tmp_path / "file").write_bytes(b"abcd")
    name = content_digest(tmp_path / "file")
    depot.add(name, b"ab", last=False)
    assert depot.missing({name: ""}) == [name]
    with pytest.raises(WireError, match="instead of"):
        depot.add(name, b"xx", last=True)
    assert depot.missing({name: "file"}) == [name]
    depot.add(name, b"ab", last=False)
    depot.add(name, b"cd", last=True)
    assert depot.missing({name: ""}) == []
    depot.close()


def test_on_a_disk_without_links_a_node_is_given_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object, **named: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    for name in ("symlink", "link", "chmod"):
        monkeypatch.setattr(os, name, refused)
    (tmp_path / "there").write_bytes(b"of the host")
    there, sent = content_digest(tmp_path / "there"), xxhash.xxh3_128(b"sent").hexdigest()
    depot = Depot(str(tmp_path / "depot"))
    assert depot.missing({there: str(tmp_path / "there"), sent: ""}) == [sent]
    depot.add(sent, b"sent", last=True)
    node = depot.lay_out("actor-0", {"model/a": there, "model/b": sent}, {})
    assert [(node / "model" / name).read_bytes() for name in "ab"] == [b"of the host", b"sent"]
    depot.close()
