# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Polar attention: softmax against a learned null, read as a direction and a magnitude.

ATMA paper, arXiv 2606.25156, section on polar attention. For a query that sees n keys, per head:

    sigma_j = q . k_j / sqrt(D)                  temp = 1 + softplus(length_gain) ln(n)
    null    = null_base + softplus(null_slope) sqrt(ln(n + 1))
    a_j = temp sigma_j      a_0 = temp null      w = softmax([a_1..a_n, a_0])
    direction c = s / max(|s|, 1e-6)             s = sum_j w_j v_j + w_0 v_null
    n_eff = 1 / sum_j p_j^2                      p_j = w_j / (1 - w_0)
    magnitude = tanh(softplus(magnitude_gain) ln(1 + m_eff))         m_eff = n_eff (1 - w_0)

All of it is evaluated from l1 = logsumexp_j a_j and l2 = logsumexp_j 2 a_j, without an eps:
n_eff = exp(2 l1 - l2), 1 - w_0 = sigmoid(l1 - a_0). Partial results over disjoint keys merge
exactly, and the magnitude stays right when the null takes nearly everything.

Inside this file tensors are heads-first, [B, H, T, ...]; queries of one key/value group are folded
into the rows of one matrix, so keys and values are never expanded.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .backend import choose_backend, compute_dtype, without_autocast
from .visibility import Visibility, check_shapes, check_window

try:
    from .polar_attention_backward_triton import polar_bwd, polar_bwd_op
    from .polar_attention_triton import polar_fwd, polar_fwd_op, serves
except ImportError:  # no Triton here: the torch path serves every device
    polar_bwd = polar_bwd_op = polar_fwd = polar_fwd_op = serves = None

__all__ = [
    "PolarOutput",
    "PolarStatistics",
    "block_sizes",
    "distractor_mass",
    "finish_polar_attention",
    "polar_attention",
    "polar_attention_reference",
    "stream_polar_attention",
    "temperature_and_null",
]

MIN_NORM = 1e-6
# The most elements of a temporary of the streaming form: what a core's cache holds, or on an
# accelerator enough to keep it busy.
BLOCK_ELEMENTS_CPU = 2**19
BLOCK_ELEMENTS = 2**24


class PolarStatistics(NamedTuple):
    """What the queries looked at, detached: `n_eff` and `null_weight` (w_0), [B, T, H] in fp32."""

    n_eff: torch.Tensor
    null_weight: torch.Tensor


class PolarOutput(NamedTuple):
    """`direction` [B, T, H, D] and `magnitude` [B, T, H] in the dtype of the query.

    `statistics` and `weights` (w_j of the real keys, [B, H, T, S]) are None unless asked for.
    """

    direction: torch.Tensor
    magnitude: torch.Tensor
    statistics: PolarStatistics | None = None
    weights: torch.Tensor | None = None


