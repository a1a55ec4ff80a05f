"""TRL's asynchronous trainer where there are no two GPUs: its own rollouts from a vLLM server, queue, packing, loss, optimizer.

Three of its parts need CUDA, two GPUs, or the Hub. Each is replaced here, as narrowly as it can be:

    weights      go by NCCL to a server on another GPU; here by a file, through TRL's own `weight_transfer`
    attention    of its packed rows is a FlashAttention 3 kernel from the Hub; here torch's, over the same segments
    peak FLOPs   of the GPU are looked up, for a metric; here they are unknown
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from async_rlhf.actors.vllm_engine.loading import environment
from async_rlhf.actors.vllm_engine.settings import VLLMEngineConfig
from async_rlhf.buffers.interpreter import python
from async_rlhf.experiments.throughput.harness import Device, MissingError
from async_rlhf.experiments.throughput.judges import BATCH_SIZE, similarity, slow_similarity
from async_rlhf.experiments.throughput.trl_side import spare
from async_rlhf.launch.sockets import LOOPBACK, free_port

_START_S = 300.0
_END_S = 20.0
# TRL's requests have seeds, which on a CPU must not meet a prompt that is computed in parts.
_SERVER = ("--dtype=float32", "--max-num-seqs=256", "--disable-log-stats", "--uvicorn-log-level=warning")
_ON = {"cpu": ("--enforce-eager", "--no-enable-chunked-prefill", "--kv-cache-memory-bytes=1073741824"),
       "cuda": ("--gpu-memory-utilization=0.5",)}  # fmt: skip
_OF_SERVER = ("vllm", "watchfiles", "jmespath", "model_hosting_container_standards", "prometheus_fastapi_instrumentator")


def check_server() -> None:
    """Raises MissingError."""
    if missing := [name for name in _OF_SERVER if importlib.util.find_spec(name) is None]:
        raise MissingError(f"vLLM's server lacks {', '.join(missing)}: make setup .venv/.vllm")


@contextmanager
def vllm_server(model: str, threads: int, device: Device, log: Path) -> Iterator[str]:
    """Its URL, as soon as it answers; its processes end with the block. Raises RuntimeError when it does not start."""
    port = free_port(LOOPBACK)
    # As for the engine of ours that it is compared with; and by its endpoints for development weights are loaded.
    config = VLLMEngineConfig(kind="vllm", threads=threads, device=device)
    variables = environment(config, enforce_eager=device == "cpu", actor_pid=os.getpid(), given=os.environ)
    variables |= {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"}
    arguments = ["-m", "vllm.entrypoints.openai.api_server", "--model", model, f"--host={LOOPBACK}", f"--port={port}"]
    arguments += [*_SERVER, *_ON[device]]
    with log.open("w") as file:
        server = subprocess.Popen(python(*arguments), env=os.environ | variables, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + _START_S
        while not _answers(url := f"http://{LOOPBACK}:{port}"):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"vLLM's server did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield url
    finally:
        if server.poll() is None:
            own_process = psutil.Process(server.pid)
            processes = [own_process, *own_process.children(recursive=True)]
            server.terminate()
            for process in psutil.wait_procs(processes, _END_S)[1]:
                process.kill()
            server.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


def run(spec: dict[str, Any], connection: Connection) -> None:
    """One whole run against the server of `spec`: monotonic seconds at which steps ended (`ends`), tokens trained on in each
    (`tokens`), and seconds that the forward pass of attention took until then (`attention`)."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl.experimental import async_grpo
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    kernel = PathAttention()
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    packing._flash_attn = lambda: kernel
    ends, tokens, attention = list[float](), list[float](), list[float]()

    class AsyncRecorder(TrainerCallback):  # type: ignore[misc]
        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "batch/trained_tokens_per_step" in logs:
                ends.append(time.monotonic())
                tokens.append(logs["batch/trained_tokens_per_step"])
                attention.append(kernel.seconds)

    # Its prompts are messages; this template makes the same tokens of them as of plain text.
    tokenizer = AutoTokenizer.from_pretrained(spec["model"], local_files_only=True, trust_remote_code=False)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "fields": {"content": {"content": "text"}}}
    rows = [json.loads(line) for line in Path(spec["prompts"]).read_text().splitlines()]
    connection.recv()
    async_grpo.AsyncGRPOTrainer(
        model=spec["model"],
        reward_funcs=_slow if spec["slow_reward"] else _quick,
        train_dataset=Dataset.from_list([row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]),
        processing_class=tokenizer,
        callbacks=[AsyncRecorder()],
        weight_transfer=Files(spec["server"], Path(spec["output_dir"]) / "weights"),
        args=async_grpo.AsyncGRPOConfig(
            **spare(spec),
            max_steps=spec["steps"],
            per_device_train_batch_size=BATCH_SIZE,
            token_budget=0,  # as many completions a step as are named, not as many tokens
            num_generations=spec["group_size"],
            max_completion_length=spec["max_completion_length"],
            max_staleness=spec["max_staleness"],
            vllm_server_base_url=spec["server"],
        ),
    ).train()
    connection.send({"ends": ends, "tokens": tokens, "attention": attention})


