"""What a group number means: its row, its prompt, its requests, its environment, and how completions become text; and a rollout
that has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from async_rlhf.actors.config import GenerationConfig
from async_rlhf.actors.engine import Completion, Request, RolloutKey
from async_rlhf.actors.environments import Content, EnvironmentSpec, Message
from async_rlhf.actors.environments.pool import EpisodePool
from async_rlhf.actors.environments.rendering import Renderer
from async_rlhf.actors.prompts import PLAIN, Row, Template, encode, prompt_number, rollout_seed
from async_rlhf.actors.rewards.answer import as_text
from async_rlhf.buffers.composition import Composition
from async_rlhf.buffers.record import Score, sampled, source_of
from async_rlhf.buffers.sampling import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Environment:
    """An environment and what it needs. max_length: of a rollout, in tokens behind the prompt."""

    spec: EnvironmentSpec
    pool: EpisodePool[RolloutKey]
    rendering: Renderer
    max_prompt_length: int
    max_length: int

    @property
    def name(self) -> str:
        """Of its score."""
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
    """The environments of a run. default: of rows whose source has none of its own; None: those have one turn. Several may have
    one name: their scores are then one component of the reward."""

    default: Environment | None = None
    by_source: Mapping[str, Environment] = field(default_factory=dict)

    @property
    def all(self) -> tuple[Environment, ...]:
        return (*(() if self.default is None else (self.default,)), *self.by_source.values())

    def of(self, columns: Mapping[str, Any]) -> Environment | None:
        """Of a row with these columns."""
        return self.by_source.get(source_of(columns) or "", self.default)

    def scores(self, own: Environment | None, score: Score | None) -> dict[str, Score]:
        """By environment, of a rollout that `own` has finished; the others do not apply."""
        none = {environment.name: Score() for environment in self.all}
        return none if own is None else {**none, own.name: score or Score()}

    def counted(self) -> dict[str, float]:
        """As in `wire.Telemetry`, of all together."""
        each = [environment.counted() for environment in self.all]
        return {name: sum(counted[name] for counted in each) for name in (each[0] if each else ())}


NO_ENVIRONMENTS = Environments()


@dataclass(frozen=True)
class RunContext:
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
    environments: Environments = NO_ENVIRONMENTS
    """The environments, where episodes have one."""

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


@dataclass(frozen=True)
class FinishedRollout:
    """A rollout that has ended.

    completion: all that goes into the record, observations included; text: of that, and where a row began anew of the
    observation there. prompt, prompt_ids: the first observation, or the row's ids and no text; of an agent no text. turns: what
    the model wrote, in time; last: the last of them that is trained on. num_sampled: tokens of all. anew: what was read where a
    row began anew. messages: the conversation of the last turn, is_chat: as such; num_prompt: of them before the first turn.
    score: the environment's; turn_scores: as of `Rollout`. steps: when the environment worked on it, (began, ended)
    in seconds since the epoch.
    """

    completion: Completion
    prompt_ids: tuple[int, ...]
    text: str
    turns: tuple[str, ...]
    prompt: str = ""
    anew: tuple[Content, ...] = ()
    messages: Sequence[Message] = ()
    num_prompt: int = 0
    is_chat: bool = True
    score: Score | None = None
    turn_scores: tuple[float | None, ...] = ()
    steps: tuple[tuple[float, float], ...] = ()
    last: int = -1
    num_sampled: int = 0

    @property
    def answer(self) -> str:
        """What rewards are given as the completion."""
        return self.turns[self.last]

    @property
    def fields(self) -> dict[str, Any]:
        """What rewards may ask for where there is an environment."""
        if not self.messages:
            return {}
        was_sampled = sampled(self.completion.spans).tolist()
        return {
            "messages": [*self.messages],
            "completion_messages": [*self.messages[self.num_prompt :]],
            "model_prompt": self.messages[:-1] if self.is_chat else as_text(self.messages[:-1], ""),
            "turns": [*self.turns],
            "sampled": was_sampled,
        }
