"""What images in prompts cost the built-in engine: tokens a second of groups of eight whose prompts have one image of 224 x 224
each, beside prompts of text of the same length, and the work of the tower once a group, one after the other.

Images are other ones in each turn, so that nothing is left of those before. The model is a random Idefics 3 with 64 tokens an
image; end tokens are disabled, so that every length is forced.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from async_rlhf.actors.engine import Request, RolloutKey, completed
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.buffers.images.processor import ImageProcessor
from async_rlhf.buffers.images.store import ImageStore
from async_rlhf.buffers.images.tower import ImageTower
from async_rlhf.buffers.model_directory import from_pretrained
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.experiments.throughput.harness import ROOT, Bench, BenchmarkRow, beside, timed

_GROUP, _SIDE, _NEW = 8, 224, 32
_TEXT = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "head_dim": 64, "max_position_embeddings": 512}
_VISION = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "image_size": _SIDE, "patch_size": 14}


def images(bench: Bench) -> Iterator[BenchmarkRow]:
    """Compare prompts with images with text of their length and the tower's work, in tokens a second."""
    torch.set_num_threads(1)
    groups = bench.size(8, 1)
    with tempfile.TemporaryDirectory() as name:
        directory, store, numbers = _model(Path(name) / "model"), ImageStore(Path(name) / "images"), count()
        model = AutoModelForImageTextToText.from_pretrained(directory, local_files_only=True, trust_remote_code=False).eval()
        tower = ImageTower(model, ImageProcessor(directory, store))
        engine = TorchEngine(
            model, slots=groups * _GROUP, max_length=512, tower=ImageTower(model, ImageProcessor(directory, store))
        )

        def prompts() -> list[tuple[str, list[int]]]:
            """An image for each group, and the prompt with it."""
            drawn = [store.add(_drawn(next(numbers))) for _ in range(groups)]
            return [(each, _encoded(engine, each)) for each in drawn]

        def ours() -> None:
            _generate(engine, [(ids, (image,)) for image, ids in prompts()])

        def text_and_tower() -> None:
            given = prompts()
            _generate(engine, [(_as_text(ids, number), ()) for number, (_, ids) in enumerate(given)])
            for image, _ in given:
                tower.features((image,))

        sides = {"images": timed(ours), "text and tower": timed(text_and_tower)}
        figures = {"prompt_tokens": len(prompts()[0][1]), "parameters": sum(each.numel() for each in model.parameters())}
        yield beside(
            f"images, {groups} groups of {_GROUP}", sides, bench.num_turns(5), "tok/s", groups * _GROUP * _NEW, at_least=0.8,
            figures=figures,
        )  # fmt: skip


def _model(directory: Path) -> Path:
    """Of the shipped model's family, with its tokenizer."""
    shutil.copytree(ROOT / "configs" / "models" / "tiny-namer", directory)
    config = from_pretrained(AutoConfig, directory)
    for part, sizes in ((config.text_config, _TEXT), (config.vision_config, _VISION)):
        for key, value in sizes.items():
            setattr(part, key, value)
    config.text_config.eos_token_id = None
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config, trust_remote_code=False).save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    for name, changed in (
        ("preprocessor_config.json", {"size": {"longest_edge": _SIDE}, "max_image_size": {"longest_edge": _SIDE}}),
        ("processor_config.json", {"image_seq_len": (_SIDE // 14 // 2) ** 2}),
    ):
        file = directory / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    return directory


def _drawn(seed: int) -> bytes:
    """A file of noise."""
    return b"P6 %d %d 255 " % (_SIDE, _SIDE) + np.random.default_rng(seed).bytes(3 * _SIDE * _SIDE)


def _encoded(engine: TorchEngine, image: str) -> list[int]:
    assert engine.tower is not None
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "what is it ?"}]
    return engine.tower.processor.encode([{"role": "user", "content": parts}], {}).ids


def _as_text(ids: list[int], seed: int) -> list[int]:
    """As many tokens, none of which is a place."""
    return [int(each) for each in np.random.default_rng(seed).integers(4, 30, len(ids))]


def _generate(engine: TorchEngine, prompts: list[tuple[list[int], tuple[str, ...]]]) -> None:
    requests = [
        Request(RolloutKey(group, 0, member), tuple(ids), _NEW, Sampling(), seed=group * _GROUP + member, images=images)
        for group, (ids, images) in enumerate(prompts)
        for member in range(_GROUP)
    ]
    assert sum(len(each.token_ids) for each in completed(engine, requests).values()) == len(requests) * _NEW