_Messages = Sequence[Mapping[str, str]]


# By name: TRL's process for rollouts imports them.
def _quick(completions: Sequence[_Messages], answer: Sequence[str], **_: Any) -> list[float]:
    return [similarity(each[0]["content"], right) for each, right in zip(completions, answer, strict=True)]


async def _slow(completions: Sequence[_Messages], answer: Sequence[str], **_: Any) -> list[float]:
    pairs = zip(completions, answer, strict=True)
    return await asyncio.gather(*[slow_similarity(each[0]["content"], right) for each, right in pairs])


class Files:
    """TRL's `WeightTransferProtocol`: weights as a file, which vLLM loads while it is paused."""

    def __init__(self, url: str, directory: Path) -> None:
        from trl.experimental.async_grpo.vllm_client import VLLMClient

        server = VLLMClient(url)
        self._url, self._directory, self.pause, self.resume = url, directory, server.pause, server.resume

    def init_weight_transfer(self) -> None:
        self._directory.mkdir(parents=True)

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in iterator}, self._directory / "model.safetensors")
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(self._directory)}}
        request = urllib.request.Request(
            f"{self._url}/collective_rpc", json.dumps(call).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=_START_S).close()

    def destroy(self) -> None:
        pass  # what it owns lies in the benchmark's directory


class PathAttention:
    """The part of FlashAttention that TRL calls: segments of a row, each over its own keys, here as one padded batch."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._of: object = None

    def flash_attn_varlen_func(
        self, query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor, starts_k: Tensor,
        longest_q: int, longest_k: int, softmax_scale: float | None = None, **_further: Any,
    ) -> Tensor:  # fmt: skip
        """[N, heads, D] of queries [N, heads, D], keys and values [K, key heads, D]. starts: int32 [S + 1], of segments.
        The last query of a segment sees all its keys, and each before it one less."""
        began = time.perf_counter()
        if starts_k is not self._of:  # the layers of a pass have the same
            self._of = starts_k
            self._queries, self._real = _padded(starts_q, longest_q)
            self._keys, _ = _padded(starts_k, longest_k)
            places = [torch.arange(longest, device=starts_k.device) for longest in (longest_q, longest_k)]
            last = places[0] + (starts_k.diff() - starts_q.diff()).long()[:, None]
            self._mask = (places[1] <= last[:, :, None])[:, None]
        out = F.scaled_dot_product_attention(
            query[self._queries].transpose(1, 2),
            key[self._keys].transpose(1, 2),
            value[self._keys].transpose(1, 2),
            attn_mask=self._mask,
            scale=softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        out = out.transpose(1, 2)[self._real]
        self.seconds += time.perf_counter() - began
        return out


def _padded(starts: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """int64 [S, longest]: the places of each segment, filled up with its last; bool [S, longest]: which are real."""
    lengths, places = starts.diff().long()[:, None], torch.arange(longest, device=starts.device)
    return starts[:-1].long()[:, None] + torch.minimum(places, lengths - 1), places < lengths
