"""A run whose episodes harnesses elsewhere start and play, while an actor and the server are killed."""

from __future__ import annotations

import http.client
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SPELLER, Start, Train, kept_port, wait_for

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.rest

TEMPLATE = """{%- for m in messages %}{{ m.role[0] }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}a: {% endif %}"""


class Harnesses:
    """Plays whatever waits, in several threads, until `stop`. What fails in a session is the run's to notice."""

    def __init__(self, port: int, key_file: Path) -> None:
        self._port, self._key_file = port, key_file
        self.stop, self.ended = threading.Event(), list[float]()

    def post(self, action: str, /, **body: Any) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        try:
            key = self._key_file.read_text().strip()
            connection.request("POST", f"/{action}", json.dumps(body), {"authorization": f"Bearer {key}"})
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def is_served(self) -> bool:
        try:
            return "wait_s" in self.post("start_session")
        except OSError:
            return False

    def __call__(self, number: int) -> None:
        while not self.stop.is_set():
            try:
                session = self.post("start_session")
                if "session_id" not in session:
                    self.stop.wait(0.05)
                    continue
                self.ended.append(self._play(session, number))
            except (OSError, ValueError, http.client.HTTPException, openai.OpenAIError):  # the server, or the session, is gone
                self.stop.wait(0.1)

    def _play(self, session: Any, number: int) -> float:
        with openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"], max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": session["row"]["prompt"]}]
            first = client.chat.completions.create(model="policy", messages=messages).choices[0].message
            messages += [first, {"role": "user", "content": f"again, {number}"}]
            text = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""
        answer = self.post("end_session", session_id=session["session_id"], reward=len(set(text)) / 100)
        return float(answer["score"])


def test_harnesses_play_a_run_whatever_is_killed(command: Start, training: Train, tmp_path: Path) -> None:
    model = shutil.copytree(SPELLER, tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with ExitStack() as made:
        port, other = (made.enter_context(kept_port()) for _ in range(2))
        _play_under_kills(command, training, tmp_path / "key", model, port, f"tcp://127.0.0.1:{other}")


def _play_under_kills(command: Start, training: Train, key_file: Path, model: Path, port: int, address: str) -> None:
    serve = ["serve", "sessions", "--address", address, "--port", str(port), "--key-file", str(key_file)]
    server, harnesses = command(*serve), Harnesses(port, key_file)
    wait_for(lambda: harnesses.is_served(), "the server")
    settings = {
        "name": "sessions",
        "model": str(model),
        "environment": {"function": f"remote:{address}"},
        "rewards.functions": [], "generation.max_completion_length": 8, "generation.max_episode_length": 80,
        "queue.max_staleness": 1, "max_steps": 8,
    }  # fmt: skip
    with ThreadPoolExecutor(8) as threads:
        for number in range(8):
            threads.submit(harnesses, number)
        try:
            started = training(**settings)
            started.reach(2)
            started.end("actor")
            started.reach(4)
            server.close()
            server = command(*serve)
            started.ends_with(0)
        finally:
            harnesses.stop.set()
    records = started.run.read_metrics()
    assert [record["step"] for record in records] == list(range(1, 9))
    assert all(record["staleness/max"] <= 1 for record in records)
    assert records[-1]["rewards/sessions/mean"] > 0 and records[-1]["reported/sessions/conversations"] == 1
