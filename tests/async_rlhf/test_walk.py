"""One rollout through every room, over real sockets: hub, actor and learner, each in a thread of its own."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rlhf.buffers.clients.control import control
from async_rlhf.buffers.clients.learner import LearnerClient
from async_rlhf.buffers.errors import DeadlineError
from async_rlhf.buffers.hub.exchange import Exchange
from async_rlhf.buffers.hub.learner_session import Outbox
from async_rlhf.buffers.weights import weight_set
from async_rlhf.run.processes import roles
from async_rlhf.run.run_dir import RunDir


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the hub was told and what it answered, in order; everything is passed on unchanged."""
    seen: list[str] = []
    handle, send = Exchange._handle, Outbox.send

    def spy_handle(self: Exchange, identity: bytes, request: int, message: Any, arrays: Any) -> Any:
        seen.append(message.type)
        return handle(self, identity, request, message, arrays)

    def spy_send(self: Outbox, identity: bytes, message: Any, *rest: Any, **named: Any) -> None:
        seen.extend([message.type] * (len(message.groups) if message.type == "ack" else 1))
        send(self, identity, message, *rest, **named)

    monkeypatch.setattr(Exchange, "_handle", spy_handle)
    monkeypatch.setattr(Outbox, "send", spy_send)
    return seen


def test_a_rollout_walks_through_every_room(
    small: Any, socket_dir: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_set, "CHUNK_BYTES", 1 << 18)  # more chunks than come with the manifest
    config = small(**{"max_steps": 2, "queue.max_staleness": 1, "weights.transport": "chunks"})
    run, address = RunDir.create(config), f"ipc://{socket_dir}/hub"
    hub = threading.Thread(target=roles.run_hub, args=(run, config, address))
    actor = threading.Thread(target=roles.run_actor, args=(run, config, address, "actor-0"))
    hub.start()
    actor.start()
    try:
        roles.run_learner(run, config, address)
        actor.join(timeout=300)
        with control(address, timeout_s=60) as asked:
            ledger = asked.status()["ledger"]
    finally:
        with control(address, timeout_s=60) as asked:
            asked.halt()
        hub.join(timeout=300)
    assert not actor.is_alive() and not hub.is_alive()

    # The order of the walk: each thing happens for the first time only after what it needs.
    first = {event: events.index(event) for event in set(events)}
    walk = ["register", "publish", "chunk", "adopt", "fetch", "manifest", "fetch_chunk", "credits", "put", "ack", "batch"]
    walk += ["trained", "ended", "stop"]
    assert [first[event] for event in walk] == sorted(first[event] for event in walk)
    assert first["trained"] < first["commit"], "checkpoints are written while training goes on"
    assert events.count("put") == events.count("ack") == 8

    metrics = run.read_metrics()
    assert [record["step"] for record in metrics] == [1, 2]
    assert [record["groups"] for record in metrics] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert all(record["staleness/violations"] == 0 and record["staleness/max"] <= 1 for record in metrics)
    assert ledger["closes"] and ledger["trained"] == ledger["credited"] == ledger["committed"] == 8
    assert ledger["tokens_trained"] == sum(record["num_tokens"] for record in metrics)

    # What is recorded is what the model said, and the checkpoint is a model that has changed.
    tokenizer = AutoTokenizer.from_pretrained(run.latest / "model", local_files_only=True)
    sample = json.loads((run.path / "rollouts.jsonl").read_text().splitlines()[0])
    for rollout in sample["rollouts"]:
        assert tokenizer.decode(rollout["tokens"], skip_special_tokens=True) == rollout["text"]
        assert rollout["spans"] == [[0, len(rollout["tokens"])]]
        # the weights that sampled are the weights that were trained: the importance weight is 1
        assert rollout["weight"] == pytest.approx(1.0, abs=1e-4)
    before = AutoModelForCausalLM.from_pretrained(config.model).state_dict()
    after = AutoModelForCausalLM.from_pretrained(run.latest / "model").state_dict()
    assert any(not np.array_equal(before[name].numpy(), after[name].numpy()) for name in before)


def test_a_learner_waits_with_a_deadline_and_says_for_what(socket_dir: Path) -> None:
    client = LearnerClient(f"ipc://{socket_dir}/nobody", timeout_s=0.3)
    with pytest.raises(DeadlineError, match="waited 0 s for the answer to 'register'"):
        client.register(0, 0)
    client.close()
