"""How long each stage of a step takes on given devices, by rooflines: arithmetic or memory traffic, plus the links.

Efficiencies are the reached shares of peaks; with 1 everywhere the times are lower bounds. A roofline leaves out
kernels, so times of a real system need efficiencies that were measured on it. Sizes of models come from `model_costs`, peaks
from `devices.toml`, with the source of each.
"""

from __future__ import annotations

import math
import random
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from importlib import resources

from pydantic import BaseModel, ConfigDict, Field

from async_rlhf.experiments.planning.model.model_costs import ModelCosts

_BYTES = 2  # of a weight, a gradient or an activation in bfloat16


class Device(BaseModel):
    """One accelerator and its links, each in one direction. Peaks: which share of them is reached is given beside it.

    Latencies are of one round of a ring: the geometric mean of NCCL's figures for small and large messages (its table `hwLat`
    in src/graph/tuning.cc, "Ring", LL and Simple: NVLink 0.47 and 3.4 us, PCI 1.0 and 5.7, network 2.7 and 9.6), for RCCL too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    peak_flops: float = Field(gt=0, description="dense bfloat16 FLOP/s")
    memory_bytes: float = Field(gt=0)
    memory_bytes_per_s: float = Field(gt=0)
    link_bytes_per_s: float = Field(gt=0, description="to the other devices of the node")
    link_latency_s: float = Field(default=1.3e-6, ge=0)
    network_bytes_per_s: float = Field(gt=0, description="of the device's share of its node's ports")
    network_latency_s: float = Field(default=5.1e-6, ge=0)
    host_bytes_per_s: float = Field(gt=0, description="to the memory of the host")
    is_cpu: bool = Field(default=False, description="a processor's socket, not an accelerator")


@cache
def catalogue() -> dict[str, Device]:
    """Name to device, as packed with the code."""
    tables = tomllib.loads((resources.files(__package__) / "devices.toml").read_text())
    return {name: Device.model_validate(table) for name, table in tables.items()}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model lies on its devices: tensor · pipeline hold it once, data such groups work on different rows.

    context: groups that share the positions of a row, each with the same weights. micro_rows: of one forward and backward pass
    of a data-parallel part. recompute: a backward pass computes the activations again.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    zero_stage: int = 0
    micro_rows: int = 1
    recompute: bool = False

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    def micro_batches(self, rows: int) -> int:
        """Micro-batches of each pipeline, for one update over so many rows."""
        return math.ceil(rows / self.data / self.micro_rows)

    def __str__(self) -> str:
        sizes = {"tp": self.tensor, "pp": self.pipeline, "cp": self.context, "dp": self.data}
        parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        if self.zero_stage:
            parts.append(f"ZeRO-{self.zero_stage}")
        if self.recompute:
            parts.append("recomputation")
        return ", ".join(parts) or "one device"


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Reached shares of a device's peaks, above 0 and at most 1; launch_s: what a decode step takes besides, on the host."""

    flops: float = 1.0
    memory: float = 1.0
    links: float = 1.0
    launch_s: float = 0.0


@dataclass(frozen=True)
class DeviceLink:
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
    """A model on its devices. spread: groups of pipeline and data lie on several nodes, whose network is between them; else the
    node's own links."""

    model: ModelCosts
    device: Device
    layout: Layout = field(default_factory=Layout)
    spread: bool = False
    efficiency: Efficiency = field(default_factory=Efficiency)

    @property
    def flops(self) -> float:
        """Per second, reached by one device."""
        return self.device.peak_flops * self.efficiency.flops

    @property
    def memory_bytes_per_s(self) -> float:
        """Reached by one device."""
        return self.device.memory_bytes_per_s * self.efficiency.memory

    @property
    def near(self) -> DeviceLink:
        """Between devices of a node."""
        return DeviceLink(self.device.link_latency_s, self.device.link_bytes_per_s * self.efficiency.links)

    @property
    def far(self) -> DeviceLink:
        """Between groups of pipeline and data."""
        if not self.spread:
            return self.near
        return DeviceLink(self.device.network_latency_s, self.device.network_bytes_per_s * self.efficiency.links)


