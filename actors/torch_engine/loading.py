"""From a model directory to a running engine. The only place of the engine that opens files; nothing is downloaded."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from async_rlhf.actors.engine import Bits, OnUpdate
from async_rlhf.actors.served_model.devices import check_device
from async_rlhf.actors.served_model.files import find_stop_ids, find_tokenizer, read_model
from async_rlhf.actors.served_model.weights import Base
from async_rlhf.actors.torch_engine.chunks import attention_of
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.actors.torch_engine.forward import record_on_cuda
from async_rlhf.actors.torch_engine.kv_policy import KVPolicy, ending
from async_rlhf.actors.torch_engine.llama_invariant import can_be_invariant
from async_rlhf.actors.torch_engine.model_check import check_engine, check_reading
from async_rlhf.actors.torch_engine.settings import TorchEngineConfig
from async_rlhf.buffers.attention import cache_argument, max_length
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.images.processor import ImageProcessor
from async_rlhf.buffers.images.tower import ImageTower
from async_rlhf.buffers.model_directory import language_model, load_whole


def load_engine(
    model_dir: str,
    config: TorchEngineConfig,
    *,
    on_update: OnUpdate = "keep",
    version: int = -1,
    images: ImageProcessor | None = None,
) -> TorchEngine:
    """An engine that serves the weights of `model_dir`, stamped `version`. images: prepares those of prompts.

    Sets the CPU threads of the whole process to `config.threads`.
    Raises ConfigError when the directory holds no causal language model, or one whose numbers the engine would not get right
    or that `engine.kv` is not for, or the device is not there.
    """
    torch.set_num_threads(config.threads)
    model = _load_model(model_dir, config)
    tokenizer = find_tokenizer(model_dir)
    max_places = None if config.kv_bytes is None else find_max_places(model, config.kv_bytes, config.kv.budget)
    make = partial(
        TorchEngine,
        model,
        slots=config.slots,
        stop_ids=find_stop_ids(model, tokenizer),
        decode=None if tokenizer is None else partial(tokenizer.decode, skip_special_tokens=True),
        version=version,
        max_length=max_length(model.config.get_text_config().to_dict()),
        on_update=on_update,
        prefill_tokens=config.prefill_tokens,
        max_places=max_places,
        recorder=record_on_cuda if config.cuda_graphs else None,
        base=Base(Path(model_dir)),
        kv_policy=find_kv_policy(model, tokenizer, config),
        record_routing=config.replay_routing,
        tower=None if images is None else ImageTower(model, images),
    )
    obstacle = _obstacle(model, config)
    engine = make(batch_invariant=not obstacle)
    bits = check_engine(engine, model)
    check_reading(engine, model)
    if not obstacle and bits.obstacle:
        if config.batch_invariant:
            raise ConfigError(f'engine.batch_invariant = true: {bits.obstacle}. Set engine.batch_invariant = "none"')
        obstacle, engine = bits.obstacle, make()
        check_engine(engine, model)
    engine.bits = Bits(obstacle=obstacle) if obstacle else bits
    return engine


@torch.inference_mode()
def find_max_places(model: PreTrainedModel, kv_bytes: int, kv_budget: int | None = None) -> int:
    """Tokens whose keys and values fit into so many bytes; found by computing one. Raises ConfigError when not one fits, or not
    what a row keeps."""
    cache = DynamicCache(config=model.config)
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    model(input_ids=token, use_cache=True, **{cache_argument(model): cache})
    size = sum(int(part.numel() * part.element_size()) for layer in cache.layers for part in (layer.keys, layer.values))
    if kv_bytes < size:
        raise ConfigError(f"engine.kv_bytes = {kv_bytes} holds no token: keys and values of one take {size} bytes")
    if kv_budget is not None and kv_bytes < (kv_budget + 1) * size:
        raise ConfigError(
            f"engine.kv_bytes = {kv_bytes} holds {kv_bytes // size} tokens, and a row takes {kv_budget + 1}: what engine.kv "
            f"keeps, and one; lowest: {(kv_budget + 1) * size}"
        )
    return kv_bytes // size


def find_kv_policy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, config: TorchEngineConfig
) -> KVPolicy | None:
    """The KV policy for this model and its tokens; None where all keys and values stay. Raises ConfigError."""
    if (kv := config.kv).budget is None:
        return None
    for refusal in config.window_refusals(attention_of(model.config).window, str(model.config.get_text_config().model_type)):
        raise ConfigError(refusal)
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    ends = np.zeros(vocabulary, np.bool_)
    chunked = kv.policy == "chunk_sink"
    if chunked and kv.ends:
        count = 0 if tokenizer is None else min(vocabulary, len(tokenizer))
        texts = [] if tokenizer is None else tokenizer.batch_decode([[token] for token in range(count)])
        ends[:count] = ending(texts, kv.ends)
        if not ends.any():
            raise ConfigError(
                f"engine.kv.ends = {list(kv.ends)}: no token of the model ends with one of these. Name texts that its tokens "
                "end with, or set engine.kv.ends = [], which makes chunks of engine.kv.chunk tokens"
            )
    return KVPolicy(kv.sinks, kv.window, kv.representatives if chunked else 0, kv.chunk, ends)


def _obstacle(model: PreTrainedModel, config: TorchEngineConfig) -> str:
    """Why the engine is not to be batch invariant; empty where it is. Raises ConfigError where it is demanded and cannot be."""
    obstacle = config.bits_obstacle
    if not obstacle and not can_be_invariant(model):
        obstacle = (
            f"model type {model.config.model_type!r} as it is configured; only plain Llama, and Idefics 3 with it, "
            "with heads of a multiple of 4 can"
        )
    if config.batch_invariant and obstacle:
        raise ConfigError(f'engine.batch_invariant = true with {obstacle}. Set that, or engine.batch_invariant = "none".')
    return obstacle


def _load_model(model_dir: str, config: TorchEngineConfig) -> PreTrainedModel:
    if config.cuda_graphs and (torch.device(config.device).type != "cuda" or config.kv_bytes is not None):
        raise ConfigError(
            f"engine.cuda_graphs = true with engine.device = {config.device!r} and engine.kv_bytes = {config.kv_bytes}: "
            "it needs a CUDA device, and all slots' memory; set engine.device = 'cuda' and leave engine.kv_bytes out"
        )
    check_device("engine.device", config.device)
    # cuDNN makes a plan for each new shape of attention (60 ms on an H200), and here the shape changes from pass to pass.
    torch.backends.cuda.enable_cudnn_sdp(False)
    dtype = getattr(torch, config.dtype)
    model = read_model(model_dir, lambda directory: load_whole(language_model(directory), directory, dtype=dtype))
    attention_of(model.config)
    return model.to(config.device).eval()
