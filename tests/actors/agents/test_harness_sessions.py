"""Sessions that a harness elsewhere plays: over the real sockets on both sides, the actor's and the harness'."""

from __future__ import annotations

import http.client
import json
import socket
import socketserver
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, OpenAI

from async_rlhf.actors.agents.endpoint import Llm
from async_rlhf.actors.agents.harness import Harnesses, serve_harnesses
from async_rlhf.actors.environments.settings import Reply
from async_rlhf.actors.environments.tool_calls import TEMPLATE
from async_rlhf.actors.environments.yields import EpisodeEnd, Read
from async_rlhf.buffers.errors import ConfigError
from tests.actors.agents.by_hand import asked, said
from tests.actors.environments.played import Bench
from tests.actors.served import running
from tests.conftest import Clock, wait_for

KEY = "the key of the harness"


class Harness:
    """A client of the control side."""

    def __init__(self, origin: str, key: str = KEY) -> None:
        self._address, self._key = origin.removeprefix("http://"), key

    def post(self, action: str, /, **body: Any) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self._address, timeout=60)
        try:
            headers = {"authorization": f"Bearer {self._key}"}
            connection.request("POST", f"/{action}", json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def start(self) -> Any:
        """The next session, as soon as there is one."""
        found: list[Any] = []

        def started() -> bool:
            status, data = self.post("start_session")
            assert status == 200, data
            found.append(data)
            return "session_id" in data

        wait_for(started, "an episode waits")
        return found[-1]


def client(session: Any, **more: Any) -> OpenAI:
    return OpenAI(base_url=session["base_url"], api_key=session["api_key"], **more)


def answered(session: Any, *texts: str) -> Any:
    """texts: of user and assistant in turn."""
    return client(session).chat.completions.create(model="policy", **said(*texts))


def ask(session: Any, *texts: str) -> str:
    return answered(session, *texts).choices[0].message.content or ""


# -- the whole way --------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Bench, Harness]]:
    with ExitStack() as made:
        key_file = tmp_path / "key"
        server, harnesses = serve_harnesses("tcp://127.0.0.1:*", 0, key_file, None, {"max_turns": 3})
        made.enter_context(running(server))
        bench = made.enter_context(Bench(tmp_path, f"remote:{server.address}"))
        yield bench, Harness(harnesses.origin, key_file.read_text().strip())


def test_a_harness_plays_an_episode_of_the_run_and_its_reward_is_the_score(served: tuple[Bench, Harness]) -> None:
    bench, harness = served
    texts = {1: Reply("four", "stop", 5, 2), 2: Reply("five", "length", 9, 3)}

    def play() -> list[Any]:
        session = harness.start()
        first, second = ask(session, "2+2?"), answered(session, "2+2?", "four", "sure?")
        said = [session["row"]["question"], first, second.choices[0].message.content]
        harness.post("set_reward", session_id=session["session_id"], reward=0.25)
        harness.post("set_reward", session_id=session["session_id"], reward={"right": 1.0, "short": 0.5})
        for id, reward, status in [
            (second.id, "?", 400),
            (second.id, -0.5, 200),
            (second.id, -0.5, 409),
            ("turn_2", 1.0, 404),
            (None, 1.0, 404),
        ]:
            assert harness.post("set_reward", session_id=session["session_id"], call_id=id, reward=reward)[0] == status
        return [*said, harness.post("end_session", session_id=session["session_id"])]

    with ThreadPoolExecutor(1) as thread:
        bench.begin("episode", question="what is 2+2?")
        playing = thread.submit(play)
        bench.until(lambda: bench.ended("episode") is not None, lambda key, turn: texts[turn])
        assert playing.result(60) == ["what is 2+2?", "four", "five", (200, {"score": 1.5, "failure": None})]
    one, two, end = bench.events["episode"]
    assert isinstance(one, Read) and isinstance(two, Read) and isinstance(end, EpisodeEnd) and end.score is not None
    assert one.call is not None and two.call is not None and (one.call.conversation, two.call.conversation) == (0, 0)
    assert two.content == [{"role": "user", "content": "sure?"}]
    assert (end.reason, end.score.value, end.turn_scores) == ("scored", 1.5, (None, -0.5))
    assert end.score.metrics == {
        "calls": 2.0, "unparsed_turns": 0.0, "conversations": 1.0, "retries_joined": 0.0, "calls_left": 0.0,
        "right": 1.0, "short": 0.5,
    }  # fmt: skip


def test_an_episode_that_no_harness_starts_waits_and_one_that_is_given_up_can_be_started_no_more(
    served: tuple[Bench, Harness],
) -> None:
    bench, harness = served
    for number in range(3):
        bench.begin(number, question=str(number))
    first = harness.start()
    assert first["row"]["question"] == "0"
    bench.pool.discard([0, 1])
    wait_for(lambda: harness.post("end_session", session_id=first["session_id"])[0] == 410, "the session has ended")
    assert harness.start()["row"]["question"] == "2"
    assert harness.post("start_session") == (200, {"wait_s": 1.0})
    with pytest.raises(APIStatusError) as refused:
        client(first, max_retries=0).chat.completions.create(model="policy", messages=[{"role": "user", "content": "?"}])
    assert refused.value.status_code in (404, 503)


def test_an_episode_has_as_many_turns_as_its_run_allows(served: tuple[Bench, Harness]) -> None:
    bench, harness = served
    refused: list[int] = []

    def play() -> None:
        session = harness.start()
        try:
            for number in range(10):
                ask(session, f"question {number}")
        except APIStatusError as error:
            refused.append(error.status_code)

    with ThreadPoolExecutor(1) as thread:
        bench.begin("episode")
        playing = thread.submit(play)
        bench.until(lambda: bench.ended("episode") is not None, lambda key, turn: Reply(str(turn), "stop", 5, 1))
        playing.result(60)
    end = bench.ended("episode")
    assert end is not None and end.reason == "max_turns" and refused[0] in (404, 503)


# -- what a session is, by hand ------------------------------------------------------------------------------------------


@pytest.fixture
def board(clock: Clock) -> Iterator[Harnesses]:
    made = Harnesses(10.0, TEMPLATE, harness_key=KEY, clock=clock)
    yield made
    made.close()


@pytest.fixture
def harness(board: Harnesses) -> Harness:
    return Harness(board.origin)


def event(board: Harnesses) -> Any:
    """The next."""
    found: list[Any] = []
    wait_for(lambda: bool(found.extend(board.poll()) or found), "an event")
    (only,) = found
    return only.result


def test_a_session_is_given_to_one_harness(board: Harnesses, harness: Harness) -> None:
    for key in range(20):
        board.begin(key, {"n": key})
    with ThreadPoolExecutor(8) as threads:
        answers = [*threads.map(lambda _: harness.post("start_session")[1], range(24))]
    assert sorted(answer["row"]["n"] for answer in answers if "row" in answer) == [*range(20)]
    assert len({answer["session_id"] for answer in answers if "row" in answer}) == 20


class Forwarder(socketserver.ThreadingTCPServer):
    """A port that another one answers, as ssh forwards it."""

    daemon_threads = True

    def __init__(self, origin: str) -> None:
        super().__init__(("127.0.0.1", 0), _Forwarded)
        self.to = int(origin.rpartition(":")[2])


class _Forwarded(socketserver.BaseRequestHandler):
    server: Forwarder

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.to)) as other:
            threading.Thread(target=self._pump, args=(self.request, other), daemon=True).start()
            self._pump(other, self.request)

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


