"""What stages cost by the rooflines of `stages`, for a simulation of a run on devices that were not measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

from async_rlhf.plan.model_costs import Recompute
from async_rlhf.plan.stages import Place, decode_step_s, optimizer_s, prefill_s, publication_s, training_s


@dataclass(frozen=True, kw_only=True)
class RooflineCosts:
    """`costs.StageCosts`. generator: of one actor; learner: of all its devices; completion_tokens: mean of a completion, which
    says over how many rows a step's tokens are spread. Each completion is trained on behind a prompt of its own."""

    generator: Place
    learner: Place
    completion_tokens: float
    actors: int = 1
    micro_batches: int = 1
    zero_stage: int = 0
    recompute: Recompute = "none"
    completion_s: float = 0.0

    @property
    def copy_s(self) -> float:
        """Read and written in the learner's memory, by its devices at once."""
        return 2 * self.learner.model.weight_bytes / self.learner.devices / self.learner.memory_bytes_per_s

    @property
    def travel_s(self) -> float:
        return publication_s(
            self.learner, self.actors, links=min(self.learner.tensor * self.learner.pipeline, self.generator.devices)
        )

    @property
    def adopt_s(self) -> float:
        """Read and written in the generator's memory."""
        return 2 * self.generator.model.weight_bytes / self.generator.devices / self.generator.memory_bytes_per_s

    def decode_s(self, rows: int, context: float) -> float:
        """A maximum of two linear functions of the context, so that a mean context gives at most what the steps take."""
        return decode_step_s(self.generator, math.ceil(rows / self.generator.data), context)

    def prefill_s(self, prompts: int, tokens: int) -> float:
        return prefill_s(self.generator, math.ceil(prompts / self.generator.data), tokens)

    def training_s(self, prompts: int, prompt_tokens: int, completion_tokens: int, updates: int) -> float:
        rows = max(1, round(completion_tokens / self.completion_tokens))
        length = prompt_tokens + round(completion_tokens / rows)
        passes = training_s(
            self.learner, rows, length, micro_batches=self.micro_batches, zero_stage=self.zero_stage, recompute=self.recompute
        )
        return passes + updates * optimizer_s(self.learner, zero_stage=self.zero_stage)
