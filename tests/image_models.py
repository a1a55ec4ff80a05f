"""Tiny random models of images and text, of seven families, as directories with processor, tokenizer and chat template."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast

from async_rlhf.buffers.images.processor import ImageProcessor
from async_rlhf.buffers.images.tower import ImageTower
from async_rlhf.buffers.record import Group

_WORDS = [*"abcdefghijklmnopqrstuvwxyz \n?:", "user", "system", "assistant"]
_TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_channels": 3,
}  # fmt: skip
_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def _tokenizer(special: dict[str, str], further: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    names = ["<pad>", "<eos>", "<unk>", *dict.fromkeys((*special.values(), *further))]
    vocabulary = {token: number for number, token in enumerate([*names, *_WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        additional_special_tokens=[*dict.fromkeys((*special.values(), *further))], extra_special_tokens=special,
    )  # fmt: skip


def _qwen2_5() -> tuple[Any, Any, Any, dict[str, Any]]:
    special = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    tokenizer = _tokenizer(special, ("<|vision_start|>", "<|vision_end|>"))
    config = transformers.Qwen2_5_VLConfig(
        text_config=_TEXT | {"vocab_size": len(tokenizer), "rope_parameters": _MROPE},
        vision_config={
            "depth": 2, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 24, "patch_size": 4,
            "fullatt_block_indexes": [1], "window_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        **_ids(tokenizer, image="<|image_pad|>", video="<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    )  # fmt: skip
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 8 * 8 * 4, "longest_edge": 8 * 8 * 24}
    )
    return config, tokenizer, images, {"mark": "<|vision_start|><|image_pad|><|vision_end|>"}


def _qwen3() -> tuple[Any, Any, Any, dict[str, Any]]:
    _, tokenizer, images, rest = _qwen2_5()
    turning = _MROPE | {"mrope_interleaved": True}
    config = transformers.Qwen3VLConfig(
        text_config=_TEXT | {"vocab_size": len(tokenizer), "head_dim": 8, "rope_parameters": turning},
        vision_config={
            "depth": 3, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 24, "patch_size": 4,
            "deepstack_visual_indexes": [0, 1], "spatial_merge_size": 2, "temporal_patch_size": 2,
            "num_position_embeddings": 64,
        },
        **_ids(tokenizer, image="<|image_pad|>", video="<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    )  # fmt: skip
    return config, tokenizer, images, rest


def _gemma3() -> tuple[Any, Any, Any, dict[str, Any]]:
    tokenizer = _tokenizer(
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        ("\n\n", "\n\n\n", "\n\n\n\n"),
    )
    config = transformers.Gemma3Config(
        text_config=_TEXT
        | {"vocab_size": len(tokenizer), "head_dim": 8, "sliding_window": 6, "layer_types": _LAYERS, "num_hidden_layers": 3},
        vision_config=_VISION | {"image_size": 16, "patch_size": 4, "vision_use_head": False},
        mm_tokens_per_image=4,
        image_token_id=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
        boi_token_id=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_id=tokenizer.convert_tokens_to_ids("<end_of_image>"),
    )
    images = transformers.Gemma3ImageProcessorPil(size={"height": 16, "width": 16}, image_seq_length=4)
    return config, tokenizer, images, {"mark": "<start_of_image>", "image_seq_length": 4}


_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


def _idefics3(smol: bool) -> tuple[Any, Any, Any, dict[str, Any]]:
    special = {
        "image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    }  # fmt: skip
    tokenizer = _tokenizer(special, tuple(f"<row_{row}_col_{col}>" for row in (1, 2, 3) for col in (1, 2, 3)))
    kind = transformers.SmolVLMConfig if smol else transformers.Idefics3Config
    config = kind(
        text_config=_TEXT | {"model_type": "llama", "vocab_size": len(tokenizer)},
        vision_config=_VISION | {"image_size": 16, "patch_size": 4},
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    maker: Any = transformers.SmolVLMImageProcessorPil if smol else transformers.Idefics3ImageProcessorPil
    images = maker(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    return config, tokenizer, images, {"mark": "<image>", "image_seq_len": 4}


def _llava() -> tuple[Any, Any, Any, dict[str, Any]]:
    tokenizer = _tokenizer({"image_token": "<image>", "video_token": "<video>"})
    config = transformers.LlavaOnevisionConfig(
        text_config=_TEXT | {"model_type": "qwen2", "vocab_size": len(tokenizer)},
        vision_config=_VISION
        | {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4, "vision_use_head": False},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=[[16, 16], [16, 32], [32, 16], [32, 32]],
        vision_feature_layer=-1,
    )
    images = transformers.LlavaOnevisionImageProcessorPil(
        size={"height": 16, "width": 16}, image_grid_pinpoints=[[16, 16], [16, 32], [32, 16], [32, 32]]
    )
    return config, tokenizer, images, {"mark": "<image>", "num_image_tokens": 16, "vision_feature_select_strategy": "full"}


def _internvl() -> tuple[Any, Any, Any, dict[str, Any]]:
    special = {
        "context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>",
        "video_token": "<video>",
    }  # fmt: skip
    tokenizer = _tokenizer(special)
    config = transformers.InternVLConfig(
        text_config=_TEXT | {"model_type": "qwen2", "vocab_size": len(tokenizer)},
        vision_config=_VISION | {"image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        downsample_ratio=0.5,
    )
    images = transformers.GotOcr2ImageProcessorPil(
        size={"height": 16, "width": 16}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    return config, tokenizer, images, {"mark": "<IMG_CONTEXT>", "image_seq_length": 4}


def _ids(tokenizer: Any, *, image: str, video: str) -> dict[str, int]:
    found = {"image_token_id": image, "video_token_id": video}
    return {name: int(tokenizer.convert_tokens_to_ids(token)) for name, token in found.items()}


MAKERS: dict[str, Callable[[], tuple[Any, Any, Any, dict[str, Any]]]] = {
    "qwen2_5_vl": _qwen2_5, "qwen3_vl": _qwen3, "gemma3": _gemma3, "idefics3": lambda: _idefics3(False),
    "smolvlm": lambda: _idefics3(True), "llava_onevision": _llava, "internvl": _internvl,
}  # fmt: skip


def make(family: str, directory: Path, *, wide: bool = False) -> PreTrainedModel:
    """Write a model directory; weights are large enough that a wrong place, position or mask shows. wide: with heads that the
    kernels of vLLM know."""
    import json

    config, tokenizer, images, settings = MAKERS[family]()
    if wide:
        _widen(config)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config).float().eval()
    for weights in model.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.15)
    model.save_pretrained(directory)
    if config.vision_config.model_type == "siglip_vision_model":
        _as_published(directory / "model.safetensors")
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", settings.pop("mark"))
    tokenizer.save_pretrained(directory)
    images.save_pretrained(directory)
    (directory / "processor_config.json").write_text(json.dumps(settings))
    return model


def _as_published(file: Path) -> None:
    """With the level of names that transformers keeps of a directory that it was read from, and gives none of its own."""
    tensors = load_file(file)
    save_file({name.replace("vision_tower.", "vision_tower.vision_model."): each for name, each in tensors.items()}, file)


def _widen(config: Any) -> None:
    config.text_config.update({"hidden_size": 128, "head_dim": 32, "intermediate_size": 128})
    if "mrope_section" in config.text_config.rope_parameters:
        config.text_config.rope_parameters["mrope_section"] = [6, 5, 5]
    if hasattr(config.vision_config, "out_hidden_size"):
        config.vision_config.out_hidden_size = 128


@torch.no_grad()
def plain(model: Any, processor: ImageProcessor, group: Group) -> list[torch.Tensor]:
    """Log-probabilities of what was sampled of each rollout, each piece by a pass of transformers' own over it and its images.
    NaN from a sampled token of images on, which such a pass would take for a place."""
    tower, found = ImageTower(model, processor), list[torch.Tensor]()
    for rollout in group.rollouts:
        parts = []
        for number, (piece, head) in enumerate(zip(rollout.pieces, rollout.heads, strict=True)):
            before = [] if number else group.prompt_ids.tolist()
            images = (*([] if number else group.images), *(rollout.images[number] if rollout.images else ()))
            ids, start = [*before, *rollout.completion_ids[piece.start : piece.stop].tolist()], len(before) + head
            end = ids.index(processor.place_id, start) if processor.place_id in ids[start:] else len(ids)
            read = ids[: max(start, end - 1)]
            logits = tower.plain(read, start, images) if images else model(torch.tensor([read]), use_cache=False).logits[0]
            logp = torch.full((len(ids),), torch.nan)
            logp[1 : len(read) + 1] = torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1 : len(read) + 1])[:, None])[
                :, 0
            ]
            parts.append(logp[len(before) :][torch.from_numpy(rollout.sampled[piece.start : piece.stop])])
        found.append(torch.cat(parts))
    return found


def drawn(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG of random colours."""
    pixels = np.random.default_rng(seed).integers(256, size=(height, width, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def asking(*images: str, text: str = "what is it?") -> list[dict[str, Any]]:
    """One user message with these images, and text between and behind them."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": "look:"}]
    for digest in images:
        parts += [{"type": "image", "image": digest}, {"type": "text", "text": "a"}]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
