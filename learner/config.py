"""The settings of the learner: optimisation, the loss, checkpoints; and how many logits there are at a time. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import cache
from typing import Any, ClassVar, Literal

from pydantic import (
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    create_model,
    field_validator,
    model_serializer,
    model_validator,
)

from async_rlhf.buffers.config import KindSection, Section
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.learner.registry import Decorator, advantage_spec, check_kind, declared, loss_spec, shipped

Interval = tuple[float, float]


class FunctionSection(KindSection):
    """A section whose `kind` names a function, with the function's own parameters as settings beside its fields.

    The parameters of a shipped function are filled in when the section is made; those of a user's file when they are first
    requested, by the check before a run, so that a configuration can be read without the file.
    """

    model_config = ConfigDict(extra="allow")
    decorator: ClassVar[Decorator]

    @classmethod
    def kinds(cls) -> Collection[str]:
        return shipped(cls.decorator)

    @classmethod
    def of_kind(cls, kind: str) -> type[Section]:
        return own_parameters(cls, kind)

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        return check_kind(kind, cls.decorator)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        kind = values.get("kind", cls.model_fields["kind"].default) if isinstance(values, dict) else None
        if not isinstance(kind, str) or kind not in shipped(cls.decorator):
            return values
        own = {name: value for name, value in values.items() if name not in cls.model_fields}
        return {**values, **dict(own_parameters(cls, kind).model_validate(own))}

    @model_serializer(mode="wrap")
    def _dump(self, dump: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """Leave out filled-in values when only set or changed ones are wanted."""
        values: dict[str, Any] = dump(self)
        if not (info.exclude_defaults or info.exclude_unset) or self.kind not in shipped(self.decorator):
            return values
        filled_in = own_parameters(type(self), self.kind)().model_dump()
        extra = self.model_extra or {}
        return {name: value for name, value in values.items() if name not in extra or extra[name] != filled_in[name]}

    @property
    def parameters(self) -> dict[str, Any]:
        """The function's own parameters. Raises ConfigError for a function that cannot be read, ValidationError for values that
        it does not take."""
        return dict(own_parameters(type(self), self.kind).model_validate(self.model_extra))

    @property
    def arguments(self) -> dict[str, Any]:
        """All that the function takes by keyword: fields of this section, and its own parameters. Raises as `parameters`."""
        shared = declared(self.decorator, self.kind).parameters.keys() & type(self).model_fields
        return {name: getattr(self, name) for name in shared} | self.parameters


@cache
def own_parameters(section: type[FunctionSection], kind: str) -> type[Section]:
    """A section of the function's parameters that are not fields of `section`. Raises ConfigError."""
    taken = declared(section.decorator, kind).parameters
    for name in taken.keys() & section.model_fields:
        if taken[name][1] is not ...:
            raise ConfigError(
                f"{section.decorator}.kind = {kind!r}: parameter {name!r} has the name of {section.decorator}.{name}, which is "
                "given to it; leave its default out, or choose another name"
            )
    fields: dict[str, Any] = {name: each for name, each in taken.items() if name not in section.model_fields}
    return create_model(kind, __base__=_Parameters, **fields)


class _Parameters(Section):
    model_config = ConfigDict(validate_default=True, protected_namespaces=())


class AdvantageConfig(FunctionSection):
    """The advantage of a completion or of each token. Beside these keys each estimator has keys of its own."""

    decorator = "advantage"
    kind: str = "group_relative"
    """From rewards: `group_relative` (GRPO), `leave_one_out` (RLOO), `optimal_token`, `max_rl`, `oapl`, `reinforce_pp` (over
    the batch). With a critic: `gae`, or for stale data `v_trace` and `traced`. One of your own: `file.py:name` or
    `package.module:name`."""
    level: Literal["completion", "turn"] = "completion"
    """`turn`: each turn of an episode has an advantage (`group_relative`, `leave_one_out`): its return, the reward and what the
    environment gave from this turn on (an agent: for it alone), compared with its siblings' same turn."""
    constant_groups: Literal["keep", "drop", "refill"] = "keep"
    """Groups whose rewards are all equal: kept (their advantage is 0), dropped from the batch and counted, or replaced by
    others before a batch is made, so that it is full of groups with different rewards (dynamic sampling)."""
    max_refills: int = Field(default=3, ge=1)
    """`refill`: constant groups are replaced among the first `max_refills` batches' worth made for a batch; later ones enter,
    and are dropped."""
    max_constant_batches: int = Field(default=10, ge=1)
    """The run ends after so many batches in a row in which every reward returned None (all batches of a shorter one), or with
    `drop`, `refill` and `loss.mask_truncated` nothing was to be learned."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token, of estimators that look at tokens: `reinforce_pp` and those with a critic."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """Decay of the traces of `gae` and `traced` (and of `v_trace`, times its c)."""
    normalise: bool = True
    """With a critic: normalise the advantages of the batch's tokens to mean 0 and standard deviation 1."""

    @property
    def needs_critic(self) -> bool:
        return advantage_spec(self.kind).critic

    @property
    def needs_energy(self) -> bool:
        return advantage_spec(self.kind).level == "group_tokens"


