"""Log-probabilities, entropies and energies of chosen tokens, in float32, without the whole [tokens, vocabulary] matrix. Pure.

The logits of a few tokens at a time are made from the hidden states and used. Of so many tokens as there is memory for, the
backward pass finds the probabilities again; of all others it makes them again. With `sampling_masks` (see `SamplingMasks`) the
distribution is restricted to the tokens that each was chosen among.

Axes: N tokens, C tokens of a chunk, V vocabulary, D width of the model; J tokens in a place, of which the first was chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from async_rlhf.learner.batch.micro_batch import SamplingMasks

# p log p of a token that p = 0 masks: far below where exp underflows, and finite times any gradient.
_LOG_ZERO = -1e4


def token_logprobs(
    logits_NV: Tensor, target: Tensor, temperature_N: Tensor, sampling_masks: SamplingMasks | None = None
) -> Tensor:
    """float32, as [N] or [N, J] as `target`: log softmax(logits / temperature)[target], the distribution the engine sampled
    from."""
    scaled = _scaled(logits_NV, temperature_N, sampling_masks)
    found_NJ = scaled.gather(-1, target.view(len(target), -1)) - torch.logsumexp(scaled, dim=-1, keepdim=True)
    return found_NJ.view_as(target)


def token_ids(logits_NV: Tensor, target_N: Tensor, others: int | Tensor) -> Tensor:
    """int64 [N, J]: the target and, behind it, so many of the likeliest tokens (at most all), or these int64 [N, J - 1]."""
    if isinstance(others, int):
        others = logits_NV.topk(min(others, logits_NV.shape[-1])).indices
    return torch.cat([target_N[:, None], others], dim=1)


def token_entropy(logits_NV: Tensor, temperature_N: Tensor, sampling_masks: SamplingMasks | None = None) -> Tensor:
    """float32 [N]: entropy of softmax(logits / temperature) in nats."""
    logp = torch.log_softmax(_scaled(logits_NV, temperature_N, sampling_masks), dim=-1)
    # 0 log 0 is 0: a masked token of the vocabulary has log-probability -inf
    return -(logp.exp() * logp.clamp(min=_LOG_ZERO)).sum(-1)


def token_energy(logits_NV: Tensor, target_N: Tensor, temperature_N: Tensor, masks: SamplingMasks | None = None) -> Tensor:
    """float32 [N]: |d log p[target] / dz|^2 = 1 - 2 p[target] + sum p^2 with z = logits / temperature, p = softmax(z)."""
    p_NV = torch.softmax(_scaled(logits_NV, temperature_N, masks), dim=-1)
    return _energy(p_NV, p_NV.gather(-1, target_N[:, None]).squeeze(-1))


def _energy(p_NV: Tensor, p_target_N: Tensor) -> Tensor:
    energy_N: Tensor = (torch.linalg.vector_norm(p_NV, dim=-1).square() + 1 - 2 * p_target_N).clamp_(min=0)
    return energy_N


def _scaled(logits_NV: Tensor, temperature_N: Tensor, sampling_masks: SamplingMasks | None) -> Tensor:
    scaled = logits_NV.float() / temperature_N[:, None]
    return scaled if sampling_masks is None else sampling_masks.restrict_(scaled)


def chunked_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    target_N: Tensor,
    temperature_N: Tensor,
    rows: int,
    sampling_masks: SamplingMasks | None = None,
    remembered: int = 0,
    energies: bool = False,
    others: int | Tensor = 0,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(float32 [N, J], [N], [N] or None, int64 [N, J]): log p of tokens, entropy in nats and, with `energies`, energy (see
    `token_energy`) of p = softmax((hidden @ weight.T + bias) / temperature); and which tokens, as `token_ids` gives them.

    The first two carry gradients to hidden, weight and bias. `rows` tokens are treated at a time (see `chunks`); of
    the first `remembered`, in whole chunks, float32 [.., V] is kept for the backward pass. Beside these there are two chunks
    of float32 at a time. Products are computed in the autocast type where that is on, else in the type of `hidden`;
    everything after them is float32.
    """
    device = hidden_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_ND.dtype
    inputs = hidden_ND, weight_VD, bias_V, target_N, temperature_N, sampling_masks, rows, remembered, dtype
    energy_N = torch.empty(len(target_N), dtype=torch.float32, device=device) if energies else None
    logp_NJ, entropy_N, ids_NJ = _Chunked.apply(*inputs, others, energy_N)  # type: ignore[no-untyped-call]
    return logp_NJ, entropy_N, energy_N, ids_NJ


