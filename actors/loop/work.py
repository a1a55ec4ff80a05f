"""What a group number means: its row, its prompt, its requests, and how completions become text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from async_rlhf.actors.config import GenerationConfig
from async_rlhf.actors.engine import Request, RolloutKey
from async_rlhf.actors.loop.episodes import Play
from async_rlhf.actors.prompts import PLAIN, Row, Template, encode, prompt_number, rollout_seed
from async_rlhf.buffers.composition import Composition
from async_rlhf.buffers.sampling import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Work:
    """What a group number means: the same for every actor, and for an evaluation. rows: empty where they come while the run
    goes on."""

    seed: int
    rows: Sequence[Row]
    generation: GenerationConfig
    tokenizer: PreTrainedTokenizerBase
    template: Template = PLAIN
    partial_every: int = 0
    """Tokens by which a completion grows each time it is offered to incremental scoring; 0: there is none."""
    refill: Composition | None = None
    """Where constant groups are to be replaced by others: how rewards are made of scores."""
    play: Play | None = None
    """The environment, where episodes have one."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text that environments and rewards are given."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def requests(
        self,
        number: int,
        attempt: int,
        row: Row | None = None,
        place: int | None = None,
        samplings: Sequence[Sampling] | None = None,
    ) -> tuple[Row, str, list[Request]]:
        """Row, prompt text and requests of group `number`. Seeds do not depend on the attempt: a crash changes nothing.

        row, place (of the row in the first epoch): where the hub gives one; else the row follows from the number. samplings:
        one a member; None: a group as it is trained on.
        """
        row = row or self.rows[prompt_number(self.seed, number if place is None else place, len(self.rows))]
        generation = self.generation
        text, ids = encode(row, self.tokenizer, self.template, generation.max_prompt_length)
        prompt_ids = tuple(ids)
        requests = [
            Request(
                RolloutKey(number, attempt, member),
                prompt_ids,
                generation.max_completion_length,
                sampling,
                rollout_seed(self.seed, number, member),
                generation.stop,
                self.partial_every,
            )
            for member, sampling in enumerate(samplings or [generation.sampling] * generation.group_size)
        ]
        return row, text, requests
