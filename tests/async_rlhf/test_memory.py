"""What `check` says a learner takes is what its own parts are seen to take, on made-up tensors of a 4B model's width.

Layers are alike, so two and four of them are measured, and 36 follow on the same line. What an engine holds between turns and
what a process of an environment takes are measured as they are.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from async_rlhf.actors.config import GenerationConfig
from async_rlhf.actors.engine import Request, RolloutKey
from async_rlhf.actors.engine_config import Demand, EngineConfig
from async_rlhf.actors.environments import EnvironmentConfig, resolve
from async_rlhf.actors.environments.pool import EpisodePool
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.actors.torch_engine.settings import TorchEngineConfig
from async_rlhf.buffers.images.processor import ARRAYS_BYTES, FEATURES_BYTES, ImageProcessor
from async_rlhf.buffers.images.store import ImageStore
from async_rlhf.buffers.images.tower import ImageTower, tower_parameters
from async_rlhf.buffers.model_directory import ModelShape, shape_of
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.learner.batch.micro_batch import MicroBatch
from async_rlhf.learner.config import LearnerConfig, LossConfig
from async_rlhf.learner.model.policy import Policy, _checkpoint_gradients
from async_rlhf.learner.objective.objective import LossInputs, objective
from async_rlhf.learner.step.torch_machine import make_adamw
from async_rlhf.run.checks import memory
from async_rlhf.run.checks.images import ImageLoad
from tests import image_models

LAYERS = 36
ROWS, LENGTH, TOKENS = 4, 2048, 64
GENERATION = GenerationConfig(max_prompt_length=512, max_completion_length=512)


def qwen3_4b(layers: int, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=tied,
    )


def micro_batch() -> MicroBatch:
    """Two completions a row, so that rows are packed and masked."""
    ids_RL, n = torch.zeros(ROWS, LENGTH, dtype=torch.int64), torch.zeros(TOKENS, dtype=torch.int64)
    return MicroBatch(
        ids_RL=ids_RL,
        positions_RL=ids_RL,
        blocks_B4=torch.tensor([[at, at + LENGTH // 2, at, at + LENGTH // 2] for at in range(0, ROWS * LENGTH, LENGTH // 2)]),
        source_N=n,
        target_N=n,
        temperature_N=torch.ones(TOKENS),
        member_N=n,
        group_S=torch.zeros(2 * ROWS, dtype=torch.int64),
        version_N=n,
        comparable_N=n == 0,
        logp_behaviour_N=torch.zeros(TOKENS),
        advantage_N=torch.zeros(TOKENS),
    )


def measured(config: Qwen3Config, learner: LearnerConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[int, ModelShape]:
    """Bytes at the peak of the second micro-batch of an update, the optimizer's state included."""
    monkeypatch.setattr(Policy, "_output_layer_is_last", lambda self: True)  # it looks at numbers, and there are none
    batch = micro_batch()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Qwen3ForCausalLM(config).eval()
        policy = Policy(model, learner)
        policy.sharing = "rows"  # which needs more than blocks do
        named = dict(model.named_parameters())
        optimizer = make_adamw(named, {}, learner, torch.device("cpu"))
        for p in policy.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            logp_N, entropy_N, *_ = policy(batch)
            inputs = LossInputs(
                logp_current_N=logp_N,
                logp_proximal_N=logp_N.detach(),
                logp_behaviour_N=batch.logp_behaviour_N,
                advantage_N=batch.advantage_N,
                sequence_N=batch.member_N,
                group_S=batch.group_S,
                staleness_N=batch.version_N,
                mask_N=None,
                logp_reference_N=None,
                entropy_N=entropy_N,
            )
            objective(inputs, LossConfig(entropy_coef=0.01, is_cap=None, allow_uncorrected=True)).total.backward()
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    return int(peak), ModelShape.of(config.to_dict(), sum(p.numel() for p in named.values()))