class _Chunked(torch.autograd.Function):
    """With z = logits / T, p = softmax(z), H = -sum p log p: d log p[a] / dz = 1[a] - p and dH / dz = -p (log p + H).

    One exp of each logit: with y = z - max z, log p = y + log max p and H = -sum p y - log max p.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        temperature_N: Tensor,
        sampling_masks: SamplingMasks | None,
        rows: int,
        remembered: int,
        dtype: torch.dtype,
        others: int | Tensor,
        energy_N: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Fills `energy_N`."""
        weight = weight_VD.to(dtype)
        num_others = min(others, len(weight)) if isinstance(others, int) else others.shape[1]
        ids_NJ = target_N.new_empty(len(target_N), 1 + num_others)
        logp_NJ = torch.empty(ids_NJ.shape, dtype=torch.float32, device=hidden_ND.device)
        entropy_N = torch.empty_like(logp_NJ[:, 0])
        kept = []
        masked = bias_V is not None or sampling_masks is not None
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for part, cut in _parts(len(target_N), rows, sampling_masks):
                z_CV = _scaled_logits(hidden_ND[part].to(dtype), weight, bias_V, temperature_N[part], cut)
                p_CV = torch.softmax(z_CV, dim=-1)
                y_CV = z_CV.sub_(z_CV.amax(-1, keepdim=True))
                highest_C = p_CV.amax(-1).log()
                ids_NJ[part] = token_ids(y_CV, target_N[part], others if isinstance(others, int) else others[part])
                logp_NJ[part] = y_CV.gather(-1, ids_NJ[part]) + highest_C[:, None]
                if energy_N is not None:
                    energy_N[part] = _energy(p_CV, logp_NJ[part, 0].exp())
                if masked:
                    y_CV.clamp_(min=torch.finfo(torch.float32).min)  # so that it times its probability is 0
                entropy_N[part] = _entropy_(y_CV, p_CV, highest_C)
                if part.stop <= remembered:
                    kept.append(p_CV)
                del z_CV, y_CV, p_CV  # else they stand beside the next ones
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, ids_NJ, temperature_N, entropy_N, *kept)
        ctx.sampling_masks, ctx.rows, ctx.dtype = sampling_masks, rows, dtype
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(ids_NJ)
        return logp_NJ, entropy_N, ids_NJ

    @staticmethod
    def backward(ctx: Any, grad_logp_NJ: Tensor | None, grad_entropy_N: Tensor | None, _: None) -> Any:
        hidden_ND, weight_VD, bias_V, ids_NJ, temperature_N, entropy_N, *kept = ctx.saved_tensors
        rows, dtype = ctx.rows, ctx.dtype
        weight = weight_VD.to(dtype)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden_ND) if needs_hidden else None
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias and bias_V is not None else None
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for index, (part, cut) in enumerate(_parts(len(ids_NJ), rows, ctx.sampling_masks)):
                hidden = hidden_ND[part].to(dtype)
                dz = _gradient(
                    kept[index]
                    if index < len(kept)
                    else torch.softmax(_scaled_logits(hidden, weight, bias_V, temperature_N[part], cut), dim=-1),
                    ids_NJ[part],
                    entropy_N[part],
                    None if grad_logp_NJ is None else grad_logp_NJ[part] / temperature_N[part, None],
                    None if grad_entropy_N is None else grad_entropy_N[part] / temperature_N[part],
                )
                if grad_bias is not None:
                    grad_bias += dz.sum(0)
                dz = dz.to(dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = dz @ weight
                if grad_weight is not None and dtype == torch.float32:
                    grad_weight.addmm_(dz.T, hidden)
                elif grad_weight is not None:
                    grad_weight += dz.T @ hidden
                del dz
        as_weight = None if grad_weight is None else grad_weight.to(weight_VD.dtype)
        as_bias = None if grad_bias is None else grad_bias.to(bias_V.dtype)
        return grad_hidden, as_weight, as_bias, None, None, None, None, None, None, None, None


def _parts(count: int, rows: int, sampling_masks: SamplingMasks | None) -> list[tuple[slice, SamplingMasks | None]]:
    """The tokens of each chunk, and their sampling masks."""
    parts = [slice(start, min(start + rows, count)) for start in range(0, count, rows)]
    return (
        [(part, None) for part in parts]
        if sampling_masks is None
        else list(zip(parts, sampling_masks.chunks(rows), strict=False))
    )


def _scaled_logits(
    hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, temperature_C: Tensor, sampling_masks: SamplingMasks | None
) -> Tensor:
    """float32 [C, V]"""
    z = hidden_CD @ weight_VD.T
    if bias_V is not None:
        z += bias_V.to(z.dtype)
    z = z.float().div_(temperature_C[:, None])
    if sampling_masks is not None:
        sampling_masks.restrict_(z)
    return z


def _entropy_(y_CV: Tensor, p_CV: Tensor, highest_C: Tensor) -> Tensor:
    """float32 [C], with highest_C = log max p; uses up `y_CV`."""
    return -(y_CV.mul_(p_CV).sum(-1) + highest_C)


def _gradient(
    p_CV: Tensor, ids_CJ: Tensor, entropy_C: Tensor, grad_logp_CJ: Tensor | None, grad_entropy_C: Tensor | None
) -> Tensor:
    """float32 [C, V]: gradient of the logits before the temperature; the incoming ones are divided by it already."""
    whole_C1 = None if grad_logp_CJ is None else grad_logp_CJ.sum(-1, keepdim=True)
    if grad_entropy_C is None:
        factor = torch.zeros_like(p_CV) if whole_C1 is None else p_CV * -whole_C1
    else:
        factor = p_CV.log().clamp_(min=_LOG_ZERO).add_(entropy_C[:, None]).mul_(-grad_entropy_C[:, None])
        factor = (factor if whole_C1 is None else factor.sub_(whole_C1)).mul_(p_CV)
    if grad_logp_CJ is not None:
        factor.scatter_add_(-1, ids_CJ, grad_logp_CJ)
    return factor
