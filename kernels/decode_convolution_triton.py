# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Steps of the causal depthwise convolutions in Triton: results and new window in one launch."""

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("The Triton path of decoding needs the package triton.") from error

from .operators import define_operator

__all__ = ["canon_step_op", "causal_conv1d_step_op", "gated_causal_conv1d_step_op"]

_BLOCK_CHANNELS = 128


@triton.jit
def _gated(p_b, p_h, offsets, mask):
    """b * h, rounded to the inputs' dtype as the window will be."""
    b_b = tl.load(p_b + offsets, mask=mask, other=0.0)
    b_h = tl.load(p_h + offsets, mask=mask, other=0.0)
    return (b_b.to(tl.float32) * b_h.to(tl.float32)).to(p_h.dtype.element_ty)


@triton.jit
def _input(p_x, p_gate, offsets, mask, GATED: tl.constexpr):
    if GATED:
        return _gated(p_gate, p_x, offsets, mask).to(tl.float32)
    return tl.load(p_x + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _step(
    p_x,
    p_gate,
    p_scale,
    p_weight,
    p_window,
    p_y,
    p_input,
    o_c,
    m_c,
    num_tokens,
    num_real,
    stride_xt,
    stride_ww,
    stride_y,
    K: tl.constexpr,
    BW: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
):
    """All tokens of some channels of a row, then the window that the next call continues from.

    With GATED the convolution's input is gate * x, which is kept in `p_input`, and its output is
    multiplied by scale.
    """
    for i_t in range(0, num_tokens):
        t = tl.cast(i_t, tl.int64)
        b_x = _input(p_x, p_gate, t * stride_xt + o_c, m_c, GATED)
        b_y = b_x * tl.load(p_weight + o_c * K + K - 1, mask=m_c, other=0.0).to(tl.float32)
        if GATED:
            tl.store(p_input + t * stride_y + o_c, b_x.to(p_input.dtype.element_ty), mask=m_c)
        if RESIDUAL:
            b_y += b_x
        for i in tl.static_range(1, K):
            is_new = t >= i
            b_new = _input(p_x, p_gate, (t - i) * stride_xt + o_c, m_c & is_new, GATED)
            p_old = p_window + (t - i + K - 1) * stride_ww + o_c
            b_old = tl.load(p_old, mask=m_c & (t < i), other=0.0).to(tl.float32)
            b_weight = tl.load(p_weight + o_c * K + K - 1 - i, mask=m_c, other=0.0).to(tl.float32)
            b_y += tl.where(is_new, b_new, b_old) * b_weight
        if GATED:
            b_y *= tl.load(p_scale + t * stride_xt + o_c, mask=m_c, other=0.0).to(tl.float32)
        tl.store(p_y + t * stride_y + o_c, b_y.to(p_y.dtype.element_ty), mask=m_c)

    o_w = tl.arange(0, BW)
    m_w = (o_w < K - 1)[:, None] & m_c[None, :]
    # Place w of the new window holds what stands num_real places later in (window, inputs).
    source = o_w[:, None] + num_real
    is_old = source < K - 1
    b_old = tl.load(p_window + source * stride_ww + o_c[None, :], mask=m_w & is_old, other=0.0)
    o_new = (source - (K - 1)) * stride_xt + o_c[None, :]
    b_new = _input(p_x, p_gate, o_new, m_w & (source >= K - 1), GATED)
    b_window = tl.where(is_old, b_old, b_new.to(b_old.dtype))
    # Other threads may still have to read what is about to be overwritten.
    tl.debug_barrier()
    tl.store(p_window + o_w[:, None] * stride_ww + o_c[None, :], b_window, mask=m_w)


@triton.jit
def _num_real(lengths, i_b, num_tokens, HAS_LENGTHS: tl.constexpr):
    if HAS_LENGTHS:
        return tl.minimum(tl.load(lengths + i_b), num_tokens).to(tl.int32)
    return num_tokens


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "stride_qb",
        "stride_qt",
        "stride_kb",
        "stride_kt",
        "stride_vb",
        "stride_vt",
    ]
)
def canon_step_kernel(
    query,
    key,
    value,
    query_weight,
    key_weight,
    value_weight,
    window,
    lengths,
    query_out,
    key_out,
    value_out,
    num_tokens,
    stride_qb,
    stride_qt,
    stride_kb,
    stride_kt,
    stride_vb,
    stride_vt,
    stride_wb,
    stride_ww,
    CQ: tl.constexpr,
    CK: tl.constexpr,
    CV: tl.constexpr,
    K: tl.constexpr,
    BC: tl.constexpr,
    BW: tl.constexpr,
    RESIDUAL: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):
    NQ: tl.constexpr = (CQ + BC - 1) // BC
    NK: tl.constexpr = (CK + BC - 1) // BC
    NV: tl.constexpr = (CV + BC - 1) // BC
    i_p = tl.program_id(0)
    i_c = i_p % (NQ + NK + NV)
    i_b = (i_p // (NQ + NK + NV)).to(tl.int64)
    num_real = _num_real(lengths, i_b, num_tokens, HAS_LENGTHS)
    p_window = window + i_b * stride_wb
    p_q = query + i_b * stride_qb
    p_k = key + i_b * stride_kb
    p_v = value + i_b * stride_vb
    p_qo = query_out + i_b * num_tokens * CQ
    p_ko = key_out + i_b * num_tokens * CK
    p_vo = value_out + i_b * num_tokens * CV
    if i_c < NQ:
        o_c = i_c * BC + tl.arange(0, BC)
        m_c = o_c < CQ
        _step(
            p_q, p_q, p_q, query_weight, p_window, p_qo, p_qo, o_c, m_c,
            num_tokens, num_real, stride_qt, stride_ww, CQ, K, BW, RESIDUAL, False,
        )  # fmt: skip
    elif i_c < NQ + NK:
        o_c = (i_c - NQ) * BC + tl.arange(0, BC)
        m_c = o_c < CK
        _step(
            p_k, p_k, p_k, key_weight, p_window + CQ, p_ko, p_ko, o_c, m_c,
            num_tokens, num_real, stride_kt, stride_ww, CK, K, BW, RESIDUAL, False,
        )  # fmt: skip
    else:
        o_c = (i_c - NQ - NK) * BC + tl.arange(0, BC)
        m_c = o_c < CV
        _step(
            p_v, p_v, p_v, value_weight, p_window + CQ + CK, p_vo, p_vo, o_c, m_c,
            num_tokens, num_real, stride_vt, stride_ww, CV, K, BW, RESIDUAL, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "stride_pb", "stride_pt"])
