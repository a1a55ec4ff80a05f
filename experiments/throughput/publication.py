"""What does a publication cost those who have other work? On one host, and over a tree of relays.

- beside generation: a learner publishes to an actor that decodes. How long from its call to adopted, beside copying the set as
  often as it must be (out of the learner, into the engine); how long the learner stands still, while it copies the set as in a
  run; how long the actor does, beyond the engine's own copy. Decoding is a matrix product of some 20 ms, on one thread.
- relay tree: bytes that the hub sends to eight pretended hosts with a relay each, where every relay serves two more, beside one
"""

from __future__ import annotations

import statistics
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from async_rlhf.buffers.clients.actor import ActorClient, ActorState
from async_rlhf.buffers.clients.control import control
from async_rlhf.buffers.clients.learner import LearnerClient
from async_rlhf.buffers.config import QueueConfig
from async_rlhf.buffers.hub.hub import Hub
from async_rlhf.buffers.protocol import wire
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.buffers.weights.relay import Relay
from async_rlhf.experiments.throughput.harness import Bench, Row, alternate
from async_rlhf.experiments.throughput.weight_roles import DEADLINE_S, as_tensors, make_words, weights_config
from async_rlhf.experiments.throughput.weights import Fleet, Megabytes, Published, memcpy_seconds
from async_rlhf.launch.network import LOOPBACK, free_port

_HOSTS = 8
_WIDTH = 1024  # of the product that stands for a decode step


def publication(bench: Bench, megabytes: Megabytes = 2048) -> Iterator[Row]:
    """Measure what a publication costs learner and generation, and what relays spare the hub."""
    torch.set_num_threads(1)
    yield beside_generation(bench.num_turns(3), bench.size(megabytes, 16) << 20)
    num_bytes = bench.size(16, 2) << 20
    sent = {f"{hosts} hosts": [sent_by_hub(hosts, num_bytes)] for hosts in (_HOSTS, 1)}
    yield Row.of("relay tree", sent, "bytes", at_most=1.0, counted=True, figures={"set_mb": num_bytes / 1e6})


def beside_generation(turns: int, num_bytes: int) -> Row:
    published = list[Published]()
    matrix = torch.ones(_WIDTH, _WIDTH)
    with Fleet.of("ipc", "auto", num_bytes) as fleet:

        def ours() -> float:
            published.append(fleet.publish(lambda: torch.mm(matrix, matrix)))
            return published[-1].total

        seconds = alternate({"ours": ours, "copies": lambda: 2 * memcpy_seconds(num_bytes)}, turns)
    timed = published[-turns:]
    figures = {
        "set_mb": num_bytes / 1e6,
        "learner_blocked_s": statistics.median(each.blocked for each in timed),
        "generation_stopped_s": statistics.median(each.looked for each in timed),
        "reload_s": statistics.median(each.reload for each in timed),
        "cpu_s": statistics.median(each.cpu for each in timed),
    }
    return Row.of("beside generation", seconds, "s", at_most=3.0, figures=figures)


def sent_by_hub(num_hosts: int, num_bytes: int) -> int:
    """One set, adopted by an actor on each host: behind the hub one relay, behind every relay two."""
    config, addresses = weights_config("chunks"), [f"tcp://{LOOPBACK}:{free_port(LOOPBACK)}" for _ in range(num_hosts + 1)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        bound = Bound(groups_per_batch=1, max_staleness=1, num_groups=1)
        hub = Hub(addresses[0], Path(folder), QueueConfig(lease_s=600), bound, weights=config)
        running = threading.Thread(target=hub.run)
        running.start()
        stack.callback(running.join)
        operator = stack.enter_context(control(addresses[0]))
        stack.callback(operator.halt)
        waiting = set[ActorClient]()
        for number, address in enumerate(addresses[1:]):
            relay = Relay(addresses[(number + 1) // 2], address, config)
            thread = threading.Thread(target=relay.run)
            thread.start()
            stack.callback(thread.join)
            stack.callback(relay.stop)
            client = ActorClient(address, f"actor-{number}", beat_s=1.0, timeout_s=DEADLINE_S, weights=config)
            stack.callback(client.close)
            waiting.add(client)
        learner = LearnerClient(addresses[0], timeout_s=DEADLINE_S, weights=config)
        stack.callback(learner.close)
        learner.register(0, 0)
        learner.publish(0, as_tensors(make_words(num_bytes)))
        while waiting:
            for client in list(waiting):
                client.poll(ActorState(0, 0, -1, ()), wire.Telemetry(), timeout_s=0.01)
                if client.weights() is not None:
                    waiting.discard(client)
        return int(operator.status()["weights"]["served_bytes"])
