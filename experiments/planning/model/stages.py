"""How long each stage of a step takes on given devices, by rooflines: arithmetic or memory traffic, plus the links.

Efficiencies are the reached shares of peaks; with 1 everywhere the times are lower bounds. A roofline does not know
kernels, so times of a real system need efficiencies that were measured on it. Sizes of models come from `model_costs`, peaks
from `devices`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.planning.model.devices import Device
from async_rlhf.experiments.planning.model.model_costs import ModelCosts, Recompute

_BYTES = 2  # of a weight, a gradient or an activation in bfloat16


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Reached shares of a device's peaks, above 0 and at most 1; launch_s: what a decode step takes besides, on the host."""

    flops: float = 1.0
    memory: float = 1.0
    links: float = 1.0
    launch_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("flops", "memory", "links"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"efficiency {name} = {getattr(self, name)}: above 0 and at most 1")
        if not 0 <= self.launch_s < math.inf:
            raise ConfigError(f"efficiency launch_s = {self.launch_s}: seconds, 0 or more")


@dataclass(frozen=True)
class Link:
    """Rings on equal links (Thakur et al., Optimization of collective communication operations in MPICH, 2005, section 3)."""

    latency_s: float
    bytes_per_s: float

    def gather_s(self, size: float, ranks: int) -> float:
        """All-gather of `size` bytes in all, or reduce-scatter: n - 1 rounds of size / n."""
        return (ranks - 1) * (self.latency_s + size / ranks / self.bytes_per_s)

    def reduce_s(self, size: float, ranks: int) -> float:
        """All-reduce: AR(x, n) = 2(n - 1)·α + 2(n - 1)/n · x·β, a reduce-scatter and an all-gather."""
        return 2 * self.gather_s(size, ranks)

    def send_s(self, size: float) -> float:
        return self.latency_s + size / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Place:
    """A model on its devices: tensor · pipeline hold it once, data such groups work on different rows.

    context: groups that share the positions of a row, each with the same weights. experts: of the data-parallel groups, how
    many share the experts of a layer. Tensor groups lie within a node; the others use the network where they are spread over
    nodes, else the node's own links.
    """

    model: ModelCosts
    device: Device
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    experts: int = 1
    spread: bool = False
    efficiency: Efficiency = field(default_factory=Efficiency)

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data", "context", "experts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"a place with {name} = {getattr(self, name)}: at least 1")
        if self.model.heads % self.tensor:
            near = max(number for number in range(1, self.tensor) if self.model.heads % number == 0)
            raise ConfigError(f"tensor = {self.tensor} must divide the model's {self.model.heads} heads; nearest: {near}")
        if self.experts > 1 and (self.model.experts % self.experts or self.data % self.experts):
            raise ConfigError(
                f"experts = {self.experts} must divide the model's {self.model.experts} experts and {self.data} groups of "
                f"data; nearest: {math.gcd(self.model.experts, self.data, self.experts) or 1}"
            )
        if self.pipeline > self.model.layers:
            raise ConfigError(
                f"pipeline = {self.pipeline} of a model with {self.model.layers} layers; nearest: {self.model.layers}"
            )

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def flops(self) -> float:
        """Per second, reached by one device."""
        return self.device.peak_flops * self.efficiency.flops

    @property
    def memory_bytes_per_s(self) -> float:
        """Reached by one device."""
        return self.device.memory_bytes_per_s * self.efficiency.memory

    @property
    def near(self) -> Link:
        """Between devices of a node."""
        return Link(self.device.link_latency_s, self.device.link_bytes_per_s * self.efficiency.links)

    @property
    def far(self) -> Link:
        """Between groups of pipeline and data."""
        if not self.spread:
            return self.near
        return Link(self.device.network_latency_s, self.device.network_bytes_per_s * self.efficiency.links)


