"""Teachers: each source's own says of every token what the learner says of the same model, from a directory and from a server;
and what a server may answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rlhf.actors.rewards import TransientError, resolve
from async_rlhf.actors.scoring import served_teacher
from async_rlhf.actors.scoring.incremental import TextSample
from async_rlhf.actors.scoring.model_stages import reference
from async_rlhf.actors.scoring.models import ReferenceModel
from tests.actors.scored import Bench
from tests.learner.making import make_model

SAMPLES = [TextSample([5, 1, 7], [3, 2, 9, 4], None), TextSample([8], [6], None), TextSample([2, 2], [11, 0], None)]


class Server(ThreadingHTTPServer):
    """Answers as vLLM does for `model`; `spoil` changes what it says."""

    daemon_threads = True

    def __init__(self, model: ReferenceModel) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model, self.asked = model, list[tuple[dict[str, Any], str | None]]()
        self.spoil: Callable[[dict[str, Any]], Any] = lambda answer: answer
        self.status, self.busy, self.is_endless = 200, 0, False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for index, ids in enumerate(asked["prompt"]):
            (hidden,) = self.model.read([ids[:1]], [ids[1:]])
            values = self.model.logprobs(hidden, ids[1:], 1.0, None).tolist()
            told = [{str(token): {"logprob": value, "rank": 1}} for token, value in zip(ids[1:], values, strict=True)]
            choices.append({"index": index, "text": "", "prompt_logprobs": [None, *told]})
        return {"choices": choices[::-1]}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((asked, self.headers.get("Authorization")))
        busy, self.server.busy = self.server.busy > 0, self.server.busy - 1
        body = json.dumps(self.server.spoil(self.server.answer(asked))).encode()
        self.send_response(503 if busy else self.server.status)
        if self.server.is_endless:
            self.end_headers()
            with suppress(OSError):  # until the client goes away
                while True:
                    self.wfile.write(b"[" * (1 << 20))
            return
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in ("llama", "qwen3")}
    for name, path in found.items():
        make_model(name).save_pretrained(path)
    return found


@pytest.fixture
def server(directories: dict[str, Path]) -> Iterator[Server]:
    with Server(ReferenceModel(directories["qwen3"])) as served:
        threading.Thread(target=served.serve_forever, args=(0.01,), daemon=True).start()
        yield served
        served.shutdown()


def test_each_source_has_its_own_teacher_in_a_directory_or_behind_a_server(
    directories: dict[str, Path], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "sk-1")
    asked = {
        "prompt_ids": [each.prompt for each in SAMPLES] * 2,
        "completion_ids": [each.completion for each in SAMPLES] * 2,
        "source": ["words", "numbers", "words", "code", "numbers", "words"],
    }
    teachers = {"numbers": f"{server.url}#nine", "code": str(directories["qwen3"])}
    path = str(directories["llama"])
    found = reference(**asked, path=path, temperature=1.0, by_source=teachers, api_key_env="TEACHER_KEY")
    models = {name: ReferenceModel(path) for name, path in directories.items()}
    for answer, sample, source in zip(found, SAMPLES * 2, asked["source"], strict=True):
        model = models["llama" if source == "words" else "qwen3"]
        (hidden,) = model.read([sample.prompt], [sample.completion])
        assert answer.values == pytest.approx(model.logprobs(hidden, sample.completion, 1.0, None), abs=1e-5)
    ((request, key),) = server.asked
    assert key == "Bearer sk-1" and request["model"] == "nine" and len(request["prompt"]) == 2


def test_a_source_without_a_teacher_fails(directories: dict[str, Path]) -> None:
    with pytest.raises(Exception, match="no teacher for this source"):
        reference([[1]], [[2]], "", 1.0, by_source={"words": str(directories["llama"])}, source=["numbers"])


def first(answer: dict[str, Any]) -> list[Any]:
    found: list[Any] = answer["choices"][-1]["prompt_logprobs"]
    return found


def shortened(answer: dict[str, Any]) -> dict[str, Any]:
    first(answer).pop()
    return answer


def other_tokens(answer: dict[str, Any]) -> dict[str, Any]:
    first(answer)[2] = {"23": {"logprob": -1.0}}
    return answer


def with_value(value: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def spoil(answer: dict[str, Any]) -> dict[str, Any]:
        for said in first(answer)[-1].values():
            said["logprob"] = value
        return answer

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shortened, "no prompt_logprobs of each token"),
        (other_tokens, "no prompt_logprobs of each token"),
        (lambda answer: {"choices": answer["choices"][:1]}, "no prompt_logprobs of each token"),
        (lambda answer: [], "no prompt_logprobs of each token"),
        (lambda answer: {"choices": [{"index": 0, "prompt_logprobs": None}] * 3}, "no prompt_logprobs of each token"),
        (with_value(float("nan")), "log-probability of nan; it must be finite"),
        (with_value(float("-inf")), "log-probability of -inf; it must be finite"),
        (with_value(0.5), "log-probability of 0.5; it must be finite and at most 0"),
    ],
)
def test_an_answer_without_a_number_for_each_token_is_an_error(
    server: Server, spoil: Callable[[dict[str, Any]], Any], message: str
) -> None:
    server.spoil = spoil
    with pytest.raises(ValueError, match=message):
        served_teacher.logprobs(server.url, SAMPLES, "")


def test_of_an_answer_without_an_end_no_more_is_read_than_one_may_have(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_teacher, "_MAX_BYTES", 8 << 20)
    server.is_endless = True
    with pytest.raises(ValueError, match="answered more than 8388608 bytes"):
        served_teacher.logprobs(server.url, SAMPLES, "")


def test_a_server_with_other_tokens_is_told_by_their_texts(server: Server) -> None:
    texts = {1: "a", 2: " b", 3: "\ufffd", 4: "c", 5: "d"}

    def telling(said: dict[str, str]) -> Callable[[dict[str, Any]], dict[str, Any]]:
        def spoil(answer: dict[str, Any]) -> dict[str, Any]:
            for place in first(answer)[1:]:
                for token in place:
                    place[token] |= {"decoded_token": said[token]} if token in said else {}
            return answer

        return spoil

    server.spoil = telling({"2": "b", "3": "whatever", "4": "c", "5": "\ufffd"})
    assert served_teacher.other_texts(server.url, texts, "") == [], "white space and parts of characters are not compared"
    server.spoil = telling({"2": "b", "4": "x", "5": "y"})
    assert served_teacher.other_texts(server.url, texts, "") == [(4, "x"), (5, "y")]
    server.spoil = lambda answer: answer
    assert served_teacher.other_texts(server.url, texts, "") == [], "a server may say no texts"
    server.spoil = shortened
    with pytest.raises(ValueError, match="no prompt_logprobs of each token"):
        served_teacher.other_texts(server.url, texts, "")


def test_what_may_pass_is_tried_again_by_the_pool_and_no_other_error(server: Server) -> None:
    for status, error in ((503, TransientError), (429, TransientError), (400, ValueError)):
        server.status = status
        with pytest.raises(error, match=f"answered {status}"):
            served_teacher.logprobs(server.url, SAMPLES, "")
    with pytest.raises(TransientError, match="ConnectError"):
        served_teacher.logprobs("http://127.0.0.1:1/v1", SAMPLES, "")
    with pytest.raises(ValueError, match="NO_SUCH_KEY is empty"):
        served_teacher.logprobs(server.url, SAMPLES, "NO_SUCH_KEY")


def test_in_a_pool_a_server_that_is_busy_is_asked_again(directories: dict[str, Path], server: Server) -> None:
    options = {"path": str(directories["llama"]), "temperature": 1.0, "by_source": {"numbers": server.url}}
    targets = ["reference=async_rlhf.actors.scoring.model_stages:reference"]
    specs = resolve(targets, Path(), {"reference": options}, {"reference": {"retries": 3}})
    server.busy = 1
    with Bench(specs) as bench:
        for key, (sample, source) in enumerate(zip(SAMPLES, ("words", "numbers", None), strict=True)):
            own = {"prompt_ids": sample.prompt, "completion_ids": sample.completion, "completion": "x"}
            bench.pool.submit(key, own if source is None else {**own, "source": source})
        found = bench.wait()
    assert len(server.asked) == 2, "its first answer was 503"
    for key, sample in enumerate(SAMPLES):
        model = ReferenceModel(directories["qwen3" if key == 1 else "llama"])
        (hidden,) = model.read([sample.prompt], [sample.completion])
        assert found[key].reference == pytest.approx(model.logprobs(hidden, sample.completion, 1.0, None), abs=1e-5)
        assert found[key].scores["reference"].state == "not_applicable"


def test_a_server_says_what_a_directory_says(directories: dict[str, Path], server: Server) -> None:
    by_server = served_teacher.logprobs(f"{server.url}/", SAMPLES, "")
    by_directory = reference([s.prompt for s in SAMPLES], [s.completion for s in SAMPLES], str(directories["qwen3"]), 1.0)
    for one, other in zip(by_server, by_directory, strict=True):
        assert one.dtype == np.float32 and one == pytest.approx(other.values, abs=1e-5)
