"""`async-rlhf try machine`: this machine and one model on it, measured stage by stage into the file that `plan` reads."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

from async_rlhf.actors.config import EngineConfig
from async_rlhf.buffers.attention import max_length
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.calibration.link import measure_loopback
from async_rlhf.experiments.planning.calibration.stages import measure_generation, measure_publication, measure_training
from async_rlhf.experiments.planning.model.calibration import Calibration
from async_rlhf.experiments.planning.model.costs import Costs
from async_rlhf.experiments.planning.model.devices import Device

_LONGEST = 2048  # tokens, of a model without a stated limit
_SHARES = {"peaks": 0.03, "generation": 0.5, "training": 0.3, "publication": 0.1}
"""Of the time that measuring may take, without what loading the model takes; each of the three peaks has its share."""


def measure(
    model: Path, *, device: str, dtype: str, threads: int, slots: int, seconds: float, report: Callable[[str], object]
) -> Calibration:
    """model: a model directory. slots: most rows that are decoded together. seconds: what measuring may take, about.

    Raises ConfigError for a model or a device that the engine or the learner refuses.
    """
    from async_rlhf.actors.engine import load_engine
    from async_rlhf.actors.torch_engine.peaks import measure_peaks
    from async_rlhf.learner.config import LearnerConfig, LossConfig
    from async_rlhf.learner.step.controller import make_backend

    began = time.monotonic()
    config = EngineConfig.model_validate(
        {"device": device, "dtype": dtype, "threads": threads, "slots": slots, "batch_invariant": False}
    )
    vocabulary, longest = _sizes(model)
    engine = load_engine(str(model), config)  # which refuses what it cannot serve, before anything is measured
    report(f"{platform.node() or 'this machine'}: {device}, {dtype}, {threads} threads; model {model.name}")
    peaks = measure_peaks(config, _SHARES["peaks"] * seconds)
    report(f"matrix product {peaks.flops / 1e9:,.1f} GFLOP/s, memory {peaks.memory_bytes_per_s / 1e9:.1f} GB/s")
    latency_s, bytes_per_s = measure_loopback()
    report(f"loopback {latency_s * 1e6:.0f} us, {bytes_per_s / 1e9:.1f} GB/s")
    decoding, prefill = measure_generation(
        engine,
        vocabulary,
        longest=longest,
        slots=slots,
        prefill_tokens=config.prefill_tokens,
        seconds=_SHARES["generation"] * seconds,
    )
    report(f"decoding: {decoding.points} points, median error {decoding.error:.0%}; prefill: {prefill.error:.0%}")
    learner = LearnerConfig.model_validate({"device": device, "threads": threads, "learning_rate": 1e-12})
    backend = make_backend(model, learner, LossConfig(), publish_dtype=dtype)
    training = measure_training(backend, vocabulary, _SHARES["training"] * seconds)
    report(f"learner: {training.points} points, median error {training.error:.0%}")
    published = measure_publication(backend, engine, _SHARES["publication"] * seconds)
    report(f"weights: copied in {published.copy_s:.4f} s, at the hub {published.travel_s:.4f} s later")
    engine.close()
    return Calibration(
        measured=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        machine=platform.platform(),
        model=model.name,
        engine_device=device,
        dtype=dtype,
        threads=threads,
        seconds=time.monotonic() - began,
        device=Device(
            peak_flops=peaks.flops,
            memory_bytes=peaks.memory_bytes,
            memory_bytes_per_s=peaks.memory_bytes_per_s,
            link_bytes_per_s=bytes_per_s,
            link_latency_s=latency_s,
            network_bytes_per_s=bytes_per_s,
            network_latency_s=latency_s,
            host_bytes_per_s=peaks.host_bytes_per_s,
            is_cpu=device == "cpu",
        ),
        costs=Costs(
            decode=decoding.terms,
            prefill=prefill.terms,
            training=training.terms,
            copy_s=published.copy_s,
            travel_s=published.travel_s,
            adopt_s=published.adopt_s,
        ),
        fits={"decode": decoding, "prefill": prefill, "training": training},
    )


def _sizes(model: Path) -> tuple[int, int]:
    """Vocabulary, and the tokens that the model can hold. Raises ConfigError for a directory without its configuration."""
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {str(model)!r} is no model directory: its config.json cannot be read: {error}") from error
    config = config.get("text_config", config)
    if not isinstance(vocabulary := config.get("vocab_size"), int):
        raise ConfigError(f"model {str(model)!r}: vocab_size of its config.json is {config.get('vocab_size')!r}, no number")
    return vocabulary, min(max_length(config) or _LONGEST, _LONGEST)