class LossConfig(FunctionSection):
    """The objective and its corrections for data sampled by other weights. Beside these keys each loss has keys of its own."""

    decorator = "loss"
    kind: str = "decoupled_ppo"
    """One of `docs/learner.md`: `decoupled_ppo` clips around the policy at the start of the step, `ppo_clip` around the one
    that sampled. One of your own: `file.py:name` or `package.module:name`."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio that a loss clips is clipped at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio that a loss clips is clipped at 1 + clip_high."""
    dual_clip: float | None = Field(default=3.0, gt=1)
    """With a negative advantage a clipped surrogate stops growing at this ratio; `"none"`: it does not."""
    proximal: Literal["recompute", "interpolate"] = "recompute"
    """The policy at the start of the step: computed, or log-linear between behaviour and current by the staleness of each span,
    which spares a forward pass for later updates."""
    is_cap: float | None = Field(default=2.0, gt=0)
    """Upper truncation of the importance weight of a token; `"none"`: no weight, as if data were on-policy."""
    is_normalised: bool = False
    """Whether importance weights are divided by their mean over the batch; needs a forward pass before the first update."""
    token_mask: Interval | None = None
    """Tokens whose ratio proximal / behaviour lies outside are masked (IcePop)."""
    is_level: Literal["token", "sequence", "product"] = "token"
    """The ratio of the importance weight: the token's, or its completion's, which is the geometric mean over the tokens
    (`sequence`) or their product. A loss of whole completions reads `token` as `sequence`."""
    sequence_mask: Interval | None = None
    """Completions are masked whose ratio proximal / behaviour, the geometric mean over the tokens, lies outside."""
    second_moment: float | None = Field(default=None, gt=0)
    """The most off-policy tokens are masked until the mean squared log-ratio of the batch is this (M2PO: 0.04)."""
    off_policy_delta: float | None = Field(default=None, gt=0)
    """A completion with a negative advantage is masked when its mean log-ratio behaviour / proximal is above this."""
    divergence_mean: float | None = Field(default=None, gt=0)
    """Completions whose tokens have diverged from behaviour to proximal by more than this on average, in nats, are masked; of a
    token it is r - 1 - log r with r = proximal / behaviour."""
    divergence_max: float | None = Field(default=None, gt=0)
    """Completions with a token beyond this are masked."""
    allow_uncorrected: bool = False
    """Permit staleness above 0, or an engine that samples from a part of its cache, without an importance weight."""
    mask_truncated: bool = False
    """Whether completions that a budget of tokens cut (`finish_reason` "length" or "context") leave the loss and its divisors;
    their rewards stay in baselines."""
    reduction: Literal["token", "sequence", "fixed"] = "token"
    """A loss per token is averaged over tokens, over completions, or (`fixed`) divided by completions times the most tokens
    that one can have."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference: the frozen initial model, or a teacher (`scoring.reference.path`)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """log p/q, its square halved, or q/p - 1 - log q/p, with p the policy and q the reference."""
    kl_in: Literal["loss", "reward"] = "loss"
    """The place of the divergence: a term of the loss, or subtracted from the reward of each token."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""

    @property
    def kl_in_reward(self) -> bool:
        """Whether the divergence is subtracted from rewards."""
        return self.kl_coef > 0 and self.kl_in == "reward"

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities under the frozen initial model are wanted."""
        return self.kl_coef > 0 or "reference" in loss_spec(self.kind).needs

    def needs_evaluation(self, advantage: AdvantageConfig) -> bool:
        """Whether the whole batch must be evaluated before the first update."""
        of_tokens = advantage.needs_critic or advantage.needs_energy
        return of_tokens or self.kl_in_reward or self.second_moment is not None or self.is_normalised


class GuardConfig(Section):
    """The adaptive guard: the target staleness moves below its hard bound while the data look too old to learn from. And the
    limits beyond which a run ends itself (exit code 7): after 3 steps in a row beyond one of them."""

    enabled: bool = False
    """Whether the target moves: down by one after 3 steps in a row with an effective sample size below half of the tokens, a
    mean squared log-ratio above 0.1 or more than 30 % of the tokens clipped or masked; up after 10 better by a fifth."""
    target: int | None = Field(default=None, ge=0)
    """Staleness aimed at, and the most that the guard returns to; `"none"`: `queue.max_staleness`."""
    max_kl: float | None = Field(default=None, gt=0)
    """Highest `kl/reference` of a step (`kl/behaviour` where there is no reference), in nats a token; `"none"`: no limit."""
    min_entropy: float | None = Field(default=None, ge=0)
    """Lowest `entropy` of a step, in nats a token; `"none"`: no limit."""
    min_reward: float | None = None
    """Lowest mean `reward` of a step; `"none"`: no limit."""


class LoraConfig(Section):
    """Low-rank adapters (peft) instead of full weights; off at rank 0."""

    rank: int = Field(default=0, ge=0)
    """Rank of each adapter; 0 trains the full weights."""
    alpha: float = Field(default=16.0, gt=0)
    """An adapter's product is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("all-linear",)
    """Names of the layers that get one (`"q_proj"`), or `"all-linear"` for every linear layer but the output layer."""
    publish: Literal["merged", "adapter"] = "merged"
    """Engines receive whole weights with the adapters merged, or the adapters alone, added to their model directory's
    weights."""


