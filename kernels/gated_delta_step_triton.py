# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The step of the gated delta rule in Triton: the memory is read and written once, in place.

A program holds the rows of one head's memory M in registers, all of them if the read is normalised
here, and takes the tokens one after the other. M k and M q are taken from the memory before the
write, in one go: the read after it is gamma M q + u (k . q).
"""

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("The Triton path of the memory's step needs the package triton.") from error

__all__ = ["gated_delta_step_fwd"]

_NORM_EPS = tl.constexpr(2.0**-23)


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "stride_qb",
        "stride_qt",
        "stride_kb",
        "stride_kt",
        "stride_vb",
        "stride_vt",
        "stride_rb",
        "stride_rt",
        "stride_rh",
        "stride_wb",
        "stride_wt",
        "stride_wh",
        "stride_gb",
        "stride_gt",
    ]
)
def gated_delta_step_kernel(
    query,
    key,
    value,
    retention_logits,
    write_logits,
    readout_gate,
    lengths,
    state,
    read,
    num_tokens,
    retention_bias,
    write_bias,
    max_gamma,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kg,
    stride_vb,
    stride_vt,
    stride_vg,
    stride_rb,
    stride_rt,
    stride_rh,
    stride_wb,
    stride_wt,
    stride_wh,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_sb,
    stride_sh,
    stride_sv,
    stride_sk,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_GATE: tl.constexpr,
):
    BLOCKS: tl.constexpr = (D + BV - 1) // BV
    i_p = tl.program_id(0)
    i_v = i_p % BLOCKS
    i_h = i_p // BLOCKS % H
    i_b = (i_p // BLOCKS // H).to(tl.int64)
    i_g = i_h // (H // G)
    o_v = i_v * BV + tl.arange(0, BV)
    o_k = tl.arange(0, BK)
    m_v = o_v < D
    m_k = o_k < D
    p_state = state + i_b * stride_sb + i_h.to(tl.int64) * stride_sh
    p_state = p_state + o_v[:, None] * stride_sv + o_k[None, :] * stride_sk
    m_state = m_v[:, None] & m_k[None, :]
    b_state = tl.load(p_state, mask=m_state, other=0.0)
    num_real = num_tokens
    if HAS_LENGTHS:
        num_real = tl.minimum(tl.load(lengths + i_b), num_tokens).to(tl.int32)
    for i_t in range(0, num_tokens):
        t = i_t.to(tl.int64)
        p_q = query + i_b * stride_qb + t * stride_qt + i_h * stride_qh
        p_k = key + i_b * stride_kb + t * stride_kt + i_g * stride_kg
        p_v = value + i_b * stride_vb + t * stride_vt + i_g * stride_vg
        b_q = tl.load(p_q + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_k = tl.load(p_k + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_v = tl.load(p_v + o_v, mask=m_v, other=0.0).to(tl.float32)
        b_q = b_q / tl.maximum(tl.sqrt(tl.sum(b_q * b_q, 0)), 1e-12)
        b_k = b_k / tl.maximum(tl.sqrt(tl.sum(b_k * b_k, 0)), 1e-12)
        p_r = retention_logits + i_b * stride_rb + t * stride_rt + i_h * stride_rh
        p_w = write_logits + i_b * stride_wb + t * stride_wt + i_h * stride_wh
        gamma = tl.minimum(tl.sigmoid(tl.load(p_r).to(tl.float32) + retention_bias), max_gamma)
        beta = tl.sigmoid(tl.load(p_w).to(tl.float32) + write_bias)

        is_real = i_t < num_real
        recalled = tl.sum(b_state * b_k[None, :], 1)
        b_read = tl.sum(b_state * b_q[None, :], 1)
        update = beta * (b_v - gamma * recalled)
        written = gamma * b_state + update[:, None] * b_k[None, :]
        b_read = tl.where(is_real, gamma * b_read + update * tl.sum(b_k * b_q, 0), b_read)
        b_state = tl.where(is_real, written, b_state)
        if HAS_GATE:
            p_g = readout_gate + i_b * stride_gb + t * stride_gt + i_h * stride_gh
            b_g = tl.load(p_g + o_v, mask=m_v, other=0.0).to(tl.float32)
            b_read = b_read * tl.rsqrt(tl.sum(b_read * b_read, 0) / D + _NORM_EPS) * tl.sigmoid(b_g)
        p_read = read + ((i_b * num_tokens + t) * H + i_h) * D
        tl.store(p_read + o_v, b_read.to(read.dtype.element_ty), mask=m_v)
    tl.store(p_state, b_state, mask=m_state & (num_real > 0))
