# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The chunked gated delta rule in Triton: the backward pass (ATMA paper, arXiv 2606.25156).

In the notation of the forward pass, with E the gradient of the state after a chunk, P the scores
tril((q_i . k_j) e^(g_i - g_j)) and dr the gradient of what is read:

    du = P^T dr + e^(g_C - g) k E             y = T^T du
    E of the chunk before = e^(g_C) E + (e^g q)^T dr - (beta e^g k)^T y
    dv = beta y         dA = -strict_tril(y u^T)         dP = tril(dr u^T)
    dbeta = y . (v - e^g k M) + row sums of dA A / beta
    dq = (dP e^(g_i - g_j)) k + e^g dr M^T
    dk = (dP e^(g_i - g_j))^T q - beta e^g y M^T + e^(g_C - g) u E^T + (B + B^T) k,
         with B = dA beta_i e^(g_i - g_j)

The gradient of g collects every product with an exponential of g; log gamma_l gets the sum of it
over i >= l. Pairs (i, i), whose decay is one, are left out of it, so that the gradient of a strong
decay is not the difference of large numbers. Three kernels: `start` recomputes u and finds P^T dr,
`scan` walks the chunks backwards, `finish` does the rest, a program per chunk and group that goes
through the heads of the group. No operand of a matrix product is the transpose of a result in
registers (compilers up to Triton 3.7.0 get that wrong on Hopper): transposed scores are computed
as products of their own.
"""

import torch

from .gated_delta_forward_triton import (
    Layout,
    addressable,
    chunk_layout,
    chunk_updates,
    decay_between,
    inverse_length,
    launch_options,
    load_gates,
    load_tile,
    locate_chunk,
    locate_scan,
    rows_of,
    store_tile,
    strides_of,
)

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("The Triton path of the gated delta rule needs triton.") from error

__all__ = ["gated_delta_bwd", "new_gradients"]

_LENGTHS = ["num_tokens", "chunks_per_row"]


@triton.jit(do_not_specialize=_LENGTHS)
def gated_delta_start_bwd_kernel(
    q,
    k,
    v,
    dr,
    inverse,
    gates,
    key_scale,
    states,
    query_scale,
    updates,
    du,
    q_strides,
    k_strides,
    v_strides,
    dr_strides,
    chunk_table,
    lengths,
    num_tokens,
    chunks_per_row,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    IS_PACKED: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    i_chunk, i_h = pid // H, pid % H
    i_g = i_h // (H // G)
    token, count, real = locate_chunk(
        i_chunk, chunk_table, lengths, num_tokens, chunks_per_row, BT, IS_PACKED, HAS_LENGTHS
    )
    if count <= 0:
        return
    o_t = tl.arange(0, BT)
    b_q = load_tile(rows_of(q, token, i_h, q_strides), count, q_strides[0], 0, BT, BD, D)
    b_k = load_tile(rows_of(k, token, i_g, k_strides), count, k_strides[0], 0, BT, BD, D)
    b_inv = load_tile(inverse + pid * BT * BT, BT, BT, 0, BT, BT, BT)
    b_q_scale = inverse_length(b_q)
    tl.store(query_scale + pid * BT + o_t, b_q_scale)
    b_k_scale = tl.load(key_scale + (i_chunk * G + i_g) * BT + o_t)
    b_coarse, b_fine, b_beta, b_start, _, _ = load_gates(gates, pid, BT)

    # Scores transposed: key i, query j.
    b_pt = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
    m_seen = o_t[:, None] <= o_t[None, :]
    b_decay = decay_between(-b_coarse, -b_fine, m_seen)
    b_pt = (b_pt * b_k_scale[:, None] * b_q_scale[None, :] * b_decay).to(b_k.dtype)
    for i_v in tl.static_range(0, D, BV):
        b_dr = load_tile(rows_of(dr, token, i_h, dr_strides), count, dr_strides[0], i_v, BT, BV, D)
        b_du = tl.dot(b_pt, b_dr, input_precision=PRECISION)
        store_tile(du + pid * BT * D, b_du, BT, D, i_v, D)

        b_m = load_tile(states + pid * D * D, D, D, i_v, BD, BV, D)
        b_v = load_tile(rows_of(v, token, i_g, v_strides), count, v_strides[0], i_v, BT, BV, D)
        b_u = chunk_updates(b_k, b_m, b_v, b_inv, b_beta, b_start, b_k_scale, PRECISION)
        store_tile(updates + pid * BT * D, b_u, BT, D, i_v, D)


@triton.jit(do_not_specialize=_LENGTHS)
def gated_delta_scan_bwd_kernel(
    q,
    k,
    dr,
    inverse,
    gates,
    key_scale,
    query_scale,
    du,
    final_gradient,
    state_gradients,
    initial_gradient,
    chunk_offsets,
    q_strides,
    k_strides,
    dr_strides,
    chunk_table,
    lengths,
    num_tokens,
    chunks_per_row,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    IS_PACKED: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Stores E of every chunk in `state_gradients`, and y over P^T dr in `du`."""
    i_n, i_h, i_g, i_v, first, last = locate_scan(
        chunk_offsets, chunks_per_row, H, G, D, BV, IS_PACKED
    )
    o_t = tl.arange(0, BT)

    b_e = tl.zeros([BD, BV], dtype=tl.float32)
    if final_gradient is not None:
        p_final = final_gradient + (i_n * H + i_h) * D * D + i_v * D
        b_e += tl.trans(load_tile(p_final, D - i_v, D, 0, BV, BD, D))
    for i_step in range(0, last - first):
        i_chunk = last - 1 - i_step
        token, count, real = locate_chunk(
            i_chunk, chunk_table, lengths, num_tokens, chunks_per_row, BT, IS_PACKED, HAS_LENGTHS
        )
        i_ch = i_chunk * H + i_h
        b_q = load_tile(rows_of(q, token, i_h, q_strides), count, q_strides[0], 0, BT, BD, D)
        b_k = load_tile(rows_of(k, token, i_g, k_strides), count, k_strides[0], 0, BT, BD, D)
        b_dr = load_tile(rows_of(dr, token, i_h, dr_strides), count, dr_strides[0], i_v, BT, BV, D)
        b_inv = load_tile(inverse + i_ch * BT * BT, BT, BT, 0, BT, BT, BT)
        b_du = load_tile(du + i_ch * BT * D, BT, D, i_v, BT, BV, D).to(tl.float32)
        b_k_scale = tl.load(key_scale + (i_chunk * G + i_g) * BT + o_t)
        b_q_scale = tl.load(query_scale + i_ch * BT + o_t)
        _, _, b_beta, b_start, b_end, b_total = load_gates(gates, i_ch, BT)

        b_e16 = b_e.to(k.dtype.element_ty)
        store_tile(state_gradients + i_ch * D * D, b_e16, D, D, i_v, D)
        b_du += tl.dot(b_k, b_e16, input_precision=PRECISION) * (b_end * b_k_scale)[:, None]
        b_y = tl.dot(tl.trans(b_inv), b_du.to(b_inv.dtype), input_precision=PRECISION)
        store_tile(du + i_ch * BT * D, b_y, BT, D, i_v, D)
        b_y = (b_y * (-b_beta * b_start * b_k_scale)[:, None]).to(b_k.dtype)
        b_dr = (b_dr.to(tl.float32) * (b_start * b_q_scale)[:, None]).to(b_k.dtype)
        b_e *= b_total
        b_e += tl.dot(tl.trans(b_q), b_dr, input_precision=PRECISION)
        b_e += tl.dot(tl.trans(b_k), b_y, input_precision=PRECISION)
    if initial_gradient is not None:
        p_initial = initial_gradient + (i_n * H + i_h) * D * D + i_v * D
        store_tile(p_initial, tl.trans(b_e), D - i_v, D, 0, D)