def _length_terms(count: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """ln n and sqrt(ln(n + 1)), [1 or B, 1, T]; ln 0 is taken as 0."""
    count = count[:, None].to(dtype)
    return count.clamp(min=1).log(), (count + 1).log().sqrt()


def temperature_and_null(
    count: torch.Tensor,
    length_gain: torch.Tensor,
    null_base: torch.Tensor,
    null_slope: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The temperature of the logits and the null that they compete with.

    Args:
        count: [1 or B, T] integers, n of each query.
        length_gain, null_base, null_slope: [H], raw.
        dtype: of the results.

    Returns:
        temp and null, [1 or B, H, T] each; the null's logit is a_0 = temp * null.
    """
    log_count, root = _length_terms(count, dtype)
    temp = 1 + F.softplus(length_gain.to(dtype))[:, None] * log_count
    null = null_base.to(dtype)[:, None] + F.softplus(null_slope.to(dtype))[:, None] * root
    return temp, null


class _Finished(NamedTuple):
    """The results of all keys, in the compute dtype, heads-first: [B, H, T] or [B, H, T, D]."""

    direction: torch.Tensor
    magnitude: torch.Tensor
    norm: torch.Tensor
    n_eff: torch.Tensor
    null_weight: torch.Tensor

    def output(self, dtype: torch.dtype, return_statistics: bool) -> PolarOutput:
        statistics = None
        if return_statistics:
            statistics = PolarStatistics(
                self.n_eff.detach().transpose(1, 2).to(torch.float32),
                self.null_weight.detach().transpose(1, 2).to(torch.float32),
            )
        direction, magnitude = self.direction.transpose(1, 2), self.magnitude.transpose(1, 2)
        return PolarOutput(
            direction.to(dtype).contiguous(), magnitude.to(dtype).contiguous(), statistics
        )


def _shares(
    l1: torch.Tensor, l2: torch.Tensor, a_0: torch.Tensor, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """n_eff, 1 - w_0, w_0 and ln m_eff, [B, H, T] each.

    `seen` [1 or B, 1, T] marks queries with a key; the others' l1 and l2 are finite but void.
    """
    unseen = ~seen
    real = torch.sigmoid(l1 - a_0).masked_fill(unseen, 0.0)
    null_weight = torch.sigmoid(a_0 - l1).masked_fill(unseen, 1.0)
    log_n_eff = 2 * l1 - l2
    n_eff = log_n_eff.exp().masked_fill(unseen, 0.0)
    log_m_eff = (log_n_eff + F.logsigmoid(l1 - a_0)).masked_fill(unseen, -math.inf)
    return n_eff, real, null_weight, log_m_eff


def finish_polar_attention(
    content: torch.Tensor,
    l1: torch.Tensor,
    l2: torch.Tensor,
    a_0: torch.Tensor,
    seen: torch.Tensor,
    null_value: torch.Tensor,
    magnitude_gain: torch.Tensor,
) -> _Finished:
    """Direction and magnitude from `content` [B, H, T, D], the mean of the values under p, and
    l1, l2, a_0."""
    dtype = content.dtype
    n_eff, real, null_weight, log_m_eff = _shares(l1, l2, a_0, seen)
    null_part = null_weight[..., None] * null_value.to(dtype)[:, None]
    mixed = real[..., None] * content + null_part
    norm = torch.linalg.vector_norm(mixed, dim=-1)
    direction = mixed / norm.clamp(min=MIN_NORM)[..., None]
    # ln(1 + m_eff) = softplus(ln m_eff)
    gain = F.softplus(magnitude_gain.to(dtype))[:, None]
    magnitude = torch.tanh(gain * F.softplus(log_m_eff))
    return _Finished(direction, magnitude, norm, n_eff, null_weight)


def polar_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    null_value: torch.Tensor,
    length_gain: torch.Tensor,
    null_base: torch.Tensor,
    null_slope: torch.Tensor,
    magnitude_gain: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    window: int | None = None,
    query_start: torch.Tensor | None = None,
    return_statistics: bool = False,
    return_weights: bool = False,
) -> PolarOutput:
    """The oracle: materialises all weights, plain autograd, runs in fp64 for fp64 inputs.

    The contract is that of `polar_attention`. `return_weights` adds the weights of the real keys,
    [B, H, T, S] in the dtype of the query; they sum with w_0 to 1.
    """
    check_shapes(query, key, value, cu_seqlens)
    dtype = compute_dtype(query, key, value)
    num_queries, num_keys, num_groups = query.shape[1], key.shape[1], key.shape[2]
    visibility = Visibility(
        num_queries,
        num_keys,
        query.device,
        cu_seqlens=cu_seqlens,
        window=window,
        query_start=query_start,
    )
    with without_autocast(query):
        temp, null = temperature_and_null(
            visibility.count, length_gain, null_base, null_slope, dtype
        )
        a_0 = temp * null
        grouped = query.to(dtype).unflatten(2, (num_groups, -1))
        sigma = torch.einsum("btgrd,bsgd->bgrts", grouped, key.to(dtype)).flatten(1, 2)
        logits = temp[..., None] * (sigma / math.sqrt(query.shape[3]))
        # Queries that see nothing keep all their logits: finite numbers, which `_shares` discards.
        seen = visibility.seen[:, None]
        mask = visibility.mask(slice(0, num_queries), slice(0, num_keys)) | ~seen[..., None]
        logits = logits.masked_fill(~mask, -math.inf)
        l1, l2 = logits.logsumexp(-1), (2 * logits).logsumexp(-1)
        shares = (logits - l1[..., None]).exp()
        content = torch.einsum(
            "bgrts,bsgd->bgrtd", shares.unflatten(1, (num_groups, -1)), value.to(dtype)
        ).flatten(1, 2)
        finished = finish_polar_attention(content, l1, l2, a_0, seen, null_value, magnitude_gain)
        output = finished.output(query.dtype, return_statistics)
        if return_weights:
            real = _shares(l1, l2, a_0, seen)[1]
            output = output._replace(weights=(shares * real[..., None]).to(query.dtype))
    return output


def block_sizes(query: torch.Tensor, num_groups: int, num_keys: int) -> tuple[int, int]:
    """How many queries and keys to take at a time, so that no temporary is large.

    With query [B, H, T, D], logits take B x H x queries x keys elements, and a block of keys
    B x G x keys x D.
    """
    batch, num_heads, num_queries, head_dim = query.shape
    elements = BLOCK_ELEMENTS_CPU if query.device.type == "cpu" else BLOCK_ELEMENTS
    area = max(elements // max(batch * num_heads, 1), 1)
    queries = max(min(num_queries, max(64, int(area**0.5))), 1)
    keys = min(area // queries, elements // max(batch * num_groups * head_dim, 1))
    return queries, max(min(num_keys, max(64, keys)), 1)


def _fold(x: torch.Tensor, num_groups: int) -> torch.Tensor:
    """[B, H, TQ, X] to [B, G, H/G * TQ, X]: the queries of one group are the rows of one matrix."""
    return x.reshape(x.shape[0], num_groups, x.shape[1] // num_groups * x.shape[2], x.shape[3])


def _masked_logits(
    query: torch.Tensor, key: torch.Tensor, visibility: Visibility, queries: slice, keys: slice
) -> torch.Tensor:
    """a_j [B, H, TQ, SK] of queries [B, H, TQ, D], scaled by temp / sqrt(D), and keys
    [B, G, SK, D]; -inf where the query does not see the key."""
    logits = _fold(query, key.shape[1]) @ key.transpose(-1, -2)
    logits = logits.view(*query.shape[:3], key.shape[2])
    if visibility.is_full(queries, keys):
        return logits
    return logits.masked_fill_(~visibility.mask(queries, keys), -math.inf)


def stream_polar_attention(
    query: torch.Tensor,
    load: Callable[[slice], tuple[torch.Tensor, torch.Tensor]],
    visibility: Visibility,
    block_queries: int,
    block_keys: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walks over the keys block by block; the memory is O(T x block).

    Args:
        query: [B, H, T, D] scaled by temp / sqrt(D), in the compute dtype.
        load: gives a block of keys and one of values, [B, G, SK, D] each in the compute dtype.
        visibility: which keys each query sees.
        block_queries, block_keys: how many to take at a time.

    Returns:
        content [B, H, T, D], the mean of the values under p, and l1, l2 [B, H, T]. Queries that see
        nothing get zeros.
    """
    contents, l1s, l2s = [], [], []
    batch, num_heads, num_queries, head_dim = query.shape
    for query_begin in range(0, max(num_queries, 1), block_queries):
        queries = slice(query_begin, min(query_begin + block_queries, num_queries))
        rows = query[:, :, queries].contiguous()
        content = torch.zeros_like(rows)
        total = rows.new_zeros(*rows.shape[:3], 1)
        squares = torch.zeros_like(total)
        maximum = torch.full_like(total, -math.inf)
        start, stop = visibility.span(queries)
        for key_begin in range(start, stop, block_keys):
            keys = slice(key_begin, min(key_begin + block_keys, stop))
            key, value = load(keys)
            logits = _masked_logits(rows, key, visibility, queries, keys)
            new_maximum = torch.maximum(maximum, logits.amax(-1, keepdim=True))
            # Nothing seen so far: any finite shift turns the -inf logits into zero weights.
            shift = new_maximum.masked_fill(new_maximum == -math.inf, 0.0)
            weights = logits.sub_(shift).exp_()
            decay = (maximum - shift).exp()
            update = _fold(weights, key.shape[1]) @ value
            content = content * decay + update.view(rows.shape)
            total = total * decay + weights.sum(-1, keepdim=True)
            squares = squares * decay.square() + weights.square_().sum(-1, keepdim=True)
            maximum = new_maximum
        unseen = ~visibility.seen[:, None, queries, None]
        maximum = maximum.masked_fill(unseen, 0.0)
        total = total.masked_fill(unseen, 1.0)
        squares = squares.masked_fill(unseen, 1.0)
        contents.append(content / total)
        l1s.append((maximum + total.log()).squeeze(-1))
        l2s.append((2 * maximum + squares.log()).squeeze(-1))
    return torch.cat(contents, dim=2), torch.cat(l1s, dim=2), torch.cat(l2s, dim=2)


class PolarAttentionFunction(torch.autograd.Function):
    """The streaming form with its own backward, which recomputes the logits block by block."""

    @staticmethod
    def forward(
        ctx,
        query,
        key,
        value,
        null_value,
        length_gain,
        null_base,
        null_slope,
        magnitude_gain,
        cu_seqlens,
        window,
        query_start,
    ):
        dtype = compute_dtype(query, key, value)
        visibility = Visibility(
            query.shape[1],
            key.shape[1],
            query.device,
            cu_seqlens=cu_seqlens,
            window=window,
            query_start=query_start,
        )
        with without_autocast(query):
            temp, null = temperature_and_null(
                visibility.count, length_gain, null_base, null_slope, dtype
            )
            rows = query.transpose(1, 2).to(dtype) * (temp / math.sqrt(query.shape[3]))[..., None]
            keys = key.transpose(1, 2).to(dtype).contiguous()
            values = value.transpose(1, 2).to(dtype).contiguous()
            blocks = block_sizes(rows, keys.shape[1], keys.shape[2])
            content, l1, l2 = stream_polar_attention(
                rows, lambda block: (keys[:, :, block], values[:, :, block]), visibility, *blocks
            )
            seen = visibility.seen[:, None]
            finished = finish_polar_attention(
                content, l1, l2, temp * null, seen, null_value, magnitude_gain
            )
            direction, magnitude, statistics, _ = finished.output(query.dtype, True)
        ctx.window = window
        # The backward removes what is parallel to c from the gradient; a rounded c would not do.
        c = direction if direction.dtype == dtype else finished.direction.transpose(1, 2)
        ctx.save_for_backward(
            query,
            key,
            value,
            null_value,
            length_gain,
            null_base,
            null_slope,
            magnitude_gain,
            cu_seqlens,
            query_start,
            c,
            finished.norm,
            l1,
            l2,
        )
        ctx.mark_non_differentiable(*statistics)
        return direction, magnitude, *statistics

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_direction, grad_magnitude, _grad_n_eff, _grad_null_weight):
        (
            query,
            key,
            value,
            null_value,
            length_gain,
            null_base,
            null_slope,
            magnitude_gain,
            cu_seqlens,
            query_start,
            c,
            norm,
            l1,
            l2,
        ) = ctx.saved_tensors
        dtype = l1.dtype
        scale = 1 / math.sqrt(query.shape[3])
        visibility = Visibility(
            query.shape[1],
            key.shape[1],
            query.device,
            cu_seqlens=cu_seqlens,
            window=ctx.window,
            query_start=query_start,
        )
        seen = visibility.seen[:, None]
        with without_autocast(query):
            temp, null = temperature_and_null(
                visibility.count, length_gain, null_base, null_slope, dtype
            )
            n_eff, real, null_weight, log_m_eff = _shares(l1, l2, temp * null, seen)

            # Through the direction: grad_mixed is orthogonal to s, but for the rows whose norm is
            # clamped; `correction` = grad_mixed . s is what the softmax subtracts there.
            c = c.transpose(1, 2)
            grad_c = grad_direction.transpose(1, 2).to(dtype)
            clamped = norm < MIN_NORM
            along = (grad_c * c).sum(-1)
            radial = along.masked_fill(clamped, 0.0)[..., None] * c
            grad_mixed = (grad_c - radial) / norm.clamp(min=MIN_NORM)[..., None]
            correction = along.masked_fill(~clamped, 0.0)

            # Through the magnitude tanh(gain ln(1 + m_eff)).
            gain = F.softplus(magnitude_gain.to(dtype))[:, None]
            log_1p_m_eff = F.softplus(log_m_eff)
            magnitude = torch.tanh(gain * log_1p_m_eff)
            grad_scaled = grad_magnitude.transpose(1, 2).to(dtype) * (1 - magnitude.square())
            grad_gain = (grad_scaled * log_1p_m_eff).sum((0, 2))
            grad_log_m_eff = grad_scaled * gain * torch.sigmoid(log_m_eff)

            # The null: its logit a_0 and its value.
            v_null = null_value.to(dtype)
            grad_null_value = (null_weight[..., None] * grad_mixed).sum((0, 2))
            toward_null = (grad_mixed @ v_null[..., None]).squeeze(-1) - correction
            grad_a_0 = null_weight * (toward_null - grad_log_m_eff)

            # The real keys: w_j = real p_j, so da_j = p_j (value_part_j + linear - quadratic p_j).
            linear = ((2 + null_weight) * grad_log_m_eff - real * correction)[..., None]
            quadratic = (2 * n_eff * grad_log_m_eff)[..., None]
            grad_content = real[..., None] * grad_mixed
            queries_first = query.transpose(1, 2).to(dtype)
            rows = queries_first * (temp * scale)[..., None]
            keys_first = key.transpose(1, 2).to(dtype).contiguous()
            values_first = value.transpose(1, 2).to(dtype).contiguous()
            grad_keys, grad_values = torch.zeros_like(keys_first), torch.zeros_like(values_first)
            grad_rows = torch.zeros_like(rows)
            num_queries, num_groups = query.shape[1], key.shape[2]
            block_queries, block_keys = block_sizes(rows, num_groups, key.shape[1])
            for query_begin in range(0, num_queries, block_queries):
                queries = slice(query_begin, min(query_begin + block_queries, num_queries))
                block_rows = rows[:, :, queries].contiguous()
                block_grad = _fold(grad_content[:, :, queries], num_groups)
                start, stop = visibility.span(queries)
                for key_begin in range(start, stop, block_keys):
                    keys = slice(key_begin, min(key_begin + block_keys, stop))
                    k, v = keys_first[:, :, keys], values_first[:, :, keys]
                    logits = _masked_logits(block_rows, k, visibility, queries, keys)
                    p = logits.sub_(l1[:, :, queries, None]).exp_()
                    grad_p = (block_grad @ v.transpose(-1, -2)).view(p.shape)
                    grad_p.add_(linear[:, :, queries]).sub_(quadratic[:, :, queries] * p)
                    grad_logits = _fold(grad_p.mul_(p), num_groups)
                    grad_rows[:, :, queries] += (grad_logits @ k).view(block_rows.shape)
                    grad_logits, p = grad_logits.transpose(-1, -2), _fold(p, num_groups)
                    grad_keys[:, :, keys] += grad_logits @ _fold(block_rows, num_groups)
                    grad_values[:, :, keys] += p.transpose(-1, -2) @ block_grad

            # sum_j da_j sigma_j = (sum_j da_j k_j) . q / sqrt(D)
            grad_temp = (grad_rows * queries_first).sum(-1) * scale + grad_a_0 * null
            grad_null = grad_a_0 * temp
            log_count, root = _length_terms(visibility.count, dtype)
            grads = (
                (grad_rows * (temp * scale)[..., None]).transpose(1, 2),
                grad_keys.transpose(1, 2),
                grad_values.transpose(1, 2),
                grad_null_value,
                (grad_temp * log_count).sum((0, 2)) * torch.sigmoid(length_gain.to(dtype)),
                grad_null.sum((0, 2)),
                (grad_null * root).sum((0, 2)) * torch.sigmoid(null_slope.to(dtype)),
                grad_gain * torch.sigmoid(magnitude_gain.to(dtype)),
            )
        inputs = (
            query,
            key,
            value,
            null_value,
            length_gain,
            null_base,
            null_slope,
            magnitude_gain,
        )
        return *(g.to(x.dtype) for g, x in zip(grads, inputs, strict=True)), None, None, None


def _is_traced(x: torch.Tensor) -> bool:
    """Whether a compiler looks on, which has to see operators. Otherwise the detour through
    torch's dispatcher would cost as much as a launch."""
    return torch.compiler.is_compiling() or type(x) not in (torch.Tensor, torch.nn.Parameter)


class TritonPolarAttentionFunction(torch.autograd.Function):
    """The kernels; query, key and value share one dtype. Also returns l1 and log2 n_eff."""

    @staticmethod
    def forward(ctx, query, key, value, null_value, *rest):
        inputs = (query, key, value, null_value, *rest[:4])
        cu_seqlens, window, query_start = rest[4:]
        for_backward = any(ctx.needs_input_grad)
        run = polar_fwd_op if _is_traced(query) else polar_fwd
        direction, magnitude, norm, l1, log_n_eff, rounding = run(
            *inputs, cu_seqlens, query_start, window, for_backward
        )
        ctx.window = window
        ctx.save_for_backward(
            *inputs, cu_seqlens, query_start, direction, norm, l1, log_n_eff, rounding
        )
        ctx.mark_non_differentiable(l1, log_n_eff)
        return direction, magnitude, l1, log_n_eff

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_direction, grad_magnitude, _grad_l1, _grad_log_n_eff):
        *inputs, cu_seqlens, query_start, direction, norm, l1, log_n_eff, rounding = (
            ctx.saved_tensors
        )
        run = polar_bwd_op if _is_traced(grad_direction) else polar_bwd
        gradients = run(
            grad_direction, grad_magnitude, *inputs, cu_seqlens, query_start, ctx.window,
            direction, norm, l1, log_n_eff, rounding,
        )  # fmt: skip
        return *gradients, None, None, None