def prefill_s(place: Place, rows: int, tokens: int) -> float:
    """Of `rows` prompts of `tokens` each on one group of tensor · pipeline devices: arithmetic, all-reduces.

    b · S · C_f / (F · η · tp) + 2L · AR(2·b·S·d, tp); the prompts pass the stages of a pipeline one after the other. Only the
    last token of a prompt meets the head.
    """
    _counts(rows=rows, tokens=tokens)
    model = place.model
    head = model.forward_flops(0) - model.forward_flops(0, head=False)
    flops = rows * (model.sequence_flops(tokens, head=False) + (head if tokens else 0))
    size = _BYTES * rows * tokens * model.hidden
    return flops / (place.flops * place.tensor) + _layers_s(place, size) + _boundaries_s(place, size)


def decode_step_s(place: Place, alive: int, context: float) -> float:
    """One token for each of `alive` rows of mean `context` tokens, on one group of tensor · pipeline devices.

    max((2P + a·c·c_kv) / (tp·W·η), a·C_f(c) / (tp·F·η)) + 2L · AR(2·a·d, tp) + launch: Pope et al., arXiv 2211.05102, section
    3. Weights read: those of the experts that any of the rows meets, at most all.
    """
    _counts(alive=alive)
    if alive == 0:
        return 0.0
    read = weights_read_bytes(place.model, alive) + alive * context * place.model.kv_bytes_per_token
    memory = read / (place.tensor * place.memory_bytes_per_s)
    compute = alive * place.model.forward_flops(context) / (place.tensor * place.flops)
    size = _BYTES * alive * place.model.hidden
    return max(memory, compute) + _layers_s(place, size) + _boundaries_s(place, size) + place.efficiency.launch_s


def weights_read_bytes(model: ModelCosts, rows: float) -> float:
    """By a step with one token a row. A tied embedding is read as the head, another is only looked up; rows may be inf.

    Experts that are drawn evenly: E · (1 - (1 - k / E)^rows) of them are met in the mean.
    """
    looked_up = 0 if model.tied else model.vocabulary * model.hidden
    if model.experts == model.active_experts:
        return _BYTES * (model.parameters - looked_up)
    unmet = model.experts * math.pow(1 - model.active_experts / model.experts, rows)
    one = (model.parameters - model.active_parameters) / (model.experts - model.active_experts)
    return _BYTES * (model.parameters - looked_up - one * unmet)


def knee_rows(place: Place) -> float:
    """With fewer rows a decode step without context waits for the weights, all experts among them; with more, for arithmetic.

    a* = weights / (W · η) · (F · η) / C_f(0): as each weight that is read is worth 2 FLOPs a row, close to F·η / (W·η) in a
    dense model.
    """
    weights = weights_read_bytes(place.model, math.inf)
    return weights / place.memory_bytes_per_s * place.flops / place.model.forward_flops(0)


def inference_s(place: Place, rows: int, tokens: int, *, micro_batches: int = 1, head: bool = True) -> float:
    """One forward pass over `rows` rows of `tokens` tokens, by all devices: a reference, reward or value model.

    rows · T · C_f / (G · F · η) · (pp + m - 1) / m + the links of one data-parallel group. micro_batches: of each pipeline.
    """
    _counts(rows=rows, tokens=tokens)
    return _passes_s(place, rows, tokens, micro_batches, compute=1, layers=1, head=head)


