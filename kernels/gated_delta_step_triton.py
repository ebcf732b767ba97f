# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The step of the gated delta rule in Triton: the memory is read and written once, in place.

A program advances one head's memory M, some rows at a time. M k and M q are taken from the memory
before the write, in one go: the read after it is gamma M q + u (k . q).
"""

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("The Triton path of the memory's step needs the package triton.") from error

from .operators import define_operator

__all__ = ["gated_delta_step_op"]

# head_dim up to a power of two -> rows of the memory at a time, warps, stages.
_TILES = {16: (16, 1, 2), 32: (32, 1, 2), 64: (32, 2, 3), 128: (32, 4, 3), 256: (16, 4, 3)}
_NORM_EPS = tl.constexpr(2.0**-23)


@triton.jit
def _token(
    p_q, p_k, p_r, p_w, retention_bias, write_bias, max_gamma, is_real, D: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """A token's unit query and key, [BK], gamma and beta; padding has gamma 1 and beta 0."""
    o_k = tl.arange(0, BK)
    b_q = tl.load(p_q + o_k, mask=o_k < D, other=0.0).to(tl.float32)
    b_k = tl.load(p_k + o_k, mask=o_k < D, other=0.0).to(tl.float32)
    b_q = b_q / tl.maximum(tl.sqrt(tl.sum(b_q * b_q, 0)), 1e-12)
    b_k = b_k / tl.maximum(tl.sqrt(tl.sum(b_k * b_k, 0)), 1e-12)
    gamma = tl.minimum(tl.sigmoid(tl.load(p_r).to(tl.float32) + retention_bias), max_gamma)
    beta = tl.sigmoid(tl.load(p_w).to(tl.float32) + write_bias)
    return b_q, b_k, tl.where(is_real, gamma, 1.0), tl.where(is_real, beta, 0.0)


