"""The seam between an actor's loop and whatever generates tokens.

An engine owns model weights and a set of slots. It never waits long, and never for the hub: the actor's loop calls
`step()` again and again, and between two calls it may submit, abort, or load new weights. So new weights are adopted in
flight, at a token border, without stopping generation. What becomes of the sequences that are running then is the
engine's `on_update`:

    keep        they go on, with their caches: cheapest; a token may attend to keys and values of older weights, and its
                span names the oldest of them (`Span.cache_version`)
    interrupt   they go on after their prefixes have been computed again by the new weights: every token's log-probability
                is that of its own version over its whole prefix
    finish      they end first, with the weights they began with; meanwhile nothing is admitted

A row of several turns is a series of requests with one key, each of which continues the one before: its `context` are the
tokens behind the prompt that are there already, exactly as the engine saw them. A turn that ends with `hold` may be continued
without computing its prefix again. Under `keep` held caches outlive an update to newer weights, under the others none. Rows
of one rollout have keys of their own, and are sampled at the same time, at one place in line.

An engine is made by its settings (`EngineConfig.start`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from async_rlhf.actors.engine_config import EngineConfig
from async_rlhf.buffers.errors import ConfigError, EngineError
from async_rlhf.buffers.record import FinishReason, Float32Array, Int32Array, SamplingMask, Span
from async_rlhf.buffers.routing import RoutingArray
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.buffers.tensors import RawTensor

if TYPE_CHECKING:
    from async_rlhf.buffers.images.processor import ImageProcessor

OnUpdate = Literal["keep", "interrupt", "finish"]


class Bits(NamedTuple):
    """Whether a completion has the same bits in any batch, and which. Exactly one field is set."""

    digest: str = ""
    """Digest of sample completions under the loaded weights; engines with equal digests give equal bits."""
    obstacle: str = ""
    """Why the bits are not guaranteed."""


Prompt = tuple[tuple[int, ...], tuple[str, ...]]
"""Token ids, and digests of images."""
NO_PROMPT: Prompt = ((), ())


class RolloutKey(NamedTuple):
    """Names one rollout in the whole run; of an engine's requests with `row`, one of its rows."""

    group: int
    attempt: int
    member: int
    row: int = 0

    @property
    def rollout(self) -> RolloutKey:
        return self._replace(row=0)


@dataclass(frozen=True)
class Request:
    """One completion to generate."""

    key: RolloutKey
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    """Limit of this turn alone."""
    sampling: Sampling
    seed: int
    """Alone decides the completion's random numbers, whatever else is in the batch."""
    stop: tuple[str, ...] = ()
    """The completion ends with the token after which its text contains one of these."""
    partial_every: int = 0
    """`Engine.partials` returns the completion each time it has grown by this number of tokens; 0: never."""
    context: tuple[int, ...] = ()
    """Tokens between prompt and completion: turns sampled before, and observations. The completion continues `prefix_ids`, and
    holds the new turn only."""
    hold: bool = False
    """When the request ends, its keys and values and its place in line may be kept for one of the same key that continues it
    (whose context begins with this one's context and tokens). That one releases them; `abort`, and the end of a request of its
    key without `hold`, release all of the key."""
    images: tuple[str, ...] = ()
    """Digests of the prompt's images, in the order of their places in it."""

    @property
    def prompt(self) -> Prompt:
        """What is computed alike for all requests that have the same."""
        return self.prompt_ids, self.images

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """The tokens before the completion: the prompt and its context."""
        return (*self.prompt_ids, *self.context) if self.context else self.prompt_ids

    @property
    def most_tokens(self) -> int:
        """Number of tokens of the row after the longest allowed completion."""
        return len(self.prompt_ids) + len(self.context) + self.max_new_tokens

    @property
    def parts(self) -> str:
        """The parts of `most_tokens`, for messages."""
        context = f" + {len(self.context)} context" if self.context else ""
        return f"{len(self.prompt_ids)} prompt{context} + {self.max_new_tokens} new tokens"


def check_requests(
    requests: Sequence[Request],
    known: Set[RolloutKey],
    check: Callable[[Request], None] = lambda request: None,
    vocabulary: int | None = None,
    max_length: int | None = None,
) -> set[RolloutKey]:
    """The keys of these and of those known already; raises EngineError for the first request that cannot be served.

    `check` raises it for what is particular to one engine. vocabulary: how many token ids the model has; max_length: tokens of
    the longest row; None: not known.
    """
    known = set(known)
    for request in requests:
        if len(request.prompt_ids) == 0:
            raise EngineError(f"{request.key} has an empty prompt; give it at least one token (a begin token will do)")
        if request.max_new_tokens < 1:
            raise EngineError(f"{request.key} asks for max_new_tokens = {request.max_new_tokens}; at least 1 is needed")
        if request.seed < 0:
            raise EngineError(f"{request.key} has seed {request.seed}; at least 0 is needed")
        if max_length is not None and request.most_tokens > max_length:
            raise EngineError(
                f"{request.key} needs {request.parts}, the model holds {max_length}; shorten the prompt or lower "
                "max_completion_length (vLLM: or raise engine.kv_bytes)"
            )
        least, most = min(request.prefix_ids), max(request.prefix_ids)
        if vocabulary is not None and not 0 <= least <= most < vocabulary:
            raise EngineError(
                f"{request.key} has token ids {least} to {most}, the model knows 0 to {vocabulary - 1}; use the tokenizer that "
                "belongs to the model"
            )
        check(request)
        if request.key in known:
            raise EngineError(f"{request.key} is already submitted; a key names one completion")
        known.add(request.key)
    return known


