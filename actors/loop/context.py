"""The meaning of a group number: row, prompt, requests, environment, and how completions become text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from async_rlhf.actors.config import GenerationConfig
from async_rlhf.actors.engine import Request, RolloutKey
from async_rlhf.actors.environments import EnvironmentSpec
from async_rlhf.actors.environments.pool import EpisodePool
from async_rlhf.actors.environments.rendering import Renderer
from async_rlhf.actors.prompts import PLAIN, Row, Template, encode, prompt_number, rollout_seed
from async_rlhf.buffers.composition import Composition
from async_rlhf.buffers.failures import FailureKind
from async_rlhf.buffers.record import Score, source_of
from async_rlhf.buffers.sampling import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from async_rlhf.buffers.images.processor import ImageProcessor


@dataclass(frozen=True)
class Environment:
    """An environment and what it needs."""

    spec: EnvironmentSpec
    pool: EpisodePool[RolloutKey]
    rendering: Renderer
    max_prompt_length: int
    max_length: int
    """Limit of a rollout, in tokens behind the prompt."""

    @property
    def name(self) -> str:
        """The name of its score."""
        return self.spec.name

    @property
    def at_limit(self) -> Score:
        """The score of an episode that a limit ends; one without a value leaves it out of the batch."""
        return Score(self.spec.at_limit)

    def goes_on(self, turns: int) -> bool:
        """Whether a turn may follow that which begins after `turns` others; else the engine holds nothing of it."""
        return turns + 1 < self.spec.max_turns

    def counted(self) -> dict[str, float]:
        """As in `wire.Telemetry`."""
        counters = self.pool.counters
        return {
            "episodes_failed_total": float(counters.episodes["failed"]),
            "episodes_lost_total": float(counters.lost),
            "cleanups_failed_total": float(counters.cleanups_failed),
        }


@dataclass(frozen=True)
class Environments:
    """The environments of a run. Several may have one name: their scores are then one component of the reward."""

    default: Environment | None = None
    """For rows whose source has none of its own; None: those have one turn."""
    by_source: Mapping[str, Environment] = field(default_factory=dict)

    @property
    def all(self) -> tuple[Environment, ...]:
        return (*(() if self.default is None else (self.default,)), *self.by_source.values())

    def of(self, columns: Mapping[str, Any]) -> Environment | None:
        """The environment of a row with these columns."""
        return self.by_source.get(source_of(columns) or "", self.default)

    def scores(self, played_by: Environment | None, score: Score | None) -> dict[str, Score]:
        """By environment, of a rollout with this score of its own; the others do not apply."""
        none = {environment.name: Score() for environment in self.all}
        return none if played_by is None else {**none, played_by.name: score or Score()}

    @property
    def failed(self) -> Counter[FailureKind]:
        """Failures of episodes, by kind."""
        return sum((environment.pool.counters.failed for environment in self.all), Counter())

    def counted(self) -> dict[str, float]:
        """As in `wire.Telemetry`, of all together."""
        counters = [environment.counted() for environment in self.all]
        return {name: sum(counted[name] for counted in counters) for name in (counters[0] if counters else ())}


NO_ENVIRONMENTS = Environments()


@dataclass(frozen=True)
class RunContext:
    """Maps group numbers to requests, alike for each actor and evaluation."""

    seed: int
    rows: Sequence[Row]
    """Empty where they come while the run goes on."""
    generation: GenerationConfig
    tokenizer: PreTrainedTokenizerBase
    template: Template = PLAIN
    partial_every: int = 0
    """Tokens by which a completion grows each time it is offered to incremental scoring; 0: there is none."""
    refill: Composition | None = None
    """Where constant groups are to be replaced by others: how rewards are made of scores."""
    environments: Environments = NO_ENVIRONMENTS
    """The environments, where episodes have one."""
    images: ImageProcessor | None = None
    """What prepares images, where rows have some."""

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
        text, ids = encode(row, self.tokenizer, self.template, generation.max_prompt_length, self.images)
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
                images=row.images,
            )
            for member, sampling in enumerate(samplings or [generation.sampling] * generation.group_size)
        ]
        return row, text, requests