@triton.jit(do_not_specialize=_LENGTHS)
def gated_delta_finish_bwd_kernel(
    q,
    k,
    v,
    dr,
    gates,
    key_scale,
    query_scale,
    states,
    state_gradients,
    updates,
    y,
    dq,
    dk,
    dv,
    d_retention,
    d_write,
    q_strides,
    k_strides,
    v_strides,
    dr_strides,
    chunk_table,
    lengths,
    num_tokens,
    chunks_per_row,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    IS_PACKED: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    i_chunk, i_g = pid // G, pid % G
    token, count, real = locate_chunk(
        i_chunk, chunk_table, lengths, num_tokens, chunks_per_row, BT, IS_PACKED, HAS_LENGTHS
    )
    if count <= 0:
        return
    o_t = tl.arange(0, BT)
    m_tokens = o_t < count
    m_before, m_not_after = o_t[:, None] > o_t[None, :], o_t[:, None] >= o_t[None, :]
    m_after, m_not_before = o_t[:, None] < o_t[None, :], o_t[:, None] <= o_t[None, :]
    # The last token that is not padding: its decay to the chunk's end is one.
    is_last = o_t == tl.maximum(real, 1) - 1
    # Some products are added under this mask only because a product that accumulates into another
    # makes the compiler keep every row twice, once per group of four warps.

    b_k_scale = tl.load(key_scale + (i_chunk * G + i_g) * BT + o_t)
    b_dk = tl.zeros([BT, BD], dtype=tl.float32)
    # What the heads have in common is computed for each: kept, it would fill the registers.
    for i_h in tl.range(i_g * (H // G), (i_g + 1) * (H // G), disable_licm=True):
        i_ch = i_chunk * H + i_h
        b_k = load_tile(rows_of(k, token, i_g, k_strides), count, k_strides[0], 0, BT, BD, D)
        b_q_scale = tl.load(query_scale + i_ch * BT + o_t)
        b_coarse, b_fine, b_beta, b_start, b_end, b_total = load_gates(gates, i_ch, BT)

        # Through the states. y . (k M) = k . (y M^T), and so on: every gradient of g is a product
        # with a key or a query. One tile of sums at a time, for the sake of registers.
        b_dbeta = tl.zeros([BT], dtype=tl.float32)
        b_sum = tl.zeros([BT, BD], dtype=tl.float32)
        for i_v in range(0, D, BV):
            b_m = load_tile(states + i_ch * D * D, D, D, i_v, BD, BV, D)
            b_y = load_tile(y + i_ch * BT * D, BT, D, i_v, BT, BV, D)
            b_v = load_tile(rows_of(v, token, i_g, v_strides), count, v_strides[0], i_v, BT, BV, D)
            b_dbeta += tl.sum(b_y.to(tl.float32) * b_v.to(tl.float32), axis=1)
            b_sum += tl.dot(b_y, tl.trans(b_m), input_precision=PRECISION)
        b_sum *= b_start[:, None]
        b_product = tl.sum(b_sum * (b_k.to(tl.float32) * b_k_scale[:, None]), axis=1)
        b_dbeta -= b_product
        b_dg = -b_beta * b_product
        b_dk -= b_beta[:, None] * b_sum

        state_product = 0.0
        b_sum = tl.zeros([BT, BD], dtype=tl.float32)
        for i_v in range(0, D, BV):
            b_m = load_tile(states + i_ch * D * D, D, D, i_v, BD, BV, D)
            b_e = load_tile(state_gradients + i_ch * D * D, D, D, i_v, BD, BV, D)
            b_u = load_tile(updates + i_ch * BT * D, BT, D, i_v, BT, BV, D)
            state_product += tl.sum(b_m.to(tl.float32) * b_e.to(tl.float32))
            b_sum += tl.dot(b_u, tl.trans(b_e), input_precision=PRECISION)
        b_sum *= b_end[:, None]
        b_product = tl.sum(b_sum * (b_k.to(tl.float32) * b_k_scale[:, None]), axis=1)
        b_product = tl.where(is_last, 0.0, b_product)
        b_dg -= b_product
        b_dg += tl.where(is_last, tl.sum(b_product, axis=0) + b_total * state_product, 0.0)
        b_dk += b_sum

        # Through A: B = dA beta_i e^(g_i - g_j), and its transpose.
        b_da = tl.zeros([BT, BT], dtype=tl.float32)
        b_dat = tl.zeros([BT, BT], dtype=tl.float32)
        for i_v in range(0, D, BV):
            b_y = load_tile(y + i_ch * BT * D, BT, D, i_v, BT, BV, D)
            b_u = load_tile(updates + i_ch * BT * D, BT, D, i_v, BT, BV, D)
            b_da += tl.dot(b_y, tl.trans(b_u), input_precision=PRECISION)
            b_dat += tl.dot(b_u, tl.trans(b_y), input_precision=PRECISION)
        b_da *= -decay_between(b_coarse, b_fine, m_before)
        b_product = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
        b_product *= b_da * b_k_scale[:, None] * b_k_scale[None, :]
        b_dbeta += tl.sum(b_product, axis=1)
        b_product *= b_beta[:, None]
        b_dg += tl.sum(b_product, axis=1) - tl.sum(b_product, axis=0)
        b_dat *= -decay_between(-b_coarse, -b_fine, m_after)
        b_da = b_da * b_beta[:, None] + b_dat * b_beta[None, :]
        b_da = (b_da * b_k_scale[None, :]).to(b_k.dtype)
        b_sum = tl.dot(b_da, b_k, input_precision=PRECISION)
        b_dk += tl.where(m_tokens[:, None], b_sum, 0.0)

        # Through what is read: the scores, then the state.
        b_q = load_tile(rows_of(q, token, i_h, q_strides), count, q_strides[0], 0, BT, BD, D)
        b_dp = tl.zeros([BT, BT], dtype=tl.float32)
        b_dpt = tl.zeros([BT, BT], dtype=tl.float32)
        for i_v in range(0, D, BV):
            b_u = load_tile(updates + i_ch * BT * D, BT, D, i_v, BT, BV, D)
            b_dr = load_tile(
                rows_of(dr, token, i_h, dr_strides), count, dr_strides[0], i_v, BT, BV, D
            )
            b_dp += tl.dot(b_dr, tl.trans(b_u), input_precision=PRECISION)
            b_dpt += tl.dot(b_u, tl.trans(b_dr), input_precision=PRECISION)
        b_dpt *= decay_between(-b_coarse, -b_fine, m_not_before) * b_q_scale[None, :]
        b_sum = tl.dot(b_dpt.to(b_k.dtype), b_q, input_precision=PRECISION)
        b_dk += tl.where(m_tokens[:, None], b_sum, 0.0)
        b_dp *= decay_between(b_coarse, b_fine, m_not_after) * b_k_scale[None, :]
        b_product = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * b_q_scale[:, None]
        b_product = tl.where(m_before, b_product * b_dp, 0.0)
        b_dg += tl.sum(b_product, axis=1) - tl.sum(b_product, axis=0)
        b_dp = b_dp.to(b_k.dtype)

        b_dq = tl.zeros([BT, BD], dtype=tl.float32)
        for i_v in range(0, D, BV):
            b_m = load_tile(states + i_ch * D * D, D, D, i_v, BD, BV, D)
            b_dr = load_tile(
                rows_of(dr, token, i_h, dr_strides), count, dr_strides[0], i_v, BT, BV, D
            )
            b_dq += tl.dot(b_dr, tl.trans(b_m), input_precision=PRECISION)
        b_q32 = b_q.to(tl.float32) * b_q_scale[:, None]
        b_dq *= b_start[:, None]
        b_dg += tl.sum(b_dq * b_q32, axis=1)
        b_sum = tl.dot(b_dp, b_k, input_precision=PRECISION)
        b_dq += tl.where(m_tokens[:, None], b_sum, 0.0)
        b_dq = _gradient_of_length(b_dq, b_q32, b_q_scale, b_q.dtype)
        store_tile(dq + (token * H + i_h) * D, b_dq, count, H * D, 0, D)

        b_slope = tl.load(gates + i_ch * 4 * BT + 3 * BT + o_t)
        b_dg = tl.cumsum(b_dg, axis=0, reverse=True) * b_slope
        p_gate = token * H + i_h + o_t * H
        tl.store(d_retention + p_gate, b_dg.to(d_retention.dtype.element_ty), mask=m_tokens)
        b_dbeta *= b_beta * (1.0 - b_beta)
        tl.store(d_write + p_gate, b_dbeta.to(d_write.dtype.element_ty), mask=m_tokens)

    b_k = load_tile(rows_of(k, token, i_g, k_strides), count, k_strides[0], 0, BT, BD, D)
    b_k32 = b_k.to(tl.float32) * b_k_scale[:, None]
    b_dk = _gradient_of_length(b_dk, b_k32, b_k_scale, b_k.dtype)
    store_tile(dk + (token * G + i_g) * D, b_dk, count, G * D, 0, D)
    for i_v in range(0, D, BV):
        b_dv = tl.zeros([BT, BV], dtype=tl.float32)
        for i_h in range(i_g * (H // G), (i_g + 1) * (H // G)):
            i_ch = i_chunk * H + i_h
            b_beta = tl.load(gates + i_ch * 4 * BT + 2 * BT + o_t)
            b_y = load_tile(y + i_ch * BT * D, BT, D, i_v, BT, BV, D)
            b_dv += b_beta[:, None] * b_y.to(tl.float32)
        store_tile(dv + (token * G + i_g) * D, b_dv, count, G * D, i_v, D)


@triton.jit
def _gradient_of_length(b_dx, b_unit, b_scale, dtype: tl.constexpr):
    """The gradient of x from that of x / max(|x|, eps); rows up to eps long are only scaled."""
    LARGEST: tl.constexpr = 2.0 if dtype == tl.float16 else 1e12
    along = tl.where(b_scale < LARGEST, tl.sum(b_dx * b_unit, axis=1), 0.0)
    return (b_dx - b_unit * along[:, None]) * b_scale[:, None]


def gated_delta_bwd(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    read_gradient: torch.Tensor,
    final_gradient: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    lengths: torch.Tensor | None,
    inverse: torch.Tensor,
    states: torch.Tensor,
    gates: torch.Tensor,
    key_scale: torch.Tensor,
    needs_initial_gradient: bool,
) -> tuple[torch.Tensor, ...]:
    """The backward pass, from the tensors that `gated_delta_fwd` took and returned.

    Returns the gradients of query, key and value in their dtype, and in fp32 those of
    retention_logits, write_logits and the initial state [N, H, D, D] (empty if not needed).
    """
    layout = chunk_layout(query, key, cu_seqlens, lengths)
    H, D, C = layout.num_heads, layout.head_dim, layout.chunk_size
    gradients = new_gradients(query, key, value, layout, needs_initial_gradient)
    if layout.chunk_table is not None:
        # Tokens past the last document belong to no chunk.
        for gradient in gradients[:5]:
            gradient.zero_()
    dq, dk, dv, d_retention, d_write, initial_gradient = gradients
    query_scale = query.new_empty(layout.num_chunks, H, C, dtype=torch.float32)
    updates = query.new_empty(layout.num_chunks, H, C, D)
    du = torch.empty_like(updates)
    state_gradients = torch.empty_like(states)

    query, key, value = addressable(query), addressable(key), addressable(value)
    dr = addressable(read_gradient)
    scan, sizes = launch_options("scan_bwd", layout, query), layout.arguments(query.dtype)
    strides = {"q_strides": strides_of(query), "k_strides": strides_of(key)}
    strides["dr_strides"] = strides_of(dr)
    with torch.cuda.device_of(query):
        gated_delta_start_bwd_kernel[(layout.num_chunks * H,)](
            query,
            key,
            value,
            dr,
            inverse,
            gates,
            key_scale,
            states,
            query_scale,
            updates,
            du,
            v_strides=strides_of(value),
            **strides,
            **sizes,
            **launch_options("start_bwd", layout, query),
        )
        gated_delta_scan_bwd_kernel[(layout.num_states * H * triton.cdiv(D, scan["BV"]),)](
            query,
            key,
            dr,
            inverse,
            gates,
            key_scale,
            query_scale,
            du,
            None if final_gradient is None else final_gradient.contiguous(),
            state_gradients,
            initial_gradient if needs_initial_gradient else None,
            layout.chunk_offsets,
            **strides,
            **sizes,
            **scan,
        )
        gated_delta_finish_bwd_kernel[(layout.num_chunks * layout.num_groups,)](
            query,
            key,
            value,
            dr,
            gates,
            key_scale,
            query_scale,
            states,
            state_gradients,
            updates,
            du,
            dq,
            dk,
            dv,
            d_retention,
            d_write,
            v_strides=strides_of(value),
            **strides,
            **sizes,
            **launch_options("finish_bwd", layout, query),
        )
    return dq, dk, dv, d_retention, d_write, initial_gradient


def new_gradients(query, key, value, layout: Layout, needs_initial_gradient: bool):
    """Buffers for what `gated_delta_bwd` returns."""
    H, D = layout.num_heads, layout.head_dim
    num_initial = layout.num_states if needs_initial_gradient else 0
    return (
        *(x.new_empty(x.shape) for x in (query, key, value)),
        *(query.new_empty(query.shape[:3], dtype=torch.float32) for _ in range(2)),
        query.new_empty(num_initial, H, D, D, dtype=torch.float32),
    )