@dataclass(frozen=True)
class Completion:
    """A finished request: int32 [T] tokens (end token included when sampled), float32 [T] log-probabilities, versions."""

    key: RolloutKey
    token_ids: Int32Array
    logprobs: Float32Array
    """Under the distribution really sampled from, renormalised after truncation."""
    spans: tuple[Span, ...]
    finish_reason: FinishReason
    sampling_mask: SamplingMask | None = None
    """The tokens left by truncation; None where nothing was cut off or the engine does not report it."""
    routing: RoutingArray | None = None
    """The experts of all computed positions (the prefix, and all tokens but the last), from the pass that made their keys and
    values; None where it is not recorded."""


@dataclass(frozen=True)
class Partial:
    """The beginning of an unfinished completion: int32 [T] tokens, of its own turn."""

    key: RolloutKey
    token_ids: Int32Array


class Engine(Protocol):
    """Generates tokens for many requests at once.

    Owns: weights, caches, slots. Woken by `step()`. On close: its memory, and its processes where it has some.
    """

    @property
    def version(self) -> int:
        """Version of the weights the next token will be sampled from; -1 before any were adopted."""

    @property
    def bits(self) -> Bits:
        """The guarantee on the bits of completions."""

    @property
    def num_unfinished(self) -> int:
        """Requests submitted and not yet returned or aborted, waiting ones included, held ones not."""

    @property
    def progress(self) -> int:
        """Rises while tokens are sampled; where that is not known before a completion's end, while the engine answers."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, in order. Those with equal prompts share one prompt computation.

        Raises EngineError for an empty prompt or one that cannot fit with its context and completion.
        """

    def abort(self, keys: Iterable[RolloutKey]) -> int:
        """Forget these requests, running, waiting or held; unknown keys are ignored. Returns the tokens thrown away, of
        which a held one has none."""

    def step(self) -> list[Completion]:
        """Fill free slots, sample a token in running sequences, return those that ended (none on most calls)."""

    def partials(self, known: Mapping[RolloutKey, int]) -> list[Partial]:
        """Unfinished completions `partial_every` tokens longer than in `known`, where a missing key counts as 0.

        What they begin with never changes. Cheap enough to be called after every step.
        """

    def load_weights(self, version: int, tensors: Mapping[str, RawTensor]) -> None:
        """Adopt a whole weight set (parameter name, as in `named_parameters`, -> tensor); the next token is `version`'s.
        The tower of a model that reads images stays as it is where the set has none of its parameters.

        With `on_update = "finish"` and sequences running, the set waits until they have ended: `version` changes in a
        later `step()`, before anything is sampled from the set; one that is loaded meanwhile replaces it.
        Raises WeightsError, and changes nothing, when a name is missing or unknown or a shape or dtype differs.
        """

    def probe(self, token_ids: Sequence[int], *, behind_images: bool = False) -> Float32Array:
        """float32 [T - 1]: log-probability of each token but the first, given those before it, at temperature 1.
        behind_images: before them stands the prompt with made-up images (`ImageProcessor.sample`).

        By the weights the next token will be sampled from; what is being generated does not notice.
        """

    def close(self) -> None:
        """Release everything; the engine is not used any more."""


def load_engine(
    model_dir: str,
    config: EngineConfig,
    *,
    on_update: OnUpdate = "keep",
    version: int = -1,
    images: ImageProcessor | None = None,
) -> Engine:
    """The engine of this kind, serving the weights of `model_dir` stamped `version`. images: prepares those of prompts.

    Raises ConfigError when its library is not installed, or the engine refuses the model or the configuration.
    """
    try:
        reading = {} if images is None else {"images": images}
        return config.start(model_dir, on_update=on_update, version=version, **reading)
    except ImportError as error:
        advice = "; install the extra of that name, or use 'torch'" if config.needs else ""
        raise ConfigError(f"engine.kind = {config.kind!r} cannot be used: {error}{advice}") from error


def check_room(engine: Engine, prompt: int, new: int) -> None:
    """Raises ConfigError where `new` tokens behind a prompt of `prompt` tokens have no room in the engine."""
    request = Request(RolloutKey(0, 0, 0), (0,) * prompt, new, Sampling(), seed=0)
    try:
        engine.submit([request])
    except EngineError as error:
        raise ConfigError(f"a completion {str(error).removeprefix(f'{request.key} ')}") from error
    engine.abort([request.key])


def completed(engine: Engine, requests: Sequence[Request]) -> dict[RolloutKey, Completion]:
    """Submit these, and step until nothing is unfinished."""
    engine.submit(requests)
    ended: list[Completion] = []
    while engine.num_unfinished:
        ended += engine.step()
    return {completion.key: completion for completion in ended}
