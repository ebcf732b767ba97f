# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The algebraic soft cap and the cross entropy after it, in Triton (ATMA paper, arXiv 2606.25156).

With u = x / cap and r = 1 / sqrt(1 + u^2) the cap is z = x r, and dz/dx = r^3. A program walks over
the logits of a token: once for the logarithm of the sum of e^z, and, where the gradient is wanted,
once more, while the row is still in the cache, for (softmax(z) - one_hot) r^3.
"""

import math

import torch

from .pointwise_triton import flat_launch, flat_offsets, load_flat

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("The Triton path of the cross entropy needs the package triton.") from error

__all__ = ["cross_entropy_rows", "soft_cap_bwd", "soft_cap_fwd"]

_LOG2_E = tl.constexpr(math.log2(math.e))
# Logits per step and warps.
_ROW_TILE = {"BV": 4096, "num_warps": 8}


@triton.jit
def _slope(b_x, inverse_cap):
    """r, which caps x, and whose cube is the derivative of the capped x."""
    b_u = b_x * inverse_cap
    return tl.rsqrt(1.0 + b_u * b_u)


@triton.jit(do_not_specialize=["num_units"])
def soft_cap_kernel(x, dz, out, inverse_cap, num_units, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """The capped x, or, given dz, the gradient of x."""
    o_x, mask = flat_offsets(num_units, UNIT, BLOCK)
    b_x = load_flat(x, o_x, mask)
    b_r = _slope(b_x, inverse_cap)
    if dz is None:
        b_out = b_x * b_r
    else:
        b_out = load_flat(dz, o_x, mask) * (b_r * b_r * b_r)
    tl.store(out + o_x, b_out.to(out.dtype.element_ty), mask=mask)


@triton.jit
def cross_entropy_kernel(
    logits,
    labels,
    losses,
    gradient,
    scale,
    capped,
    d_capped,
    stride,
    vocab_size,
    ignore_index,
    inverse_cap,
    BV: tl.constexpr,
):
    """`gradient` may be `logits` itself. `capped` is written, `d_capped` added to the gradient."""
    row = tl.program_id(0).to(tl.int64)
    p_x = logits + row * stride
    label = tl.load(labels + row)
    is_counted = label != ignore_index
    o_v = tl.arange(0, BV)
    if is_counted:
        # Before the first step of the sums, and so before any program writes into this row.
        x_label = tl.load(p_x + label).to(tl.float32)
        z_label = x_label * _slope(x_label, inverse_cap)
        maximum = float("-inf")
        b_sum = tl.zeros([BV], dtype=tl.float32)
        for start in range(0, vocab_size, BV):
            mask = start + o_v < vocab_size
            b_x = tl.load(p_x + start + o_v, mask=mask, other=0.0).to(tl.float32)
            b_z = b_x * _slope(b_x, inverse_cap)
            if capped is not None:
                p_z = capped + row * vocab_size + start + o_v
                tl.store(p_z, b_z.to(capped.dtype.element_ty), mask=mask)
            b_z = tl.where(mask, b_z, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(b_z, axis=0))
            b_sum *= tl.exp2((maximum - new_maximum) * _LOG2_E)
            b_sum += tl.exp2((b_z - new_maximum) * _LOG2_E)
            maximum = new_maximum
        log_sum = maximum + tl.log(tl.sum(b_sum, axis=0))
        tl.store(losses + row, log_sum - z_label)
        if gradient is not None:
            factor = 1.0
            if scale is not None:
                factor = tl.load(scale).to(tl.float32)
            for start in range(0, vocab_size, BV):
                mask = start + o_v < vocab_size
                b_x = tl.load(p_x + start + o_v, mask=mask, other=0.0).to(tl.float32)
                b_r = _slope(b_x, inverse_cap)
                b_d = tl.exp2((b_x * b_r - log_sum) * _LOG2_E)
                b_d = tl.where(start + o_v == label, b_d - 1.0, b_d) * factor
                if d_capped is not None:
                    p_dz = d_capped + row * vocab_size + start + o_v
                    b_d += tl.load(p_dz, mask=mask, other=0.0).to(tl.float32)
                b_d *= b_r * b_r * b_r
                p_d = gradient + row * vocab_size + start + o_v
                tl.store(p_d, b_d.to(gradient.dtype.element_ty), mask=mask)
    else:
        tl.store(losses + row, 0.0)
        if capped is not None:
            for start in range(0, vocab_size, BV):
                mask = start + o_v < vocab_size
                b_x = tl.load(p_x + start + o_v, mask=mask, other=0.0).to(tl.float32)
                p_z = capped + row * vocab_size + start + o_v
                b_z = b_x * _slope(b_x, inverse_cap)
                tl.store(p_z, b_z.to(capped.dtype.element_ty), mask=mask)
        if gradient is not None:
            for start in range(0, vocab_size, BV):
                mask = start + o_v < vocab_size
                b_d = tl.zeros([BV], dtype=tl.float32)
                if d_capped is not None:
                    b_x = tl.load(p_x + start + o_v, mask=mask, other=0.0).to(tl.float32)
                    b_r = _slope(b_x, inverse_cap)
                    p_dz = d_capped + row * vocab_size + start + o_v
                    b_dz = tl.load(p_dz, mask=mask, other=0.0).to(tl.float32)
                    b_d = b_dz * (b_r * b_r * b_r)
                p_d = gradient + row * vocab_size + start + o_v
                tl.store(p_d, b_d.to(gradient.dtype.element_ty), mask=mask)


def cross_entropy_rows(
    logits: torch.Tensor,
    labels: torch.Tensor,
    cap: float,
    ignore_index: int,
    gradient: torch.Tensor | None,
    scale: torch.Tensor | None = None,
    capped: torch.Tensor | None = None,
    d_capped: torch.Tensor | None = None,
) -> torch.Tensor:
    """The cross entropy of each token after the cap, [N] in fp32; 0 where the label is ignored.

    Args:
        logits: [N, V], uncapped, rows of adjacent elements.
        labels: [N] int64, in 0..V-1 or `ignore_index`.
        gradient: [N, V] contiguous, gets the gradient of the sum of the losses; may be `logits`.
        scale: a scalar, times which the gradient is stored.
        capped: [N, V] contiguous, gets the capped logits.
        d_capped: [N, V] contiguous, a gradient of the capped logits, which joins `gradient`.
    """
    num_tokens, vocab_size = logits.shape
    losses = torch.empty(num_tokens, dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):
        cross_entropy_kernel[(num_tokens,)](
            logits,
            labels,
            losses,
            gradient,
            scale,
            capped,
            d_capped,
            logits.stride(0),
            vocab_size,
            ignore_index,
            1.0 / cap,
            BV=min(_ROW_TILE["BV"], triton.next_power_of_2(vocab_size)),
            num_warps=_ROW_TILE["num_warps"],
        )
    return losses


def soft_cap_fwd(x: torch.Tensor, cap: float) -> torch.Tensor:
    """`cap x / sqrt(x^2 + cap^2)` in the dtype of x, contiguous."""
    return _soft_cap(x, None, cap)


def soft_cap_bwd(x: torch.Tensor, dz: torch.Tensor, cap: float) -> torch.Tensor:
    """The gradient of x from that of the capped x."""
    return _soft_cap(x, dz.contiguous(), cap)


def _soft_cap(x, dz, cap):
    x = x.contiguous()
    out = torch.empty_like(x)
    grid, sizes = flat_launch(x.numel())
    with torch.cuda.device_of(x):
        soft_cap_kernel[grid](x, dz, out, 1.0 / cap, **sizes)
    return out