class CriticConfig(Section):
    """An estimate of the return from each token on, for the advantages that need one."""

    kind: Literal["none", "head", "model"] = "none"
    """`head`: an output on the policy's trunk. `model`: a trunk of its own, a copy of the policy's."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """Highest learning rate of the critic; it rises and falls as the policy's does."""
    warmup_steps: int = Field(default=0, ge=0)
    """First steps in which only the critic learns."""
    updates: int = Field(default=1, ge=1)
    """`model`: times it learns from the tokens of each update, all but one of them alone."""
    freeze_attention: bool = False
    """`model`: its attention layers stay equal to the policy's initial ones."""

    def learns_alone(self, step: int) -> bool:
        """Whether nothing but the critic learns in step `step` (from 0)."""
        return self.kind != "none" and step < self.warmup_steps


class LearnerConfig(Section):
    """The optimiser and the machine it runs on."""

    batch_size: int = Field(default=128, ge=1, le=131072)
    """Completions per step; a multiple of `generation.group_size`."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """Highest learning rate of AdamW, after the warm-up."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay, of every parameter that learns."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up; `linear` and `cosine` fall to 0 at `max_steps`."""
    updates_per_step: int = Field(default=1, ge=1)
    """Optimizer updates made from one pass over a batch (minibatches of whole groups)."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a batch."""
    micro_batch_tokens: int = Field(default=2048, ge=1)
    """Padded tokens of one forward and backward pass, with the patches of images where `train_vision` is on; for completions of
    one prompt, in addition to the prompt."""
    row_tokens: int | None = Field(default=None, ge=1)
    """A limit of memory: tokens of a prompt with several of its completions in one pass."""
    publish_every: int = Field(default=1, ge=1)
    """Steps between two published weight sets."""
    device: str = "cpu"
    """Torch device of the learner; with several ranks `"cuda"` gives every rank its own."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of products; weights and optimizer stay float32."""
    reference_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the frozen reference's weights, where the learner holds it; in `bfloat16` its products are too."""
    compile: bool = False
    """`torch`: layers are compiled (torch.compile), forward and backward; the first steps take minutes longer."""
    train_vision: bool = False
    """Whether the part of a model that reads images learns too; false computes what it makes of an image once."""
    gradient_checkpointing: bool = False
    """Layers compute their activations again in the backward pass instead of keeping them."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads of each rank."""
    ranks: int = Field(default=1, ge=1, le=64)
    """Processes that share the gradient of a batch."""
    sequence_parallel: int = Field(default=1, ge=1, le=64)
    """`deepspeed`: ranks that share the positions of every row (Ulysses): 1, or all `learner.ranks`."""
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """`deepspeed`: ranks that share every layer (AutoTP): 1, or all `learner.ranks`."""
    rank_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds a rank may keep the others waiting; then the learner restarts from its last checkpoint."""
    backend: Literal["torch", "deepspeed"] = "torch"
    """`torch`: every rank holds everything. `deepspeed`: ZeRO shares it out."""
    zero_stage: Literal[1, 2, 3] = 2
    """`deepspeed` shards the optimizer state (1), also the gradients (2), also the parameters (3)."""
    deepspeed_config: str | None = None
    """`deepspeed`: a JSON file laid over the configuration made from these settings."""
    lora: LoraConfig = LoraConfig()
    critic: CriticConfig = CriticConfig()

    @property
    def ranks_per_row(self) -> int:
        """Ranks that work on the same rows."""
        return self.sequence_parallel * self.tensor_parallel


class CheckpointConfig(Section):
    """When the learner's state is made durable."""

    save_every: int = Field(default=25, ge=1)
    """Steps between two checkpoints (the last step always makes one)."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints kept."""
    keep_every: int | None = Field(default=None, ge=1)
    """Checkpoints of steps that are a multiple of this are kept for good."""