def training_s(
    place: Place, rows: int, tokens: int, *, micro_batches: int = 1, zero_stage: int = 0, recompute: Recompute = "none"
) -> float:
    """Forward, backward and the exchange of gradients of one step over `rows` rows of `tokens` tokens, without the optimizer.

    A backward pass is two forward ones; with full recomputation there is one more. All-reduces of a tensor group: 2 a layer
    in each forward pass, and 2 in the backward one (Megatron-LM, arXiv 1909.08053). Gradients: a reduce-scatter and an
    all-gather of 2P bytes for each tensor · pipeline part; with ZeRO-3, two all-gathers and a reduce-scatter for each
    micro-batch (arXiv 1910.02054, section 7).
    """
    _counts(rows=rows, tokens=tokens)
    if zero_stage not in range(4):
        raise ConfigError(f"zero_stage = {zero_stage}: 0 to 3; nearest: {min(max(zero_stage, 0), 3)}")
    again = 1 if recompute == "full" else 0
    passes = _passes_s(place, rows, tokens, micro_batches, compute=3 + again, layers=2 + again, head=True)
    shared = place.model.expert_bytes
    parts = ((place.model.weight_bytes - shared, 1), (shared, place.experts))
    gathers = 3 * micro_batches if zero_stage == 3 else 2
    return passes + gathers * sum(
        place.far.gather_s(size / (place.tensor * place.pipeline * few), place.data * place.context // few)
        for size, few in parts
        if size
    )


def optimizer_s(place: Place, *, zero_stage: int = 0) -> float:
    """Adam reads and writes its 16 bytes a parameter; ZeRO divides them over the data-parallel devices from stage 1 on."""
    share = place.tensor * place.pipeline * (place.data * place.context if zero_stage else 1)
    return 2 * 16 * place.model.parameters / share / place.memory_bytes_per_s


def publication_s(source: Place, replicas: int, *, links: int = 1) -> float:
    """New weights from training to `replicas` of the generator: shard-wise over `links` links, on through a tree of replicas.

    2P / links · β + α · (1 + ⌈log2 replicas⌉). The tree hands on while it receives, so that its depth costs latency only.
    """
    if min(replicas, links) < 1:
        raise ConfigError(f"replicas = {replicas}, links = {links}: each at least 1")
    link = source.far
    return source.model.weight_bytes / (links * link.bytes_per_s) + link.latency_s * (1 + math.ceil(math.log2(replicas)))


def _passes_s(place: Place, rows: int, tokens: int, micro_batches: int, *, compute: int, layers: int, head: bool) -> float:
    """compute, layers: forward passes that the arithmetic and the all-reduces of the tensor groups are worth."""
    if micro_batches < 1:
        raise ConfigError(f"micro_batches = {micro_batches}: at least 1")
    # The group with the most rows is waited for.
    most = math.ceil(rows / place.data)
    flops = compute * most * place.model.sequence_flops(tokens, head=head)
    size = _BYTES * most * tokens * place.model.hidden / place.context
    bubble = (place.pipeline + micro_batches - 1) / micro_batches
    busy = flops / (place.flops * place.tensor * place.pipeline * place.context)
    # Each stage of a pipeline does the all-reduces of its own layers.
    reduced = layers * _layers_s(place, size / micro_batches) * micro_batches / place.pipeline
    exchanged = layers * _exchanges_s(place, most / micro_batches, tokens) * micro_batches / place.pipeline
    crossings = (1 if layers == 1 else 2) * _boundaries_s(place, size / micro_batches)
    return (busy + reduced + exchanged) * bubble + crossings


def _layers_s(place: Place, size: float) -> float:
    """Two all-reduces of `size` bytes for each layer of the model."""
    return 2 * place.model.layers * place.near.reduce_s(size, place.tensor)


def _exchanges_s(place: Place, rows: float, tokens: int) -> float:
    """Of all layers, for one pass forward: keys and values in a ring of context groups, tokens to their experts and back.

    Ring attention (Liu et al., arXiv 2310.01889): c - 1 hops of one group's keys and values, hidden behind its attention as far
    as that takes as long. Experts: two all-to-alls of each token's hidden state for each of its experts (GShard, arXiv
    2006.16668, section 3.2).
    """
    model, own = place.model, tokens / place.context
    seconds = 0.0
    if place.context > 1:
        hops = (place.context - 1) * place.far.send_s(rows * own * model.kv_bytes_per_token / model.layers / place.tensor)
        attention = rows * own * (model.forward_flops(tokens / 2) - model.forward_flops(0)) / model.layers
        seconds += model.layers * max(0.0, hops - attention / (place.flops * place.tensor))
    if place.experts > 1:
        away = (place.experts - 1) / place.experts
        size = _BYTES * rows * own * model.hidden * model.active_experts * away / place.tensor
        seconds += 2 * model.layers * place.far.send_s(size)
    return seconds


def _boundaries_s(place: Place, size: float) -> float:
    return (place.pipeline - 1) * place.far.send_s(size)


def _counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 0:
            raise ConfigError(f"{name} = {value}: 0 or more")
