# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Polar attention in Triton: the backward, four kernels without atomics.

The first works row by row. It finds what the gradients of the outputs mean for a row: the gradient
`content` of the mean of the values, and two numbers for the magnitude's share, so that
da_j = p_j (content.v_j + linear - quadratic p_j), and leaves them for the others. It also sums over
its rows what the null's value and the scalars receive. The second walks over the keys of a tile of
queries and gives dq, the third over the queries of a tile of keys, all heads of the group in turn,
and gives dk and dv. Both take da_j times the row's rate temp log2(e) / sqrt(D), with which it leads
on to queries and keys. The last adds up, in a fixed order, what the programs of the first two found
for the null's value and the scalars.
"""

import torch

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError as error:
    raise ImportError("The Triton path of polar attention needs the package triton.") from error

from .operators import define_operator
from .polar_attention_tiles import choose_tile
from .polar_attention_triton import (
    LN2,
    LOG2E,
    MIN_NORM,
    NO_LIMIT,
    PARTS,
    Problem,
    document_of,
    key_range,
    length_terms,
    load_rows,
    locate,
    partial_sums,
    rows_contiguous,
    softplus,
    streamed,
)

__all__ = ["polar_bwd", "polar_bwd_op"]

# Rows that a program of the first kernel takes, and how many at a time: few, for want of registers.
ROWS, ROWS_AT_ONCE = 128, 16


@triton.jit(do_not_specialize=[
    "B", "T", "S", "num_documents", "search_steps", "offset", "window",
    "row_length", "s_gb", "s_gt", "s_gh", "s_mb", "s_mt", "s_mh",
])  # fmt: skip
def polar_attention_bwd_row_kernel(
    p_null, p_gain, p_base, p_slope, p_magnitude_gain, p_cu_seqlens, p_query_start,
    p_c, p_rest, p_norm, p_l1, p_log_n_eff, p_gc, p_gm, p_unit,
    p_content, p_row_terms, p_sums,
    B, T, S, num_documents, search_steps, offset, window, scale,
    row_length, s_gb, s_gt, s_gh, s_mb, s_mt, s_mh,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ALIGN: tl.constexpr,
    PACKED: tl.constexpr, STARTS: tl.constexpr, REST: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    i_bh = tl.program_id(0) % (B * H)
    i_b, i_h = i_bh // H, i_bh % H
    b64 = i_b.to(tl.int64)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    unit = 1.0
    if SCALED:
        unit = tl.load(p_unit)
    raw_length_gain = tl.load(p_gain + i_h).to(tl.float32)
    raw_null_slope = tl.load(p_slope + i_h).to(tl.float32)
    raw_gain = tl.load(p_magnitude_gain + i_h).to(tl.float32)
    length_gain = softplus(raw_length_gain)
    null_base = tl.load(p_base + i_h).to(tl.float32)
    null_slope = softplus(raw_null_slope)
    gain = softplus(raw_gain)
    b_null = tl.load(p_null + i_h * D + o_d, m_d, 0.0).to(tl.float32)
    g_null_value = tl.zeros([BD], tl.float32)
    g_temp = tl.zeros([BM], tl.float32)
    g_null = tl.zeros([BM], tl.float32)
    g_slope = tl.zeros([BM], tl.float32)
    g_gain = tl.zeros([BM], tl.float32)
    for i in range(0, ROWS, BM):
        row = tl.program_id(0) // (B * H) * ROWS + i
        o_t = row + tl.arange(0, BM)
        m_t = o_t < T
        m_td = m_t[:, None] & m_d[None, :]
        b_first, b_last, b_count = locate(
            o_t, i_b, p_cu_seqlens, p_query_start, num_documents, search_steps, offset, window, S,
            PACKED, STARTS,
        )  # fmt: skip
        m_seen = (b_last >= b_first) & m_t
        log_count, root = length_terms(b_count)
        temp = 1 + length_gain * log_count
        null = null_base + null_slope * root
        heads_first = (b64 * H + i_h) * T + o_t
        b_l1 = tl.load(p_l1 + heads_first, m_t, 0.0)
        b_log_n_eff = tl.load(p_log_n_eff + heads_first, m_t, 0.0)
        b_norm = tl.load(p_norm + heads_first, m_t, 1.0)
        gap = b_l1 * LN2 - temp * null
        real = tl.where(m_seen, tl.sigmoid(gap), 0.0)
        null_weight = tl.where(m_seen, tl.sigmoid(-gap), tl.where(m_t, 1.0, 0.0))

        # Through the direction: the gradient of s is orthogonal to s, but for the rows whose norm
        # is clamped; `correction`, its product with s, is what the softmax subtracts there.
        o_td = ((b64 * T + o_t) * H + i_h)[:, None] * D + o_d[None, :]
        b_c = tl.load(p_c + o_td, m_td, 0.0).to(tl.float32)
        if REST:
            rest = tl.load(p_rest + o_td, m_td, 0).to(tl.int32) << 8
            b_c = (b_c.to(tl.int32, bitcast=True) + rest).to(tl.float32, bitcast=True)
        b_gc = load_rows(p_gc, i_b, i_h, row, T, s_gb, s_gt, s_gh, BM, D, BD, ALIGN, False)
        b_gc = b_gc.to(tl.float32) / unit
        along = tl.sum(b_gc * b_c, 1)
        m_clamped = b_norm < MIN_NORM
        b_norm = tl.maximum(b_norm, MIN_NORM)
        b_gs = (b_gc - tl.where(m_clamped, 0.0, along)[:, None] * b_c) / b_norm[:, None]
        correction = tl.where(m_clamped, along, 0.0)

        # Through the magnitude tanh(x), x = gain ln(1 + m_eff): its slope is 4 e / (1 + e)^2.
        log_m_eff = tl.where(m_seen, b_log_n_eff * LN2 - softplus(-gap), float("-inf"))
        log_1p_m_eff = softplus(log_m_eff)
        e = tl.exp(-2 * gain * log_1p_m_eff)
        gm = tl.load(
            p_gm + b64 * s_mb + i_h.to(tl.int64) * s_mh + o_t.to(tl.int64) * s_mt, m_t, 0.0
        )
        g_scaled = gm.to(tl.float32) / unit * (4 * e / ((1 + e) * (1 + e)))
        g_log_m_eff = g_scaled * gain * tl.sigmoid(log_m_eff)
        linear = (2 + null_weight) * g_log_m_eff - real * correction
        quadratic = 2 * tl.where(m_seen, tl.exp2(b_log_n_eff), 0.0) * g_log_m_eff

        # The null: its value and its logit a_0. All da sum to zero, so that in
        # temp dtemp = sum_j da_j a_j + da_0 a_0 logits may be counted from l1.
        g_a_0 = null_weight * (tl.sum(b_gs * b_null[None, :], 1) - correction - g_log_m_eff)
        g_null_value += tl.sum(null_weight[:, None] * b_gs, 0)
        g_temp -= tl.where(m_t, g_a_0 * gap / temp * log_count, 0.0)
        g_null += g_a_0 * temp
        g_slope += g_a_0 * temp * root
        g_gain += g_scaled * log_1p_m_eff

        b_content = real[:, None] * b_gs
        if p_content.dtype.element_ty == tl.float16:
            # With gradients of at most 1, only rows of |s| < 2e-5 reach this bound.
            b_content = tl.minimum(tl.maximum(b_content, -65504.0), 65504.0)
        b_content = b_content.to(p_content.dtype.element_ty)
        tl.store(p_content + o_td, b_content, m_td)
        # Rounding turns this gradient a little towards the values' mean, all da_j of the row in one
        # direction. Their sum is known, so that part is removed (where s does not hide the mean).
        b_mean = b_c * b_norm[:, None] - null_weight[:, None] * b_null[None, :]
        excess = tl.sum((b_content.to(tl.float32) - real[:, None] * b_gs) * b_mean, 1)
        linear -= tl.where(real > 1e-3, excess / tl.maximum(real, 1e-3), 0.0)
        # Four numbers for each row, a plane each. Rows past the end get theirs too: finite ones.
        terms = (b64 * H + i_h) * row_length + o_t
        plane = B.to(tl.int64) * H * row_length
        m_t = o_t < row_length
        rate = temp * (scale * LOG2E)
        tl.store(p_row_terms + terms, rate, m_t)
        tl.store(p_row_terms + plane + terms, b_l1, m_t)
        tl.store(p_row_terms + 2 * plane + terms, rate * linear, m_t)
        tl.store(p_row_terms + 3 * plane + terms, rate * quadratic, m_t)

    p_sums += tl.program_id(0).to(tl.int64) * (D + 4)
    tl.store(p_sums + o_d, g_null_value, m_d)
    tl.store(p_sums + D, tl.sum(g_temp, 0) * tl.sigmoid(raw_length_gain))
    tl.store(p_sums + D + 1, tl.sum(g_null, 0))
    tl.store(p_sums + D + 2, tl.sum(g_slope, 0) * tl.sigmoid(raw_null_slope))
    tl.store(p_sums + D + 3, tl.sum(g_gain, 0) * tl.sigmoid(raw_gain))


@triton.jit
def _row_terms(
    x, i_plane: tl.constexpr, i_b, i_h, row, B, row_length,
    H: tl.constexpr, BM: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Planes i_plane and i_plane + 1 of the row terms for rows [row, row + BM) of one head."""
    if TMA:
        b_x, b_y = tl.split(tl.trans(x.load([i_plane, i_b, i_h, row]).reshape(2, BM)))
    else:
        o_t = row + tl.arange(0, BM)
        m_t = o_t < row_length
        plane = B.to(tl.int64) * H * row_length
        p_rows = x + i_plane * plane + (i_b.to(tl.int64) * H + i_h) * row_length + o_t
        b_x = tl.load(p_rows, m_t, 0.0)
        b_y = tl.load(p_rows + plane, m_t, 0.0)
    return b_x, b_y