@triton.jit
def _advance(b_state, b_q, b_k, b_v, gamma, beta, is_real):
    """Some rows of the memory, [BV, BK], after a token, and what is read from them, [BV]."""
    recalled = tl.sum(b_state * b_k[None, :], 1)
    b_read = tl.sum(b_state * b_q[None, :], 1)
    update = tl.where(is_real, beta * (b_v - gamma * recalled), 0.0)
    b_read = gamma * b_read + update * tl.sum(b_k * b_q, 0)
    written = gamma * b_state + update[:, None] * b_k[None, :]
    return tl.where(is_real, written, b_state), b_read


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
    raw_read,
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
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_GATE: tl.constexpr,
):
    BLOCKS: tl.constexpr = (D + BV - 1) // BV
    i_h = (tl.program_id(0) % H).to(tl.int64)
    i_b = (tl.program_id(0) // H).to(tl.int64)
    i_g = i_h // (H // G)
    p_q = query + i_b * stride_qb + i_h * stride_qh
    p_k = key + i_b * stride_kb + i_g * stride_kg
    p_v = value + i_b * stride_vb + i_g * stride_vg
    p_r = retention_logits + i_b * stride_rb + i_h * stride_rh
    p_w = write_logits + i_b * stride_wb + i_h * stride_wh
    p_raw = raw_read + (i_b * num_tokens * H + i_h) * D
    p_state = state + (i_b * H + i_h) * (D * D)
    num_real = num_tokens
    if HAS_LENGTHS:
        num_real = tl.minimum(tl.load(lengths + i_b), num_tokens).to(tl.int32)
    o_k = tl.arange(0, BK)
    if ONE_TOKEN:
        is_real = num_real > 0
        b_q, b_k, gamma, beta = _token(
            p_q, p_k, p_r, p_w, retention_bias, write_bias, max_gamma, is_real, D, BK
        )
        for i_v in tl.range(0, BLOCKS, num_stages=STAGES):
            o_v = i_v * BV + tl.arange(0, BV)
            m_state = (o_v < D)[:, None] & (o_k < D)[None, :]
            p_rows = p_state + o_v[:, None] * D + o_k[None, :]
            b_state = tl.load(p_rows, mask=m_state, other=0.0)
            b_v = tl.load(p_v + o_v, mask=o_v < D, other=0.0).to(tl.float32)
            b_state, b_read = _advance(b_state, b_q, b_k, b_v, gamma, beta, is_real)
            tl.store(p_raw + o_v, b_read.to(raw_read.dtype.element_ty), mask=o_v < D)
            tl.store(p_rows, b_state, mask=m_state & is_real)
    else:
        for i_v in range(0, BLOCKS):
            o_v = i_v * BV + tl.arange(0, BV)
            m_state = (o_v < D)[:, None] & (o_k < D)[None, :]
            p_rows = p_state + o_v[:, None] * D + o_k[None, :]
            b_state = tl.load(p_rows, mask=m_state, other=0.0)
            for i_t in range(0, num_tokens):
                t = tl.cast(i_t, tl.int64)
                is_real = i_t < num_real
                b_q, b_k, gamma, beta = _token(
                    p_q + t * stride_qt, p_k + t * stride_kt, p_r + t * stride_rt,
                    p_w + t * stride_wt, retention_bias, write_bias, max_gamma, is_real, D, BK,
                )  # fmt: skip
                p_token = p_v + t * stride_vt + o_v
                b_v = tl.load(p_token, mask=o_v < D, other=0.0).to(tl.float32)
                b_state, b_read = _advance(b_state, b_q, b_k, b_v, gamma, beta, is_real)
                p_token = p_raw + t * (H * D) + o_v
                tl.store(p_token, b_read.to(raw_read.dtype.element_ty), mask=o_v < D)
            tl.store(p_rows, b_state, mask=m_state & (num_real > 0))

    if HAS_GATE:
        # What other threads of this program have read from their rows.
        tl.debug_barrier()
        for i_t in range(0, num_tokens):
            t = tl.cast(i_t, tl.int64)
            b_read = tl.load(p_raw + t * (H * D) + o_k, mask=o_k < D, other=0.0)
            p_g = readout_gate + i_b * stride_gb + t * stride_gt + i_h * stride_gh
            b_g = tl.load(p_g + o_k, mask=o_k < D, other=0.0).to(tl.float32)
            b_read = b_read * tl.rsqrt(tl.sum(b_read * b_read, 0) / D + _NORM_EPS)
            b_read = (b_read * tl.sigmoid(b_g)).to(read.dtype.element_ty)
            p_read = read + ((i_b * num_tokens + t) * H + i_h) * D
            tl.store(p_read + o_k, b_read, mask=o_k < D)


def gated_delta_step_fwd(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    retention_logits: torch.Tensor,
    write_logits: torch.Tensor,
    readout_gate: torch.Tensor | None,
    lengths: torch.Tensor | None,
    state: torch.Tensor,
    retention_bias: float,
    write_bias: float,
    max_gamma: float,
) -> torch.Tensor:
    """The arguments are those of `gated_delta_step`, max_gamma at most 1, the state contiguous.

    A readout gate normalises and gates what is read: RMSNorm(read) * sigmoid(gate).
    """
    B, T, H, D = query.shape
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    has_gate = readout_gate is not None
    gate = query if readout_gate is None else readout_gate
    gate = gate if gate.stride(3) == 1 else gate.contiguous()
    read = query.new_empty(query.shape)
    if read.numel() == 0:
        return read
    BK = max(triton.next_power_of_2(D), 16)
    BV, num_warps, stages = _TILES[BK]
    raw_read = torch.empty_like(read, dtype=torch.float32) if has_gate else read
    with torch.cuda.device_of(query):
        gated_delta_step_kernel[(B * H,)](
            query,
            key,
            value,
            retention_logits,
            write_logits,
            gate,
            state if lengths is None else lengths.contiguous(),
            state,
            raw_read,
            read,
            T,
            retention_bias,
            write_bias,
            max_gamma,
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            *retention_logits.stride(),
            *write_logits.stride(),
            *gate.stride()[:3],
            H=H,
            G=key.shape[2],
            D=D,
            BV=BV,
            BK=BK,
            STAGES=stages,
            ONE_TOKEN=T == 1,
            HAS_LENGTHS=lengths is not None,
            HAS_GATE=has_gate,
            num_warps=num_warps,
        )
    return read


def _gated_delta_step_fake(query, *_):
    return query.new_empty(query.shape)


gated_delta_step_op = define_operator(
    __name__,
    "gated_delta_step(Tensor query, Tensor key, Tensor value, Tensor retention_logits, "
    "Tensor write_logits, Tensor? readout_gate, Tensor? lengths, Tensor(a!) state, "
    "float retention_bias, float write_bias, float max_gamma) -> Tensor",
    gated_delta_step_fwd,
    _gated_delta_step_fake,
)