def _kernel_dtype(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.dtype:
    """The one dtype that the kernels read query, key and value in: autocast's, as for every
    attention, else the widest of the three."""
    dtype = query.dtype
    if not dtype == key.dtype == value.dtype:
        dtype = torch.promote_types(torch.promote_types(dtype, key.dtype), value.dtype)
    device_type = query.device.type
    if device_type == "meta" or dtype == torch.float64:  # which autocast does not know, or leaves
        return dtype
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return dtype


def _triton_polar_attention(
    query, key, value, parameters, dtype, cu_seqlens, window, query_start, return_statistics
) -> PolarOutput:
    check_window(window)
    direction, magnitude, l1, log_n_eff = TritonPolarAttentionFunction.apply(
        query.to(dtype),
        key.to(dtype),
        value.to(dtype),
        *parameters,
        cu_seqlens,
        window,
        query_start,
    )
    statistics = None
    if return_statistics:
        visibility = Visibility(
            query.shape[1],
            key.shape[1],
            query.device,
            cu_seqlens=cu_seqlens,
            window=window,
            query_start=query_start,
        )
        with torch.no_grad():
            temp, null = temperature_and_null(visibility.count, *parameters[1:4], torch.float32)
            l1, log_n_eff = l1 * math.log(2), log_n_eff * math.log(2)
            n_eff, _, null_weight, _ = _shares(
                l1, 2 * l1 - log_n_eff, temp * null, visibility.seen[:, None]
            )
        statistics = PolarStatistics(n_eff.transpose(1, 2), null_weight.transpose(1, 2))
    return PolarOutput(direction.to(query.dtype), magnitude.to(query.dtype), statistics)


def polar_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    null_value: torch.Tensor,
    length_gain: torch.Tensor,
    null_base: torch.Tensor,
    null_slope: torch.Tensor,
    magnitude_gain: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    window: int | None = None,
    query_start: torch.Tensor | None = None,
    return_statistics: bool = False,
    backend: str = "auto",
) -> PolarOutput:
    """Causal polar attention (ATMA paper, arXiv 2606.25156), differentiable once.

    Args:
        query: [B, T, H, D], fp64, fp32, bf16 or fp16; all results take its dtype. Computed in fp32
            (fp64 for fp64 inputs), autocast or not; the kernels, which accumulate in fp32, read
            query, key and value in autocast's dtype where it is on.
        key, value: [B, S, G, D]; G divides H, query head h reads group h // (H / G).
        null_value: [H, D], the value that the null stands for.
        length_gain, null_base, null_slope, magnitude_gain: [H], the learned scalars, raw.
        cu_seqlens: [N + 1] offsets of packed documents that do not see each other; B = 1, S = T.
        window: W, the most keys that a query sees, its own position included.
        query_start: [B] position of each row's first query among its keys. Default: the queries
            are the last T of the S tokens. Keys past a row's end are thus never seen by its real
            queries. A query before the first key sees nothing: its magnitude is 0, its direction
            that of the null's value.
        return_statistics: adds n_eff and w_0 to the output, detached.
        backend: "auto", "triton" or "torch". The kernels serve head sizes that are multiples of 8,
            from 16 to 256, in fp32, bf16 and fp16; "auto" takes them on a GPU.

    Returns:
        `PolarOutput` with direction [B, T, H, D] and magnitude [B, T, H]. In bf16 and fp16 the
        kernels' gradients are right to 8e-3, but for those of length_gain, null_base and
        null_slope: sums over all tokens of terms with both signs, right to 2e-2 where these nearly
        cancel.

    Raises:
        ValueError: for shapes or arguments that do not fit together, or a backend that cannot run.
    """
    check_shapes(query, key, value, cu_seqlens)
    dtype = _kernel_dtype(query, key, value)
    has_triton = serves is not None and serves(query.shape[3], dtype)
    if choose_backend(backend, query, "polar_attention", has_triton) == "triton":
        parameters = (null_value, length_gain, null_base, null_slope, magnitude_gain)
        return _triton_polar_attention(
            query,
            key,
            value,
            parameters,
            dtype,
            cu_seqlens,
            window,
            query_start,
            return_statistics,
        )
    direction, magnitude, n_eff, null_weight = PolarAttentionFunction.apply(
        query,
        key,
        value,
        null_value,
        length_gain,
        null_base,
        null_slope,
        magnitude_gain,
        cu_seqlens,
        window,
        query_start,
    )
    statistics = PolarStatistics(n_eff, null_weight) if return_statistics else None
    return PolarOutput(direction, magnitude, statistics)