@triton.jit(do_not_specialize=[
    "B", "T", "S", "num_documents", "search_steps", "offset", "window",
    "row_length", "s_qb", "s_qt", "s_qh", "s_kb", "s_kt", "s_kh", "s_vb", "s_vt", "s_vh",
    "s_cb", "s_ct", "s_ch",
])  # fmt: skip
def polar_attention_bwd_query_kernel(
    p_q, p_k, p_v, p_gain, p_cu_seqlens, p_query_start, p_unit, p_content, p_row_terms,
    p_dq, p_moments,
    B, T, S, num_documents, search_steps, offset, window, scale, row_length,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_cb, s_ct, s_ch,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ALIGN: tl.constexpr,
    PACKED: tl.constexpr, STARTS: tl.constexpr, SCALED: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    # The last tiles of causal rows are the longest: they start first.
    i_bh = tl.program_id(0) % (B * H)
    i_t = tl.cdiv(T, BM) - 1 - tl.program_id(0) // (B * H)
    i_b, i_h = i_bh // H, i_bh % H
    i_g = i_h // (H // G)
    o_t = i_t * BM + tl.arange(0, BM)
    m_t = o_t < T
    b_first, b_last, b_count = locate(
        o_t, i_b, p_cu_seqlens, p_query_start, num_documents, search_steps, offset, window, S,
        PACKED, STARTS,
    )  # fmt: skip
    start, stop, full_start, full_stop = key_range(b_first, b_last, o_t, T)
    b_rate, b_l1 = _row_terms(p_row_terms, 0, i_b, i_h, i_t * BM, B, row_length, H, BM, False)
    b_linear, b_quadratic = _row_terms(
        p_row_terms, 2, i_b, i_h, i_t * BM, B, row_length, H, BM, False
    )
    b_q = load_rows(p_q, i_b, i_h, i_t * BM, T, s_qb, s_qt, s_qh, BM, D, BD, ALIGN, False)
    b_content = load_rows(
        p_content, i_b, i_h, i_t * BM, T, s_cb, s_ct, s_ch, BM, D, BD, ALIGN, False
    )
    b_acc = tl.zeros([BM, BD], tl.float32)
    b_moment = tl.zeros([BM, PARTS], tl.float32)
    for j in range(start, stop, BN):
        b_k = load_rows(p_k, i_b, i_g, j, S, s_kb, s_kt, s_kh, BN, D, BD, ALIGN, TMA)
        b_v = load_rows(p_v, i_b, i_g, j, S, s_vb, s_vt, s_vh, BN, D, BD, ALIGN, TMA)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        b_dp = tl.dot(b_content, tl.trans(b_v), input_precision="ieee")
        b_x = b_s * b_rate[:, None] - b_l1[:, None]
        b_p = tl.exp2(b_x)
        if (j < full_start) | (j + BN > full_stop):
            o_n = j + tl.arange(0, BN)
            m_s = (b_first[:, None] <= o_n[None, :]) & (o_n[None, :] <= b_last[:, None])
            b_p = tl.where(m_s, b_p, 0.0)
        b_da = b_p * (b_dp * b_rate[:, None] - (b_quadratic[:, None] * b_p - b_linear[:, None]))
        b_moment += partial_sums(b_da * b_x)
        b_acc = tl.dot(b_da.to(b_k.dtype), b_k, b_acc, input_precision="ieee")

    # The keys' part of dtemp ln n, in logarithms to base 2.
    log_count, _ = length_terms(b_count)
    b_moment = tl.sum(b_moment, 1) / (b_rate * b_rate)
    g_temp = tl.sum(tl.where(m_t, b_moment * log_count, 0.0), 0)
    length_gain = tl.load(p_gain + i_h).to(tl.float32)
    tl.store(p_moments + tl.program_id(0), g_temp * scale * tl.sigmoid(length_gain))
    o_d = tl.arange(0, BD)
    o_td = ((i_b.to(tl.int64) * T + o_t) * H + i_h)[:, None] * D + o_d[None, :]
    unit = 1.0
    if SCALED:
        unit = tl.load(p_unit)
    # The rate carries log2(e) too many.
    tl.store(p_dq + o_td, b_acc * (unit * LN2), m_t[:, None] & (o_d < D)[None, :])


@triton.jit(do_not_specialize=[
    "B", "T", "S", "num_documents", "search_steps", "offset", "window",
    "row_length", "s_qb", "s_qt", "s_qh", "s_kb", "s_kt", "s_kh", "s_vb", "s_vt", "s_vh",
    "s_cb", "s_ct", "s_ch",
])  # fmt: skip
def polar_attention_bwd_key_kernel(
    p_q, p_k, p_v, p_cu_seqlens, p_query_start, p_unit, p_content, p_row_terms, p_dk, p_dv,
    B, T, S, num_documents, search_steps, offset, window, row_length,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_cb, s_ct, s_ch,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ALIGN: tl.constexpr,
    PACKED: tl.constexpr, STARTS: tl.constexpr, SCALED: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    # The first keys are seen by the most queries: their tiles start first.
    i_bg = tl.program_id(0) % (B * G)
    i_n = tl.program_id(0) // (B * G)
    i_b, i_g = i_bg // G, i_bg % G
    o_n = i_n * BN + tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    m_n, m_d = o_n < S, o_d < D
    m_nd = m_n[:, None] & m_d[None, :]
    # The queries [first, end) that see each key.
    if PACKED:
        index = document_of(p_cu_seqlens, num_documents, search_steps, o_n)
        b_first = o_n
        b_end = tl.load(p_cu_seqlens + index + 1, index < num_documents, T).to(tl.int32)
    else:
        if STARTS:
            offset = tl.load(p_query_start + i_b).to(tl.int32)
        b_first = o_n - offset
        b_end = tl.full([BN], T, tl.int32)
    b_end = tl.minimum(b_end, b_first + window)
    # The copy engine reads row terms from multiples of 16 bytes on.
    start = tl.maximum(tl.min(b_first, 0), 0) // BM * BM
    stop = tl.minimum(tl.max(tl.where(m_n, b_end, 0), 0), T)
    full_start = tl.max(tl.where(m_n, b_first, -NO_LIMIT), 0)
    full_stop = tl.min(tl.where(m_n, b_end, NO_LIMIT), 0)

    b_k = load_rows(p_k, i_b, i_g, i_n * BN, S, s_kb, s_kt, s_kh, BN, D, BD, ALIGN, False)
    b_v = load_rows(p_v, i_b, i_g, i_n * BN, S, s_vb, s_vt, s_vh, BN, D, BD, ALIGN, False)
    b_dk = tl.zeros([BN, BD], tl.float32)
    b_dv = tl.zeros([BN, BD], tl.float32)
    # All heads of the group in one loop, so that loads run ahead from one head to the next.
    R: tl.constexpr = H // G
    num_blocks = tl.cdiv(tl.maximum(stop - start, 0), BM)
    for i in range(0, num_blocks * R):
        # No division by zero, which even a loop that does not run may not hold.
        i_r = i // tl.maximum(num_blocks, 1)
        i_h = i_g * R + i_r
        i_t = start + (i - i_r * num_blocks) * BM
        # Rows past the end are zeros here, so that their p = 1 counts for nothing.
        b_q = load_rows(p_q, i_b, i_h, i_t, T, s_qb, s_qt, s_qh, BM, D, BD, ALIGN, TMA)
        b_content = load_rows(p_content, i_b, i_h, i_t, T, s_cb, s_ct, s_ch, BM, D, BD, ALIGN, TMA)
        b_rate, b_l1 = _row_terms(p_row_terms, 0, i_b, i_h, i_t, B, row_length, H, BM, TMA)
        b_s = tl.dot(b_k, tl.trans(b_q), input_precision="ieee")
        b_p = tl.exp2(b_s * b_rate[None, :] - b_l1[None, :])
        if (i_t < full_start) | (i_t + BM > full_stop):
            o_t = i_t + tl.arange(0, BM)
            m_s = (b_first[:, None] <= o_t[None, :]) & (o_t[None, :] < b_end[:, None])
            b_p = tl.where(m_s, b_p, 0.0)
        b_dv = tl.dot(b_p.to(b_content.dtype), b_content, b_dv, input_precision="ieee")
        b_dp = tl.dot(b_v, tl.trans(b_content), input_precision="ieee")
        # Read here and not earlier, for the sake of registers.
        b_linear, b_quadratic = _row_terms(p_row_terms, 2, i_b, i_h, i_t, B, row_length, H, BM, TMA)
        b_da = b_p * (b_dp * b_rate[None, :] - (b_quadratic[None, :] * b_p - b_linear[None, :]))
        b_dk = tl.dot(b_da.to(b_q.dtype), b_q, b_dk, input_precision="ieee")

    unit = 1.0
    if SCALED:
        unit = tl.load(p_unit)
    o_kv = ((i_b.to(tl.int64) * S + o_n) * G + i_g)[:, None] * D + o_d[None, :]
    tl.store(p_dk + o_kv, b_dk * (unit * LN2), m_nd)
    tl.store(p_dv + o_kv, b_dv * unit, m_nd)


# What a program of the last kernel adds up: columns of the first kernel's sums, and rows at a time.
SUM_COLUMNS, SUM_ROWS = 32, 64


@triton.jit(do_not_specialize=["num_rows", "num_moments"])
def polar_attention_bwd_sum_kernel(
    p_sums, p_moments, p_unit, p_null_value, p_gain, p_base, p_slope, p_magnitude_gain,
    num_rows, num_moments,
    H: tl.constexpr, D: tl.constexpr, SCALED: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Sums [num_rows, H, D + 4] over the rows; the first of the last four is joined by moments
    [num_moments, H]."""
    i_h = tl.program_id(0) % H
    o_c = tl.program_id(0) // H * BC + tl.arange(0, BC)
    o_r = tl.arange(0, BR)
    p_block = p_sums + i_h * (D + 4) + o_c[None, :]
    b_sum = tl.zeros([BR, BC], tl.float32)
    for i in range(0, num_rows, BR):
        rows = (i + o_r)[:, None]
        offsets = rows.to(tl.int64) * (H * (D + 4))
        b_sum += tl.load(p_block + offsets, (rows < num_rows) & (o_c < D + 4)[None, :], 0.0)
    b_sum = tl.sum(b_sum, 0)
    if (tl.min(o_c) <= D) & (tl.max(o_c) >= D):
        b_moment = tl.zeros([BR], tl.float32)
        for i in range(0, num_moments, BR):
            b_moment += tl.load(p_moments + (i + o_r) * H + i_h, i + o_r < num_moments, 0.0)
        b_sum += tl.where(o_c == D, tl.sum(b_moment, 0), 0.0)
    if SCALED:
        b_sum *= tl.load(p_unit)
    tl.store(p_null_value + i_h * D + o_c, b_sum, o_c < D)
    one = tl.zeros_like(o_c) + i_h
    tl.store(p_gain + one, b_sum, o_c == D)
    tl.store(p_base + one, b_sum, o_c == D + 1)
    tl.store(p_slope + one, b_sum, o_c == D + 2)
    tl.store(p_magnitude_gain + one, b_sum, o_c == D + 3)


def _gradient_unit(grad_direction: torch.Tensor, grad_magnitude: torch.Tensor):
    """The unit in which the kernels take gradients, [1] in fp32, or None for 1.

    In fp16 products with 1 / |s| would overflow: there the largest gradient is taken as 1.
    """
    if grad_direction.dtype != torch.float16:
        return None
    largest = torch.maximum(grad_direction.abs().amax(), grad_magnitude.abs().amax()).float()
    return torch.where(largest > 0, largest, 1.0).view(1)


def polar_bwd(
    grad_direction: torch.Tensor,
    grad_magnitude: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    null_value: torch.Tensor,
    length_gain: torch.Tensor,
    null_base: torch.Tensor,
    null_slope: torch.Tensor,
    magnitude_gain: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    query_start: torch.Tensor | None,
    window: int | None,
    direction: torch.Tensor,
    norm: torch.Tensor,
    l1: torch.Tensor,
    log_n_eff: torch.Tensor,
    rest: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The backward, from the arguments and the results of `polar_fwd`.

    Returns:
        The gradients of query, key, value, null_value, length_gain, null_base, null_slope and
        magnitude_gain, contiguous, each in the dtype of its input.
    """
    inputs = (query, key, value, null_value, length_gain, null_base, null_slope, magnitude_gain)
    gradients = tuple(_empty_like(x) for x in inputs)
    if query.numel() == 0:
        return tuple(x.zero_() for x in gradients)
    query, key, value = rows_contiguous(query), rows_contiguous(key), rows_contiguous(value)
    grad_direction, direction = rows_contiguous(grad_direction), direction.contiguous()
    problem = Problem(query, key, cu_seqlens, query_start, window)
    B, T, H, D = problem.B, problem.T, problem.H, problem.D
    sizes = problem.sizes()
    length_gain = length_gain.contiguous()
    content = query.new_empty(query.shape)
    # The copy engine needs rows of a multiple of 16 bytes.
    row_length = triton.cdiv(T, 4) * 4
    row_terms = query.new_empty(4, B, H, row_length, dtype=torch.float32)
    unit = _gradient_unit(grad_direction, grad_magnitude)
    num_rows = triton.cdiv(T, ROWS) * B
    sums = query.new_empty(num_rows * H * (D + 4), dtype=torch.float32)
    with torch.cuda.device_of(query):
        strides = (*grad_direction.stride()[:3], *grad_magnitude.stride())
        polar_attention_bwd_row_kernel[(num_rows * H,)](
            null_value.contiguous(), length_gain, null_base.contiguous(), null_slope.contiguous(),
            magnitude_gain.contiguous(), problem.cu_seqlens, problem.query_start,
            direction, rest, norm, l1, log_n_eff, grad_direction, grad_magnitude, unit,
            content, row_terms, sums,
            *sizes, D**-0.5, row_length, *strides,
            **problem.constants(*strides[:3]), REST=rest.numel() > 0, SCALED=unit is not None,
            ROWS=ROWS, BM=ROWS_AT_ONCE,
        )  # fmt: skip

        strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3])
        constants = problem.constants(*strides)
        constants["SCALED"] = unit is not None
        strides += content.stride()[:3]
        BM, BN, warps, stages = choose_tile("query", query, problem.BD)
        num_moments = triton.cdiv(T, BM) * B
        moments = query.new_empty(num_moments * H, dtype=torch.float32)
        (keys, values), tma = streamed([key, value], BN, problem.BD)
        polar_attention_bwd_query_kernel[(num_moments * H,)](
            query, keys, values, length_gain, problem.cu_seqlens, problem.query_start,
            unit, content, row_terms, gradients[0], moments,
            *sizes, D**-0.5, row_length, *strides, **constants, TMA=tma,
            BM=BM, BN=BN, num_warps=warps, num_stages=stages,
        )  # fmt: skip

        BM, BN, warps, stages = choose_tile("key", query, problem.BD)
        (queries, contents), tma = streamed([query, content], BM, problem.BD)
        terms = row_terms
        if tma:
            terms = TensorDescriptor.from_tensor(row_terms, [2, 1, 1, BM])
        polar_attention_bwd_key_kernel[(triton.cdiv(problem.S, BN) * B * problem.G,)](
            queries, key, value, problem.cu_seqlens, problem.query_start,
            unit, contents, terms, gradients[1], gradients[2],
            *sizes, row_length, *strides, **constants, TMA=tma,
            BM=BM, BN=BN, num_warps=warps, num_stages=stages,
        )  # fmt: skip

        polar_attention_bwd_sum_kernel[(triton.cdiv(D + 4, SUM_COLUMNS) * H,)](
            sums, moments, unit, *gradients[3:], num_rows, num_moments,
            H=H, D=D, SCALED=unit is not None, BC=SUM_COLUMNS, BR=SUM_ROWS,
        )  # fmt: skip
    return gradients


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, whatever the strides of `x`."""
    return x.new_empty(x.shape)


def _fake_polar_bwd(grad_direction, grad_magnitude, *inputs):
    """Empty tensors like those of `polar_bwd`."""
    return tuple(_empty_like(x) for x in inputs[:8])


polar_bwd_op = define_operator(
    __name__,
    "polar_attention_bwd(Tensor grad_direction, Tensor grad_magnitude, Tensor query, Tensor key, "
    "Tensor value, Tensor null_value, Tensor length_gain, Tensor null_base, Tensor null_slope, "
    "Tensor magnitude_gain, Tensor? cu_seqlens, Tensor? query_start, int? window, "
    "Tensor direction, Tensor norm, Tensor l1, Tensor log_n_eff, Tensor rest) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    polar_bwd,
    _fake_polar_bwd,
)
