# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Projections of one token in Triton: every program multiplies a few rows of the weights.

The token is multiplied elementwise, in fp32; a matrix unit would wait for its many rows. Every
program computes the norm or the gate of the token anew, which lies in the cache while the weights
come from memory.
"""

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("The Triton path of projections needs the package triton.") from error

from .operators import define_operator
from .squared_relu_triton import squared_relu_times

__all__ = ["project_step_op", "project_sum_step_op"]

# Rows and columns of a weight at a time, and warps.
_TILE = (4, 1024, 4)
_SUM_TILE = (2, 1024, 4)


@triton.jit
def _pick(pointers, index, offset):
    """`pointers[index] + offset` for blocks of indices and offsets."""
    found = pointers[0] + offset
    for i in tl.static_range(1, len(pointers)):
        found = tl.where(index == i, pointers[i] + offset, found)
    return found


@triton.jit
def _products(
    x, norm_weight, gate, p_rows, m_n, eps, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """The token's products [BN] with rows of weights, given by pointers, in fp32."""
    o_k = tl.arange(0, BK)
    b_acc = tl.zeros([BN, BK], tl.float32)
    b_squares = tl.zeros([BK], tl.float32)
    for k in tl.range(0, K, BK):
        m_k = k + o_k < K
        b_w = tl.load(p_rows[:, None] + (k + o_k)[None, :], m_n[:, None] & m_k[None, :], other=0.0)
        b_x = tl.load(x + k + o_k, mask=m_k, other=0.0).to(tl.float32)
        if HAS_NORM:
            b_squares += b_x * b_x
            b_x *= tl.load(norm_weight + k + o_k, mask=m_k, other=0.0).to(tl.float32)
        if HAS_GATE:
            b_x *= tl.sigmoid(tl.load(gate + k + o_k, mask=m_k, other=0.0).to(tl.float32))
        b_acc += b_w.to(tl.float32) * b_x[None, :]
    b_y = tl.sum(b_acc, 1)
    if HAS_NORM:
        b_y *= tl.rsqrt(tl.sum(b_squares, 0) / K + eps)
    return b_y