def distractor_mass(
    query: torch.Tensor,
    distractor_key: torch.Tensor,
    length_gain: torch.Tensor,
    null_base: torch.Tensor,
    null_slope: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    window: int | None = None,
    query_start: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """The mean mass that random keys take from the null, each query with its own temp and null.

    Args:
        query: [B, T, H, D].
        distractor_key: [R, G, D], the same for all queries.
        length_gain, null_base, null_slope: [H], raw.
        cu_seqlens, window, query_start: as in `polar_attention`, where query_start defaults to 0.
        lengths: [B] number of real queries of each row; the mean leaves out the others.

    Returns:
        A scalar in the compute dtype: the mean over heads and real queries of
        sum_r softmax([a_1..a_R, a_0])_r. Differentiable in the query, the keys and the scalars.
    """
    dtype = compute_dtype(query, distractor_key)
    batch, num_queries, num_heads, head_dim = query.shape
    visibility = Visibility(
        num_queries,
        num_queries,
        query.device,
        cu_seqlens=cu_seqlens,
        window=window,
        query_start=query_start,
    )
    with without_autocast(query):
        temp, null = temperature_and_null(
            visibility.count, length_gain, null_base, null_slope, dtype
        )
        grouped = query.to(dtype).unflatten(2, (distractor_key.shape[1], -1))
        sigma = torch.einsum("btgmd,rgd->bgmtr", grouped, distractor_key.to(dtype)).flatten(1, 2)
        logits = temp[..., None] * (sigma / math.sqrt(head_dim))
        mass = torch.sigmoid(logits.logsumexp(-1) - temp * null)
    if lengths is None:
        return mass.mean()
    real = torch.arange(num_queries, device=query.device) < lengths[:, None]
    return mass.masked_fill(~real[:, None], 0.0).sum() / (real.sum() * num_heads).clamp(min=1)