@pytest.mark.parametrize(
    ("settings", "tied"),
    [
        ({"dtype": "bfloat16"}, True),
        ({"dtype": "bfloat16", "gradient_checkpointing": True}, False),
        ({"dtype": "float32"}, True),
    ],
    ids=["bfloat16", "with checkpointing", "float32"],
)
def test_the_estimate_of_a_learner_is_what_policy_loss_and_optimizer_take(
    settings: dict[str, Any], tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = LearnerConfig(micro_batch_tokens=ROWS * LENGTH, row_tokens=LENGTH, **settings)
    found = []
    for layers in (2, 4):
        total, shape = measured(qwen3_4b(layers, tied), learner, monkeypatch)
        estimate = sum(memory.learner(learner, shape, GENERATION, reference=0).values())
        assert estimate == pytest.approx(total, rel=0.15), layers
        found.append((total, shape.parameters))
    (two, p2), (four, p4) = found
    whole = ModelShape.of(qwen3_4b(LAYERS, tied).to_dict(), p2 + (LAYERS - 2) // 2 * (p4 - p2))
    estimate = sum(memory.learner(learner, whole, GENERATION, reference=0).values())
    assert estimate == pytest.approx(two + (LAYERS - 2) // 2 * (four - two), rel=0.15)


class Drawn:
    """Stands for a processor: a prompt's tiles, and nothing else."""

    def __init__(self, tiles: int, side: int) -> None:
        self.arrays = {"pixel_values": np.ones((1, tiles, 3, side, side), np.float32)}

    def inputs(self, images: tuple[str, ...]) -> dict[str, Any]:
        return self.arrays

    def num_patches(self, images: tuple[str, ...]) -> int:
        return self.arrays["pixel_values"].size // (3 * 14 * 14)


@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize(("layers", "checkpointing"), [(6, False), (6, True), (2, False)])
def test_the_estimate_of_what_reads_images_is_what_a_tower_takes(layers: int, checkpointing: bool, trains: bool) -> None:
    config, *_ = image_models.MAKERS["idefics3"]()
    sizes = {"hidden_size": 288, "intermediate_size": 1076, "num_hidden_layers": layers, "image_size": 84, "patch_size": 14}
    config.vision_config.update({**sizes, "num_attention_heads": 8})
    model: Any = AutoModelForImageTextToText.from_config(config).eval()
    shape = ModelShape.of(
        config.to_dict(),
        sum(p.numel() for p in model.parameters()),
        sum(p.numel() for p in tower_parameters(model).values()),
    )
    drawn, learner = Drawn(40, 84), LearnerConfig(train_vision=trains, gradient_checkpointing=checkpointing)
    read = ImageTower(model, cast(Any, drawn), trains=trains)
    if checkpointing:
        _checkpoint_gradients(model, None)
    for p in model.parameters() if trains else ():
        p.grad = torch.zeros_like(p)
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        vectors = read.features(("a",)).vectors
        if trains:
            vectors.sum().backward()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"] - 4 * shape.parameters * (1 + trains)
    load = ImageLoad(1, len(vectors), drawn.arrays["pixel_values"].size, read.num_patches(()), 0)
    assert shape.tower is not None
    estimate = memory._tower(learner, shape.tower, load.patches) if trains else memory._reading(load, shape, 4)
    assert estimate == pytest.approx(peak, rel=0.15)


@pytest.mark.parametrize("family", image_models.MAKERS)
def test_the_parameters_that_read_images_are_found_by_their_names_in_the_files(family: str, tmp_path: Path) -> None:
    model = image_models.make(family, tmp_path)
    shape = shape_of(tmp_path)
    assert shape is not None and shape.tower is not None
    assert shape.tower.parameters == sum(p.numel() for p in tower_parameters(model).values())
    store = ImageStore(tmp_path / "images")
    processor = ImageProcessor(tmp_path, store)
    digest = store.add(image_models.drawn(16, 16))
    processor.encode(image_models.asking(digest), {})
    assert shape.tower.deeper == len(ImageTower(model, processor).features((digest,)).deeper)


def test_what_is_kept_of_images_is_what_there_is_of_it_at_most() -> None:
    shape = ModelShape.of(
        qwen3_4b(LAYERS, True).to_dict() | {"vision_config": {"hidden_size": 8, "patch_size": 2, "depth": 1}}, 4_000_000_000, 5
    )
    one = ImageLoad(prompts=1, places=100, numbers=10_000, patches=900, pixels=4_000)
    many = replace(one, prompts=1_000_000)
    made = 4 * 100 * 2560
    assert memory._reading(many, shape, 4) - memory._reading(one, shape, 4) == FEATURES_BYTES - made
    assert memory._files(many) - memory._files(one) == ARRAYS_BYTES - 40_000
    parts = [memory.learner(LearnerConfig(), shape, GENERATION, reference=held, images=many)["images"] for held in (0, 1)]
    assert parts[1] == 2 * parts[0] > 2 * FEATURES_BYTES


def test_zero_shares_out_what_its_stage_says() -> None:
    shape = ModelShape.of(qwen3_4b(LAYERS, True).to_dict(), 4_000_000_000)
    reduced = 4 * 100_000_000

    def parts(**settings: Any) -> dict[str, int]:
        return dict(memory.learner(LearnerConfig(backend="deepspeed", **settings), shape, GENERATION, reference=0))

    for stage, (weights, gradients) in {1: (16, 16), 2: (16, 4), 3: (4, 4)}.items():
        found = parts(ranks=4, zero_stage=stage)
        assert found["optimizer"] == 12e9 and found["weights"] == weights * 1e9
        assert found["gradients"] == gradients * 1e9 + reduced
    assert parts(ranks=4, zero_stage=3, dtype="bfloat16")["weights"] == 2e9
    assert parts(ranks=4, tensor_parallel=4, zero_stage=1)["weights"] == 4e9
    both = {"zero_stage": 3, "ranks": 4, "tensor_parallel": 2}
    for reference_dtype, settings, size in [
        ("float32", {"backend": "deepspeed", **both}, 4e9),
        ("bfloat16", {"backend": "deepspeed", **both}, 2e9),
        ("bfloat16", {"backend": "deepspeed", "zero_stage": 2, "ranks": 4}, 8e9),
        ("bfloat16", {"backend": "torch", "zero_stage": 3}, 8e9),
    ]:
        learner = LearnerConfig(reference_dtype=reference_dtype, **settings)  # type: ignore[arg-type]
        assert memory.learner(learner, shape, GENERATION, reference=shape.parameters)["reference"] == size
    plain = memory.learner(LearnerConfig(lora={"rank": 16}), shape, GENERATION, reference=shape.parameters)  # type: ignore[arg-type]
    assert plain["optimizer"] < 0.01 * 8 * 4e9 and plain["reference"] == 16e9


def test_an_engine_holds_keys_and_values_for_its_slots_or_up_to_its_limit() -> None:
    shape = ModelShape.of(qwen3_4b(LAYERS, True).to_dict(), 4_000_000_000)
    token = 2 * LAYERS * 8 * 128 * 2

    def cache(holds: bool = False, **settings: Any) -> int:
        config = EngineConfig.model_validate({"device": "cuda", "dtype": "bfloat16", **settings})
        parts = config.memory(Demand(shape, 1024, holds), 40 << 30)
        return sum(parts.get(name, 0) for name in ("keys and values", "held between turns"))

    assert cache(slots=64) == 64 * 1024 * token
    assert cache(slots=64, kv_bytes=1 << 30) == 1 << 30
    assert cache(slots=64, kv_bytes=1 << 30, holds=True) == 2 << 30
    assert cache(kind="vllm") == cache(kind="vllm", holds=True) == (40 << 30) - 8_000_000_000
    assert cache(kind="vllm", tensor_parallel_size=4) == (40 << 30) - 2_000_000_000


@pytest.mark.parametrize("max_places", [None, 64], ids=["by slots", "engine.kv_bytes"])
def test_what_an_engine_holds_between_turns_is_what_was_estimated_at_most(max_places: int | None) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    model = LlamaForCausalLM(config)
    token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, width, bytes of a float32
    settings = TorchEngineConfig(slots=4, kv_bytes=max_places and max_places * token)
    shape = ModelShape.of(config.to_dict(), sum(each.numel() for each in model.parameters()))
    estimate = settings.memory(Demand(shape, 32, holds=True), None)["held between turns"]
    engine = TorchEngine(model, slots=4, max_length=32, max_places=max_places)
    engine.submit([Request(RolloutKey(n, 0, 0), (n,) * 20, 12, Sampling(), n, hold=True) for n in range(9)])
    held = 0
    while engine.num_unfinished:
        engine.step()
        holds = engine._scheduler._holds._cached
        held = max(held, sum(part.nbytes for hold in holds for part in hold.cache))
    assert 0.9 * estimate <= held <= estimate


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_of_an_environment_that_imports_nothing_takes_what_was_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "say.py").write_text("def say(prompt):\n    while True:\n        yield prompt\n")
    main = sys.modules["__main__"]  # of pytest, which the process would import as it does a user's program
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.delattr(main, "__file__", raising=False)
    config, bell = EnvironmentConfig(), threading.Event()
    pool = EpisodePool[int](resolve("say.py:say", tmp_path), config, bell.set)
    try:
        for number in range(16):
            pool.begin(number, {"prompt": "a"})
        observed = list[Any]()
        while len(observed) < 16:
            assert bell.wait(60)
            bell.clear()
            observed += pool.poll()
        (process,) = pool._sessions._workers.values()  # type: ignore[union-attr]
        guard = process.process._popen._guard  # type: ignore[attr-defined]
        taken = sum(private_bytes(pid) for pid in (process.process.pid, guard))
    finally:
        pool.close()
    assert taken == pytest.approx(memory.EPISODES, rel=0.15)


def private_bytes(pid: int) -> int:
    """What a process shares with no other."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))
