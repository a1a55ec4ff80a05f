"""Bytes of one published weight set: whole, with the adapters merged, and the adapters alone.

python -m experiments.throughput.adapters [--model DIR] [--rank 8]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from learner.config import LearnerConfig, LoraConfig, LossConfig
from learner.torch_backend import TorchBackend

SHIPPED = Path(__file__).resolve().parents[2] / "configs" / "models" / "tiny-speller"


def published_bytes(model: Path, lora: LoraConfig) -> int:
    backend = TorchBackend(model, LearnerConfig(lora=lora), LossConfig())
    return sum(len(tensor.data) for tensor in backend.tensors().values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SHIPPED)
    parser.add_argument("--rank", type=int, default=8)
    asked = parser.parse_args()
    merged, alone = (published_bytes(asked.model, LoraConfig(rank=asked.rank, publish=how)) for how in ("merged", "adapter"))
    text = f"{asked.model.name}, rank {asked.rank}: merged {merged:,} bytes, adapter {alone:,} bytes: 1/{merged / alone:.1f}"
    print(text)  # noqa: T201


if __name__ == "__main__":
    main()