LOGITS_MIB = 256
"""The float32 probabilities kept for the backward pass; those of further tokens are computed twice. On an accelerator also
the size of a chunk of logits: its products want many tokens, and its allocator keeps the memory."""
FLOAT32_BYTES = 4
# One chunk of logits on a CPU. The C library takes blocks above 32 MiB from the system each time, and for a narrow model
# touching their pages takes longer than computing their values. But each chunk reads the whole output layer, and adds to its
# whole gradient, so with a large vocabulary a chunk has at least `_CPU_TOKENS` tokens.
_CPU_MIB = 16
_CPU_TOKENS = 128


def tokens_within(vocabulary: int, mib: int) -> int:
    """Tokens whose float32 logits fit into `mib` MiB; at least one."""
    return max(1, mib * 2**20 // (FLOAT32_BYTES * vocabulary))


def chunk_tokens(vocabulary: int, device: str) -> int:
    """Tokens whose logits the loss treats at a time on a type of device."""
    within = tokens_within(vocabulary, LOGITS_MIB)
    return min(within, max(_CPU_TOKENS, tokens_within(vocabulary, _CPU_MIB))) if device == "cpu" else within


def token_cost(weights: float, width: int) -> float:
    """The cost of a token beside attention in a layer with `weights` weights. The unit is the cost of one query-key pair with
    `width` numbers in all heads. A token is multiplied with each weight once, a pair with each of its numbers twice; the
    backward pass has twice as many products with weights, and 2.5 times as many with pairs."""
    return 3.0 * weights / (3.5 * 2 * width)


def room_beside(prompt: int, cost: float) -> float:
    """Tokens of completions in a row behind a prompt of this length, where all pairs of the row are computed. Further
    completions spare prompts and cost pairs that are masked: with w the cost of a token in pairs, (w l + l^2) / c, of a row of
    l = p + c, is least at c^2 = p^2 + w p."""
    return math.sqrt(prompt * (prompt + cost))


def check_division(config: LearnerConfig, size_of: Callable[[str], int | None]) -> None:
    """Raise ConfigError when the number of ranks does not divide the sizes that they share. `size_of`: a number in the model's
    configuration, None where it has none."""
    heads = ("num_attention_heads", "num_key_value_heads")
    shared = {"sequence_parallel": heads, "tensor_parallel": (*heads, "intermediate_size")}
    for setting, names in shared.items():
        ranks = int(getattr(config, setting))
        sizes = {name: size for name in names if (size := size_of(name)) is not None}
        most = math.gcd(*sizes.values())
        if ranks > 1 and most % ranks:
            model = ", ".join(f"{name} = {size}" for name, size in sizes.items())
            choice = ", ".join(str(n) for n in range(1, most + 1) if most % n == 0)
            raise ConfigError(f"learner.{setting} = {ranks} does not divide all of the model's {model}; choose {choice}")
