"""The server of one process: sessions, retries, clients that go away, and what is no good request."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.actors.agents import endpoint
from async_rlhf.actors.agents.endpoint import HEADER, MAX_BODY_BYTES
from async_rlhf.actors.data.images import ImageLoader
from async_rlhf.buffers.images.store import ImageStore
from tests.actors.agents.by_hand import answer, asked, connection, post, said
from tests.actors.agents.conftest import Opened
from tests.conftest import wait_for
from tests.image_models import drawn

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

BODY = said("hi")


def text_of(got: Any) -> str:
    assert got.status == 200, got.text
    return str(got.data["choices"][0]["message"]["content"])


def waiting(opened: Opened) -> list[int]:
    """On how many connections each call is waited for."""
    return [call.num_waiting for calls in opened.session._calls.values() for call in calls]


def test_a_session_is_named_by_its_url_or_its_key(opened: Opened) -> None:
    ways: list[tuple[str, dict[str, str]]] = [
        ("/v1/chat/completions", {"authorization": f"bearer {opened.llm.api_key}"}),
        ("/v1/chat/completions", {"authorization": "", "x-api-key": opened.llm.api_key}),
        (f"/sessions/{opened.llm.api_key}/v1/chat/completions", {"authorization": "Bearer sk-of-another"}),
    ]
    for number, (path, headers) in enumerate(ways):
        with asked(opened.llm, BODY, path, **headers) as open:
            opened.write(opened.call(), f"{number}")
            assert text_of(answer(open)) == f"{number}"


def test_a_key_is_of_one_session_and_of_none_that_has_ended(opened: Opened) -> None:
    other = Opened(opened.server)
    with asked(opened.llm, BODY) as one, asked(other.llm, BODY) as two:
        other.write(other.call(), "two")
        opened.write(opened.call(), "one")
        assert [text_of(answer(each)) for each in (one, two)] == ["one", "two"]
    opened.server.end(opened.session)
    path = f"/sessions/{opened.llm.api_key}/v1"
    assert post(opened.llm, BODY).status == 401
    assert post(opened.llm, BODY, f"{path}/chat/completions").status == 404
    gone = post(opened.llm, {**BODY, "max_tokens": 1}, f"{path}/messages")
    assert (gone.status, gone.data["type"], gone.data["error"]["type"]) == (404, "error", "not_found_error")
    assert post(opened.llm, BODY, authorization="").status == 401
    with asked(other.llm, said("again")) as still:
        other.write(other.call(), "three")
        assert text_of(answer(still)) == "three"


def test_two_clients_with_one_session_have_a_call_each(opened: Opened) -> None:
    with asked(opened.llm, BODY) as one, asked(opened.llm, BODY) as two:
        for number, call in enumerate([opened.call(), opened.call()]):
            opened.write(call, f"{number}")
        assert {text_of(answer(one)), text_of(answer(two))} == {"0", "1"}
    assert opened.session.num_joined == 0


def test_a_retry_joins_the_call_in_flight(opened: Opened) -> None:
    with asked(opened.llm, BODY) as first:
        call = opened.call()
        with asked(opened.llm, BODY, x_stainless_retry_count="1") as again:
            wait_for(lambda: opened.session.num_joined == 1, "the retry")
            opened.write(call, "once")
            assert text_of(answer(again)) == text_of(answer(first)) == "once"
    assert opened.calls.empty()


@pytest.mark.parametrize("is_sampled", [False, True])
def test_a_request_like_one_whose_connection_was_lost_has_its_answer(opened: Opened, is_sampled: bool) -> None:
    with asked(opened.llm, BODY):
        call = opened.call()
    wait_for(lambda: waiting(opened) == [0], "the end of the connection")
    if is_sampled:
        opened.write(call, "once")
    with asked(opened.llm, BODY) as again:
        wait_for(lambda: opened.session.num_joined == 1, "the second request")
        if not is_sampled:
            opened.write(call, "once")
        assert text_of(answer(again)) == "once"
    assert opened.calls.empty()


def test_what_was_answered_is_given_again_to_a_retry_and_asked_again_by_another_request(opened: Opened) -> None:
    with asked(opened.llm, BODY) as first:
        opened.write(opened.call(), "once")
        assert text_of(answer(first)) == "once"
    assert text_of(post(opened.llm, BODY, x_stainless_retry_count="2")) == "once"
    with asked(opened.llm, BODY) as second:
        opened.write(opened.call(), "twice")
        assert text_of(answer(second)) == "twice"
    assert text_of(post(opened.llm, BODY, x_stainless_retry_count="1")) == "twice"
    assert opened.calls.empty() and opened.session.num_joined == 2


def test_another_body_or_another_dialect_is_another_call_also_for_a_retry(opened: Opened) -> None:
    with ExitStack() as open:
        for body, path, trained in [
            (BODY, "/v1/chat/completions", "true"),
            ({**BODY, "max_tokens": 1}, "/v1/chat/completions", "true"),
            (BODY, "/v1/messages", "true"),
            (BODY, "/v1/chat/completions", "false"),
        ]:
            open.enter_context(asked(opened.llm, body, path, x_stainless_retry_count="1", **{HEADER: trained}))
            assert opened.call()[0].trained == (trained == "true")


def test_the_sdks_own_retry_of_an_answer_that_was_lost_is_no_second_call(opened: Opened) -> None:
    """Between them stands what cuts the first connection behind the request."""
    relay = socket.create_server(("127.0.0.1", 0))
    host, _, port = opened.llm.origin.rpartition("/")[2].partition(":")

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def run() -> None:
        for is_cut in (True, False):
            with relay.accept()[0] as client, socket.create_connection((host, int(port))) as server:
                thread = threading.Thread(target=pump, args=(client, server))
                thread.start()
                if is_cut:
                    call = opened.call()
                    client.shutdown(socket.SHUT_RDWR)
                else:
                    pump(server, client)
                thread.join(300)
            if is_cut:
                wait_for(lambda: waiting(opened) == [0], "the end of the connection")
                opened.write(call, "once")

    thread = threading.Thread(target=run)
    thread.start()
    with openai.OpenAI(base_url=f"http://127.0.0.1:{relay.getsockname()[1]}/v1", api_key=opened.llm.api_key) as client:
        got = client.chat.completions.create(model="m", **BODY)
    assert got.choices[0].message.content == "once"
    assert opened.calls.empty() and opened.session.num_joined == 1
    thread.join(300)
    relay.close()


def test_a_stream_that_nobody_reads_to_its_end_was_a_turn(opened: Opened) -> None:
    with asked(opened.llm, {**BODY, "stream": True}) as open:
        opened.write(opened.call(), "long " * 50_000)
        assert open.getresponse().read(100).startswith(b'data: {"id": "chatcmpl-turn_1_')
    again = post(opened.llm, {**BODY, "stream": True}, x_stainless_retry_count="1")
    assert again.text.endswith("data: [DONE]\n\n") and opened.calls.empty()


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/chat/completions", "server_error"), ("/v1/messages", "api_error"), ("/v1/responses", "server_error")],
)
def test_open_requests_fail_when_the_episode_ends_and_are_not_worth_a_retry(opened: Opened, path: str, kind: str) -> None:
    body = {"input": "hi"} if path.endswith("responses") else BODY
    with asked(opened.llm, body, path) as open, asked(opened.llm, {**body, "stream": True}, path) as streamed:
        opened.call(), opened.call()
        opened.server.end(opened.session)
        for got in (answer(open), answer(streamed)):
            assert (got.status, got.data["error"]["type"], got.headers["x-should-retry"]) == (503, kind, "false")
            assert "the episode has ended" in got.data["error"]["message"]


def test_what_asks_for_no_turn_is_answered_without_a_session_and_leaves_none_behind(opened: Opened) -> None:
    with openai.OpenAI(base_url=opened.llm.base_url, api_key="none") as client:
        assert [model.id for model in client.models.list()] == [opened.llm.model]
        assert client.models.retrieve("any").id == opened.llm.model
    with anthropic.Anthropic(base_url=opened.llm.anthropic_url, api_key="none") as claude:
        assert [model.id for model in claude.models.list()] == [opened.llm.model]
        with pytest.raises(anthropic.NotFoundError, match=r"there are: POST /v1/chat/completions, POST /v1/messages"):
            claude.messages.count_tokens(model="any", messages=[{"role": "user", "content": "hi"}])
    for path in ("/health", "/version", "/"):
        with connection(opened.llm) as open:
            open.request("GET", path)
            assert answer(open).data["status"] == "ok"
    assert post(opened.llm, BODY, "/v1/embeddings").status == 404
    assert opened.calls.empty() and not opened.session._calls


BAD: list[tuple[bytes, dict[str, str], int, str]] = [
    (b"", {}, 400, "the body is no JSON"),
    (b"[]", {}, 400, "the body is no JSON object"),
    (b"\xff", {}, 400, "the body is no JSON"),
    (b'{"messages": ' + b"[" * 100_000, {}, 400, "nested too deeply"),
    (b'{"messages": [{"role": "user", "content": ' + b"1" * 5000 + b"}]}", {}, 400, "the body is no JSON"),
    (json.dumps(said("hi", n=2)).encode(), {}, 400, "n=2 cannot be kept"),
    (json.dumps(BODY).encode(), {HEADER: "maybe"}, 400, "choose true or false"),
    (b" " * (MAX_BODY_BYTES + 1), {}, 413, f"a body has at most {MAX_BODY_BYTES} bytes"),
    (b" " * (100 << 20), {}, 413, f"a body has at most {MAX_BODY_BYTES} bytes"),
]


@pytest.mark.parametrize(("body", "headers", "status", "reason"), BAD, ids=range(len(BAD)))
def test_what_is_no_good_request_is_answered_with_the_reason(
    opened: Opened, body: bytes, headers: dict[str, str], status: int, reason: str
) -> None:
    got = post(opened.llm, body, **headers)
    assert got.status == status and reason in got.data["error"]["message"]
    assert opened.calls.empty()


PLAIN = Path(__file__).parent / "by_hand.py"
IMAGES: list[tuple[Any, str]] = [
    ({"url": "https://example.org/a.png"}, "nothing is fetched while a run goes on"),
    ({"url": str(PLAIN)}, "a data URL was expected"),
    ({"url": "f" * 32}, "a data URL was expected"),
    ({"url": "data:image/png,abc"}, "a data URL with base64 was expected"),
    ({"url": "data:image/png;base64,YWJj"}, "it is no image of a known format"),
    ({"url": "data:image/png;base64,?"}, "its base64 is damaged"),
    ({"path": str(PLAIN)}, "a data URL was expected"),
    ({"file_id": "file-1"}, "an object has the key 'file_id', which is not read"),
    ({}, "one of image, image_url, source, bytes"),
]


@pytest.mark.parametrize(("image", "reason"), IMAGES)
def test_an_image_that_cannot_be_read_is_answered_with_the_reason(
    opened: Opened, tmp_path: Path, image: Any, reason: str
) -> None:
    def asking(*parts: Any) -> Any:
        content = [{"type": "text", "text": "see"}, *({"type": "image_url", "image_url": part} for part in parts)]
        return post(opened.llm, {"messages": [{"role": "user", "content": content}]})

    good = {"url": f"data:image/png;base64,{base64.b64encode(drawn(8, 8)).decode()}"}
    got = asking(good)
    assert got.status == 400 and "this run takes none while it goes on: set data.images" in got.data["error"]["message"]
    store = ImageStore(tmp_path)
    opened.server.image = ImageLoader(None, store.add, store)
    got = asking(good, image)
    message = got.data["error"]["message"]
    assert got.status == 400 and "image 2: " in message and reason in message, message
    assert opened.calls.empty()


def test_calls_are_answered_while_the_image_of_another_is_read(opened: Opened) -> None:
    answered = threading.Event()

    def image(given: Any) -> str:
        if not answered.wait(timeout=300):
            raise ValueError("the other call was not answered meanwhile")
        return "0" * 32

    opened.server.image = image
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,YWJj"}}
    with asked(opened.llm, {"messages": [{"role": "user", "content": [part]}]}) as first, asked(opened.llm, BODY) as other:
        opened.write(opened.call(), "other")
        assert text_of(answer(other)) == "other"
        answered.set()
        opened.write(opened.call(), "first")
        assert text_of(answer(first)) == "first"


def test_a_body_that_does_not_come_whole_ends_at_a_deadline_and_one_that_breaks_off_asks_for_nothing(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "_BODY_S", 0.1)
    with connection(opened.llm) as open:
        open.putrequest("POST", "/v1/chat/completions")
        open.putheader("authorization", f"Bearer {opened.llm.api_key}")
        open.putheader("content-length", "1000")
        open.endheaders(b'{"messages"')
        got = answer(open)
        assert (got.status, got.headers["x-should-retry"]) == (408, "true")
    monkeypatch.setattr(endpoint, "_BODY_S", 300.0)
    with connection(opened.llm) as open:
        open.putrequest("POST", "/v1/chat/completions")
        open.putheader("authorization", f"Bearer {opened.llm.api_key}")
        open.putheader("content-length", "1000")
        open.endheaders(json.dumps(BODY).encode())
    with asked(opened.llm, said("whole")) as open:
        assert opened.call()[0].messages[0]["content"] == "whole"
    assert opened.calls.empty()


def test_headers_are_bounded_and_a_body_may_come_in_pieces(opened: Opened) -> None:
    with suppress(OSError):  # it is closed while the rest is sent
        assert post(opened.llm, BODY, x_long="x" * (4 << 20)).status == 400
    assert opened.calls.empty()

    def pieces() -> Iterator[bytes]:
        yield from (bytes([byte]) for byte in json.dumps(BODY).encode())

    with asked(opened.llm, pieces()) as open:
        opened.write(opened.call(), "hello")
        assert text_of(answer(open)) == "hello"


def test_a_closed_endpoint_answers_what_is_open_and_takes_no_session(opened: Opened) -> None:
    with asked(opened.llm, BODY) as open:
        opened.call()
        opened.server.close()
        assert answer(open).status == 503
    with pytest.raises(Exception, match="the thread of the agents' endpoint has ended"):
        Opened(opened.server)
