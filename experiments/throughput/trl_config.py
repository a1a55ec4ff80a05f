"""What both benchmarks against TRL set alike: plain policy gradient in float32 on the processor, all that can be spared off.

Imported by the interpreter of `.venv-trl` alone.
"""

from __future__ import annotations

from typing import Any

from trl import GRPOConfig


def spare_config(output_dir: str, learning_rate: float, **further: Any) -> GRPOConfig:
    """TRL's configuration with nothing that costs time and is not asked for; `further` goes to it as it is."""
    return GRPOConfig(
        output_dir=output_dir,
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        beta=0.0,  # no reference model
        model_init_kwargs={"dtype": "float32"},
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,  # on by default; it computes the forward pass twice
        dataloader_pin_memory=False,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
        **further,
    )