def test_through_a_forwarded_port_a_session_is_played_by_that_port(served: tuple[Bench, Harness]) -> None:
    bench, harness = served

    def play(near: Harness, origin: str) -> Any:
        session = near.start()
        assert session["base_url"].startswith(f"{origin}/sessions/") and session["anthropic_url"].startswith(
            f"{origin}/sessions/"
        )
        assert session["environ"]["ANTHROPIC_BASE_URL"] == session["anthropic_url"]
        return ask(session, "2+2?"), near.post("end_session", session_id=session["session_id"], reward=1)[0]

    with Forwarder(f"http://{harness._address}") as forwarder, ThreadPoolExecutor(1) as thread:
        threading.Thread(target=forwarder.serve_forever, args=(0.01,), daemon=True).start()
        origin = f"http://localhost:{forwarder.server_address[1]}"
        bench.begin("episode", question="what is 2+2?")
        playing = thread.submit(play, Harness(origin, harness._key), origin)
        bench.until(lambda: bench.ended("episode") is not None, lambda key, turn: Reply("four", "stop", 5, 2))
        assert playing.result(60) == ("four", 200)
        forwarder.shutdown()


def test_a_host_that_is_none_is_in_no_url(board: Harnesses) -> None:
    for host in ("", "a b", "x/y", 'x"', "x:y", "[::1"):
        board.begin(1, {})
        connection = http.client.HTTPConnection(board.origin.removeprefix("http://"), timeout=60)
        connection.putrequest("POST", "/start_session", skip_host=True)
        for name, value in (("host", host), ("authorization", f"Bearer {KEY}"), ("content-length", "0")):
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        assert json.loads(answer.read())["base_url"].startswith(board.origin) if answer.status == 200 else answer.status == 400
        connection.close()