def prefill_s(place: Place, rows: int, tokens: int) -> float:
    """Seconds of `rows` prompts of `tokens` each on one group of tensor · pipeline devices: arithmetic, all-reduces.

    b · S · C_f / (F · η · tp) + 2L · AR(2·b·S·d, tp); the prompts pass the stages of a pipeline one after the other. Only the
    last token of a prompt meets the head.
    """
    model = place.model
    head = model.forward_flops(0) - model.forward_flops(0, head=False)
    flops = rows * (model.sequence_flops(tokens, head=False) + (head if tokens else 0))
    size = _BYTES * rows * tokens * model.hidden
    return flops / (place.flops * place.layout.tensor) + _layers_s(place, size) + _boundaries_s(place, size)


def decode_step_s(place: Place, alive: int, context: float) -> float:
    """One token for each of `alive` rows of mean `context` tokens, on one group of tensor · pipeline devices.

    max((2P + a·c·c_kv) / (tp·W·η), a·C_f(c) / (tp·F·η)) + 2L · AR(2·a·d, tp) + launch: Pope et al., arXiv 2211.05102, section
    3. Weights read: those of the experts that any of the rows meets, at most all.
    """
    if alive == 0:
        return 0.0
    read = weights_read_bytes(place.model, alive) + alive * context * place.model.kv_bytes_per_token
    memory = read / (place.layout.tensor * place.memory_bytes_per_s)
    compute = alive * place.model.forward_flops(context) / (place.layout.tensor * place.flops)
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


def replica_s(
    place: Place, lengths: Sequence[int], replicas: int, *, prompt_tokens: int, slots: int, prefill_s: Callable[[int], float]
) -> float:
    """Seconds from the first prompt to the last row's end: of the engine with the longest row, and its even share of the others
    in no particular order. lengths: of all completions, descending."""
    own = list(lengths[::replicas])
    random.Random(0).shuffle(own)
    ends = generation_ends_s(
        own,
        prompt_tokens=prompt_tokens,
        slots=slots,
        step_s=lambda rows, context: decode_step_s(place, rows, context),
        prefill_s=prefill_s,
    )
    return max(ends)


def generation_ends_s(
    lengths: Sequence[int],
    *,
    prompt_tokens: int,
    slots: int,
    step_s: Callable[[int, float], float],
    prefill_s: Callable[[int], float],
) -> list[float]:
    """When each row ends. Rows wait in the order of `lengths`, tokens of each completion, and begin as slots become free; with
    as many slots as rows it is a static batch. Time goes from one row's end to the next: in between the same rows are alive,
    each of them one token longer with every step.

    step_s(alive, context): a decode step, context the mean over the alive rows of prompt and completion, its token among them;
    taken at the middle of each stretch of steps with the same rows, which is exact where it is linear in the context.
    prefill_s(rows): of that many prompts that begin together; the alive rows wait for it.
    """
    alive: list[tuple[int, int]] = []  # (the step behind which it ends, row)
    ends = [0.0] * len(lengths)
    now, step, waiting, begun_at = 0.0, 0, 0, 0  # begun_at: the sum of the steps at which the alive rows began
    while alive or waiting < len(lengths):
        begun = min(slots - len(alive), len(lengths) - waiting)
        if begun:
            now += prefill_s(begun)
        for row in range(waiting, waiting + begun):
            heappush(alive, (step + lengths[row], row))
        waiting, begun_at = waiting + begun, begun_at + begun * step
        rows, stretch = len(alive), alive[0][0] - step
        now += stretch * step_s(rows, prompt_tokens + step - begun_at / rows + (stretch + 1) / 2)
        step += stretch
        while alive and alive[0][0] == step:
            row = heappop(alive)[1]
            begun_at -= step - lengths[row]
            ends[row] = now
    return ends