@triton.jit
def project_step_kernel(
    x,
    norm_weight,
    weights,
    biases,
    ends,
    y,
    eps,
    num_rows,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SQUARED_RELU: tl.constexpr,
):
    o_r = tl.program_id(0) * BN + tl.arange(0, BN)
    m_r = o_r < num_rows
    if SQUARED_RELU:
        # The two weights take turns.
        index = o_r % 2
        o_n = o_r // 2
    else:
        # The weights stand below each other.
        index = o_r * 0
        o_n = o_r
        for i in tl.static_range(len(weights) - 1):
            index = tl.where(o_r >= ends[i], i + 1, index)
            o_n = tl.where(o_r >= ends[i], o_r - ends[i], o_n)
    p_rows = _pick(weights, index, o_n.to(tl.int64) * K)
    b_y = _products(x, norm_weight, x, p_rows, m_r, eps, K, BN, BK, HAS_NORM, False)
    if HAS_BIAS:
        b_y += tl.load(_pick(biases, index, o_n), mask=m_r, other=0.0).to(tl.float32)
    if SQUARED_RELU:
        b_gate, b_up = tl.split(tl.reshape(b_y, [BN // 2, 2]))
        b_y = squared_relu_times(b_gate, b_up)
        o_r = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
        m_r = o_r < num_rows // 2
    tl.store(y + o_r, b_y.to(y.dtype.element_ty), mask=m_r)


@triton.jit
def project_sum_step_kernel(
    inputs,
    gate,
    weights,
    biases,
    residual,
    real,
    y,
    num_rows,
    KS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_REAL: tl.constexpr,
):
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    m_n = o_n < num_rows
    b_y = tl.zeros([BN], tl.float32)
    for i in tl.static_range(len(weights)):
        p_rows = weights[i] + o_n.to(tl.int64) * KS[i]
        # The gate is the first input's.
        b_y += _products(
            inputs[i], gate, gate, p_rows, m_n, 0.0, KS[i], BN, BK, False, HAS_GATE and i == 0
        )
        if HAS_BIAS:
            b_y += tl.load(biases[i] + o_n, mask=m_n, other=0.0).to(tl.float32)
    if HAS_REAL:
        b_y = tl.where(tl.load(real) != 0, b_y, 0.0)
    b_y += tl.load(residual + o_n, mask=m_n, other=0.0).to(tl.float32)
    tl.store(y + o_n, b_y.to(y.dtype.element_ty), mask=m_n)


def project_step_fwd(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    norm_weight: torch.Tensor | None,
    eps: float,
    squared_relu: bool,
) -> torch.Tensor:
    """The arguments are those of `project_step`; one token, contiguous weights, all biases or none.

    Returns:
        The projections side by side [..., sum of N_i], or with `squared_relu` [..., N].
    """
    sizes = [weight.shape[0] for weight in weights]
    num_rows = sum(sizes)
    y = x.new_empty(*x.shape[:-1], num_rows // 2 if squared_relu else num_rows)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    BN, BK, num_warps = _TILE
    BN = 2 * BN if squared_relu else BN
    with torch.cuda.device_of(x):
        project_step_kernel[(triton.cdiv(num_rows, BN),)](
            x.contiguous(),
            x if norm_weight is None else norm_weight,
            tuple(weights),
            tuple(biases or weights),
            tuple(ends or [0]),
            y,
            eps,
            num_rows,
            K=x.shape[-1],
            BN=BN,
            BK=min(BK, triton.next_power_of_2(x.shape[-1])),
            HAS_NORM=norm_weight is not None,
            HAS_BIAS=bool(biases),
            SQUARED_RELU=squared_relu,
            num_warps=num_warps,
        )
    return y


def project_sum_step_fwd(
    inputs: list[torch.Tensor],
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    residual: torch.Tensor,
    gate: torch.Tensor | None,
    real: torch.Tensor | None,
) -> torch.Tensor:
    """The arguments and the result are those of `project_sum_step`, restricted as above."""
    y = torch.empty_like(residual, memory_format=torch.contiguous_format)
    BN, BK, num_warps = _SUM_TILE
    widths = tuple(weight.shape[1] for weight in weights)
    with torch.cuda.device_of(y):
        project_sum_step_kernel[(triton.cdiv(y.numel(), BN),)](
            tuple(x.contiguous() for x in inputs),
            residual if gate is None else gate.contiguous(),
            tuple(weights),
            tuple(biases or weights),
            residual.contiguous(),
            residual if real is None else real,
            y,
            y.numel(),
            KS=widths,
            BN=BN,
            BK=min(BK, triton.next_power_of_2(max(widths))),
            HAS_GATE=gate is not None,
            HAS_BIAS=bool(biases),
            HAS_REAL=real is not None,
            num_warps=num_warps,
        )
    return y


def _project_step_fake(x, weights, biases, norm_weight, eps, squared_relu):
    num_rows = sum(weight.shape[0] for weight in weights)
    return x.new_empty(*x.shape[:-1], num_rows // 2 if squared_relu else num_rows)


def _project_sum_step_fake(inputs, weights, biases, residual, gate, real):
    return residual.new_empty(residual.shape)


project_step_op = define_operator(
    __name__,
    "project_step(Tensor x, Tensor[] weights, Tensor[] biases, Tensor? norm_weight, float eps, "
    "bool squared_relu) -> Tensor",
    project_step_fwd,
    _project_step_fake,
)
project_sum_step_op = define_operator(
    __name__,
    "project_sum_step(Tensor[] inputs, Tensor[] weights, Tensor[] biases, Tensor residual, "
    "Tensor? gate, Tensor? real) -> Tensor",
    project_sum_step_fwd,
    _project_sum_step_fake,
)