def test_only_the_harness_key_starts_and_ends_and_it_asks_the_model_for_nothing(board: Harnesses, harness: Harness) -> None:
    board.begin(1, {})
    session = harness.start()
    for key in (session["api_key"], "", KEY + "."):
        other = Harness(board.origin, key)
        assert other.post("start_session")[0] == other.post("end_session", session_id=session["session_id"])[0] == 401
    with pytest.raises(APIStatusError, match="unknown or closed session"):
        OpenAI(base_url=f"{board.origin}/v1", api_key=KEY, max_retries=0).models.with_raw_response.list() and OpenAI(
            base_url=f"{board.origin}/v1", api_key=KEY, max_retries=0
        ).chat.completions.create(model="policy", messages=[{"role": "user", "content": "?"}])


def test_a_harness_that_is_silent_loses_its_session_and_one_that_waits_for_the_model_does_not(
    board: Harnesses, harness: Harness, clock: Clock
) -> None:
    board.begin(1, {})
    board.begin(2, {})
    clock.now = 1e6  # no harness had started them: their time had not begun
    assert not board.poll()
    asking, silent = harness.start(), harness.start()
    with ThreadPoolExecutor(1) as thread:
        text = thread.submit(ask, asking, "?")
        assert isinstance(event(board), Read)
        clock.now += 11.0
        end = event(board)
        assert (
            isinstance(end, EpisodeEnd)
            and end.failure is not None
            and end.failure.reason == "its harness sent nothing for 10 s (timeout_s)"
        )
        assert harness.post("end_session", session_id=silent["session_id"])[0] == 410
        board.reply(1, Reply("late", "stop", 1, 1))
        assert text.result(60) == "late"
    clock.now += 9.0
    assert harness.post("set_reward", session_id=asking["session_id"], reward=1)[0] == 200
    clock.now += 9.0
    assert not board.poll()
    clock.now += 2.0
    assert isinstance(event(board), EpisodeEnd) and board.counters["timed_out"] == 2


@pytest.mark.parametrize(
    ("ends", "reason", "failure"),
    [
        ({}, "scored", None),
        ({"reward": 0}, "scored", None),
        ({"reward": "much"}, "failed", "much"),
        ({"reward": {"one": 1, "two": None}}, "scored", None),
        ({"failure": "the sandbox died"}, "failed", "the sandbox died"),
        ({"failure": "it died", "reward": 1}, "failed", "it died"),
    ],
)
def test_without_a_reward_an_episode_has_no_score_and_what_is_no_reward_is_a_failure(
    board: Harnesses, harness: Harness, ends: dict[str, Any], reason: str, failure: str | None
) -> None:
    board.begin(1, {})
    session = harness.start()
    with ThreadPoolExecutor(1) as thread:
        text = thread.submit(ask, session, "?")
        assert isinstance(event(board), Read)
        board.reply(1, Reply("!", "stop", 1, 1))
        text.result(60)
    status, _ = harness.post("end_session", session_id=session["session_id"], **ends)
    end = event(board)
    assert status == 200 and isinstance(end, EpisodeEnd) and end.reason == reason and (failure or "") in str(end.failure)
    value = {"reward": ends.get("reward")}["reward"]
    assert end.score is not None and end.score.value == (None if reason == "failed" or value is None else float(
        sum(each for each in value.values() if each is not None) if isinstance(value, dict) else value
    ))  # fmt: skip