def gated_causal_conv1d_step_kernel(
    projected,
    weight,
    window,
    lengths,
    y,
    conv_input,
    num_tokens,
    stride_pb,
    stride_pt,
    stride_wb,
    stride_ww,
    C: tl.constexpr,
    K: tl.constexpr,
    BC: tl.constexpr,
    BW: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):
    N: tl.constexpr = (C + BC - 1) // BC
    i_c = tl.program_id(0) % N
    i_b = (tl.program_id(0) // N).to(tl.int64)
    num_real = _num_real(lengths, i_b, num_tokens, HAS_LENGTHS)
    o_c = i_c * BC + tl.arange(0, BC)
    m_c = o_c < C
    p_b = projected + i_b * stride_pb
    p_y = y + i_b * num_tokens * C
    p_input = conv_input + i_b * num_tokens * C
    _step(
        p_b + 2 * C, p_b, p_b + C, weight, window + i_b * stride_wb, p_y, p_input, o_c, m_c,
        num_tokens, num_real, stride_pt, stride_ww, C, K, BW, False, True,
    )  # fmt: skip


def conv_steps_fwd(
    inputs: list[torch.Tensor],
    weights: list[torch.Tensor],
    window: torch.Tensor,
    lengths: torch.Tensor | None,
    residual: bool,
) -> list[torch.Tensor]:
    """One to three streams [B, T, C_i] with weights [C_i, K] and one window [B, K - 1, sum C_i]."""
    inputs = [x if x.stride(2) == 1 else x.contiguous() for x in inputs]
    outputs = [x.new_empty(x.shape) for x in inputs]
    B, T, _ = inputs[0].shape
    if B * T == 0:
        return outputs
    K = weights[0].shape[1]
    missing = 3 - len(inputs)
    channels = [x.shape[2] for x in inputs] + [0] * missing
    num_blocks = sum(triton.cdiv(c, _BLOCK_CHANNELS) for c in channels)
    streams, results = inputs + inputs[:1] * missing, outputs + outputs[:1] * missing
    with torch.cuda.device_of(window):
        canon_step_kernel[(B * num_blocks,)](
            *streams,
            *[weight.contiguous() for weight in weights + weights[:1] * missing],
            window,
            window if lengths is None else lengths.contiguous(),
            *results,
            T,
            *[stride for x in streams for stride in x.stride()[:2]],
            *window.stride()[:2],
            CQ=channels[0],
            CK=channels[1],
            CV=channels[2],
            K=K,
            BC=_BLOCK_CHANNELS,
            BW=triton.next_power_of_2(max(K - 1, 1)),
            RESIDUAL=residual,
            HAS_LENGTHS=lengths is not None,
            num_warps=1,
        )
    return outputs


def gated_causal_conv1d_step_fwd(
    projected: torch.Tensor,
    weight: torch.Tensor,
    window: torch.Tensor,
    lengths: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The arguments and results are those of `gated_causal_conv1d_step`."""
    projected = projected if projected.stride(2) == 1 else projected.contiguous()
    B, T, C = *projected.shape[:2], weight.shape[0]
    K = weight.shape[1]
    y, conv_input = projected.new_empty(B, T, C), projected.new_empty(B, T, C)
    if y.numel() == 0:
        return y, conv_input
    with torch.cuda.device_of(window):
        gated_causal_conv1d_step_kernel[(B * triton.cdiv(C, _BLOCK_CHANNELS),)](
            projected,
            weight.contiguous(),
            window,
            window if lengths is None else lengths.contiguous(),
            y,
            conv_input,
            T,
            *projected.stride()[:2],
            *window.stride()[:2],
            C=C,
            K=K,
            BC=_BLOCK_CHANNELS,
            BW=triton.next_power_of_2(max(K - 1, 1)),
            HAS_LENGTHS=lengths is not None,
            num_warps=1,
        )
    return y, conv_input


def _canon_step(inputs, weights, window, lengths, residual):
    return tuple(conv_steps_fwd(inputs, weights, window, lengths, residual))


def _canon_step_fake(inputs, weights, window, lengths, residual):
    return tuple(x.new_empty(x.shape) for x in inputs)


def _causal_conv1d_step(x, weight, window, lengths, residual):
    return conv_steps_fwd([x], [weight], window, lengths, residual)[0]


def _causal_conv1d_step_fake(x, weight, window, lengths, residual):
    return x.new_empty(x.shape)


def _gated_causal_conv1d_step_fake(projected, weight, window, lengths):
    shape = (*projected.shape[:2], weight.shape[0])
    return projected.new_empty(shape), projected.new_empty(shape)


canon_step_op = define_operator(
    __name__,
    "canon_step(Tensor[] inputs, Tensor[] weights, Tensor(a!) window, Tensor? lengths, "
    "bool residual) -> (Tensor, Tensor, Tensor)",
    _canon_step,
    _canon_step_fake,
)
causal_conv1d_step_op = define_operator(
    __name__,
    "causal_conv1d_step(Tensor x, Tensor weight, Tensor(a!) window, Tensor? lengths, "
    "bool residual) -> Tensor",
    _causal_conv1d_step,
    _causal_conv1d_step_fake,
)
gated_causal_conv1d_step_op = define_operator(
    __name__,
    "gated_causal_conv1d_step(Tensor projected, Tensor weight, Tensor(a!) window, "
    "Tensor? lengths) -> (Tensor, Tensor)",
    gated_causal_conv1d_step_fwd,
    _gated_causal_conv1d_step_fake,
)
