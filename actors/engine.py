"""The seam between an actor's loop and whatever generates tokens. No framework here.

An engine owns model weights and a set of slots. It never waits, never talks to a socket and never reads a clock: the
actor's loop calls `step()` again and again, and between two calls it may submit, abort, or adopt new weights. So new
weights are adopted in flight, at a token border, without stopping generation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from buffers.record import FinishReason, Float32Array, Int32Array, Span
from buffers.tensors import RawTensor


class RolloutKey(NamedTuple):
    """Names one completion in the whole run."""

    group: int
    attempt: int
    member: int


@dataclass(frozen=True)
class Request:
    """One completion to generate.

    temperature: 0 is greedy (its log-probabilities are then of the temperature-1 distribution).
    seed: alone decides the completion's random numbers, whatever else is in the batch.
    """

    key: RolloutKey
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class Completion:
    """A finished request: int32 [T] tokens (end token included when sampled), float32 [T] log-probabilities, versions."""

    key: RolloutKey
    token_ids: Int32Array
    logprobs: Float32Array
    spans: tuple[Span, ...]
    finish_reason: FinishReason


class Engine(Protocol):
    """Generates tokens for many requests at once.

    Owns: weights, caches, slots. Waits for nothing. Woken by `step()`. On close: nothing to release but memory.
    """

    @property
    def version(self) -> int:
        """Version of the weights the next token will be sampled from; -1 before any were adopted."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Requests submitted and not yet returned or aborted, waiting ones included."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, in order. Those submitted together with equal prompts share one prompt computation.

        Raises EngineError for an empty prompt or one that cannot fit with its completion.
        """
        ...

    def abort(self, keys: Iterable[RolloutKey]) -> int:
        """Forget these requests, running or waiting; unknown keys are ignored. Returns the tokens thrown away."""
        ...

    def step(self) -> list[Completion]:
        """Fill free slots, sample one token in every running sequence, return those that ended."""
        ...

    def load_weights(self, version: int, tensors: Mapping[str, RawTensor]) -> None:
        """Adopt a whole weight set (parameter name, as in `named_parameters`, -> tensor); the next token is `version`'s.

        Raises WeightsError, and changes nothing, when a name is missing or unknown or a shape or dtype differs.
        """
        ...

    def probe(self, token_ids: Sequence[int]) -> Float32Array:
        """float32 [T - 1]: log-probability of each token but the first, given those before it, at temperature 1.

        By the weights the next token will be sampled from; what is being generated does not notice.
        """
        ...