def test_an_episode_without_a_call_fails_and_calls_at_once_are_answered_one_after_the_other(
    board: Harnesses, harness: Harness
) -> None:
    board.begin(1, {})
    session = harness.start()
    status, given = harness.post("end_session", session_id=session["session_id"], reward=1)
    end = event(board)
    assert isinstance(end, EpisodeEnd) and end.failure is not None and end.failure.kind == "no_turn"
    assert status == 200 and given == {"score": None, "failure": end.failure.reason}

    board.begin(2, {})
    session = harness.start()
    with ThreadPoolExecutor(3) as threads:
        texts = {text: threads.submit(ask, session, text) for text in "abc"}
        for number in range(3):
            read = event(board)
            assert isinstance(read, Read) and read.call is not None and read.call.conversation == number and not board.poll()
            board.reply(2, Reply(read.call.messages[0]["content"] * 2, "stop", 1, 1, number))
        assert {text: answer.result(60) for text, answer in texts.items()} == {"a": "aa", "b": "bb", "c": "cc"}


def test_a_call_behind_another_whose_client_has_gone_is_left_out(board: Harnesses, harness: Harness) -> None:
    board.begin(1, {})
    session = harness.start()
    llm, calls = Llm(board.origin, session["api_key"]), board.endpoint._sessions[session["session_id"]]._calls
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(ask, session, "first")
        assert isinstance(event(board), Read)
        with asked(llm, said("gone")):
            wait_for(lambda: len(calls) == 2, "the second call")
        wait_for(lambda: [call.num_waiting for of_key in calls.values() for call in of_key] == [1, 0], "its client has gone")
        board.reply(1, Reply("!", "stop", 1, 1))
        assert first.result(60) == "!" and not board.poll()
        second = threads.submit(ask, session, "second")
        read = event(board)
        assert isinstance(read, Read) and read.content == [{"role": "user", "content": "second"}]
        board.reply(1, Reply("?", "stop", 1, 1, 1))
        assert second.result(60) == "?"
    harness.post("end_session", session_id=session["session_id"], reward=1)
    end = event(board)
    assert end.score.metrics.items() >= {"calls": 2.0, "calls_left": 1.0}.items()


def test_a_call_that_runs_when_the_run_gives_its_episode_up_fails_and_what_comes_for_it_later_is_ignored(
    board: Harnesses, harness: Harness
) -> None:
    board.begin(1, {})
    session, refused = harness.start(), list[int]()

    def asks() -> None:
        try:
            client(session, max_retries=0).chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
        except APIStatusError as error:
            refused.append(error.status_code)

    thread = threading.Thread(target=asks)
    thread.start()
    assert isinstance(event(board), Read)
    board.discard([1, 7])
    thread.join(60)
    board.reply(1, Reply("too late", "stop", 1, 1))
    assert refused == [503] and not board.poll()
    board.begin(1, {"again": True})
    assert harness.start()["row"] == {"again": True}


# -- before anything is served -------------------------------------------------------------------------------------------


def test_the_key_is_made_once_for_this_user_alone_and_a_file_without_one_is_refused(tmp_path: Path) -> None:
    def serve(file: Path) -> None:
        server, _ = serve_harnesses("tcp://127.0.0.1:*", 0, file, None, {})
        with running(server):
            pass

    serve(tmp_path / "key")
    first = (tmp_path / "key").read_text()
    serve(tmp_path / "key")
    assert (tmp_path / "key").read_text() == first and stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    (tmp_path / "empty").write_text("short\n")
    with pytest.raises(ConfigError, match="holds no key of at least 16 characters"):
        serve(tmp_path / "empty")
    with pytest.raises(ConfigError, match="sessions cannot be served"):
        serve(tmp_path / "no" / "such" / "key")