def inference_s(place: Place, rows: int, tokens: int, *, micro_batches: int = 1, head: bool = True) -> float:
    """One forward pass over `rows` rows of `tokens` tokens, by all devices: a reference, reward or value model.

    rows · T · C_f / (G · F · η) · (pp + m - 1) / m + the links of one data-parallel group. micro_batches: of each pipeline.
    """
    return _passes_s(place, rows, tokens, micro_batches, compute=1, layers=1, head=head)


def training_s(place: Place, rows: int, tokens: int, *, micro_batches: int) -> float:
    """Forward, backward and the exchange of gradients of one update over `rows` rows of `tokens` tokens, and the optimizer.

    A backward pass is two forward ones; with full recomputation there is one more. All-reduces of a tensor group: 2 a layer
    in each forward pass, and 2 in the backward one (Megatron-LM, arXiv 1909.08053). Gradients: a reduce-scatter and an
    all-gather of 2P bytes for each tensor · pipeline part; with ZeRO-3, two all-gathers and a reduce-scatter for each
    micro-batch (arXiv 1910.02054, section 7). Adam reads and writes its 16 bytes a parameter; ZeRO divides them over the
    data-parallel devices from stage 1 on.
    """
    layout, model = place.layout, place.model
    again = 1 if layout.recompute else 0
    passes = _passes_s(place, rows, tokens, micro_batches, compute=3 + again, layers=2 + again, head=True)
    part, shared = layout.tensor * layout.pipeline, layout.data * layout.context
    gathers = 3 * micro_batches if layout.zero_stage == 3 else 2
    exchange = gathers * place.far.gather_s(model.weight_bytes / part, shared)
    moved = 2 * 16 * model.parameters / (part * (shared if layout.zero_stage else 1))
    return passes + exchange + moved / place.memory_bytes_per_s


def _passes_s(place: Place, rows: int, tokens: int, micro_batches: int, *, compute: int, layers: int, head: bool) -> float:
    """compute, layers: forward passes that the arithmetic and the all-reduces of the tensor groups are worth."""
    layout = place.layout
    # The group with the most rows is waited for.
    most = math.ceil(rows / layout.data)
    flops = compute * most * place.model.sequence_flops(tokens, head=head)
    size = _BYTES * most * tokens * place.model.hidden / layout.context
    bubble = (layout.pipeline + micro_batches - 1) / micro_batches
    busy = flops / (place.flops * layout.tensor * layout.pipeline * layout.context)
    # Each stage of a pipeline does the all-reduces of its own layers.
    reduced = layers * _layers_s(place, size / micro_batches) * micro_batches / layout.pipeline
    ringed = layers * _ring_s(place, most / micro_batches, tokens) * micro_batches / layout.pipeline
    crossings = (1 if layers == 1 else 2) * _boundaries_s(place, size / micro_batches)
    return (busy + reduced + ringed) * bubble + crossings


def _layers_s(place: Place, size: float) -> float:
    """Two all-reduces of `size` bytes for each layer of the model."""
    return 2 * place.model.layers * place.near.reduce_s(size, place.layout.tensor)


def _ring_s(place: Place, rows: float, tokens: int) -> float:
    """Seconds of all layers, for one pass forward: keys and values in a ring of context groups.

    Ring attention (Liu et al., arXiv 2310.01889): c - 1 hops of one group's keys and values, hidden behind its attention as far
    as that takes as long.
    """
    model, layout, own = place.model, place.layout, tokens / place.layout.context
    if layout.context == 1:
        return 0.0
    hops = (layout.context - 1) * place.far.send_s(rows * own * model.kv_bytes_per_token / model.layers / layout.tensor)
    attention = rows * own * (model.forward_flops(tokens / 2) - model.forward_flops(0)) / model.layers
    return model.layers * max(0.0, hops - attention / (place.flops * layout.tensor))


def _boundaries_s(place: Place, size: float) -> float:
    return (place.layout.pipeline - 1) * place.far.send_s(size)
